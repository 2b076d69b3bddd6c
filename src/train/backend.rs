//! Where a head is computed: on the CPU in f32, or on a GPU in bf16 with f32 masters.
//!
//! The incremental loop and the held-out scoring know a head by the two traits alone. What is kept is f32 on the host, so
//! that a run may go on elsewhere than where it began.

use crate::compute::cuda;
use crate::config::TrainDevice;
use crate::head::{HeadConfig, HeadTensors};

use super::cuda::{CudaBackend, CudaStep};
use super::optimizer::{AdamWOptions, clip_gradients};
use super::tensors::zeros;
use super::{Checkpoint, Document, DraftTarget, Step, StepReport, TrainError};

/// A head that drafts on documents.
pub trait Drafter {
    /// S, the tokens drafted in a row.
    fn unroll(&self) -> usize;

    /// The weight of each further step in the loss.
    fn decay(&self) -> f64;

    /// What the head says about the documents; and for each document, for each of its chains in order, for each step: whether the step is supervised and the draft's best token is the one that the model said. [chains * S] each.
    fn draft(&mut self, documents: &[Document]) -> Result<(StepReport, Vec<Vec<bool>>), TrainError>;
}

/// A head in training: weights, gradients and optimizer.
pub(super) trait Backend: Drafter {
    /// Loss and gradients of a batch.
    fn forward_backward(&mut self, documents: &[Document]) -> Result<StepReport, TrainError>;

    /// Scales the gradients down to a joint norm of at most `limit`; gives the norm before.
    fn clip(&mut self, limit: f64) -> Result<f64, TrainError>;

    /// One update by the clipped gradients.
    fn update(&mut self, learning_rate: f64) -> Result<(), TrainError>;

    /// Weights and optimizer as they are now. The progress in it is the caller's to keep.
    fn state(&mut self) -> Result<&mut Checkpoint, TrainError>;
}

/// What a device must know of a head.
#[derive(Clone, Copy)]
pub struct DraftOptions<'a> {
    pub config: &'a HeadConfig,
    /// S, the length of the unroll.
    pub unroll: usize,
    /// Weight of each further step of the unroll.
    pub decay: f64,
}

/// An error where the device can be known not to work before anything is opened on it.
pub fn check_device(device: TrainDevice) -> Result<(), TrainError> {
    if device != TrainDevice::Cuda {
        return Ok(());
    }
    cuda::check(0).map_err(|reason| TrainError::Device { reason })
}

/// A head to be scored, on the device.
pub fn open_drafter<'a>(
    device: TrainDevice,
    options: DraftOptions,
    weights: &'a HeadTensors<f32>,
    target: &'a DraftTarget,
) -> Result<Box<dyn Drafter + 'a>, TrainError> {
    let on_gpu = on_gpu(device, || {
        let unroll = (options.unroll, options.decay);
        CudaStep::new(0, options.config, unroll, target, weights, false, AdamWOptions::default())
    })?;
    Ok(match on_gpu {
        Some(step) => Box::new(step),
        None => Box::new(CpuHead {
            step: Step::new(options.config, options.unroll, options.decay, target)?,
            weights,
        }),
    })
}

/// A head to be trained on from `state`, on the device.
pub(super) fn open_backend<'a>(
    device: TrainDevice,
    options: DraftOptions,
    train_lm_head: bool,
    state: Checkpoint,
    target: &'a DraftTarget,
) -> Result<Box<dyn Backend + 'a>, TrainError> {
    let on_gpu = on_gpu(device, || {
        let unroll = (options.unroll, options.decay);
        let (weights, optimizer) = (&state.weights, &state.optimizer);
        let mut step = CudaStep::new(
            0,
            options.config,
            unroll,
            target,
            weights,
            train_lm_head,
            optimizer.options.clone(),
        )?;
        step.set_optimizer(optimizer)?;
        Ok(step)
    })?;
    if let Some(step) = on_gpu {
        tracing::info!(device = step.device().name()?, "training on the GPU");
        return Ok(Box::new(CudaBackend::new(step, state)));
    }
    let mut step = Step::new(options.config, options.unroll, options.decay, target)?;
    step.set_train_lm_head(train_lm_head);
    tracing::info!(threads = rayon::current_num_threads(), "training on the CPU");
    Ok(Box::new(CpuBackend { step, gradients: zeros(options.config), train_lm_head, state }))
}

/// What `open` gives, or none where the CPU shall do it.
fn on_gpu<T>(
    device: TrainDevice,
    open: impl FnOnce() -> Result<T, TrainError>,
) -> Result<Option<T>, TrainError> {
    if device == TrainDevice::Cpu || (device == TrainDevice::Auto && !cuda::is_present()) {
        return Ok(None);
    }
    match open() {
        Ok(opened) => Ok(Some(opened)),
        Err(TrainError::Cuda(reason)) if device == TrainDevice::Cuda => Err(TrainError::Device { reason }),
        Err(TrainError::Cuda(error)) => {
            tracing::warn!(%error, "the GPU cannot be used");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// A head on the CPU, to be scored.
struct CpuHead<'a> {
    step: Step<'a, f32>,
    weights: &'a HeadTensors<f32>,
}

impl Drafter for CpuHead<'_> {
    fn unroll(&self) -> usize {
        self.step.steps()
    }

    fn decay(&self) -> f64 {
        self.step.decay()
    }

    fn draft(&mut self, documents: &[Document]) -> Result<(StepReport, Vec<Vec<bool>>), TrainError> {
        let report = self.step.forward(self.weights, documents)?;
        Ok((report, self.step.hits(documents.len())))
    }
}

/// A head in training on the CPU.
struct CpuBackend<'a> {
    step: Step<'a, f32>,
    gradients: HeadTensors<f32>,
    train_lm_head: bool,
    state: Checkpoint,
}

impl Drafter for CpuBackend<'_> {
    fn unroll(&self) -> usize {
        self.step.steps()
    }

    fn decay(&self) -> f64 {
        self.step.decay()
    }

    fn draft(&mut self, documents: &[Document]) -> Result<(StepReport, Vec<Vec<bool>>), TrainError> {
        let report = self.step.forward(&self.state.weights, documents)?;
        Ok((report, self.step.hits(documents.len())))
    }
}

impl Backend for CpuBackend<'_> {
    fn forward_backward(&mut self, documents: &[Document]) -> Result<StepReport, TrainError> {
        self.step.forward_backward(&self.state.weights, documents, &mut self.gradients)
    }

    fn clip(&mut self, limit: f64) -> Result<f64, TrainError> {
        Ok(clip_gradients(&mut self.gradients, limit))
    }

    fn update(&mut self, learning_rate: f64) -> Result<(), TrainError> {
        let Checkpoint { weights, optimizer, .. } = &mut self.state;
        optimizer.update(weights, &self.gradients, learning_rate, self.train_lm_head);
        Ok(())
    }

    fn state(&mut self) -> Result<&mut Checkpoint, TrainError> {
        Ok(&mut self.state)
    }
}
