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
use crate::promote::{PromoteError, Registry, Verdict, adopt_running};
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
            Action::Show { head, config } => {
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
            Action::Export { head, to, format, config, json } => {
                let registry = open(&config.load()?)?;
                let id = registry.resolve(&head)?;
                registry.export(&id, &to, format.format(), HeadDtype::Bf16, true)?;
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
    if matches!(&live, Ok(Some(live)) if *live == id) {
        if json {
            println!("{}", json!({ "head": id, "promoted": true, "reason": "it is live already" }));
        } else {
            println!("{id} is live already");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let compared = live.and_then(|live| learn::compare(config, &registry, &id, live.as_deref()));
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

/// The head that a candidate must beat: the one that vLLM runs, taken into the registry if it is not there; the one that
/// is marked live where vLLM is to be left alone.
fn live_head(config: &Config, registry: &Registry, no_swap: bool) -> anyhow::Result<Option<String>> {
    let marked = registry.live()?.map(|pointer| pointer.id);
    if no_swap {
        return Ok(marked);
    }
    let status = swap::running(config)?;
    let Verifier { shape, tensors, identity } = Verifier::read(config)?;
    let id = adopt_running(registry, &status, &shape, &identity, &tensors)?;
    if marked.as_ref() != Some(&id) {
        let instead = marked.map_or_else(String::new, |marked| format!(", not {marked}"));
        eprintln!("draftsmith: vLLM runs head {id}{instead}: heads/live.json says so now");
        registry.promote(&id, "vLLM ran it")?;
    }
    Ok(Some(id))
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
    let runs_another = !no_swap && !runs(&registry, &swap::running(config)?, &marked.id)?;
    let (id, swapped, rolled_back) = if runs_another {
        eprintln!(
            "draftsmith: vLLM runs another head than {}, which heads/live.json names: it gets that one",
            marked.id
        );
        let swapped = swap::swap_registered(config, &registry, &marked.id)?;
        (marked.id, Some(swapped), None)
    } else {
        let id = registry.fallback()?.id;
        let swapped = if no_swap { None } else { Some(swap::swap_registered(config, &registry, &id)?) };
        (id, swapped, registry.roll_back()?.rolled_back)
    };
    if json {
        println!("{:#}", json!({ "head": id, "rolled_back": rolled_back, "swap": swapped }));
        return Ok(());
    }
    match &swapped {
        Some(swapped) => swap::print(swapped),
        None => println!("{id} is marked live; vLLM was left alone"),
    }
    Ok(())
}

/// Whether vLLM runs this registered head. A head without a digest is nobody's.
fn runs(registry: &Registry, status: &PluginStatus, id: &str) -> anyhow::Result<bool> {
    let Some(digest) = &status.digest else { return Ok(false) };
    let manifest = registry.show(id)?;
    Ok(manifest.is_of(digest))
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
        Some(directory) => record::token_frequencies(&DataDir::new(directory), shape.vocab_size)?,
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
