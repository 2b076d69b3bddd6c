//! The draft vocabulary: the verifier's tokens that a head can draft, ascending.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use super::error::HeadError;

/// Tokens of a new head's draft vocabulary when nobody says how many: what published heads use, or the whole of a smaller
/// vocabulary. A swap cannot change it, so the head that vLLM starts with and those trained for it must agree.
pub fn default_draft_vocabulary_size(vocab_size: usize) -> usize {
    vocab_size.min(32_000)
}

/// The `size` most frequent tokens, ties to the lower id. `always` (end of turn and the like) is in whatever its count.
/// When fewer tokens were seen, the lowest unused ids fill the rest.
///
/// `counts[id]` is how often token `id` was seen; its length is the verifier's vocabulary size.
pub fn draft_vocabulary(counts: &[u64], size: usize, always: &[u32]) -> Result<Vec<u32>, HeadError> {
    let vocab_size = counts.len();
    if size == 0 || size > vocab_size {
        return Err(problem(format!("size {size}; expected 1 to {vocab_size} (the verifier's vocabulary)")));
    }
    let mut chosen: BTreeSet<u32> = BTreeSet::new();
    for id in always {
        if *id as usize >= vocab_size {
            return Err(problem(format!("special token {id}; expected ids below {vocab_size}")));
        }
        chosen.insert(*id);
    }
    if chosen.len() > size {
        return Err(problem(format!(
            "{} special tokens do not fit into {size}; raise the size",
            chosen.len()
        )));
    }
    let mut by_count: Vec<u32> = (0..vocab_size as u32).collect();
    // Stable and from ascending ids: among equals, and among the unseen, the lower id comes first.
    by_count.sort_by_key(|id| std::cmp::Reverse(counts[*id as usize]));
    for id in by_count {
        if chosen.len() == size {
            break;
        }
        chosen.insert(id);
    }
    Ok(chosen.into_iter().collect())
}

/// Checks that ids are ascending, different, and below `vocab_size`.
pub fn check_draft_ids(draft_ids: &[u32], vocab_size: usize) -> Result<(), HeadError> {
    for (index, id) in draft_ids.iter().enumerate() {
        if *id as usize >= vocab_size {
            return Err(problem(format!(
                "draft id {index} stands for token {id}; expected below {vocab_size}"
            )));
        }
        if index > 0 && draft_ids[index - 1] >= *id {
            return Err(problem(format!(
                "draft id {index} stands for token {id} after {}; expected ascending tokens, each once",
                draft_ids[index - 1]
            )));
        }
    }
    Ok(())
}

/// Names a vocabulary map in manifests: sha256 of the ids, little-endian u32, in hex.
pub fn vocabulary_digest(draft_ids: &[u32]) -> String {
    let mut hash = Sha256::new();
    for id in draft_ids {
        hash.update(id.to_le_bytes());
    }
    format!("{:x}", hash.finalize())
}

fn problem(problem: String) -> HeadError {
    HeadError::Vocabulary { problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_frequent_win_and_ties_go_to_the_lower_id() {
        assert_eq!(draft_vocabulary(&[1, 5, 5, 9, 5], 3, &[]).unwrap(), [1, 2, 3]);
    }

    #[test]
    fn special_tokens_are_always_in() {
        assert_eq!(draft_vocabulary(&[1, 5, 5, 9, 0], 3, &[4, 4]).unwrap(), [1, 3, 4]);
    }

    #[test]
    fn unseen_tokens_fill_from_the_lowest() {
        assert_eq!(draft_vocabulary(&[0, 0, 0, 0, 0, 2], 4, &[]).unwrap(), [0, 1, 2, 5]);
        assert_eq!(draft_vocabulary(&[0; 4], 4, &[3]).unwrap(), [0, 1, 2, 3]);
    }

    #[test]
    fn impossible_sizes_and_ids_are_refused() {
        let too_large = draft_vocabulary(&[0; 4], 5, &[]).unwrap_err().to_string();
        assert!(too_large.contains("size 5") && too_large.contains("1 to 4"), "{too_large}");
        assert!(draft_vocabulary(&[0; 4], 0, &[]).is_err());
        assert!(draft_vocabulary(&[0; 4], 2, &[4]).unwrap_err().to_string().contains("special token 4"));
        assert!(draft_vocabulary(&[0; 4], 1, &[0, 1]).unwrap_err().to_string().contains("2 special tokens"));
    }

    #[test]
    fn order_and_range_are_checked() {
        assert!(check_draft_ids(&[0, 2, 3], 4).is_ok());
        assert!(check_draft_ids(&[0, 2, 2], 4).unwrap_err().to_string().contains("token 2 after 2"));
        assert!(check_draft_ids(&[0, 4], 4).unwrap_err().to_string().contains("below 4"));
    }

    #[test]
    fn digest_tells_maps_apart() {
        assert_ne!(vocabulary_digest(&[0, 1]), vocabulary_digest(&[0, 2]));
        assert_eq!(vocabulary_digest(&[]).len(), 64);
    }
}
