//! Child processes: their output goes to a log file, and they end with the demo.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

/// How long a child may take to end after SIGTERM before it is killed. vLLM is known to linger.
const GRACE: Duration = Duration::from_secs(20);

/// A child process that runs beside the demo.
pub struct Background {
    name: &'static str,
    log: std::path::PathBuf,
    child: Child,
}

impl Background {
    pub fn start(name: &'static str, mut command: Command, log: &Path) -> anyhow::Result<Self> {
        let file = File::create(log).with_context(|| format!("log file {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        Ok(Self { name, log: log.to_owned(), child })
    }

    /// An error that quotes the end of the log if the process has ended.
    pub fn check_alive(&mut self) -> anyhow::Result<()> {
        let Some(status) = self.child.try_wait()? else {
            return Ok(());
        };
        bail!("{} ended with {status}; the end of {}:\n{}", self.name, self.log.display(), tail(&self.log))
    }

    /// Asks the whole process group to end, then insists.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        let Some(id) = self.child.id() else {
            return Ok(());
        };
        signal_group(id, Signal::TERM)?;
        if tokio::time::timeout(GRACE, self.child.wait()).await.is_err() {
            tracing::warn!(process = self.name, "did not end after SIGTERM; killing it");
            signal_group(id, Signal::KILL)?;
            self.child.wait().await?;
        }
        Ok(())
    }
}

/// Sends a signal to the process group that the child with this id leads. Minimal systems have no program for it.
fn signal_group(id: u32, signal: Signal) -> anyhow::Result<()> {
    let group = i32::try_from(id).ok().and_then(Pid::from_raw);
    let group = group.with_context(|| format!("{id} is no process id"))?;
    kill_process_group(group, signal).with_context(|| format!("{signal:?} to the process group {id}"))
}

/// Runs a command whose output goes to a log; an error quotes the log's end.
pub async fn run_to_end(name: &str, mut command: Command, log: &Path) -> anyhow::Result<()> {
    let file = File::create(log).with_context(|| format!("log file {}", log.display()))?;
    let status = command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .kill_on_drop(true)
        .status()
        .await
        .with_context(|| format!("starting {name}"))?;
    if !status.success() {
        bail!("{name} ended with {status}; the end of {}:\n{}", log.display(), tail(log));
    }
    Ok(())
}

/// Runs this very binary with `--json`; its standard error stays the terminal's.
pub async fn run_json(arguments: &[&str]) -> anyhow::Result<serde_json::Value> {
    let output = Command::new(std::env::current_exe()?)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output()
        .await?;
    if !output.status.success() {
        bail!("draftsmith {} ended with {}", arguments.join(" "), output.status);
    }
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("draftsmith {} printed no JSON", arguments.join(" ")))
}

fn tail(path: &Path) -> String {
    const LINES: usize = 30;
    let text =
        std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
