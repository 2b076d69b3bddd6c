//! Learning from what was captured: wires the state store, the records, the heads and the trainer together.
//!
//! [`train_candidate`] makes a candidate head from captured traffic and registers it; [`score_head`] scores a head on the
//! held-out conversations. Neither touches a running vLLM.

mod samples;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use serde::Serialize;

use crate::config::Config;
use crate::head::{
    FreshOptions, Head, HeadDtype, HeadFormat, HeadTensors, OutputHead, VerifierIdentity, VerifierShape,
    VerifierTensors, draft_vocabulary, fresh_head,
};
use crate::promote::{Candidate, HeldOutScore, Origin, Registry, TrainingSummary};
use crate::record;
use crate::store::DataDir;
use crate::train::{
    self, AdamWOptions, BatchSize, Control, DraftTarget, SampleSource, Schedule, Score, Step, TrainEvent,
    TrainOptions,
};
pub use samples::{Samples, Side};

/// Documents scored at a time.
const SCORE_BATCH: usize = 4;
/// Points of the learning curve, evenly over a run.
const CURVE_POINTS: u64 = 8;

/// Which head a run starts from.
#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    /// Fresh weights and a draft vocabulary of this size, chosen by what was recorded.
    Scratch { draft_vocab_size: usize },
    /// A registered head by id, or `live`.
    Registered(String),
    /// Any head's directory.
    Directory(std::path::PathBuf),
}

/// One point of the learning curve.
#[derive(Clone, Debug, Serialize)]
pub struct CurvePoint {
    pub step: u64,
    /// Tokens of all documents seen, prompts and repeated passes included.
    pub tokens_seen: u64,
    pub loss: f64,
    /// On the held-out conversations.
    pub acceptance_length: f64,
    pub seconds: f64,
}

/// What a run gave.
#[derive(Clone, Debug, Serialize)]
pub struct TrainReport {
    /// The candidate's id in the registry.
    pub head: String,
    pub steps: u64,
    pub samples: usize,
    pub held_out_samples: usize,
    pub tokens_seen: u64,
    pub seconds: f64,
    pub tokens_per_second: f64,
    pub curve: Vec<CurvePoint>,
    pub score: Score,
}

/// The verifier as training needs it.
pub struct Verifier {
    pub shape: VerifierShape,
    pub tensors: VerifierTensors,
    pub identity: VerifierIdentity,
}

impl Verifier {
    /// Reads `verifier.directory` of the configuration.
    pub fn read(config: &Config) -> anyhow::Result<Self> {
        let directory = config
            .verifier
            .directory
            .as_deref()
            .context("verifier.directory is not set; give the directory of the model that vLLM serves")?;
        let shape = VerifierShape::read(directory)?;
        let tensors = VerifierTensors::read(directory, &shape)?;
        let name =
            directory.file_name().map_or_else(|| "verifier".to_owned(), |name| name.to_string_lossy().into());
        let identity = VerifierIdentity::read(directory, &name, &shape)?;
        Ok(Self { shape, tensors, identity })
    }
}

/// Trains on the captured training split and registers the result with its held-out score.
///
/// `steps`: optimizer steps; without it, `train.passes` over the samples. `follow` is told each point of the curve.
pub fn train_candidate(
    config: &Config,
    start: &Start,
    steps: Option<u64>,
    mut follow: impl FnMut(&CurvePoint),
) -> anyhow::Result<TrainReport> {
    let data = DataDir::new(&config.data.directory);
    let verifier = Verifier::read(config)?;
    let training = Samples::open(&data, Side::Train, verifier.shape.hidden_size)?;
    let held_out = Samples::open(&data, Side::HeldOut, verifier.shape.hidden_size)?;
    ensure!(
        !training.is_empty(),
        "no training samples in {}; let traffic through `draftsmith serve` with the plugin first",
        data.states().display()
    );
    let registry = Registry::open(&data)?;
    let (mut head, parent) = starting_head(start, &data, &registry, &verifier, config)?;
    let target = DraftTarget::from_verifier(&verifier.tensors, head.draft_ids.clone())?;

    let per_pass = training.len().div_ceil(config.train.batch_documents) as u64;
    let total = steps.unwrap_or(per_pass * config.train.passes as u64).max(1);
    let options = TrainOptions {
        steps: total,
        unroll: config.train.unroll_steps,
        decay: config.train.step_decay,
        batch: BatchSize::Documents(config.train.batch_documents),
        learning_rate: config.train.learning_rate,
        schedule: Schedule::Cosine,
        warmup: config.train.warmup_steps,
        optimizer: AdamWOptions { weight_decay: config.train.weight_decay, ..AdamWOptions::default() },
        clip: config.train.gradient_clip,
        seed: config.train.seed,
        train_lm_head: config.train.train_lm_head,
        evaluate_every: (total / CURVE_POINTS).max(1),
        ..TrainOptions::default()
    };
    let began = Instant::now();
    let mut watch = Curve {
        scorer: Step::new(&head.config, config.train.unroll_steps, config.train.step_decay, &target)?,
        held_out: &held_out,
        began,
        points: Vec::new(),
        score: Score::default(),
        failure: None,
        follow: &mut follow,
    };
    let outcome = train::train(&options, &head.config, head.tensors, &target, &training, &mut watch)?;
    if let Some(error) = watch.failure {
        return Err(error.into());
    }
    let (curve, score) = (watch.points, watch.score);
    head.tensors = outcome.weights;
    let seconds = began.elapsed().as_secs_f64();
    let summary = TrainingSummary {
        steps: outcome.progress.step,
        tokens_seen: outcome.progress.tokens,
        samples: training.len() as u64,
        loss: curve.last().map_or(0.0, |point| point.loss),
    };
    let manifest = registry.add(&Candidate {
        head: &head,
        verifier: &verifier.identity,
        origin: Origin::Trained,
        parent,
        training: Some(summary),
        score: (score.drafts > 0).then(|| held_out_score(&score, &held_out)),
        format: HeadFormat::Flat,
        dtype: HeadDtype::F32,
    })?;
    Ok(TrainReport {
        head: manifest.id,
        steps: outcome.progress.step,
        samples: training.len(),
        held_out_samples: held_out.len(),
        tokens_seen: outcome.progress.tokens,
        seconds,
        tokens_per_second: outcome.progress.tokens as f64 / seconds,
        curve,
        score,
    })
}

/// Scores a head on the held-out conversations, walking each answer as the engine does.
pub fn score_head(config: &Config, head: &Head) -> anyhow::Result<(Score, HeldOutScore)> {
    let data = DataDir::new(&config.data.directory);
    let verifier = Verifier::read(config)?;
    let held_out = Samples::open(&data, Side::HeldOut, verifier.shape.hidden_size)?;
    ensure!(
        !held_out.is_empty(),
        "no held-out samples in {}; data.held_out_fraction of the conversations is held out, so let more traffic through",
        data.states().display()
    );
    let target = DraftTarget::from_verifier(&verifier.tensors, head.draft_ids.clone())?;
    let mut step =
        Step::<f32>::new(&head.config, config.train.unroll_steps, config.train.step_decay, &target)?;
    let score = train::evaluate(&mut step, &head.tensors, &held_out, SCORE_BATCH)?;
    let summary = held_out_score(&score, &held_out);
    Ok((score, summary))
}

fn held_out_score(score: &Score, held_out: &Samples) -> HeldOutScore {
    HeldOutScore::new(held_out.digest(), score.drafts, score.accepted_per_position.clone())
}

fn starting_head(
    start: &Start,
    data: &DataDir,
    registry: &Registry,
    verifier: &Verifier,
    config: &Config,
) -> anyhow::Result<(Head, Option<String>)> {
    match start {
        Start::Scratch { draft_vocab_size } => {
            let counts = record::token_frequencies(data, verifier.shape.vocab_size)?;
            let draft_ids = draft_vocabulary(&counts, *draft_vocab_size, &verifier.shape.eos_token_ids)?;
            let options = FreshOptions {
                seed: config.train.seed,
                output_head: OutputHead::FromVerifier,
                aux_layer_ids: None,
            };
            Ok((fresh_head(&verifier.shape, draft_ids, &options, &verifier.tensors)?, None))
        }
        Start::Registered(name) => {
            let id = registry.resolve(name)?;
            let (head, manifest) = registry.load(&id)?;
            Ok((head, Some(manifest.id)))
        }
        Start::Directory(directory) => Ok((read_directory(directory, verifier)?, None)),
    }
}

fn read_directory(directory: &Path, verifier: &Verifier) -> anyhow::Result<Head> {
    let mut head = Head::read(directory, Some(&verifier.shape))?;
    head.share_embedding(directory, &verifier.tensors)?;
    Ok(head)
}

/// Watches a run: the held-out score at even steps.
struct Curve<'a, F: FnMut(&CurvePoint)> {
    scorer: Step<'a, f32>,
    held_out: &'a Samples,
    began: Instant,
    points: Vec<CurvePoint>,
    score: Score,
    failure: Option<train::TrainError>,
    follow: &'a mut F,
}

impl<F: FnMut(&CurvePoint)> train::Observer for Curve<'_, F> {
    fn evaluate(&mut self, weights: &HeadTensors<f32>, event: &TrainEvent) -> Control {
        match train::evaluate(&mut self.scorer, weights, self.held_out, SCORE_BATCH) {
            Ok(score) => self.score = score,
            Err(error) => {
                self.failure = Some(error);
                return Control::Stop;
            }
        }
        let point = CurvePoint {
            step: event.progress.step,
            tokens_seen: event.progress.tokens,
            loss: event.report.loss,
            acceptance_length: self.score.acceptance_length,
            seconds: self.began.elapsed().as_secs_f64(),
        };
        (self.follow)(&point);
        self.points.push(point);
        Control::Continue
    }
}
