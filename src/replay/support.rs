//! A narrow dataset: one support assistant, its products and their troubles.
//!
//! Traffic of one deployment is narrow, and that is what a head trained on it gains from. The conversation's id is the
//! product and the trouble, so that no pair of them is on both sides of the held-out split.

use std::io::Write;

use serde_json::{Value, json};

const SYSTEM: &str =
    "You are a support assistant for Northwind Electronics. Be brief and polite, give numbered steps.";

const ITEMS: [&str; 11] = [
    "router",
    "laptop",
    "phone",
    "printer",
    "camera",
    "headset",
    "tablet",
    "keyboard",
    "monitor",
    "speaker",
    "thermostat",
];

const TROUBLES: [&str; 12] = [
    "does not turn on",
    "keeps restarting",
    "is very slow",
    "shows an error message",
    "lost my settings",
    "does not connect to Wi-Fi",
    "overheats",
    "makes a strange noise",
    "has a cracked screen",
    "drains the battery quickly",
    "will not update",
    "arrived damaged",
];

const TONES: [&str; 10] = [
    "Please help.",
    "What should I do?",
    "I am upset.",
    "Can I get a refund?",
    "It was working yesterday.",
    "I need it for work today.",
    "I have tried turning it off and on.",
    "It is one month old.",
    "Is this covered by the warranty?",
    "My colleague has the same problem.",
];

/// How many different rows there are.
pub const MAX_ROWS: usize = ITEMS.len() * TROUBLES.len() * TONES.len();

/// Up to [`MAX_ROWS`] rows `{"id", "conversation_id", "messages"}`; the same ones for the same seed. Each pair of product
/// and trouble comes once before any comes twice.
pub fn rows(count: usize, seed: u64) -> Vec<Value> {
    let mut pairs: Vec<(&str, &str)> = Vec::with_capacity(ITEMS.len() * TROUBLES.len());
    for item in ITEMS {
        for trouble in TROUBLES {
            pairs.push((item, trouble));
        }
    }
    let mut state = seed;
    for last in (1..pairs.len()).rev() {
        let other = (split_mix(&mut state) % (last as u64 + 1)) as usize;
        pairs.swap(last, other);
    }
    let mut rows = Vec::with_capacity(count.min(MAX_ROWS));
    for (round, tone) in TONES.iter().enumerate() {
        for (item, trouble) in &pairs {
            if rows.len() == count {
                return rows;
            }
            let conversation = format!("{item}/{trouble}");
            rows.push(json!({
                "id": format!("{conversation}/{round}"),
                "conversation_id": conversation,
                "messages": [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": format!("My {item} {trouble}. {tone}")},
                ],
            }));
        }
    }
    rows
}

/// Writes [`rows`] as JSON lines; returns how many there were.
pub fn write(count: usize, seed: u64, mut target: impl Write) -> std::io::Result<usize> {
    let rows = rows(count, seed);
    for row in &rows {
        writeln!(target, "{row}")?;
    }
    target.flush()?;
    Ok(rows.len())
}

/// SplitMix64: good enough to shuffle, and the same everywhere.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::{Dataset, DatasetOptions};
    use std::collections::HashSet;

    #[test]
    fn rows_are_distinct_repeatable_and_readable() {
        let all = rows(usize::MAX, 1);
        assert_eq!(all.len(), MAX_ROWS);
        let texts: HashSet<String> =
            all.iter().map(|row| row["messages"][1]["content"].to_string()).collect();
        assert_eq!(texts.len(), MAX_ROWS);
        assert_eq!(rows(50, 1), all[..50]);
        assert_ne!(rows(50, 2), all[..50]);
        let pairs: HashSet<String> =
            all[..132].iter().map(|row| row["conversation_id"].to_string()).collect();
        assert_eq!(pairs.len(), 132);

        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(write(30, 1, &file).unwrap(), 30);
        let items: Vec<_> =
            Dataset::open(file.path(), DatasetOptions::default()).unwrap().map(|row| row.unwrap()).collect();
        assert_eq!(items.len(), 30);
        assert_eq!(items[3].conversation_id, all[3]["conversation_id"].as_str().unwrap());
        assert_eq!(items[3].messages.len(), 2);
    }
}
