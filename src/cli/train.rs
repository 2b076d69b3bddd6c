//! `draftsmith train` and `draftsmith eval`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;

use super::ConfigFlags;
use crate::head::Head;
use crate::learn::{self, Start};
use crate::promote::Registry;
use crate::store::DataDir;

#[derive(Debug, Args)]
pub struct TrainCommand {
    #[command(flatten)]
    config: ConfigFlags,
    /// Where to start: a registered id, `live`, a head's directory, or `scratch`
    #[arg(long, default_value = "live")]
    head: String,
    /// Tokens of the draft vocabulary of a head from scratch
    #[arg(long, default_value_t = 8192)]
    draft_vocab: usize,
    /// Optimizer steps; without it, train.passes over what was captured
    #[arg(long)]
    steps: Option<u64>,
    /// Passes over what was captured, over the file's train.passes
    #[arg(long)]
    passes: Option<usize>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct EvalCommand {
    /// A registered id, `live`, or a head's directory
    head: String,
    #[command(flatten)]
    config: ConfigFlags,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

impl TrainCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut config = self.config.load()?;
        if let Some(passes) = self.passes {
            config.train.passes = passes;
        }
        let start = match self.head.as_str() {
            "scratch" => Start::Scratch { draft_vocab_size: self.draft_vocab },
            name if Path::new(name).is_dir() => Start::Directory(PathBuf::from(name)),
            name => Start::Registered(name.to_owned()),
        };
        let report = learn::train_candidate(&config, &start, self.steps, |point| {
            eprintln!(
                "step {:>6}  tokens seen {:>9}  loss {:>7.4}  held-out acceptance length {:.3}  {:.0} s",
                point.step, point.tokens_seen, point.loss, point.acceptance_length, point.seconds
            );
        })?;
        if self.json {
            println!("{}", serde_json::to_string_pretty(&report)?);
        } else {
            println!(
                "{}  {} steps on {} samples, {:.0} tokens/s, held-out acceptance length {:.3}",
                report.head,
                report.steps,
                report.samples,
                report.tokens_per_second,
                report.score.acceptance_length
            );
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl EvalCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let config = self.config.load()?;
        let head = if Path::new(&self.head).is_dir() {
            Head::read(Path::new(&self.head), None)?
        } else {
            let registry = Registry::open(&DataDir::new(&config.data.directory))?;
            registry.load(&registry.resolve(&self.head)?)?.0
        };
        let (score, _) = learn::score_head(&config, &head)?;
        if self.json {
            println!("{}", serde_json::to_string_pretty(&score)?);
            return Ok(ExitCode::SUCCESS);
        }
        println!("expected acceptance length {:.3} over {} drafts", score.acceptance_length, score.drafts);
        for (position, share) in score.accepted_per_position.iter().enumerate() {
            println!("  accepted up to position {position}: {:.1}%", share * 100.0);
        }
        Ok(ExitCode::SUCCESS)
    }
}
