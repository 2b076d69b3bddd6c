//! The whole loop on a real vLLM (CPU) with a real model: `draftsmith demo` on one narrow domain, and what it must show.
//! Then its head goes out in the other checkpoint format, into a vLLM that starts with it.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

mod common {
    pub mod environment;
    pub mod ports;
    pub mod vllm;
}

use std::path::Path;
use std::process::Command;

use common::vllm::Vllm;
use draftsmith::config::Config;
use draftsmith::replay;
use draftsmith::vllm::{Client, Timeouts};
use serde_json::Value;

/// Tokens of an answer, as in the demo's narrow traffic.
const ANSWER_TOKENS: u64 = 80;
/// Requests at once: other batches may turn near ties of the greedy answers.
const CONCURRENCY: usize = 16;

#[tokio::test]
#[ignore = "real vLLM: 15 minutes, once installed"]
async fn the_loop_raises_acceptance_on_a_real_vllm() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path().join("demo");
    let report = demo(&run);
    check(&report);

    let head = report["training"]["head"].as_str().unwrap();
    let exported = directory.path().join("speculators");
    let export = ["heads", "export", head, exported.to_str().unwrap(), "--format", "speculators", "--config"];
    draftsmith(Command::new(env!("CARGO_BIN_EXE_draftsmith")).args(export).arg(run.join("draftsmith.toml")));
    let text = std::fs::read_to_string(exported.join("config.json")).unwrap();
    assert!(text.contains("speculators_model_type"), "the format that vLLM is given: {text}");
    let vllm = Vllm::with_head(directory.path(), &exported, &[]).await;
    let accepted = acceptance_length(&vllm, &run).await;
    let after = report["after"]["acceptance_length"].as_f64().unwrap();
    println!("acceptance length of the head as exported for Speculators: {accepted}, swapped in: {after}");
    assert!((accepted - after).abs() <= 0.05, "started with the export: {accepted}, swapped in: {after}");

    // What it was started with reads as the same rules, so the registry's flat file may follow it.
    let swapped = draftsmith(
        Command::new(env!("CARGO_BIN_EXE_draftsmith"))
            .args(["swap", head, "--json", "--config"])
            .arg(run.join("draftsmith.toml"))
            .env("DRAFTSMITH_PROXY__UPSTREAM", format!("http://{}", vllm.address)),
    );
    assert_eq!(serde_json::from_slice::<Value>(&swapped).unwrap()["label"], head);
}

/// What the command wrote to standard output.
fn draftsmith(command: &mut Command) -> Vec<u8> {
    let output = command.stderr(std::process::Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{command:?} ended with {}", output.status);
    output.stdout
}

/// vLLM's own counters over the demo's held-out prompts.
async fn acceptance_length(vllm: &Vllm, run: &Path) -> f64 {
    let url = format!("http://{}", vllm.address);
    let client = Client::new(&url, Timeouts::default()).unwrap();
    let before = client.metrics().await.unwrap().spec.unwrap();
    let mut options =
        replay::RunOptions::new(run.join("prompts.jsonl"), url, run.join("exported-errors.jsonl"));
    options.concurrency = CONCURRENCY;
    options.split = replay::Split::HeldOut;
    options.held_out_fraction = Config::default().data.held_out_fraction;
    options.max_tokens = Some(ANSWER_TOKENS);
    options.temperature = Some(0.0);
    let replayed = replay::run(options, std::future::pending()).await.unwrap();
    assert_eq!(replayed.exit_code(), 0, "{replayed:?}");
    let after = client.metrics().await.unwrap().spec.unwrap();
    after.since(&before).unwrap().acceptance_length().unwrap()
}

fn demo(run: &Path) -> Value {
    let [vllm, proxy, control] = std::array::from_fn(|_| common::ports::free_port().to_string());
    let told = draftsmith(
        Command::new(env!("CARGO_BIN_EXE_draftsmith"))
            .args(["demo", "--domain", "narrow", "--json", "--vllm-port", &vllm, "--proxy-port", &proxy])
            .args(["--control-port", &control])
            .arg("--environment")
            .arg(common::environment::environment())
            .arg("--directory")
            .arg(run),
    );
    println!("{}", String::from_utf8_lossy(&told));
    serde_json::from_slice(&told).unwrap()
}

fn check(report: &Value) {
    let before = report["before"]["acceptance_length"].as_f64().unwrap();
    let after = report["after"]["acceptance_length"].as_f64().unwrap();
    let forecast = report["forecast"].as_f64().unwrap();
    assert!(before < 1.05, "a random head was accepted: {before}");
    assert!(after >= 2.2, "acceptance length {after}");
    assert!((forecast - after).abs() <= 0.08, "forecast {forecast}, live {after}");

    // Summed over the records: what vLLM counted.
    for part in ["before", "training_traffic", "after"] {
        let (part, recorded) = (&report[part], &report[part]["recorded"]);
        assert_eq!(recorded["drafts"].as_f64(), part["drafts"].as_f64());
        assert_eq!(recorded["drafted_tokens"].as_f64(), part["draft_tokens"].as_f64());
        assert_eq!(recorded["accepted_tokens"].as_f64(), part["accepted_tokens"].as_f64());
    }

    // Every prompt became a row, those of the two streams too, and every answer gave a sample.
    let prompts: u64 = ["before", "training_traffic", "after"]
        .iter()
        .map(|part| report[part]["prompts"].as_u64().unwrap())
        .sum();
    assert_eq!(report["records"].as_u64().unwrap(), prompts + 2);
    assert_eq!(report["states"].as_u64().unwrap(), prompts + 2);
    assert!(report["training"]["steps"].as_u64().unwrap() > 0);

    let lengths: Vec<f64> = report["training"]["curve"]
        .as_array()
        .unwrap()
        .iter()
        .map(|point| point["acceptance_length"].as_f64().unwrap())
        .collect();
    assert!(lengths.len() > 2, "a learning curve: {lengths:?}");
    assert!(lengths.last() > lengths.first(), "it rises: {lengths:?}");

    assert_eq!(report["swap"]["same_text"], true);
    assert_eq!(report["swap"]["within_the_stream"], true);
    let gap = |name: &str| report["swap"][name].as_f64().unwrap();
    assert!(gap("usual_gap_ms") > 0.0 && gap("largest_gap_ms") >= gap("usual_gap_ms"));
    let seconds = report["seconds"].as_f64().unwrap();
    assert!(seconds <= 1500.0, "traffic and training within 25 minutes: {seconds} s");
}
