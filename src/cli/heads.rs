//! `draftsmith heads init|list|show|import|export`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use serde_json::json;

use super::ConfigFlags;
use crate::config::Config;
use crate::head::{
    FreshOptions, HeadDtype, HeadFormat, OutputHead, VerifierIdentity, VerifierShape, VerifierTensors,
    WriteOptions, draft_vocabulary, fresh_head,
};
use crate::promote::Registry;
use crate::record;
use crate::store::DataDir;

/// Tokens of the draft vocabulary when none is given: what published heads use, or the whole of a smaller one.
const DEFAULT_DRAFT_VOCABULARY: usize = 32_000;

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
        /// Tokens of the draft vocabulary
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
            Action::Init { verifier, out, draft_vocab, from_records, seed, random_lm_head, format, json } => {
                let output_head = if random_lm_head { OutputHead::Random } else { OutputHead::FromVerifier };
                init(
                    &verifier,
                    &out,
                    draft_vocab,
                    from_records.as_deref(),
                    seed,
                    output_head,
                    format.format(),
                )?;
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
                let directory = settings.verifier.directory.clone().context(
                    "verifier.directory is not set; it is needed to check the head against its verifier",
                )?;
                let shape = VerifierShape::read(&directory)?;
                let identity = VerifierIdentity::read(&directory, &name_of(&directory), &shape)?;
                let tensors = VerifierTensors::read(&directory, &shape)?;
                let manifest = open(&settings)?.import(&from, &shape, &identity, Some(&tensors))?;
                println!("{}", manifest.id);
            }
            Action::Export { head, to, format, config } => {
                let registry = open(&config.load()?)?;
                let id = registry.resolve(&head)?;
                registry.export(&id, &to, format.format(), HeadDtype::Bf16, true)?;
                println!("{}", to.display());
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn open(config: &Config) -> anyhow::Result<Registry> {
    Ok(Registry::open(&DataDir::new(&config.data.directory))?)
}

/// A verifier without a name of its own is called by its directory.
pub(super) fn name_of(directory: &Path) -> String {
    directory.file_name().map_or_else(|| "verifier".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn init(
    verifier: &Path,
    out: &Path,
    draft_vocab: Option<usize>,
    from_records: Option<&Path>,
    seed: u64,
    output_head: OutputHead,
    format: HeadFormat,
) -> anyhow::Result<()> {
    anyhow::ensure!(!out.exists(), "{} exists; choose another --out", out.display());
    let shape = VerifierShape::read(verifier)?;
    let tensors = VerifierTensors::read(verifier, &shape)?;
    let counts = match from_records {
        Some(directory) => record::token_frequencies(&DataDir::new(directory), shape.vocab_size)?,
        None => vec![0; shape.vocab_size],
    };
    let size = draft_vocab.unwrap_or(DEFAULT_DRAFT_VOCABULARY.min(shape.vocab_size));
    let draft_ids = draft_vocabulary(&counts, size, &shape.eos_token_ids)?;
    let head =
        fresh_head(&shape, draft_ids, &FreshOptions { seed, output_head, aux_layer_ids: None }, &tensors)?;
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
