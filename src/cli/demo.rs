//! `draftsmith demo`

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;

use crate::demo::{self, Domain, Options, Report, Traffic};

#[derive(Debug, Args)]
pub struct DemoCommand {
    /// Whose traffic to replay
    #[arg(long, value_enum, default_value_t = Domain::Narrow)]
    domain: Domain,
    /// Prompts to replay, for a quicker and weaker run
    #[arg(long)]
    prompts: Option<usize>,
    /// Everything that this run writes
    #[arg(long, value_name = "DIR", default_value = "demo")]
    directory: PathBuf,
    /// Where vLLM, the model and the prompts are installed; kept between runs [default: ~/.cache/draftsmith/environment]
    #[arg(long, value_name = "DIR", env = "DRAFTSMITH_ENVIRONMENT")]
    environment: Option<PathBuf>,
    /// vLLM's port
    #[arg(long, default_value_t = 8000)]
    vllm_port: u16,
    /// The client port of the sidecar
    #[arg(long, default_value_t = 8080)]
    proxy_port: u16,
    /// Its control port
    #[arg(long, default_value_t = 8081)]
    control_port: u16,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

impl DemoCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let environment = match self.environment {
            Some(directory) => directory,
            None => {
                let home = std::env::home_dir().context("no home directory; give --environment DIR")?;
                home.join(".cache/draftsmith/environment")
            }
        };
        let options = Options {
            domain: self.domain,
            prompts: self.prompts,
            directory: self.directory,
            environment,
            vllm_port: self.vllm_port,
            proxy_port: self.proxy_port,
            control_port: self.control_port,
        };
        let report = super::runtime()?.block_on(demo::run(&options))?;
        if self.json {
            println!("{}", serde_json::to_string_pretty(&report)?);
        } else {
            print(&report);
        }
        let shortfalls = report.shortfalls();
        for shortfall in &shortfalls {
            eprintln!("draftsmith: {shortfall}");
        }
        Ok(if shortfalls.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn print(report: &Report) {
    let line = |name: &str, traffic: &Traffic| {
        println!(
            "{name:<28} {:>4} prompts  {:>6} tokens  {:>6.1} tokens/s  acceptance length {:.2}",
            traffic.prompts, traffic.output_tokens, traffic.tokens_per_second, traffic.acceptance_length
        );
    };
    println!("from vLLM's own counters:");
    line("held-out, random head", &report.before);
    line("training traffic", &report.training_traffic);
    line("held-out, new head", &report.after);
    println!("forecast of `draftsmith eval`: acceptance length {:.2}", report.forecast);
    println!(
        "{} records, {} samples of states, {} training steps",
        report.records, report.states, report.training["steps"]
    );
    println!(
        "swap under a stream: text {}, largest gap {:.0} ms (usual gap {:.0} ms), swap {:.0} ms",
        if report.swap.same_text { "unchanged" } else { "CHANGED" },
        report.swap.largest_gap_ms,
        report.swap.usual_gap_ms,
        report.swap.swap_ms
    );
    println!("traffic and training: {:.0} s", report.seconds);
}
