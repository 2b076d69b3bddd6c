//! `draftsmith serve` itself, as a process that can be killed.

#![allow(dead_code)]

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const START_TIMEOUT: Duration = Duration::from_secs(60);
const START_POLL: Duration = Duration::from_millis(5);

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A running sidecar. It is killed when this is dropped.
pub struct Sidecar {
    /// `host:port` for clients.
    pub address: String,
    /// The control port's URL.
    pub control: String,
    child: Child,
}

impl Sidecar {
    /// Its data are in `directory/data`, its log in `directory/serve.log`; `settings` is TOML. Comes back when it serves.
    pub async fn start(directory: &Path, upstream: &str, settings: &str) -> Sidecar {
        let config = directory.join("draftsmith.toml");
        std::fs::write(&config, settings).unwrap();
        let (port, control_port) = (free_port(), free_port());
        let log = OpenOptions::new().create(true).append(true).open(directory.join("serve.log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_draftsmith"))
            .args(["serve", "--upstream", &format!("http://{upstream}")])
            .args(["--listen", &format!("127.0.0.1:{port}"), "--config"])
            .arg(&config)
            .arg("--data")
            .arg(directory.join("data"))
            .env("DRAFTSMITH_CONTROL__LISTEN", format!("127.0.0.1:{control_port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut sidecar = Sidecar {
            address: format!("127.0.0.1:{port}"),
            control: format!("http://127.0.0.1:{control_port}"),
            child,
        };
        let client = reqwest::Client::new();
        let started = Instant::now();
        while client.get(format!("{}/healthz", sidecar.control)).send().await.is_err() {
            sidecar.check_alive();
            assert!(started.elapsed() < START_TIMEOUT, "the sidecar does not start");
            tokio::time::sleep(START_POLL).await;
        }
        sidecar
    }

    pub fn check_alive(&mut self) {
        assert_eq!(self.child.try_wait().unwrap(), None, "the sidecar ended");
    }

    /// Has it seal what it recorded.
    pub async fn flush(&self) {
        let answer = reqwest::Client::new().post(format!("{}/v1/flush", self.control)).send().await;
        assert_eq!(answer.unwrap().status(), 204);
    }

    /// SIGKILL; comes back when it is gone.
    pub fn kill(mut self) {
        self.check_alive();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM; comes back when it has ended by itself.
    pub fn stop(self) -> ExitStatus {
        self.terminate();
        self.wait()
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    }

    /// Comes back when it has ended.
    pub fn wait(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
