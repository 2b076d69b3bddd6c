//! What can go wrong in this room.

use std::io;
use std::path::PathBuf;

use crate::compute::RopeError;
use crate::compute::cuda::CudaError;

/// An error of the trainer; each names the thing, the value and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(
        "tensor {tensor} has {got} elements, the head's configuration wants {wanted}; use the head's own config.json"
    )]
    Shape { tensor: String, got: usize, wanted: usize },
    #[error("document {document} of the batch: {reason}; rebuild its states or leave it out")]
    Document { document: usize, reason: String },
    #[error("the head's configuration: {0}")]
    Config(String),
    #[error(transparent)]
    Rope(#[from] RopeError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("train.device = \"cuda\": {reason}; with \"auto\" the CPU trains where no GPU can")]
    Device { reason: CudaError },
    #[error("loss became {loss} at step {step}; lower the learning rate or look at the samples of this step")]
    NotFinite { step: u64, loss: f64 },
    #[error("the sample source is empty; record traffic first or widen the selection")]
    NoSamples,
    #[error("sample {index} cannot be read: {source}")]
    Sample { index: usize, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("checkpoint {}: {source}; check space and rights, or start without resuming", path.display())]
    CheckpointFile { path: PathBuf, source: io::Error },
    #[error("checkpoint {}: {reason}; start without resuming or restore the file", path.display())]
    CheckpointContent { path: PathBuf, reason: String },
}
