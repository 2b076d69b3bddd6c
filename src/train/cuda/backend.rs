//! The GPU's step as the incremental loop and the scoring see it.

use super::super::backend::{Backend, Drafter};
use super::super::{Checkpoint, Document, StepReport, TrainError};
use super::CudaStep;

impl Drafter for CudaStep {
    fn unroll(&self) -> usize {
        self.steps
    }

    fn decay(&self) -> f64 {
        self.decay
    }

    fn draft(&mut self, documents: &[Document]) -> Result<(StepReport, Vec<Vec<bool>>), TrainError> {
        let batch = self.batch(documents)?;
        self.forward_only(&batch)?;
        Ok((self.report(&batch)?, self.hits(&batch)?))
    }
}

/// A head in training on a GPU, with its state on the host as it was when it was last asked for.
pub(in super::super) struct CudaBackend {
    step: CudaStep,
    state: Checkpoint,
    is_current: bool,
}

impl CudaBackend {
    /// `step` holds what `state` has.
    pub fn new(step: CudaStep, state: Checkpoint) -> Self {
        Self { step, state, is_current: true }
    }
}

impl Drafter for CudaBackend {
    fn unroll(&self) -> usize {
        self.step.unroll()
    }

    fn decay(&self) -> f64 {
        self.step.decay()
    }

    fn draft(&mut self, documents: &[Document]) -> Result<(StepReport, Vec<Vec<bool>>), TrainError> {
        self.step.draft(documents)
    }
}

impl Backend for CudaBackend {
    fn forward_backward(&mut self, documents: &[Document]) -> Result<StepReport, TrainError> {
        let batch = self.step.batch(documents)?;
        self.step.forward_backward(&batch)?;
        self.step.report(&batch)
    }

    fn clip(&mut self, limit: f64) -> Result<f64, TrainError> {
        self.step.clip(limit)?;
        self.step.gradient_norm()
    }

    fn update(&mut self, learning_rate: f64) -> Result<(), TrainError> {
        self.is_current = false;
        self.step.update(learning_rate)
    }

    fn state(&mut self) -> Result<&mut Checkpoint, TrainError> {
        if !self.is_current {
            self.step.save(&mut self.state.weights, &mut self.state.optimizer)?;
            self.is_current = true;
        }
        Ok(&mut self.state)
    }
}
