use std::io;
use std::path::PathBuf;

use crate::store::ObjectError;

/// What can go wrong in this room. Every message names the thing and what to do.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("cannot {action} {}: {source}; check that the disk has room and that the directory is writable", path.display())]
    Disk { action: &'static str, path: PathBuf, source: io::Error },

    #[error(
        "{} is locked by another draftsmith; give each process its own data directory or stop the other one",
        path.display()
    )]
    Locked { path: PathBuf },

    #[error("cannot {action} {}: {source}; if the file was damaged, move it out of records/ and go on", path.display())]
    Parquet { action: &'static str, path: PathBuf, source: parquet::errors::ParquetError },

    #[error("{}: column {column} is missing or not {expected}; the file was not written by this program", path.display())]
    Column { path: PathBuf, column: &'static str, expected: &'static str },

    #[error("{}: {column} is {value:?}, which this version does not know; use a newer draftsmith", path.display())]
    Value { path: PathBuf, column: &'static str, value: String },

    #[error(
        "{}: token id {id} is outside the vocabulary of {vocab_size}; these records are another model's: \
         use another data directory, or filter by model",
        path.display()
    )]
    TokenId { path: PathBuf, id: i32, vocab_size: usize },

    #[error("{}: {what}; move it out of records/, it is not this program's", path.display())]
    Foreign { path: PathBuf, what: String },

    #[error("cannot build the rows of {}: {source}; this is a bug, please report it", path.display())]
    Rows { path: PathBuf, source: arrow_schema::ArrowError },

    #[error("cannot start the recorder's {name} thread: {source}; raise the limit on threads")]
    Thread { name: &'static str, source: io::Error },

    #[error("the recorder could not write: {0}; rows stay in memory up to the bound and are tried again")]
    Unwritten(String),

    #[error(
        "{0} WAL segments are not sealed yet; they stay in wal/ and are tried again, also at the next start"
    )]
    Unsealed(usize),

    #[error(transparent)]
    ObjectStore(#[from] ObjectError),

    #[error("the object store is not up to date: {0}; it is tried again, also at the next start")]
    NotCopied(String),

    #[error("the recorder has stopped; start it again")]
    Stopped,
}

impl RecordError {
    /// For `map_err` on file operations.
    pub(super) fn disk(action: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Disk { action, path, source }
    }

    pub(super) fn parquet(
        action: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(parquet::errors::ParquetError) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Parquet { action, path, source }
    }
}
