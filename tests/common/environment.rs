//! What the tests with a real vLLM stand on, installed from the package registries when it is first needed: no variable
//! has to be set for a test, and nothing is installed twice.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The directory of vLLM, the model and the prompts: DRAFTSMITH_ENVIRONMENT, or where `draftsmith demo` keeps it.
pub fn environment() -> PathBuf {
    let directory = match std::env::var_os("DRAFTSMITH_ENVIRONMENT") {
        Some(directory) => PathBuf::from(directory),
        None => std::env::home_dir().unwrap().join(".cache/draftsmith/environment"),
    };
    run_script("src/demo_env/setup.sh", &[&directory]);
    directory
}

/// What the script printed. It takes its own lock, so tests may come here at once.
pub fn run_script(name: &str, arguments: &[&Path]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    let mut command = Command::new("bash");
    let output = command.arg(script).args(arguments).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{name} {arguments:?} ended with {}", output.status);
    String::from_utf8(output.stdout).unwrap()
}
