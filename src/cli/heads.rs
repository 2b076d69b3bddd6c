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
use crate::promote::{Registry, Verdict};
use crate::record;
use crate::store::DataDir;

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
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Random output rows instead of the verifier's own, which learn faster
        #[arg(long)]
        random_lm_head: bool,
        /// The three layers whose states the head reads, ascending [default: 2, the middle one, the third from the top]
        #[arg(long, value_name = "LOW,MIDDLE,HIGH", value_delimiter = ',', num_args = 3)]
        aux_layers: Option<Vec<usize>>,
        #[arg(long, value_enum, default_value_t = Format::Flat)]
        format: Format,
        #[arg(long)]
        json: bool,
    },
    /// List the registered heads, oldest first
    List {
        #[command(flatten)]
        config: ConfigFlags,
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
        from: PathBuf,
        #[command(flatten)]
        config: ConfigFlags,
    },
    /// Write a registered head to a directory
    Export {
        /// A head's id or the beginning of one, or `live`
        head: String,
        to: PathBuf,
        #[arg(long, value_enum, default_value_t = Format::Flat)]
        format: Format,
        #[command(flatten)]
        config: ConfigFlags,
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
                let aux_layer_ids = aux_layers.map(|layers| [layers[0], layers[1], layers[2]]);
                let options = FreshOptions { seed, output_head, aux_layer_ids };
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
            Action::Import { from, config } => {
                let settings = config.load()?;
                let Verifier { shape, tensors, identity } = Verifier::read(&settings)?;
                let manifest = open(&settings)?.import(&from, &shape, &identity, Some(&tensors))?;
                println!("{}", manifest.id);
            }
            Action::Export { head, to, format, config } => {
                let registry = open(&config.load()?)?;
                let id = registry.resolve(&head)?;
                registry.export(&id, &to, format.format(), HeadDtype::Bf16, true)?;
                println!("{}", to.display());
            }
            Action::Promote { head, force, no_swap, config, json } => {
                return promote(&config.load()?, &head, force, no_swap, json);
            }
            Action::Rollback { no_swap, config, json } => roll_back(&config.load()?, no_swap, json)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn open(config: &Config) -> anyhow::Result<Registry> {
    Ok(Registry::open(&DataDir::new(&config.data.directory))?)
}

/// The gate, then the swap, then the pointer: a crash in between leaves a head in vLLM that is not marked, never a marked
/// one that vLLM does not run.
fn promote(config: &Config, name: &str, force: bool, no_swap: bool, json: bool) -> anyhow::Result<ExitCode> {
    let registry = open(config)?;
    let id = registry.resolve(name)?;
    if registry.live()?.is_some_and(|pointer| pointer.id == id) {
        if json {
            println!("{}", json!({ "head": id, "promoted": true, "reason": "it is live already" }));
        } else {
            println!("{id} is live already");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let compared = learn::compare(config, &registry, &id);
    let (comparison, reason) = match compared {
        Ok(comparison) => {
            let reason = comparison.decision.reason.clone();
            (Some(comparison), reason)
        }
        Err(error) if force => (None, format!("it could not be compared: {error:#}")),
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

fn print_comparison(comparison: &Comparison) {
    let live = comparison.live.as_ref().map(|live| ("live", live));
    for (what, scored) in live.into_iter().chain([("candidate", &comparison.candidate)]) {
        println!("{what:<9}  {}  acceptance length {:.3}", scored.head, scored.score.acceptance_length);
    }
}

fn roll_back(config: &Config, no_swap: bool, json: bool) -> anyhow::Result<()> {
    let registry = open(config)?;
    let id = registry.fallback()?.id;
    let swapped = if no_swap { None } else { Some(swap::swap_registered(config, &registry, &id)?) };
    let pointer = registry.roll_back()?;
    if json {
        println!("{:#}", json!({ "head": id, "rolled_back": pointer.rolled_back, "swap": swapped }));
        return Ok(());
    }
    match &swapped {
        Some(swapped) => swap::print(swapped),
        None => println!("{id} is marked live; vLLM was left alone"),
    }
    Ok(())
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
