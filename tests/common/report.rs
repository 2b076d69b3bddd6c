//! What a command with `--json` says.

use std::process::Output;

use serde_json::Value;

/// Exit code and report.
pub fn report(output: &Output) -> (i32, Value) {
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code().unwrap(), report)
}
