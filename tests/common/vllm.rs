//! Starts a real vLLM (CPU) on a free port, and ends it.

#![allow(dead_code)]

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::json;
use tokio::sync::{Mutex, MutexGuard};

use super::environment::environment;
use super::ports::free_port;

/// vLLM on a busy machine takes minutes to import and load.
const START_TIMEOUT: Duration = Duration::from_secs(600);
/// Between two looks at a server that starts: it tells nobody when it is ready.
const START_POLL: Duration = Duration::from_millis(500);
/// How long vLLM may take to end before it is killed.
const GRACE: Duration = Duration::from_secs(30);
/// Tokens of the draft vocabulary.
const DRAFT_VOCABULARY: &str = "8192";

/// Two at once would starve each other on a small machine: the tests of one file take turns, and cargo runs one file
/// after the other.
static TURN: Mutex<()> = Mutex::const_new(());

/// A running vLLM. It ends when this is dropped.
pub struct Vllm {
    /// `host:port`.
    pub address: String,
    pub environment: PathBuf,
    pub model_directory: PathBuf,
    /// Where states are handed over; empty without plugin or connector.
    pub transfer_directory: PathBuf,
    child: Child,
    /// Given on after this one has ended: fields are dropped last.
    _turn: MutexGuard<'static, ()>,
}

impl Vllm {
    /// With the plugin and a random head, as `draftsmith demo` starts it. What it writes goes to `directory`; `flags` are
    /// more arguments of `vllm serve`.
    pub async fn with_plugin(directory: &Path, flags: &[&str]) -> Vllm {
        let head = directory.join("day-0");
        draftsmith(
            Command::new(env!("CARGO_BIN_EXE_draftsmith"))
                .args(["heads", "init", "--draft-vocab", DRAFT_VOCABULARY, "--random-lm-head", "--verifier"])
                .arg(model_in(&environment()))
                .arg("--out")
                .arg(&head),
        );
        Vllm::with_head(directory, &head, flags).await
    }

    /// The same with the head of another directory.
    pub async fn with_head(directory: &Path, head: &Path, flags: &[&str]) -> Vllm {
        let environment = environment();
        let plugin = directory.join("plugin");
        draftsmith(Command::new(env!("CARGO_BIN_EXE_draftsmith")).args(["vllm", "plugin"]).arg(&plugin));
        let mut command = Command::new("bash");
        command
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/demo_env/serve.sh"))
            .args(flags)
            .env("DRAFTSMITH_ENV", &environment)
            .env("DRAFTSMITH_PLUGIN", plugin)
            .env("DRAFTSMITH_HEAD", head)
            .env("DRAFTSMITH_TRANSFER", transfer_in(directory));
        start(command, environment, directory).await
    }

    /// As it comes: no plugin, no draft head.
    pub async fn stock(directory: &Path, flags: &[&str]) -> Vllm {
        let environment = environment();
        let mut command = serve(&environment);
        command.args(flags);
        start(command, environment, directory).await
    }

    /// vLLM's own extraction of hidden states, as docs/operations.md has it, but for the copy that needs a GPU.
    pub async fn extracting(directory: &Path, layers: &[u32]) -> Vllm {
        let environment = environment();
        let speculative = json!({
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        });
        let connector = json!({
            "kv_connector": "CpuHiddenStatesConnector",
            "kv_connector_module_path": "cpu_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": transfer_in(directory)},
        });
        let mut command = serve(&environment);
        command
            .args(["--speculative-config", &speculative.to_string()])
            .args(["--kv-transfer-config", &connector.to_string()])
            .env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stock_vllm"));
        start(command, environment, directory).await
    }
}

/// vLLM without the plugin; otherwise as serve.sh starts it.
fn serve(environment: &Path) -> Command {
    let bin = environment.join("venv/bin");
    let mut command = Command::new(bin.join("vllm"));
    command
        .arg("serve")
        .arg(model_in(environment))
        .args(["--host", "127.0.0.1", "--served-model-name", "smollm2", "--dtype", "float32"])
        .args(["--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager"])
        .env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()))
        // Threads that spin starve the rest of a small machine.
        .env("LD_PRELOAD", environment.join("venv/lib/libiomp5.so"))
        .envs([("KMP_BLOCKTIME", "0"), ("OMP_NUM_THREADS", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")])
        .envs([("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_TARGET_DEVICE", "cpu"), ("HF_HUB_OFFLINE", "1")])
        .envs([("TRANSFORMERS_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("DO_NOT_TRACK", "1")]);
    command
}

async fn start(mut command: Command, environment: PathBuf, directory: &Path) -> Vllm {
    let turn = TURN.lock().await;
    let port = free_port();
    let log_path = directory.join("vllm.log");
    let log = File::create(&log_path).unwrap();
    // serve.sh has a port of its own choice; the last flag wins.
    command.args(["--port", &port.to_string()]);
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).process_group(0);
    let mut vllm = Vllm {
        address: format!("127.0.0.1:{port}"),
        model_directory: model_in(&environment),
        environment,
        transfer_directory: transfer_in(directory),
        child: command.spawn().unwrap(),
        _turn: turn,
    };
    let client = draftsmith::http::client().unwrap();
    let started = Instant::now();
    loop {
        let answer = client.get(format!("http://{}/health", vllm.address)).send().await;
        if answer.is_ok_and(|response| response.status().is_success()) {
            return vllm;
        }
        let ended = vllm.child.try_wait().unwrap();
        let told = || std::fs::read_to_string(&log_path).unwrap_or_default();
        assert!(ended.is_none(), "vLLM ended with {ended:?}:\n{}", told());
        assert!(started.elapsed() < START_TIMEOUT, "vLLM is not ready:\n{}", told());
        tokio::time::sleep(START_POLL).await;
    }
}

impl Drop for Vllm {
    fn drop(&mut self) {
        // Its worker processes are of its group, and may outlive it.
        let group = Pid::from_child(&self.child);
        let _ = kill_process_group(group, Signal::TERM);
        std::thread::scope(|scope| {
            let (ended, waited) = std::sync::mpsc::channel();
            scope.spawn(move || {
                let _ = self.child.wait();
                let _ = ended.send(());
            });
            let _ = waited.recv_timeout(GRACE);
            let _ = kill_process_group(group, Signal::KILL);
        });
    }
}

fn model_in(environment: &Path) -> PathBuf {
    environment.join("smollm2-135m")
}

fn transfer_in(directory: &Path) -> PathBuf {
    directory.join("transfer")
}

fn draftsmith(command: &mut Command) {
    let status = command.status().unwrap();
    assert!(status.success(), "{command:?} ended with {status}");
}
