//! Replaying a prompt dataset through the proxy.
//!
//! A [`Dataset`] is read row by row, whatever its size; [`run`] sends each row to a chat endpoint and lets the server
//! write the answers, so that what is recorded (and trained on) is the verifier's own text. [`support`] makes a small,
//! narrow dataset for a demonstration.
//!
//! What this room promises:
//! - replayed requests are marked (`x-draftsmith-source: replay`) and carry their conversation's id, so that they fall on
//!   the same side of the held-out split as when they are filtered here;
//! - a row is done once its whole answer came and is then skipped by later runs; a row that failed is in the error file
//!   and is tried again by the next run;
//! - a broken row costs itself alone.

mod dataset;
mod runner;
pub mod support;

pub use dataset::{BadRow, Dataset, DatasetOptions, ReplayItem};
pub(crate) use runner::progress_bar;
pub use runner::{Report, RunOptions, Shard, Split, journal_path, run};

use std::io;
use std::path::PathBuf;

/// Why a replay cannot begin or go on. Failures of single rows are in the error file instead.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    #[error("{action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "{path} is no dataset: it begins with {start:?}; give a JSON array (ShareGPT) or JSON lines with `messages`"
    )]
    Format { path: PathBuf, start: String },
    #[error("{0:?} is no shard; write I/N with 0 <= I < N, as in 0/4")]
    Shard(String),
    #[error("{0:?} is no split; write all, train or held-out")]
    Split(String),
    #[error("{option} is {value}; {remedy}")]
    Option { option: &'static str, value: String, remedy: &'static str },
    #[error("cannot ask {url} for its model: {reason}; is the server up? or name the model")]
    Model { url: String, reason: String },
}
