//! The whole loop on a real vLLM (CPU) with a real model: `draftsmith demo` on one narrow domain, and what it must show.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

mod common {
    pub mod environment;
    pub mod ports;
}

use std::process::Command;

#[test]
#[ignore = "real vLLM: 15 minutes, once installed"]
fn the_loop_raises_acceptance_on_a_real_vllm() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path().join("demo");
    let [vllm, proxy, control] = std::array::from_fn(|_| common::ports::free_port().to_string());
    let output = Command::new(env!("CARGO_BIN_EXE_draftsmith"))
        .args(["demo", "--domain", "narrow", "--json", "--vllm-port", &vllm, "--proxy-port", &proxy])
        .args(["--control-port", &control])
        .arg("--environment")
        .arg(common::environment::environment())
        .arg("--directory")
        .arg(&run)
        .stderr(std::process::Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success(), "draftsmith demo ended with {}", output.status);
    println!("{}", String::from_utf8_lossy(&output.stdout));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();

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
    assert_eq!(report["swap"]["same_text"], true);
}
