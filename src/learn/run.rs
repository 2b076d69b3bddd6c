//! One training run, from its samples to a registered candidate, and going on with an interrupted one.

use std::time::Instant;

use anyhow::{Context, ensure};
use indicatif::ProgressBar;
use serde::Serialize;

use super::run_directory::{Metrics, Plan, RunDirectory, StepLine};
use super::{
    SCORE_BATCH, Samples, Side, Start, StateLayout, Verifier, Wake, held_out_score, score, starting_head,
};
use crate::config::Config;
use crate::head::{Head, HeadDtype, HeadFormat};
use crate::promote::{Candidate, Origin, Registry, TrainingSummary};
use crate::replay::progress_bar;
use crate::store::DataDir;
use crate::train::{
    self, AdamW, AdamWOptions, BatchSize, Control, DraftTarget, Drafter, SampleSource, Schedule, Score,
    TrainEvent, TrainOptions,
};

/// Points of the learning curve, evenly over a run.
const CURVE_POINTS: u64 = 8;

/// One point of the learning curve.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CurvePoint {
    pub step: u64,
    /// Tokens of all documents seen, prompts and repeated passes included.
    pub tokens_seen: u64,
    pub loss: f64,
    /// On the held-out conversations.
    pub acceptance_length: f64,
    pub seconds: f64,
}

impl CurvePoint {
    fn of(line: &StepLine) -> Option<Self> {
        Some(Self {
            step: line.step,
            tokens_seen: line.tokens_seen,
            loss: line.loss,
            acceptance_length: line.held_out_acceptance_length?,
            seconds: line.seconds,
        })
    }
}

/// What a run gave.
#[derive(Clone, Debug, Serialize)]
pub struct TrainReport {
    /// Its directory under `data/runs/`.
    pub run: String,
    /// The candidate's id in the registry.
    pub head: String,
    pub steps: u64,
    pub samples: usize,
    pub held_out_samples: usize,
    pub tokens_seen: u64,
    /// Of work, interruptions left out.
    pub seconds: f64,
    pub tokens_per_second: f64,
    pub curve: Vec<CurvePoint>,
    pub score: Score,
}

/// How a run ended.
#[derive(Clone, Debug)]
pub enum Ended {
    Finished(Box<TrainReport>),
    /// By [`Wake::stop`], with a checkpoint.
    Stopped {
        run: String,
        step: u64,
        steps: u64,
    },
}

/// Trains on the captured training split and registers the result with its held-out score.
///
/// `steps`: optimizer steps; without it, `train.passes` over the samples. `told` gets each point of the curve.
pub fn train_candidate(
    config: &Config,
    start: &Start,
    steps: Option<u64>,
    wake: &Wake,
    told: impl FnMut(&CurvePoint),
) -> anyhow::Result<Ended> {
    let data = DataDir::new(&config.data.directory);
    let verifier = Verifier::read(config)?;
    let (head, parent) = starting_head(start, &data, &Registry::of(&data), &verifier, config)?;
    let layout = StateLayout::of(&head.config);
    let training = Samples::open(&data, Side::Train, &layout)?;
    ensure!(
        !training.is_empty(),
        "no training samples of layers {:?} in {}; let traffic through `draftsmith serve` with the plugin first",
        layout.layer_ids,
        data.states().display()
    );
    let mut options = options(config, training.len());
    options.steps = steps.unwrap_or(options.steps).max(1);
    let begun = Begun { head, parent, optimizer: None, training, options };
    begin(config, &data, &verifier, begun, wake, told)
}

/// The options of a run over so many samples.
pub(super) fn options(config: &Config, samples: usize) -> TrainOptions {
    let train = &config.train;
    let per_pass = samples.div_ceil(train.batch_documents) as u64;
    TrainOptions {
        steps: per_pass * train.passes as u64,
        unroll: train.unroll_steps,
        decay: train.step_decay,
        batch: BatchSize::Documents(train.batch_documents),
        learning_rate: train.learning_rate,
        schedule: Schedule::Cosine,
        warmup: train.warmup_steps,
        optimizer: AdamWOptions { weight_decay: train.weight_decay, ..AdamWOptions::default() },
        clip: train.gradient_clip,
        seed: train.seed,
        train_lm_head: train.train_lm_head,
        checkpoint_every: train.checkpoint_every,
        ..TrainOptions::default()
    }
}

/// What a new run begins with.
pub(super) struct Begun {
    pub head: Head,
    pub parent: Option<String>,
    /// An earlier run's moments, to go on with.
    pub optimizer: Option<AdamW>,
    pub training: Samples,
    pub options: TrainOptions,
}

/// Makes the run's directory and trains.
pub(super) fn begin(
    config: &Config,
    data: &DataDir,
    verifier: &Verifier,
    begun: Begun,
    wake: &Wake,
    told: impl FnMut(&CurvePoint),
) -> anyhow::Result<Ended> {
    // Before there is a run on disk.
    train::check_device(config.train.device)?;
    let Begun { head, parent, optimizer, training, mut options } = begun;
    options.evaluate_every = (options.steps / CURVE_POINTS).max(1);
    let held_out = Samples::open(data, Side::HeldOut, &StateLayout::of(&head.config))?;
    let plan = Plan::new(parent, &verifier.identity, options, [training.names(), held_out.names()]);
    let directory = RunDirectory::create(data, plan, &head, optimizer)?;
    let run = Run { directory, head, training, held_out };
    run.finish(config, data, verifier, wake, told)
}

/// Goes on with an unfinished run, `name` or the newest: the same steps, to the bit, as if it had not been interrupted.
pub fn resume(
    config: &Config,
    name: Option<&str>,
    wake: &Wake,
    told: impl FnMut(&CurvePoint),
) -> anyhow::Result<Ended> {
    let data = DataDir::new(&config.data.directory);
    let (mut directory, head) = RunDirectory::resume(&data, name)?;
    let verifier = Verifier::read(config)?;
    ensure!(
        directory.plan.verifier == verifier.identity,
        "run {} trains for verifier {} (config {}), verifier.directory holds {} (config {}); set verifier.directory to the former",
        directory.id,
        directory.plan.verifier.name,
        directory.plan.verifier.config_digest,
        verifier.identity.name,
        verifier.identity.config_digest
    );
    let layout = StateLayout::of(&head.config);
    let names = std::mem::take(&mut directory.plan.training);
    let training = Samples::named(&data, names, Side::Train, &layout)?;
    let names = std::mem::take(&mut directory.plan.held_out);
    let held_out = Samples::named(&data, names, Side::HeldOut, &layout)?;
    if training.gone() > 0 {
        tracing::warn!(
            run = directory.id,
            gone = training.gone(),
            samples = training.len(),
            "samples of this run were evicted from the store; it goes on without them"
        );
    }
    Run { directory, head, training, held_out }.finish(config, &data, &verifier, wake, told)
}

struct Run {
    directory: RunDirectory,
    head: Head,
    training: Samples,
    held_out: Samples,
}

impl Run {
    fn finish(
        self,
        config: &Config,
        data: &DataDir,
        verifier: &Verifier,
        wake: &Wake,
        told: impl FnMut(&CurvePoint),
    ) -> anyhow::Result<Ended> {
        let id = self.directory.id.clone();
        self.train(config, data, verifier, wake, told).with_context(|| {
            format!("run {id}; go on from its checkpoint with `draftsmith train --resume {id}`")
        })
    }

    fn train(
        self,
        config: &Config,
        data: &DataDir,
        verifier: &Verifier,
        wake: &Wake,
        mut told: impl FnMut(&CurvePoint),
    ) -> anyhow::Result<Ended> {
        let Self { directory, mut head, training, held_out } = self;
        let options = TrainOptions { device: config.train.device, ..directory.options() };
        let target = DraftTarget::from_verifier(&verifier.tensors, head.draft_ids.clone())?;
        let mut watch = Watch {
            held_out: &held_out,
            metrics: Metrics::open(&directory.path)?,
            wake,
            scored: None,
            fresh_score: None,
            failure: None,
            bar: progress_bar(usize::try_from(options.steps).ok()),
            told: &mut told,
        };
        let began = Instant::now();
        let outcome = train::train(&options, &head.config, head.tensors, &target, &training, &mut watch)?;
        let trained_seconds = began.elapsed().as_secs_f64();
        let Watch { scored, metrics, failure, bar, .. } = watch;
        bar.finish_and_clear();
        if let Some(error) = failure {
            return Err(error);
        }
        let (step, steps) = (outcome.progress.step, options.steps);
        if outcome.stopped {
            return Ok(Ended::Stopped { run: directory.id.clone(), step, steps });
        }
        head.tensors = outcome.weights;
        let (score, held_out_score) = match scored {
            Some(score) => (score.clone(), held_out_score(&score, &held_out)),
            // Interrupted between the last step and the registration.
            None => score(config, verifier, &held_out, &head)?,
        };
        let last = metrics.lines().last();
        let manifest = Registry::of(data).add(&Candidate {
            head: &head,
            verifier: &verifier.identity,
            origin: Origin::Trained,
            parent: directory.plan.parent.clone(),
            training: Some(TrainingSummary {
                steps: step,
                tokens_seen: outcome.progress.tokens,
                samples: training.len() as u64,
                loss: last.map_or(0.0, |line| line.loss),
                run: Some(directory.id.clone()),
                newest_sample: training.newest(),
            }),
            score: (score.drafts > 0).then_some(held_out_score),
            format: HeadFormat::Flat,
            dtype: HeadDtype::F32,
        })?;
        let seconds = last.map_or(trained_seconds, |line| line.seconds);
        let report = TrainReport {
            run: directory.id.clone(),
            head: manifest.id,
            steps: step,
            samples: training.len(),
            held_out_samples: held_out.len(),
            tokens_seen: outcome.progress.tokens,
            seconds,
            tokens_per_second: outcome.progress.tokens as f64 / seconds,
            curve: metrics.lines().iter().filter_map(CurvePoint::of).collect(),
            score,
        };
        directory.finish(&report)?;
        Ok(Ended::Finished(Box::new(report)))
    }
}

/// Watches a run: writes its metrics, scores it at even steps, and ends it when asked to.
struct Watch<'a, F: FnMut(&CurvePoint)> {
    held_out: &'a Samples,
    metrics: Metrics,
    wake: &'a Wake,
    /// The last score.
    scored: Option<Score>,
    /// That of the step whose line is still to be written.
    fresh_score: Option<f64>,
    failure: Option<anyhow::Error>,
    bar: ProgressBar,
    told: &'a mut F,
}

impl<F: FnMut(&CurvePoint)> Watch<'_, F> {
    fn write_line(&mut self, event: &TrainEvent) -> anyhow::Result<()> {
        let line = self.metrics.add(event.progress, event.report.loss, self.fresh_score.take())?;
        self.bar.set_position(event.progress.step);
        self.bar.set_message(format!("loss {:.3}", line.loss));
        if let Some(point) = CurvePoint::of(line) {
            self.bar.suspend(|| (self.told)(&point));
        }
        Ok(())
    }

    fn fail(&mut self, error: anyhow::Error) -> Control {
        self.failure = Some(error);
        Control::Stop
    }
}

impl<F: FnMut(&CurvePoint)> train::Observer for Watch<'_, F> {
    fn evaluate(&mut self, head: &mut dyn Drafter, _event: &TrainEvent) -> Control {
        match train::evaluate(head, self.held_out, SCORE_BATCH) {
            Ok(score) => {
                self.fresh_score = Some(score.acceptance_length);
                self.scored = Some(score);
                Control::Continue
            }
            Err(error) => self.fail(error.into()),
        }
    }

    fn step(&mut self, event: &TrainEvent) -> Control {
        if let Err(error) = self.write_line(event) {
            return self.fail(error);
        }
        if self.wake.is_stopped() { Control::Stop } else { Control::Continue }
    }
}
