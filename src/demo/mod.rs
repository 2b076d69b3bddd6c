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
use tokio::process::Command;

use crate::config::Config;
use crate::replay;
use crate::states::Drafting;
use crate::store::DataDir;
use crate::vllm::{Client, Metrics, Timeouts};
use process::{Background, run_json, run_to_end};

/// Tokens that vLLM drafts in one step.
const DRAFT_TOKENS: usize = 3;
/// Tokens of the draft vocabulary.
const DRAFT_VOCABULARY: usize = 8192;
const SETUP: &str = include_str!("../demo_env/setup.sh");
const SERVE: &str = include_str!("../demo_env/serve.sh");
/// vLLM on a busy machine takes two minutes to import and load.
const START_TIMEOUT: Duration = Duration::from_secs(600);
/// Between two looks at a server that starts: it tells nobody when it is ready.
const START_POLL: Duration = Duration::from_millis(500);

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
    /// Prompts of both sides of the split together; None: as many as the figures in the README took.
    pub prompts: Option<usize>,
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
    pub draft_tokens: f64,
    pub accepted_tokens: f64,
    pub acceptance_length: f64,
    pub accepted_per_position: Vec<f64>,
    /// The same from the records; equal, since nobody left before the end.
    pub recorded: Drafting,
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

impl Report {
    /// What the loop promises and this run did not show, for people.
    pub fn shortfalls(&self) -> Vec<String> {
        let mut found = Vec::new();
        let (before, after) = (self.before.acceptance_length, self.after.acceptance_length);
        if after <= before {
            found.push(format!("the acceptance length did not rise: {before:.3} before, {after:.3} after"));
        }
        if !self.swap.within_the_stream {
            found.push("the stream ended before the swap did, so it shows nothing".to_owned());
        }
        if !self.swap.same_text {
            found.push("the swap changed the text of the stream that ran".to_owned());
        }
        found
    }
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
            Domain::Narrow => Plan { prompts: 330, max_tokens: 80, passes: 4, concurrency: 16 },
            Domain::General => Plan { prompts: 400, max_tokens: 96, passes: 4, concurrency: 16 },
        }
    }
}

/// Runs the loop and tells each step on standard error.
pub async fn run(options: &Options) -> anyhow::Result<Report> {
    let mut plan = options.domain.plan();
    plan.prompts = options.prompts.unwrap_or(plan.prompts);
    std::fs::create_dir_all(&options.directory)
        .with_context(|| format!("directory {}", options.directory.display()))?;
    // The servers run elsewhere, so every path must be whole.
    let options = &Options {
        directory: options.directory.canonicalize()?,
        environment: std::path::absolute(&options.environment)?,
        ..options.clone()
    };
    let data = options.directory.join("data");
    if data.exists() {
        bail!("{} holds an earlier run; choose another --directory or remove it", data.display());
    }
    install(options).await?;
    let dataset = write_prompts(options, &plan)?;
    write_config(options)?;

    step("a random head: acceptance length 1.00");
    let head = options.directory.join("day-0");
    if !head.exists() {
        let vocabulary = DRAFT_VOCABULARY.to_string();
        let verifier = text(&verifier(options));
        let out = text(&head);
        run_json(&[
            "heads",
            "init",
            "--verifier",
            &verifier,
            "--out",
            &out,
            "--draft-vocab",
            &vocabulary,
            "--random-lm-head",
            "--json",
        ])
        .await?;
    }

    step("starting vLLM with that head, and draftsmith in front of it");
    let client = Client::new(&vllm_url(options), Timeouts::default())?;
    let mut vllm = start_vllm(options, &head)?;
    let mut sidecar = start_sidecar(options)?;
    let result = async {
        wait_until_healthy(&client, &mut vllm, &mut sidecar).await?;
        run_loop(options, &plan, &client, &dataset).await
    }
    .await;
    // Both are asked to end, and what went wrong first is told first.
    let stopped = [sidecar.stop().await, vllm.stop().await];
    let report = result?;
    for stop in stopped {
        stop?;
    }
    Ok(report)
}

async fn run_loop(options: &Options, plan: &Plan, client: &Client, dataset: &Path) -> anyhow::Result<Report> {
    let start = Instant::now();
    let config = text(&config_path(options));

    step("held-out prompts with the random head");
    let before = replay_and_count(options, plan, client, dataset, replay::Split::HeldOut, "before").await?;
    step("training traffic through the proxy");
    let training_traffic =
        replay_and_count(options, plan, client, dataset, replay::Split::Train, "train").await?;

    step("training on what was captured");
    let passes = plan.passes.to_string();
    let vocabulary = DRAFT_VOCABULARY.to_string();
    let training = run_json(&[
        "train",
        "--config",
        &config,
        "--head",
        "scratch",
        "--draft-vocab",
        &vocabulary,
        "--passes",
        &passes,
        "--json",
    ])
    .await?;
    let head = training["head"].as_str().context("`draftsmith train` named no head")?.to_owned();
    let score = run_json(&["eval", &head, "--config", &config, "--json"]).await?;
    let forecast =
        score["acceptance_length"].as_f64().context("`draftsmith eval` gave no acceptance length")?;

    step("swapping the new head in while a stream runs");
    let swap = stream::swap_under_load(&proxy_url(options), &head, &config).await?;
    step("the same held-out prompts with the new head");
    let after = replay_and_count(options, plan, client, dataset, replay::Split::HeldOut, "after").await?;
    let seconds = start.elapsed().as_secs_f64();

    let records = run_json(&["records", "stats", "--config", &config, "--json"]).await?;
    let states = crate::states::Reader::open(&options.directory.join("data/states"))?.index().len();
    Ok(Report {
        domain: options.domain,
        before,
        training_traffic,
        after,
        forecast,
        records: records["rows"].as_u64().context("`draftsmith records stats` counted no rows")?,
        states: states as u64,
        training,
        swap,
        seconds,
    })
}

fn step(text: &str) {
    eprintln!("== {text}");
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn config_path(options: &Options) -> PathBuf {
    options.directory.join("draftsmith.toml")
}

fn verifier(options: &Options) -> PathBuf {
    options.environment.join("smollm2-135m")
}

fn vllm_url(options: &Options) -> String {
    format!("http://127.0.0.1:{}", options.vllm_port)
}

fn proxy_url(options: &Options) -> String {
    format!("http://127.0.0.1:{}", options.proxy_port)
}

/// Installs vLLM, the model and the prompts; quick when they are there.
async fn install(options: &Options) -> anyhow::Result<()> {
    step("a real vLLM, a small model and real prompts (some minutes and 7 GB the first time)");
    let script = options.directory.join("setup.sh");
    std::fs::write(&script, SETUP)?;
    std::fs::write(options.directory.join("serve.sh"), SERVE)?;
    crate::vllm::plugin::write(&options.directory.join("plugin"))?;
    let mut command = Command::new("bash");
    command.arg(script).arg(&options.environment);
    run_to_end("the installation of vLLM", command, &options.directory.join("setup.log")).await
}

/// The prompts as a dataset that `draftsmith replay` reads. Each replay takes its own side of the split.
fn write_prompts(options: &Options, plan: &Plan) -> anyhow::Result<PathBuf> {
    let path = options.directory.join("prompts.jsonl");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path)?);
    match options.domain {
        Domain::Narrow => {
            replay::support::write(plan.prompts, 0, &mut file)?;
        }
        Domain::General => {
            write_first_turns(&options.environment.join("sharegpt.json"), plan.prompts, &mut file)?
        }
    }
    Ok(path)
}

/// First turns of ShareGPT of a length that leaves room for an answer, evenly over the file.
fn write_first_turns(path: &Path, count: usize, target: &mut impl std::io::Write) -> anyhow::Result<()> {
    const LENGTHS: std::ops::Range<usize> = 10..600;
    let mut fitting = Vec::new();
    for item in replay::Dataset::open(path, replay::DatasetOptions::default())? {
        let Ok(item) = item else {
            continue;
        };
        let length = item.messages.last().and_then(|message| message["content"].as_str()).map_or(0, str::len);
        if LENGTHS.contains(&length) {
            fitting.push(item);
        }
    }
    let every = (fitting.len() / count).max(1);
    for item in fitting.iter().step_by(every).take(count) {
        let row = serde_json::json!({
            "id": item.id, "conversation_id": item.conversation_id, "messages": item.messages,
        });
        writeln!(target, "{row}")?;
    }
    Ok(())
}

fn write_config(options: &Options) -> anyhow::Result<()> {
    let mut config = Config::default();
    config.proxy.listen = std::net::SocketAddr::from(([127, 0, 0, 1], options.proxy_port));
    config.proxy.upstream = vllm_url(options);
    config.control.listen = std::net::SocketAddr::from(([127, 0, 0, 1], options.control_port));
    config.data.directory = options.directory.join("data");
    config.verifier.directory = Some(verifier(options));
    config.states.transfer_directory = Some(options.directory.join("transfer"));
    std::fs::write(config_path(options), toml::to_string_pretty(&config)?)?;
    Ok(())
}

fn start_vllm(options: &Options, head: &Path) -> anyhow::Result<Background> {
    let mut command = Command::new("bash");
    command
        .arg(options.directory.join("serve.sh"))
        .env("DRAFTSMITH_ENV", &options.environment)
        .env("DRAFTSMITH_PLUGIN", options.directory.join("plugin"))
        .env("DRAFTSMITH_HEAD", head)
        .env("DRAFTSMITH_TRANSFER", options.directory.join("transfer"))
        .env("PORT", options.vllm_port.to_string())
        .env("K", DRAFT_TOKENS.to_string());
    Background::start("vLLM", command, &options.directory.join("vllm.log"))
}

fn start_sidecar(options: &Options) -> anyhow::Result<Background> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["serve", "--config"]).arg(config_path(options));
    Background::start("draftsmith serve", command, &options.directory.join("serve.log"))
}

async fn wait_until_healthy(
    client: &Client,
    vllm: &mut Background,
    sidecar: &mut Background,
) -> anyhow::Result<()> {
    let start = Instant::now();
    while let Err(error) = client.health().await {
        vllm.check_alive()?;
        sidecar.check_alive()?;
        if start.elapsed() > START_TIMEOUT {
            bail!("vLLM was not ready after {} s: {error}", START_TIMEOUT.as_secs());
        }
        tokio::time::sleep(START_POLL).await;
    }
    sidecar.check_alive()
}

async fn replay_and_count(
    options: &Options,
    plan: &Plan,
    client: &Client,
    dataset: &Path,
    split: replay::Split,
    name: &str,
) -> anyhow::Result<Traffic> {
    let errors = options.directory.join(format!("{name}-errors.jsonl"));
    let mut run = replay::RunOptions::new(dataset, proxy_url(options), &errors);
    run.concurrency = plan.concurrency;
    run.split = split;
    run.held_out_fraction = Config::default().data.held_out_fraction;
    run.max_tokens = Some(plan.max_tokens as u64);
    run.temperature = Some(0.0);
    flush(options).await?;
    let recorded_before = recorded(options)?;
    let before = client.metrics().await?;
    let report = replay::run(run, std::future::pending()).await?;
    flush(options).await?;
    let recorded_after = recorded(options)?;
    let after = client.metrics().await?;
    if report.exit_code() != 0 {
        bail!("{} of {} prompts failed; see {}", report.failed, report.sent, errors.display());
    }
    let recorded = Drafting {
        drafts: recorded_after.drafts - recorded_before.drafts,
        drafted_tokens: recorded_after.drafted_tokens - recorded_before.drafted_tokens,
        accepted_tokens: recorded_after.accepted_tokens - recorded_before.accepted_tokens,
    };
    traffic(report.ok, report.seconds, &before, &after, recorded)
}

/// The sums over all rows so far.
fn recorded(options: &Options) -> anyhow::Result<Drafting> {
    let mut sum = Drafting::default();
    for day in crate::record::stats(&DataDir::new(options.directory.join("data")))?.acceptance {
        sum.drafts += day.drafts;
        sum.drafted_tokens += day.drafted_tokens;
        sum.accepted_tokens += day.accepted_tokens;
    }
    Ok(sum)
}

fn traffic(
    prompts: u64,
    seconds: f64,
    before: &Metrics,
    after: &Metrics,
    recorded: Drafting,
) -> anyhow::Result<Traffic> {
    let (Some(earlier), Some(later)) = (&before.spec, &after.spec) else {
        bail!("vLLM shows no counters of speculative decoding");
    };
    let spec = later.since(earlier).context("vLLM restarted in between")?;
    let output_tokens = after.generation_tokens - before.generation_tokens;
    Ok(Traffic {
        prompts,
        output_tokens,
        seconds,
        tokens_per_second: output_tokens / seconds,
        drafts: spec.drafts,
        draft_tokens: spec.draft_tokens,
        accepted_tokens: spec.accepted_tokens,
        acceptance_length: spec.acceptance_length().context("vLLM drafted nothing")?,
        accepted_per_position: spec.accepted_per_position.iter().map(|count| count / spec.drafts).collect(),
        recorded,
    })
}

/// Has the sidecar seal its records, so that the trainer and the sums see them.
async fn flush(options: &Options) -> anyhow::Result<()> {
    let url = format!("http://127.0.0.1:{}/v1/flush", options.control_port);
    crate::http::client()?.post(url).send().await?.error_for_status()?;
    Ok(())
}
