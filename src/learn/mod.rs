//! Learning from what was captured: wires the state store, the records, the heads and the trainer together.
//!
//! [`train_candidate`] makes a candidate head from captured traffic and registers it, [`resume`] goes on with such a run
//! where it was interrupted, and [`follow`] makes one candidate after another as traffic comes in. [`score_head`] scores a
//! head on the held-out conversations, and [`compare`] a candidate with the live head. None touches a running vLLM.

mod compare;
mod follow;
mod run;
mod run_directory;
mod samples;
mod wake;

use std::path::Path;

use anyhow::{Context, ensure};

use crate::config::Config;
use crate::head::{
    FreshOptions, Head, OutputHead, VerifierIdentity, VerifierShape, VerifierTensors,
    default_draft_vocabulary_size, draft_vocabulary, fresh_head,
};
use crate::promote::{HeldOutScore, Registry};
use crate::record;
use crate::store::DataDir;
use crate::train::{self, DraftOptions, DraftTarget, SampleSource, Score};
pub use compare::{Comparison, compare};
pub use follow::follow;
pub use run::{CurvePoint, Ended, TrainReport, resume, train_candidate};
pub use run_directory::heads_that_learned_from;
pub use samples::{Samples, Side, StateLayout};
pub use wake::Wake;

/// Documents scored at a time.
const SCORE_BATCH: usize = 4;

/// Which head a run starts from.
#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    /// Fresh weights and a draft vocabulary of this size (None: the default), chosen by what was recorded.
    Scratch { draft_vocab_size: Option<usize> },
    /// A registered head by id, or `live`.
    Registered(String),
    /// Any head's directory.
    Directory(std::path::PathBuf),
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
        // A verifier without a name of its own is called by its directory.
        let name =
            directory.file_name().map_or_else(|| "verifier".to_owned(), |name| name.to_string_lossy().into());
        let identity = VerifierIdentity::read(directory, &name, &shape)?;
        Ok(Self { shape, tensors, identity })
    }
}

/// Scores a head on the held-out conversations, walking each answer as the engine does.
pub fn score_head(config: &Config, head: &Head) -> anyhow::Result<(Score, HeldOutScore)> {
    let verifier = Verifier::read(config)?;
    let held_out = held_out_samples(config, &StateLayout::of(&head.config))?;
    score(config, &verifier, &held_out, head)
}

/// The held-out samples; an error where there are none.
fn held_out_samples(config: &Config, layout: &StateLayout) -> anyhow::Result<Samples> {
    let data = DataDir::new(&config.data.directory);
    let held_out = Samples::open(&data, Side::HeldOut, layout)?;
    ensure!(
        !held_out.is_empty(),
        "no held-out samples of layers {:?} in {}; data.held_out_fraction of the conversations is held out, so let more traffic through",
        layout.layer_ids,
        data.states().display()
    );
    Ok(held_out)
}

fn score(
    config: &Config,
    verifier: &Verifier,
    held_out: &Samples,
    head: &Head,
) -> anyhow::Result<(Score, HeldOutScore)> {
    let target = DraftTarget::from_verifier(&verifier.tensors, head.draft_ids.clone())?;
    let options = DraftOptions {
        config: &head.config,
        unroll: config.train.unroll_steps,
        decay: config.train.step_decay,
    };
    let mut drafter = train::open_drafter(config.train.device, options, &head.tensors, &target)?;
    let score = train::evaluate(&mut *drafter, held_out, SCORE_BATCH)?;
    let summary = held_out_score(&score, held_out);
    Ok((score, summary))
}

fn held_out_score(score: &Score, held_out: &Samples) -> HeldOutScore {
    let mut digest = held_out.digest();
    if score.documents < held_out.len() as u64 {
        // Some were evicted meanwhile: comparable with no other score.
        digest.push_str(&format!("-{}-of-{}", score.documents, held_out.len()));
    }
    HeldOutScore::new(digest, score.drafts, score.accepted_per_position.clone())
}

/// The head to start from, and its id where it is a registered one.
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
            let size = draft_vocab_size.unwrap_or(default_draft_vocabulary_size(verifier.shape.vocab_size));
            let draft_ids = draft_vocabulary(&counts, size, &verifier.shape.eos_token_ids)?;
            let options = FreshOptions {
                seed: config.train.seed,
                output_head: OutputHead::FromVerifier,
                aux_layer_ids: StateLayout::newest_aux_layer_ids(data)?,
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
