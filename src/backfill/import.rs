//! States that Speculators generated become samples of the store.

use std::path::{Path, PathBuf};
use std::time::Instant;

use sha2::{Digest, Sha256};

use super::BackfillReport;
use super::sink::{Room, Sink};
use super::speculators::{self, DataRow, DataSet};
use crate::config::Config;
use crate::states::{OutcomeStatus, SampleKey};
use crate::store::{hex, is_held_out};

/// What such samples say of their source.
const SOURCE: &str = "import";

/// What to import.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Holds `hs_<row>.safetensors`.
    pub directory: PathBuf,
    /// The data set that the states were generated from; None: the directory above.
    pub data_set: Option<PathBuf>,
    /// The layers in the files; None: those of a day-0 head and the last layer.
    pub layer_ids: Option<Vec<u32>>,
    /// At most so many samples.
    pub limit: Option<usize>,
}

/// Imports until all is done, or what is free of the quota is full: nothing is evicted for it.
pub fn import(config: &Config, options: &ImportOptions) -> anyhow::Result<BackfillReport> {
    let began = Instant::now();
    let mut files = speculators::state_files(&options.directory)?;
    let above = options.directory.join("..");
    let mut data_set = DataSet::open(options.data_set.as_deref().unwrap_or(&above))?;
    let mut sink = Sink::open(config, options.layer_ids.as_deref(), Room::WhatIsFree)?;
    let mut remaining = options.limit.unwrap_or(usize::MAX);
    let mut number = 0;
    while remaining > 0 && sink.report.ended_early.is_none() {
        let Some(row) = data_set.next_row()? else { break };
        if let Some(path) = files.remove(&number)
            && take(&mut sink, &path, number, &row, config.data.held_out_fraction)
        {
            remaining -= 1;
        }
        number += 1;
    }
    if remaining > 0 && sink.report.ended_early.is_none() {
        for path in files.values() {
            sink.count(&path.display().to_string(), OutcomeStatus::Unmatched);
        }
    }
    sink.store.sync()?;
    sink.report.seconds = began.elapsed().as_secs_f64();
    Ok(sink.report)
}

/// Whether a file was read, whatever came of it.
fn take(sink: &mut Sink, path: &Path, number: usize, row: &DataRow, held_out_fraction: f64) -> bool {
    // A draft needs a token before the answer and one after its first.
    let prompt_length = row.prompt_length.map(|length| length.max(1));
    let Some(prompt_length) = prompt_length.filter(|length| row.token_ids.len() >= length + 2) else {
        sink.report.without_ids += 1;
        return false;
    };
    let name = sample_name(number, row);
    let held_out = is_held_out(&name, held_out_fraction);
    if sink.store.contains(&name, 0) {
        sink.report.already_stored += 1;
        return false;
    }
    if !sink.take_room(held_out, row.token_ids.len() - 1) {
        sink.report.beyond_quota += 1;
        return false;
    }
    let status = match speculators::read_states(path, &name, row, prompt_length, &sink.layer_ids) {
        Ok(file) => {
            let key = SampleKey {
                request_id: &name,
                choice_index: 0,
                conversation_id: &name,
                source: SOURCE,
                held_out,
            };
            sink.keep(key, &file)
        }
        Err(error) => {
            tracing::warn!(file = %path.display(), "states file {error}");
            OutcomeStatus::from(&error)
        }
    };
    sink.count(&name, status);
    true
}

/// The file's name, and a digest of its ids: every data set has a row 0.
fn sample_name(number: usize, row: &DataRow) -> String {
    let mut hasher = Sha256::new();
    for id in &row.token_ids {
        hasher.update(id.to_le_bytes());
    }
    format!("hs_{number}-{}", &hex(&hasher.finalize())[..16])
}
