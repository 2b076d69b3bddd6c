//! `draftsmith replay`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::replay::{self, RunOptions, Shard, Split};

#[derive(Debug, Args)]
pub struct ReplayCommand {
    /// ShareGPT JSON, or JSON lines with `messages`
    dataset: PathBuf,
    /// Where to send it: the proxy's address
    #[arg(long, value_name = "URL")]
    to: String,
    /// Requests in flight
    #[arg(long, default_value_t = 8)]
    concurrency: usize,
    /// At most so many rows
    #[arg(long)]
    limit: Option<usize>,
    /// One part of the rows, as in 0/4
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Which side of the held-out split: all, train or held-out
    #[arg(long, default_value = "all")]
    split: Split,
    /// The sidecar's data.held_out_fraction
    #[arg(long, default_value_t = crate::config::Config::default().data.held_out_fraction)]
    held_out_fraction: f64,
    /// Turns of the user to replay; the answers between them are the server's own
    #[arg(long, default_value_t = 1)]
    turns: usize,
    /// Tokens of an answer at most, over what the row says
    #[arg(long)]
    max_tokens: Option<u64>,
    /// Of the sampling, over what the row says; 0 is greedy
    #[arg(long)]
    temperature: Option<f64>,
    /// The model's name; without it the first that the server names
    #[arg(long)]
    model: Option<String>,
    /// Ask for streams
    #[arg(long)]
    stream: bool,
    /// What failed, one JSON object a line; what was done stands beside it
    #[arg(long, value_name = "FILE", default_value = "replay-errors.jsonl")]
    errors: PathBuf,
    /// Send again what an earlier run had done
    #[arg(long)]
    fresh: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

impl ReplayCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut options = RunOptions::new(self.dataset, self.to, self.errors);
        options.turns = self.turns;
        options.concurrency = self.concurrency;
        options.limit = self.limit;
        options.shard = self.shard;
        options.split = self.split;
        options.held_out_fraction = self.held_out_fraction;
        options.max_tokens = self.max_tokens;
        options.temperature = self.temperature;
        options.model = self.model;
        options.stream = self.stream;
        options.fresh = self.fresh;
        let report = super::runtime()?.block_on(replay::run(options, super::interrupted()))?;
        if self.json {
            println!("{}", serde_json::to_string_pretty(&report)?);
        } else {
            println!(
                "{} of {} rows answered, {} failed, {} unreadable, {} done before; {:.1} tokens/s",
                report.ok,
                report.sent,
                report.failed,
                report.bad_rows,
                report.skipped,
                report.tokens_per_second
            );
        }
        Ok(ExitCode::from(report.exit_code()))
    }
}
