//! `draftsmith heads init|list|show|import|export|promote|rollback`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use serde_json::json;

use super::{ConfigFlags, swap};
use crate::config::Config;
use crate::head::{
    FreshOptions, HeadDtype, HeadFormat, OutputHead, VerifierShape, VerifierTensors, WriteOptions,
    default_draft_vocabulary_size, draft_vocabulary, fresh_head,
};
use crate::learn::{self, Comparison, Verifier};
use crate::promote::{LivePointer, PastHead, PromoteError, Registry, Verdict, check_running, import_running};
use crate::record;
use crate::store::DataDir;
use crate::vllm::PluginStatus;

#[derive(Debug, Args)]
pub struct HeadsCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Make a day-0 head for a verifier: EAGLE-3.1, random weights. It fixes what a swap cannot change
    Init {
        /// The verifier's directory
        #[arg(long, value_name = "DIR")]
        verifier: PathBuf,
        /// Where to write the head; must not exist
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Tokens of the draft vocabulary [default: 32000, or all of a smaller one]
        #[arg(long)]
        draft_vocab: Option<usize>,
        /// Choose the draft vocabulary by the tokens recorded in this data directory
        #[arg(long, value_name = "DIR")]
        from_records: Option<PathBuf>,
        /// Decides the random weights
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Random output rows instead of the verifier's own, which learn faster
        #[arg(long)]
        random_lm_head: bool,
        /// The three layers whose states the head reads, ascending [default: 2, the middle one, the third from the top]
        #[arg(long, value_name = "LOW,MIDDLE,HIGH", value_parser = layers)]
        aux_layers: Option<[usize; 3]>,
        /// How config.json and the tensors are written; vLLM reads both
        #[arg(long, value_enum, default_value_t = Format::Flat)]
        format: Format,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// List the registered heads, oldest first
    List {
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Print a head's manifest
    Show {
        /// A head's id or the beginning of one, or `live`
        head: String,
        #[command(flatten)]
        config: ConfigFlags,
        /// JSON is what this prints in any case
        #[arg(long)]
        json: bool,
    },
    /// Take a head from a directory into the registry, checked against the verifier
    Import {
        /// The head's directory: config.json and model.safetensors, in either format
        from: PathBuf,
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Write a registered head to a directory
    Export {
        /// A head's id or the beginning of one, or `live`
        head: String,
        /// The directory to write; must not exist
        to: PathBuf,
        /// How config.json and the tensors are written; vLLM reads both
        #[arg(long, value_enum, default_value_t = Format::Flat)]
        format: Format,
        /// For a vLLM without our plugin, which runs no head that names the verifier's last layer; ours needs it
        #[arg(long)]
        stock: bool,
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Make a candidate the live head, if it beats the live one on the held-out conversations; exit 1 if it does not
    Promote {
        /// A head's id or the beginning of one
        head: String,
        /// Promote it whatever the gate says; heads/live.json keeps that
        #[arg(long)]
        force: bool,
        /// Leave vLLM alone: the head is marked live for its next start
        #[arg(long)]
        no_swap: bool,
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Make the head before the live one live again
    Rollback {
        /// Leave vLLM alone: the head is marked live for its next start
        #[arg(long)]
        no_swap: bool,
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Format {
    /// As EAGLE, SpecForge and SGLang write it
    Flat,
    Speculators,
}

impl Format {
    fn format(self) -> HeadFormat {
        match self {
            Format::Flat => HeadFormat::Flat,
            Format::Speculators => HeadFormat::Speculators,
        }
    }
}

fn layers(text: &str) -> Result<[usize; 3], String> {
    let ids: Result<Vec<usize>, _> = text.split(',').map(str::parse).collect();
    ids.ok().and_then(|ids| ids.try_into().ok()).ok_or_else(|| "give three layers, as in 2,16,29".to_owned())
}

impl HeadsCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.action {
            Action::Init {
                verifier,
                out,
                draft_vocab,
                from_records,
                seed,
                random_lm_head,
                aux_layers,
                format,
                json,
            } => {
                let output_head = if random_lm_head { OutputHead::Random } else { OutputHead::FromVerifier };
                let options = FreshOptions { seed, output_head, aux_layer_ids: aux_layers };
                init(&verifier, &out, draft_vocab, from_records.as_deref(), &options, format.format())?;
                if json {
                    println!("{}", json!({ "directory": out }));
                } else {
                    println!("{}", out.display());
                }
            }
            Action::List { config, json } => list(&config.load()?, json)?,
            Action::Show { head, config, json: _ } => {
                let registry = open(&config.load()?)?;
                let manifest = registry.show(&registry.resolve(&head)?)?;
                println!("{}", serde_json::to_string_pretty(&manifest)?);
            }
            Action::Import { from, config, json } => {
                let settings = config.load()?;
                let Verifier { shape, tensors, identity } = Verifier::read(&settings)?;
                let manifest = Registry::of(&DataDir::new(&settings.data.directory)).import(
                    &from,
                    &shape,
                    &identity,
                    Some(&tensors),
                )?;
                if json {
                    println!("{}", serde_json::to_string_pretty(&manifest)?);
                } else {
                    println!("{}", manifest.id);
                }
            }
            Action::Export { head, to, format, stock, config, json } => {
                let registry = open(&config.load()?)?;
                let id = registry.resolve(&head)?;
                registry.export(&id, &to, format.format(), HeadDtype::Bf16, !stock)?;
                if json {
                    println!("{}", json!({ "head": id, "directory": to }));
                } else {
                    println!("{}", to.display());
                }
            }
            Action::Promote { head, force, no_swap, config, json } => {
                return promote(&config.load()?, &head, force, no_swap, json);
            }
            Action::Rollback { no_swap, config, json } => roll_back(&config.load()?, no_swap, json)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The registry of a data directory that is there.
fn open(config: &Config) -> anyhow::Result<Registry> {
    Ok(Registry::of(&super::existing_data(config)?))
}

/// The gate, then the swap, then the pointer: a crash in between leaves a head in vLLM that is not marked, never a marked
/// one that vLLM does not run.
fn promote(config: &Config, name: &str, force: bool, no_swap: bool, json: bool) -> anyhow::Result<ExitCode> {
    let registry = open(config)?;
    let id = registry.resolve(name)?;
    let live = live_head(config, &registry, no_swap);
    let before = live.as_ref().map(Live::clone).unwrap_or_default();
    if before.id.as_ref() == Some(&id) {
        if json {
            println!("{}", json!({ "head": id, "promoted": true, "reason": "it is live already" }));
        } else {
            println!("{id} is live already");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let compared = live.and_then(|live| learn::compare(config, &registry, &id, live.id.as_deref()));
    let (comparison, reason) = match compared {
        Ok(comparison) => {
            let reason = comparison.decision.reason.clone();
            (Some(comparison), reason)
        }
        Err(error) if force => (None, format!("it could not be compared: {}", crate::told(&error))),
        Err(error) => return Err(error),
    };
    if !json && let Some(comparison) = &comparison {
        print_comparison(comparison);
    }
    let passed =
        comparison.as_ref().is_some_and(|comparison| comparison.decision.verdict == Verdict::Promote);
    if !passed && !force {
        if json {
            let report = json!({ "head": id, "promoted": false, "reason": reason, "comparison": comparison });
            println!("{report:#}");
        }
        eprintln!(
            "draftsmith: {id} stays a candidate: {reason}. Train it on more traffic, lower gate.min_gain, or give --force"
        );
        return Ok(ExitCode::FAILURE);
    }
    let grounds = if passed { format!("gate: {reason}") } else { format!("forced: {reason}") };
    let swapped = if no_swap { None } else { Some(swap::swap_registered(config, &registry, &id)?) };
    if let Some(ran) = before.id.filter(|_| before.unmarked) {
        registry.promote(&ran, "vLLM ran it")?;
    }
    registry.promote(&id, &grounds)?;
    if json {
        let report = json!({
            "head": id, "promoted": true, "forced": !passed, "reason": reason, "comparison": comparison,
            "swap": swapped,
        });
        println!("{report:#}");
        return Ok(ExitCode::SUCCESS);
    }
    match &swapped {
        Some(swapped) => swap::print(swapped),
        None => println!("{id} is marked live; vLLM was left alone"),
    }
    Ok(ExitCode::SUCCESS)
}

/// The head that a candidate must beat.
#[derive(Clone, Default)]
struct Live {
    id: Option<String>,
    /// It is not the one that heads/live.json names.
    unmarked: bool,
}

/// The head that vLLM runs, taken into the registry if it is not there; the one that is marked live where vLLM is to be
/// left alone.
fn live_head(config: &Config, registry: &Registry, no_swap: bool) -> anyhow::Result<Live> {
    let marked = registry.live()?;
    if no_swap {
        return Ok(Live { id: marked.map(|pointer| pointer.id), unmarked: false });
    }
    let status = swap::running(config)?;
    let digest = status.digest.clone().ok_or(PromoteError::RunningUnknown)?;
    let marked_runs = marked.as_ref().filter(|marked| registry.is_of(&marked.id, &marked.digest, &digest));
    let id = match (marked_runs, &marked, registry.find(&digest)?) {
        (Some(marked), ..) => marked.id.clone(),
        // Nobody chose what it runs now over the marked one.
        (None, Some(marked), _) if status.loaded_at.is_none() => anyhow::bail!(
            "vLLM was restarted with another head than {}, which heads/live.json names; `draftsmith swap live` puts that one \
             back in, or give --force to promote past it",
            marked.id
        ),
        (None, _, Some(id)) => id,
        (None, _, None) => {
            let Verifier { shape, tensors, identity } = Verifier::read(config)?;
            import_running(registry, &status, &shape, &identity, &tensors)?
        }
    };
    check_running(&status, &registry.show(&id)?.config, swap::verifier_shape(config)?.as_ref())?;
    let unmarked = marked_runs.is_none();
    if unmarked {
        let instead = marked.map_or_else(String::new, |marked| format!(", not {}", marked.id));
        eprintln!("draftsmith: vLLM runs head {id}{instead}: the candidate is compared with that one");
    }
    Ok(Live { id: Some(id), unmarked })
}

fn print_comparison(comparison: &Comparison) {
    let live = comparison.live.as_ref().map(|live| ("live", live));
    for (what, scored) in live.into_iter().chain([("candidate", &comparison.candidate)]) {
        println!("{what:<9}  {}  acceptance length {:.3}", scored.head, scored.score.acceptance_length);
    }
}

fn roll_back(config: &Config, no_swap: bool, json: bool) -> anyhow::Result<()> {
    let registry = open(config)?;
    let marked = registry.live()?.ok_or(PromoteError::NothingLive)?;
    let fallback = registry.fallback();
    let step = if no_swap {
        Step::Mark
    } else {
        next_step(&registry, &swap::running(config)?, &marked, fallback.as_ref().ok())
    };
    let (id, swapped, rolled_back) = match step {
        Step::PutMarkedBack => {
            eprintln!(
                "draftsmith: vLLM runs another head than {}, which heads/live.json names: it gets that one",
                marked.id
            );
            (marked.id.clone(), Some(swap::swap_registered(config, &registry, &marked.id)?), None)
        }
        Step::Swap => {
            let id = fallback?.id;
            let swapped = swap::swap_registered(config, &registry, &id)?;
            (id, Some(swapped), registry.roll_back()?.rolled_back)
        }
        Step::Mark => (fallback?.id, None, registry.roll_back()?.rolled_back),
    };
    if json {
        println!("{:#}", json!({ "head": id, "rolled_back": rolled_back, "swap": swapped }));
        return Ok(());
    }
    match &swapped {
        Some(swapped) => swap::print(swapped),
        None if no_swap => println!("{id} is marked live; vLLM was left alone"),
        None => println!("{id} is marked live; vLLM runs it already"),
    }
    Ok(())
}

/// What a roll-back does.
enum Step {
    /// The head before the marked one goes into vLLM.
    Swap,
    /// vLLM runs that one already: a roll-back was cut off after its swap, or the marked head was for the next start.
    Mark,
    /// vLLM runs neither: somebody swapped past the registry.
    PutMarkedBack,
}

fn next_step(
    registry: &Registry,
    status: &PluginStatus,
    marked: &LivePointer,
    fallback: Option<&PastHead>,
) -> Step {
    let runs = |id: &str, digest: &str| {
        status.digest.as_ref().is_some_and(|running| registry.is_of(id, digest, running))
    };
    if runs(&marked.id, &marked.digest) {
        return Step::Swap;
    }
    if fallback.is_some_and(|past| runs(&past.id, &past.digest)) {
        return Step::Mark;
    }
    // A damaged head must not stand in the way of the one before it.
    match registry.load(&marked.id) {
        Ok(_) => Step::PutMarkedBack,
        Err(error) => {
            eprintln!("draftsmith: {} is passed by: {error}", marked.id);
            Step::Swap
        }
    }
}

fn init(
    verifier: &Path,
    out: &Path,
    draft_vocab: Option<usize>,
    from_records: Option<&Path>,
    options: &FreshOptions,
    format: HeadFormat,
) -> anyhow::Result<()> {
    anyhow::ensure!(!out.exists(), "{} exists; choose another --out", out.display());
    let shape = VerifierShape::read(verifier)?;
    let tensors = VerifierTensors::read(verifier, &shape)?;
    let counts = match from_records {
        Some(directory) => {
            let data = DataDir::new(directory);
            anyhow::ensure!(
                data.records().is_dir(),
                "--from-records {}: no records there; give the data directory that `draftsmith serve` writes",
                directory.display()
            );
            record::token_frequencies(&data, shape.vocab_size)?
        }
        None => vec![0; shape.vocab_size],
    };
    let size = draft_vocab.unwrap_or(default_draft_vocabulary_size(shape.vocab_size));
    let draft_ids = draft_vocabulary(&counts, size, &shape.eos_token_ids)?;
    let head = fresh_head(&shape, draft_ids, options, &tensors)?;
    std::fs::create_dir_all(out).with_context(|| format!("directory {}", out.display()))?;
    head.write(out, &WriteOptions { format, dtype: HeadDtype::F32, verifier: None, target_layer: true })?;
    Ok(())
}

fn list(config: &Config, json: bool) -> anyhow::Result<()> {
    let registry = open(config)?;
    let listing = registry.list()?;
    let live = registry.live()?.map(|pointer| pointer.id);
    if json {
        println!("{}", json!({ "heads": listing.heads, "live": live }));
        return Ok(());
    }
    for manifest in &listing.heads {
        let mark = if live.as_ref() == Some(&manifest.id) { "live" } else { "" };
        let score =
            manifest.score.as_ref().map_or("-".to_owned(), |score| format!("{:.3}", score.acceptance_length));
        println!("{}  {}  acceptance length {score}  {mark}", manifest.id, manifest.created_at);
    }
    for (name, error) in &listing.broken {
        eprintln!("draftsmith: {name}: {error}");
    }
    Ok(())
}
