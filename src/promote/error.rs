//! What can go wrong with the registry.

use std::io;
use std::path::{Path, PathBuf};

use crate::head::{HeadError, Incompatible};
use crate::vllm::ClientError;

#[derive(Debug, thiserror::Error)]
pub enum PromoteError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: not valid JSON for this file: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error(transparent)]
    Head(#[from] HeadError),
    #[error(transparent)]
    Incompatible(#[from] Incompatible),
    #[error(transparent)]
    Vllm(#[from] ClientError),
    #[error(
        "vLLM's plugin does not say which head it was started with; write the plugin again with `draftsmith vllm plugin` and restart vLLM"
    )]
    OldPlugin,
    #[error(
        "vLLM does not say which file its head is from: an update of its weights failed, or it was started with a head by name; `draftsmith swap` a head that is good first"
    )]
    RunningUnknown,
    #[error(
        "{}: not the file that vLLM loaded its head from any more, so that head cannot be scored; `draftsmith swap` a head that is good first",
        file.display()
    )]
    RunningChanged { file: PathBuf },
    #[error("no head `{id}` in {}; `draftsmith heads list` names those there", directory.display())]
    NoSuchHead { id: String, directory: PathBuf },
    #[error("`{prefix}` begins the ids of {count} heads; give more of the id")]
    Ambiguous { prefix: String, count: usize },
    #[error("`{id}` is not a head id; ids are letters, digits and `-`")]
    BadId { id: String },
    #[error("{}: sha256 {found}, the manifest says {expected}; the file was changed after it was registered", path.display())]
    Digest { path: PathBuf, found: String, expected: String },
    #[error("head `{id}`: {what} is {found}, its manifest says {expected}")]
    Manifest { id: String, what: &'static str, found: String, expected: String },
    #[error("{}: manifest schema {found}; this version reads up to {expected}: upgrade draftsmith", path.display())]
    Schema { path: PathBuf, found: u32, expected: u32 },
    #[error("{} exists; give a directory that is not there yet", path.display())]
    Exists { path: PathBuf },
    #[error(
        "no head is live; train one with `draftsmith train --head scratch`, then `draftsmith heads promote ID`"
    )]
    NothingLive,
    #[error("nothing to roll back to: `{id}` is the first head that was promoted")]
    NoPrevious { id: String },
}

impl PromoteError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_path_buf(), source }
    }
}
