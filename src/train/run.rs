//! The incremental loop: samples in, better weights out, resumable at every checkpoint.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::TrainDevice;
use crate::head::{HeadConfig, HeadTensors};

use super::backend::{DraftOptions, Drafter, open_backend};
use super::optimizer::{AdamW, AdamWOptions, Schedule};
use super::shuffle::shuffled;
use super::{Checkpoint, DraftTarget, OwnedSample, Progress, SampleSource, StepReport, TrainError};

/// How much goes into one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchSize {
    Documents(usize),
    /// Documents until they have at least so many tokens together, prompts included.
    Tokens(usize),
}

/// Options of [`train`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainOptions {
    /// Optimizer steps of the whole run, those before a resume included.
    pub steps: u64,
    /// S, the length of the unroll.
    pub unroll: usize,
    /// Weight of each further step of the unroll.
    pub decay: f64,
    pub batch: BatchSize,
    pub learning_rate: f64,
    pub schedule: Schedule,
    /// Steps of linear warm-up.
    pub warmup: u64,
    pub optimizer: AdamWOptions,
    /// Largest joint gradient norm.
    pub clip: f64,
    pub seed: u64,
    pub train_lm_head: bool,
    /// Steps between calls of [`Observer::evaluate`]; 0 for none but the last.
    pub evaluate_every: u64,
    /// Where checkpoints go; none are written without it.
    #[serde(skip)]
    pub checkpoint_directory: Option<PathBuf>,
    /// Steps between checkpoints; 0 for the last alone.
    pub checkpoint_every: u64,
    /// Go on from the checkpoint in `checkpoint_directory` if there is one.
    #[serde(skip)]
    pub resume: bool,
    /// Where this process trains. A run may go on elsewhere than where it began, then not to the bit.
    #[serde(skip)]
    pub device: TrainDevice,
}

impl Default for TrainOptions {
    fn default() -> Self {
        Self {
            steps: 1000,
            unroll: 3,
            decay: 0.8,
            batch: BatchSize::Documents(4),
            learning_rate: 1e-3,
            schedule: Schedule::Cosine,
            warmup: 20,
            optimizer: AdamWOptions::default(),
            clip: 1.0,
            seed: 0,
            train_lm_head: true,
            evaluate_every: 0,
            checkpoint_directory: None,
            checkpoint_every: 0,
            resume: false,
            device: TrainDevice::Cpu,
        }
    }
}

/// What just happened.
#[derive(Clone, Debug)]
pub struct TrainEvent<'a> {
    pub progress: &'a Progress,
    pub report: &'a StepReport,
    pub learning_rate: f64,
    /// Before clipping.
    pub gradient_norm: f64,
}

/// Whether to go on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Control {
    Continue,
    /// Checkpoint (where there is a directory) and return.
    Stop,
}

/// Who watches a run.
pub trait Observer {
    /// After every `evaluate_every` steps and after the last, before [`Observer::step`] of the same step: the place to
    /// score on held-out samples.
    fn evaluate(&mut self, _head: &mut dyn Drafter, _event: &TrainEvent) -> Control {
        Control::Continue
    }

    /// After each step.
    fn step(&mut self, _event: &TrainEvent) -> Control {
        Control::Continue
    }
}

/// Nobody watches.
impl Observer for () {}

/// What a run gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub weights: HeadTensors<f32>,
    pub progress: Progress,
    /// The observer ended it before its last step.
    pub stopped: bool,
}

/// Trains `weights` on `source`. On the CPU, same inputs and same machine give the same weights to the bit, resumed or
/// not.
pub fn train(
    options: &TrainOptions,
    config: &HeadConfig,
    weights: HeadTensors<f32>,
    target: &DraftTarget,
    source: &dyn SampleSource,
    observer: &mut dyn Observer,
) -> Result<Outcome, TrainError> {
    let state = start(options, config, weights)?;
    let mut progress = state.progress.clone();
    let draft = DraftOptions { config, unroll: options.unroll, decay: options.decay };
    let mut backend = open_backend(options.device, draft, options.train_lm_head, state, target)?;
    let mut order = Order { length: source.len(), pass: None, numbers: Vec::new() };
    let mut stopped = false;
    while progress.step < options.steps && !stopped {
        let samples = next_batch(options.batch, source, &mut order, &mut progress)?;
        let documents: Vec<_> = samples.iter().map(OwnedSample::document).collect();
        let report = backend.forward_backward(&documents)?;
        progress.step += 1;
        progress.tokens += report.tokens;
        let now = progress.step;
        if !report.loss.is_finite() {
            return Err(TrainError::NotFinite { step: now, loss: report.loss });
        }
        let gradient_norm = backend.clip(options.clip)?;
        if !gradient_norm.is_finite() {
            return Err(TrainError::NotFinite { step: now, loss: gradient_norm });
        }
        let learning_rate =
            options.learning_rate * options.schedule.factor(now, options.warmup, options.steps);
        // A batch with nothing to learn from would still move the weights by old momentum.
        if report.supervised[0] > 0 {
            backend.update(learning_rate)?;
        }
        metrics::counter!("draftsmith_train_steps_total").increment(1);
        metrics::counter!("draftsmith_train_tokens_total").increment(report.tokens);
        metrics::counter!("draftsmith_train_supervised_tokens_total").increment(report.supervised[0]);
        metrics::gauge!("draftsmith_train_loss").set(report.loss);
        metrics::gauge!("draftsmith_train_learning_rate").set(learning_rate);
        metrics::gauge!("draftsmith_train_gradient_norm").set(gradient_norm);

        let event = TrainEvent { progress: &progress, report: &report, learning_rate, gradient_norm };
        let last = now == options.steps;
        if last || (options.evaluate_every > 0 && now.is_multiple_of(options.evaluate_every)) {
            stopped = observer.evaluate(&mut *backend, &event) == Control::Stop;
        }
        stopped |= observer.step(&event) == Control::Stop;
        let due = options.checkpoint_every > 0 && now.is_multiple_of(options.checkpoint_every);
        if let Some(directory) = options.checkpoint_directory.as_deref().filter(|_| last || stopped || due) {
            let state = backend.state()?;
            state.progress = progress.clone();
            state.save(directory, config)?;
        }
    }
    let stopped = progress.step < options.steps;
    let weights = std::mem::take(&mut backend.state()?.weights);
    Ok(Outcome { weights, progress, stopped })
}

fn start(
    options: &TrainOptions,
    config: &HeadConfig,
    weights: HeadTensors<f32>,
) -> Result<Checkpoint, TrainError> {
    if options.resume
        && let Some(directory) = &options.checkpoint_directory
        && let Some(checkpoint) = Checkpoint::load(directory, config)?
    {
        return Ok(checkpoint);
    }
    let progress = Progress { seed: options.seed, ..Progress::default() };
    Ok(Checkpoint { weights, optimizer: AdamW::new(config, options.optimizer.clone()), progress })
}

/// The order of the current pass.
struct Order {
    length: usize,
    pass: Option<u64>,
    numbers: Vec<usize>,
}

impl Order {
    fn next(&mut self, progress: &mut Progress) -> usize {
        if progress.cursor as usize >= self.length {
            progress.pass += 1;
            progress.cursor = 0;
        }
        if self.pass != Some(progress.pass) {
            self.numbers = shuffled(self.length, progress.seed, progress.pass);
            self.pass = Some(progress.pass);
        }
        let index = self.numbers[progress.cursor as usize];
        progress.cursor += 1;
        index
    }
}

fn next_batch(
    size: BatchSize,
    source: &dyn SampleSource,
    order: &mut Order,
    progress: &mut Progress,
) -> Result<Vec<OwnedSample>, TrainError> {
    if order.length == 0 {
        return Err(TrainError::NoSamples);
    }
    let mut samples: Vec<OwnedSample> = Vec::new();
    let (mut tokens, mut gone) = (0, 0);
    loop {
        let full = match size {
            BatchSize::Documents(count) => samples.len() >= count.max(1),
            BatchSize::Tokens(count) => tokens >= count.max(1),
        };
        if full {
            return Ok(samples);
        }
        let index = order.next(progress);
        let Some(sample) = source.load(index).map_err(|source| TrainError::Sample { index, source })? else {
            metrics::counter!("draftsmith_train_gone_samples_total").increment(1);
            gone += 1;
            if gone == order.length {
                return Err(TrainError::NoSamples);
            }
            continue;
        };
        // An empty sample would never fill a batch of tokens; the step refuses it by name.
        tokens += sample.token_ids.len().max(1);
        samples.push(sample);
    }
}
