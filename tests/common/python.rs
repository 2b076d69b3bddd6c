//! Python packages that judge what draftsmith does, in vLLM's Python but beside its packages.

use std::path::Path;
use std::process::Command;

use super::environment::{environment, run_script};

/// vLLM's Python with one of the sets of packages that packages.sh names.
pub fn python_with(packages: &str) -> Command {
    let environment = environment();
    let printed = run_script("tests/common/packages.sh", &[&environment, Path::new(packages)]);
    let mut command = Command::new(environment.join("venv/bin/python"));
    command.env("PYTHONPATH", printed.trim_end());
    command
}
