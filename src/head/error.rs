//! What can be wrong with a head or with a verifier's directory.

use std::io;
use std::path::{Path, PathBuf};

/// Every message names the file, the field or tensor, what stood there, and what was expected.
#[derive(Debug, thiserror::Error)]
pub enum HeadError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: not valid JSON: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: not a valid safetensors file: {problem}", path.display())]
    Safetensors { path: PathBuf, problem: String },
    #[error("{}: no model.safetensors and no model.safetensors.index.json; point to the directory of a checkpoint", directory.display())]
    NoWeights { directory: PathBuf },
    #[error("{}: field `{field}` is missing; expected {expected}", path.display())]
    MissingField { path: PathBuf, field: String, expected: String },
    #[error("{}: field `{field}` is {found}; expected {expected}", path.display())]
    BadField { path: PathBuf, field: String, found: String, expected: String },
    #[error("{}: `{field}` = {found} is not supported: {reason}", path.display())]
    Unsupported { path: PathBuf, field: String, found: String, reason: String },
    #[error("{}: tensor `{name}` is missing; expected shape {expected:?}", path.display())]
    MissingTensor { path: PathBuf, name: String, expected: Vec<usize> },
    #[error("{}: tensor `{name}` {found:?} is not part of this head; expected only what its config.json asks for", path.display())]
    UnknownTensor { path: PathBuf, name: String, found: Vec<usize> },
    #[error("{}: tensor `{name}` has shape {found:?}; expected {expected:?}", path.display())]
    BadShape { path: PathBuf, name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("{}: tensor `{name}` has dtype {found}; expected {expected}", path.display())]
    BadDtype { path: PathBuf, name: String, found: String, expected: &'static str },
    #[error("{}: tensor `{name}` holds {found} at element {index}; expected finite numbers (a trainer that failed, or that marks unloaded weights with NaN)", path.display())]
    NotFinite { path: PathBuf, name: String, index: usize, found: f32 },
    #[error("draft vocabulary: {problem}")]
    Vocabulary { problem: String },
    #[error("tensor `{name}` has {found} elements in memory; expected {expected} for shape {shape:?}")]
    BadLength { name: String, found: usize, expected: usize, shape: Vec<usize> },
    #[error("{}: the head's own `embed_tokens.weight` differs from the verifier's at element {index} ({found} against {expected}); training uses the verifier's embedding, so this head cannot be trained here", path.display())]
    OtherEmbedding { path: PathBuf, index: usize, found: f32, expected: f32 },
}

impl HeadError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_path_buf(), source }
    }

    pub(crate) fn unsupported(path: &Path, field: &str, found: impl ToString, reason: &str) -> Self {
        Self::Unsupported {
            path: path.to_path_buf(),
            field: field.to_owned(),
            found: found.to_string(),
            reason: reason.to_owned(),
        }
    }

    pub(crate) fn bad_field(path: &Path, field: &str, found: impl ToString, expected: impl ToString) -> Self {
        Self::BadField {
            path: path.to_path_buf(),
            field: field.to_owned(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }
}
