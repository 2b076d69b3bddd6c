//! `draftsmith serve` itself, as a process that can be killed.

#![allow(dead_code)]

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};

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
    pub fn start(directory: &Path, upstream: &str, settings: &str) -> Sidecar {
        Self::start_with(directory, upstream, settings, &[])
    }

    /// The same with more environment variables.
    pub fn start_with(
        directory: &Path,
        upstream: &str,
        settings: &str,
        environment: &[(&str, String)],
    ) -> Sidecar {
        let config = directory.join("draftsmith.toml");
        std::fs::write(&config, settings).unwrap();
        let mut log = OpenOptions::new().create(true).append(true).open(directory.join("serve.log")).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_draftsmith"))
            .args([
                "serve",
                "--upstream",
                &format!("http://{upstream}"),
                "--listen",
                "127.0.0.1:0",
                "--config",
            ])
            .arg(&config)
            .arg("--data")
            .arg(directory.join("data"))
            .env("DRAFTSMITH_CONTROL__LISTEN", "127.0.0.1:0")
            // It says where it serves at this level.
            .env("RUST_LOG", "info")
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let serving = loop {
            let line = lines.next().expect("the sidecar says where it serves before it ends: serve.log");
            writeln!(log, "{line}").unwrap();
            if line.contains(" serving ") {
                break line;
            }
        };
        // A pipe that nobody reads would stop it one day.
        std::thread::spawn(move || lines.try_for_each(|line| writeln!(log, "{line}")));
        let told = |field: &str| {
            let (_, rest) = serving.split_once(&format!(" {field}=")).unwrap();
            rest.split(' ').next().unwrap().to_owned()
        };
        Sidecar { address: told("listen"), control: format!("http://{}", told("control")), child }
    }

    /// Of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn check_alive(&mut self) {
        assert_eq!(self.child.try_wait().unwrap(), None, "the sidecar ended");
    }

    /// Has it seal what it recorded.
    pub async fn flush(&self) {
        let answer =
            draftsmith::http::client().unwrap().post(format!("{}/v1/flush", self.control)).send().await;
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
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
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
