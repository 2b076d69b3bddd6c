//! The whole loop on a small real model, from nothing: what `draftsmith demo` and the end-to-end test run.
//!
//! It installs a real vLLM (CPU) with SmolLM2-135M, makes a random head, and then does what an operator would do, through
//! the same commands: serve, replay, train, eval, swap. Every figure in the [`Report`] is measured: acceptance lengths are
//! differences of vLLM's own counters.

mod process;
mod stream;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Serialize;

use crate::replay;
use crate::vllm::client::{Client, SpecCounters};
use process::{Background, run_json, run_to_end};

/// Tokens that vLLM drafts in one step.
const DRAFT_TOKENS: usize = 3;
const SETUP: &str = include_str!("../demo_env/setup.sh");
const SERVE: &str = include_str!("../demo_env/serve.sh");

/// Whose traffic the demo replays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Domain {
    /// One narrow domain: a product-support assistant with a system prompt
    Narrow,
    /// First turns of ShareGPT
    General,
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    pub domain: Domain,
    /// Everything that this run writes; the installation is kept in `environment`.
    pub directory: PathBuf,
    /// Where vLLM, the model and the prompts are installed, once.
    pub environment: PathBuf,
    pub vllm_port: u16,
    pub proxy_port: u16,
    pub control_port: u16,
}

/// What one replay showed in vLLM's own counters.
#[derive(Clone, Debug, Serialize)]
pub struct Traffic {
    pub prompts: u64,
    pub output_tokens: f64,
    pub seconds: f64,
    pub tokens_per_second: f64,
    pub drafts: f64,
    pub acceptance_length: f64,
    pub accepted_per_position: Vec<f64>,
}

/// The story in figures.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub domain: Domain,
    pub before: Traffic,
    pub training_traffic: Traffic,
    pub after: Traffic,
    /// `draftsmith eval` of the new head on the held-out conversations.
    pub forecast: f64,
    pub records: u64,
    pub states: u64,
    pub training: serde_json::Value,
    pub swap: stream::SwapUnderLoad,
    /// Traffic and training together; installation and start-up are not counted.
    pub seconds: f64,
}

/// The sizes of a run; chosen so that traffic and training end within 25 minutes on two CPU cores.
struct Plan {
    prompts: usize,
    max_tokens: usize,
    passes: usize,
    concurrency: usize,
}

impl Domain {
    fn plan(self) -> Plan {
        match self {
            Domain::Narrow => Plan { prompts: 330, max_tokens: 80, passes: 5, concurrency: 16 },
            Domain::General => Plan { prompts: 320, max_tokens: 96, passes: 5, concurrency: 16 },
        }
    }

    fn name(self) -> &'static str {
        match self {
            Domain::Narrow => "narrow",
            Domain::General => "general",
        }
    }
}

/// Runs the loop and tells each step on standard error.
pub async fn run(options: &Options) -> anyhow::Result<Report> {
    let plan = options.domain.plan();
    let directory = &options.directory;
    std::fs::create_dir_all(directory).with_context(|| format!("directory {}", directory.display()))?;
    install(options).await?;

    let verifier = options.environment.join("smollm2-135m");
    let dataset = write_prompts(options, &plan)?;
    let head = directory.join("day-0");
    step("a random head, acceptance length 1.00");
    let text = |path: &Path| path.display().to_string();
    run_json(&["heads", "init", "--verifier", &text(&verifier), "--out", &text(&head), "--random-lm-head", "--json"])
        .await?;

    step("starting vLLM with that head, and draftsmith in front of it");
    let mut vllm = start_vllm(options, &verifier, &head)?;
    let client = Client::new(&format!("http://127.0.0.1:{}", options.vllm_port))?;
    wait_until_healthy(&client, &mut vllm).await?;
    let mut sidecar = start_sidecar(options, &verifier)?;
    let control = format!("http://127.0.0.1:{}", options.control_port);
    wait_until_ready(&control, &mut sidecar).await?;

    let result = run_loop(options, &plan, &client, &control, &dataset).await;
    sidecar.stop().await?;
    vllm.stop().await?;
    result
}

async fn run_loop(
    options: &Options,
    plan: &Plan,
    client: &Client,
    control: &str,
    dataset: &Path,
) -> anyhow::Result<Report> {
    let start = Instant::now();
    let data = options.directory.join("data").display().to_string();
    let proxy = format!("http://127.0.0.1:{}", options.proxy_port);

    step("held-out prompts with the random head");
    let before = replay_and_count(options, plan, client, &proxy, dataset, "held-out", "before").await?;
    step("training traffic through the proxy");
    let training_traffic = replay_and_count(options, plan, client, &proxy, dataset, "train", "train").await?;
    flush(control).await?;

    step("training on what was captured");
    let config = config_path(options).display().to_string();
    let passes = plan.passes.to_string();
    let training = run_json(&["train", "--config", &config, "--head", "live-shape", "--passes", &passes, "--json"]).await?;
    let head = training["head"].as_str().context("`draftsmith train` named no head")?.to_owned();
    let score = run_json(&["eval", &head, "--config", &config, "--json"]).await?;
    let forecast = score["acceptance_length"].as_f64().context("`draftsmith eval` gave no acceptance length")?;

    step("swapping the new head in while a stream runs");
    let swap = swap_under_load(&proxy, &head, &config).await?;
    step("the same held-out prompts with the new head");
    let after = replay_and_count(options, plan, client, &proxy, dataset, "held-out", "after").await?;
    flush(control).await?;
    let seconds = start.elapsed().as_secs_f64();

    let records = run_json(&["records", "stats", "--data", &data, "--json"]).await?;
    Ok(Report {
        domain: options.domain,
        before,
        training_traffic,
        after,
        forecast,
        records: records["rows"].as_u64().unwrap_or(0),
        states: records["states_stored"].as_u64().unwrap_or(0),
        training,
        swap,
        seconds,
    })
}

fn step(text: &str) {
    eprintln!("== {text}");
}

fn config_path(options: &Options) -> PathBuf {
    options.directory.join("draftsmith.toml")
}

/// Installs vLLM, the model and the prompts; quick when they are there.
async fn install(options: &Options) -> anyhow::Result<()> {
    step("a real vLLM, a small model and real prompts (some minutes and 7 GB the first time)");
    let scripts = options.directory.join("environment");
    std::fs::create_dir_all(&scripts)?;
    for (name, text) in crate::demo::SCRIPTS {
        std::fs::write(scripts.join(name), text)?;
    }
    crate::vllm::plugin::write(&options.directory.join("plugin"))?;
    let mut command = tokio::process::Command::new("bash");
    command.arg(scripts.join("setup.sh")).arg(&options.environment);
    run_to_end("the installation of vLLM", command, &options.directory.join("setup.log")).await
}
