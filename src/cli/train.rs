//! `draftsmith train` and `draftsmith eval`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;

use serde_json::json;

use super::{ConfigFlags, PARTLY_DONE};
use crate::config::Config;
use crate::head::Head;
use crate::learn::{self, CurvePoint, Ended, Start, TrainReport, Wake};
use crate::promote::Registry;

#[derive(Debug, Args)]
pub struct TrainCommand {
    #[command(flatten)]
    config: ConfigFlags,
    /// Where to start: a registered id, `live`, a head's directory, or `scratch`
    #[arg(long, default_value = "live")]
    head: String,
    /// Tokens of the draft vocabulary of a head from scratch [default: 32000, or all of a smaller one]
    #[arg(long)]
    draft_vocab: Option<usize>,
    /// Optimizer steps; without it, train.passes over what was captured
    #[arg(long)]
    steps: Option<u64>,
    /// Passes over what was captured, over the file's train.passes
    #[arg(long)]
    passes: Option<usize>,
    /// auto, cpu or cuda, over the file's train.device
    #[arg(long)]
    device: Option<String>,
    /// Go on with an interrupted run, exactly; without RUN with the newest one
    #[arg(long, value_name = "RUN", conflicts_with_all = ["head", "draft_vocab", "steps", "passes", "follow"])]
    resume: Option<Option<String>>,
    /// Train on as samples arrive, one candidate a round, until SIGINT or SIGTERM
    #[arg(long, conflicts_with = "steps")]
    follow: bool,
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
    /// auto, cpu or cuda, over the file's train.device
    #[arg(long)]
    device: Option<String>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

impl TrainCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut config = self.config.load_with(&[("train.device", &self.device)])?;
        // What follows the traffic may be started before `serve` is.
        if !self.follow {
            super::existing_data(&config)?;
        }
        if let Some(passes) = self.passes {
            config.train.passes = passes;
        }
        let start = match self.head.as_str() {
            "scratch" => Start::Scratch { draft_vocab_size: self.draft_vocab },
            name if Path::new(name).is_dir() => Start::Directory(PathBuf::from(name)),
            name => Start::Registered(name.to_owned()),
        };
        let wake = Wake::default();
        // The runtime lives until the training is over: it listens for the signals.
        let runtime = super::runtime()?;
        let stop = wake.clone();
        runtime.spawn(async move {
            crate::sidecar::shutdown_signal().await;
            stop.stop();
        });
        if self.follow {
            return follow(&config, &start, &wake, self.json);
        }
        let ended = match &self.resume {
            Some(run) => learn::resume(&config, run.as_deref(), &wake, tell)?,
            None => learn::train_candidate(&config, &start, self.steps, &wake, tell)?,
        };
        match ended {
            Ended::Finished(report) => {
                print(&report, self.json)?;
                Ok(ExitCode::SUCCESS)
            }
            Ended::Stopped { run, step, steps } => {
                if self.json {
                    println!("{:#}", json!({ "run": run, "stopped_at_step": step, "steps": steps }));
                }
                tell_how_to_resume(&run, step, steps);
                Ok(ExitCode::from(PARTLY_DONE))
            }
        }
    }
}

fn follow(config: &Config, start: &Start, wake: &Wake, json: bool) -> anyhow::Result<ExitCode> {
    let mut failed_to_print = None;
    let unfinished = learn::follow(config, start, wake, tell, |report| {
        if let Err(error) = print(report, json) {
            failed_to_print = Some(error);
            wake.stop();
        }
    })?;
    if let Some(error) = failed_to_print {
        return Err(error);
    }
    if let Some(Ended::Stopped { run, step, steps }) = unfinished {
        tell_how_to_resume(&run, step, steps);
    }
    Ok(ExitCode::SUCCESS)
}

fn tell(point: &CurvePoint) {
    eprintln!(
        "step {:>6}  tokens seen {:>9}  loss {:>7.4}  held-out acceptance length {:.3}  {:.0} s",
        point.step, point.tokens_seen, point.loss, point.acceptance_length, point.seconds
    );
}

fn print(report: &TrainReport, json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(report)?);
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
    Ok(())
}

fn tell_how_to_resume(run: &str, step: u64, steps: u64) {
    eprintln!("stopped after step {step} of {steps}; go on with `draftsmith train --resume {run}`");
}

impl EvalCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let config = self.config.load_with(&[("train.device", &self.device)])?;
        let head = if Path::new(&self.head).is_dir() {
            Head::read(Path::new(&self.head), super::swap::verifier_shape(&config)?.as_ref())?
        } else {
            let registry = Registry::of(&super::existing_data(&config)?);
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
