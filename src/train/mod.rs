//! The training step (forward and backward by hand), the loss, the optimizer, checkpoints and the incremental loop.
//!
//! What crosses this door: samples come in through [`SampleSource`], weights as [`crate::head::HeadTensors`], and what
//! the verifier gives as [`DraftTarget`]; out come better weights, [`StepReport`]s and held-out [`Score`]s. The room knows
//! neither where samples are kept nor what happens to a trained head.
//!
//! # The convention
//!
//! A document has tokens x[0..=T] and the verifier's states of rows 0..T. Row p at step k
//! - embeds x[p+1+k],
//! - has row p's aux states (step 0) or its own output of step k-1 as hidden state,
//! - predicts x[p+2+k]; its target is the softmax over the draft vocabulary of the verifier's head on the normed last
//!   state of row p+1+k.
//!
//! A chain starts at each row p >= prompt_length - 1: the first output token came from prefill, so the engine drafts from
//! there on. Step k of a chain is supervised when x[p+2+k] exists in the same document. The query of chain p at step k
//! sees step 0's keys of rows 0..=p of its document and its own keys of steps 1..=k, at position p + k, as in the engine.
//! The loss is the sum over steps of decay^k times the mean, over all supervised positions of that step in the batch, of
//! the forward KL divergence from the target to the draft.

mod attention;
mod backend;
mod bench;
mod checkpoint;
mod cuda;
mod data;
mod error;
mod evaluate;
mod loss;
mod optimizer;
mod run;
mod shuffle;
mod step;
mod tensors;

pub use backend::{DraftOptions, Drafter, check_device, open_drafter};
pub use bench::{
    BenchOptions, BenchReport, Difference, compare_with_cpu, config_by_name, measure_on_cpu, measure_on_gpu,
};
pub use checkpoint::{Checkpoint, Progress};
pub use cuda::{CudaBatch, CudaStep};
pub use data::{Document, DraftTarget, OwnedSample, SampleSource};
pub use error::TrainError;
pub use evaluate::{Score, evaluate};
pub use optimizer::{AdamW, AdamWOptions, Schedule, clip_gradients};
pub use run::{BatchSize, Control, Observer, Outcome, TrainEvent, TrainOptions, train};
pub use shuffle::shuffled;
pub use step::{Step, StepLaps, StepReport};
pub use tensors::{check_shapes, named, named_mut, zeros};
