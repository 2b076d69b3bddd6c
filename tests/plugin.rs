//! The plugin in a real vLLM, looked at with Python: real_plugin.py says what is checked.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use common::environment::environment;
use common::vllm::Vllm;

mod common {
    pub mod environment;
    pub mod ports;
    pub mod vllm;
}

#[test]
#[ignore = "vLLM's Python: a second, once installed"]
fn the_taps_rows_budget_and_guard() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(environment().join("venv/bin/python"))
        .args(["-B", "tests/tap_rows.py", "src/vllm/plugin"])
        .current_dir(root)
        .output()
        .unwrap();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
#[ignore = "real vLLM: three minutes, once installed"]
async fn states_and_swaps_in_a_real_vllm() {
    let directory = tempfile::tempdir().unwrap();
    let vllm = Vllm::with_plugin(directory.path(), &[]).await;
    let output = Command::new(vllm.environment.join("venv/bin/python"))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real_plugin.py"))
        .args(["--url", &format!("http://{}", vllm.address)])
        .arg("--model")
        .arg(&vllm.model_directory)
        .arg("--head")
        .arg(directory.path().join("day-0"))
        .arg("--transfer")
        .arg(&vllm.transfer_directory)
        .arg("--scratch")
        .arg(directory.path().join("scratch"))
        .output()
        .unwrap();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
