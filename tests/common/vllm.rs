//! Starts a real vLLM (CPU) on a free port, and ends it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::environment::environment;
use super::sidecar::free_port;

/// vLLM on a busy machine takes minutes to import and load.
const START_TIMEOUT: Duration = Duration::from_secs(600);
/// Between two looks at a server that starts: it tells nobody when it is ready.
const START_POLL: Duration = Duration::from_millis(500);
/// How long vLLM may take to end before it is killed.
const GRACE: Duration = Duration::from_secs(30);
/// Tokens of the draft vocabulary.
const DRAFT_VOCABULARY: &str = "8192";

/// A running vLLM. It ends when this is dropped.
pub struct Vllm {
    /// `host:port`.
    pub address: String,
    pub model_directory: PathBuf,
    /// Where the plugin hands over states; empty without it.
    pub transfer_directory: PathBuf,
    child: Option<Child>,
}

impl Vllm {
    /// With the plugin and a random head, as `draftsmith demo` starts it. What it writes goes to `directory`; `flags` are
    /// more arguments of `vllm serve`.
    pub async fn with_plugin(directory: &Path, flags: &[&str]) -> Vllm {
        let environment = environment();
        let head = directory.join("day-0");
        let plugin = directory.join("plugin");
        draftsmith(&["vllm", "plugin", &text(&plugin)]);
        let verifier = text(&environment.join("smollm2-135m"));
        draftsmith(&[
            "heads",
            "init",
            "--verifier",
            &verifier,
            "--out",
            &text(&head),
            "--draft-vocab",
            DRAFT_VOCABULARY,
            "--random-lm-head",
        ]);
        let mut command = Command::new("bash");
        command
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/demo_env/serve.sh"))
            .args(flags)
            .env("DRAFTSMITH_ENV", &environment)
            .env("DRAFTSMITH_PLUGIN", plugin)
            .env("DRAFTSMITH_HEAD", head)
            .env("DRAFTSMITH_TRANSFER", directory.join("transfer"));
        start(command, &environment, directory).await
    }

    /// As it comes: no plugin, no draft head.
    pub async fn stock(directory: &Path, flags: &[&str]) -> Vllm {
        let environment = environment();
        let venv = environment.join("venv");
        let mut command = Command::new(venv.join("bin/vllm"));
        command
            .arg("serve")
            .arg(environment.join("smollm2-135m"))
            .args(["--host", "127.0.0.1", "--served-model-name", "smollm2", "--dtype", "float32"])
            .args(["--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager"])
            .args(flags)
            .env("PATH", format!("{}:{}", text(&venv.join("bin")), std::env::var("PATH").unwrap()))
            // As in serve.sh: threads that spin starve the rest of a small machine.
            .env("LD_PRELOAD", venv.join("lib/libiomp5.so"))
            .envs([("KMP_BLOCKTIME", "0"), ("OMP_NUM_THREADS", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")])
            .envs([("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_TARGET_DEVICE", "cpu"), ("HF_HUB_OFFLINE", "1")])
            .envs([("TRANSFORMERS_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("DO_NOT_TRACK", "1")]);
        start(command, &environment, directory).await
    }
}

async fn start(mut command: Command, environment: &Path, directory: &Path) -> Vllm {
    use std::os::unix::process::CommandExt;
    let port = free_port();
    let log_path = directory.join("vllm.log");
    let log = File::create(&log_path).unwrap();
    // serve.sh takes the port from the environment, vLLM itself from the flag; the last flag wins.
    command.args(["--port", &port.to_string()]);
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).process_group(0);
    let child = command.spawn().unwrap();
    let mut vllm = Vllm {
        address: format!("127.0.0.1:{port}"),
        model_directory: environment.join("smollm2-135m"),
        transfer_directory: directory.join("transfer"),
        child: Some(child),
    };
    let client = reqwest::Client::new();
    let started = Instant::now();
    loop {
        let answer = client.get(format!("http://{}/health", vllm.address)).send().await;
        if answer.is_ok_and(|response| response.status().is_success()) {
            return vllm;
        }
        let ended = vllm.child.as_mut().unwrap().try_wait().unwrap();
        let told = || std::fs::read_to_string(&log_path).unwrap_or_default();
        assert!(ended.is_none(), "vLLM ended with {ended:?}:\n{}", told());
        assert!(started.elapsed() < START_TIMEOUT, "vLLM is not ready:\n{}", told());
        tokio::time::sleep(START_POLL).await;
    }
}

impl Drop for Vllm {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let group = format!("-{}", child.id());
        let _ = Command::new("kill").args(["-TERM", "--", &group]).status();
        let (ended, waited) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            let _ = child.wait();
            let _ = ended.send(());
        });
        // Its worker processes may outlive it either way.
        let _ = waited.recv_timeout(GRACE);
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
        let _ = waiting.join();
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn draftsmith(arguments: &[&str]) {
    let status = Command::new(env!("CARGO_BIN_EXE_draftsmith")).args(arguments).status().unwrap();
    assert!(status.success(), "draftsmith {arguments:?} ended with {status}");
}
