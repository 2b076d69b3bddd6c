//! Hidden states: collecting from vLLM, verifying, storing what they share once, reading samples.
//!
//! vLLM's plugin publishes one file for each finished request into a transfer directory ([`transfer`]). The
//! [`Collector`] matches the files to the requests that the proxy saw, verifies them and appends them to the
//! [`StateStore`] (bounded, one writer; what requests have in common is stored once, see `block.rs`). A [`Reader`], also in
//! another process, sees the samples as they are appended. Where there is no plugin, a [`StockSample`] takes what a second
//! vLLM's own connector wrote; both ways end in the same checks.
//!
//! What this room promises:
//! - nothing here is waited for by a request, and nothing here panics;
//! - a file from vLLM is deleted once it was looked at, whatever came of it, and each failure is counted by its reason;
//! - a sample in the store was verified (checksum, shapes, finite values, ids that decode to the recorded text);
//! - held-out samples outlive training samples;
//! - damage costs the samples whose bytes are damaged, never the reader.

mod accept;
mod bench;
mod block;
mod collector;
mod fp8;
mod frame;
mod index;
mod reader;
mod segment;
mod stock;
mod store;
pub mod transfer;
mod values;

pub use accept::{Expected, OutcomeStatus, SampleKey};
pub use bench::{BenchOptions, BenchReport, measure as measure_store};
pub use collector::{
    ChoiceText, Collector, CollectorOptions, CollectorStats, Forgetter, Outcome, RequestSummary,
};
pub use frame::Damage;
pub use index::{SampleHeader, SampleName, StateDtype};
pub use reader::{Reader, ReaderStats, Refreshed, Sample, SampleEntry, VerifyReport};
pub use stock::{StockSample, store_stock};
pub use store::{Appended, NewSample, StateStore, StoreOptions, StoreStats};
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
    #[error(
        "none of request {request_id}'s rows follows the last of its missing ones; {missing} are missing"
    )]
    NoCompleteRows { request_id: String, missing: usize },
    #[error("{path} is not a file of a state store of version {expected}: {reason}; move it away")]
    Foreign { path: PathBuf, expected: u32, reason: String },
    #[error("{path}, offset {offset}: {reason}; the sample is skipped")]
    Damaged { path: PathBuf, offset: u64, reason: String },
    #[error("the sample was evicted from {directory}; refresh the reader and go on with another one")]
    Evicted { directory: PathBuf },
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
