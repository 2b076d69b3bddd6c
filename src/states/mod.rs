//! Hidden states: collecting from vLLM, verifying, bounded shards, reading samples.
//!
//! vLLM's plugin publishes one file for each finished request into a transfer directory ([`transfer`]). The
//! [`Collector`] matches the files to the requests that the proxy saw, verifies them and appends them to the
//! [`StateStore`] (bounded, append-only shards, one writer). A [`Reader`], also in another process, sees the samples as
//! they are appended. Where there is no plugin, a [`StockSample`] takes what a second vLLM's own connector wrote; both
//! ways end in the same checks.
//!
//! What this room promises:
//! - nothing here is waited for by a request, and nothing here panics;
//! - a file from vLLM is deleted once it was looked at, whatever came of it, and each failure is counted by its reason;
//! - a sample in the store was verified (checksum, shapes, finite values, ids that decode to the recorded text);
//! - held-out samples have shards of their own and outlive training samples;
//! - a torn or damaged shard costs the damaged samples, never the reader.

mod accept;
mod collector;
mod reader;
mod shard;
mod stock;
mod store;
pub mod transfer;

pub use accept::{Expected, OutcomeStatus, SampleKey};
pub use collector::{
    ChoiceText, Collector, CollectorOptions, CollectorStats, Forgetter, Outcome, RequestSummary,
};
pub use reader::{Reader, Refreshed, Sample, SampleEntry, VerifyReport};
pub use shard::{SampleHeader, StateDtype};
pub use stock::{StockSample, store_stock};
pub use store::{StateStore, StoreOptions, StoreStats};
pub use transfer::{Drafting, TransferFile};

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong with the state store. Failures of single files from vLLM are [`OutcomeStatus`]es, not errors.
#[derive(Debug, thiserror::Error)]
pub enum StatesError {
    #[error("{action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "{path} is locked by another writer; only one draftsmith may write to a data directory: stop the other one"
    )]
    Locked { path: PathBuf },
    #[error(
        "cannot watch {path}: {reason}; is the directory there, and is fs.inotify.max_user_watches high enough?"
    )]
    Watch { path: PathBuf, reason: String },
    #[error("choice {choice_index} of request {request_id} is stored already")]
    Duplicate { request_id: String, choice_index: u32 },
    #[error(
        "a sample of {bytes} bytes is over the quota of {quota} bytes; raise the states quota or lower the context"
    )]
    TooLarge { bytes: u64, quota: u64 },
    #[error("sample of request {request_id} does not fit its header: {reason}")]
    Shape { request_id: String, reason: String },
    #[error("{path} is not a state shard of version {expected}: {reason}; move it away")]
    NotAShard { path: PathBuf, expected: u32, reason: String },
    #[error("{path}, offset {offset}: {reason}; the sample is skipped")]
    Damaged { path: PathBuf, offset: u64, reason: String },
    #[error("{path} was evicted while it was being read; refresh the reader and go on with another sample")]
    Evicted { path: PathBuf },
    #[error("the states thread has stopped; start draftsmith again")]
    Stopped,
    #[error("there is no sample {index}: the index holds {len}")]
    NoSuchSample { index: usize, len: usize },
}

impl StatesError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }
}

/// Deletes a file that was looked at.
fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("cannot delete {}: {error}; the transfer directory will fill up", path.display());
    }
}
