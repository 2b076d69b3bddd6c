//! What is compared: each arm is a process that forwards to the upstream, or nothing at all.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::record;
use crate::store::DataDir;

/// How long an arm may take to begin.
const START: Duration = Duration::from_secs(60);

/// A process that took no more than this within a rest has nothing left to do.
const RESTING: Duration = Duration::from_millis(20);
const REST: Duration = Duration::from_millis(100);

/// What /proc counts CPU time in; Linux keeps it so for all programs.
const TICKS_PER_SECOND: f64 = 100.0;

/// One way to the upstream.
pub(super) struct Arm {
    name: &'static str,
    address: SocketAddr,
    child: Option<Child>,
    /// draftsmith's alone.
    recording: Option<Recording>,
}

struct Recording {
    control: String,
    data: DataDir,
}

/// What an arm's processes took so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub cpu: Duration,
    /// Bytes.
    pub peak: u64,
}

impl Usage {
    pub(super) fn peak_mib(self) -> f64 {
        self.peak as f64 / f64::from(1 << 20)
    }
}

impl Arm {
    pub(super) fn direct(upstream: SocketAddr) -> Self {
        Self { name: "direct", address: upstream, child: None, recording: None }
    }

    /// One worker for each core, no buffering, kept connections on both sides, no log.
    pub(super) fn nginx(binary: &Path, upstream: SocketAddr, directory: &Path) -> anyhow::Result<Self> {
        let address = free_address()?;
        let home = directory.join("nginx");
        std::fs::create_dir_all(&home)?;
        let shown = home.display();
        let config = home.join("nginx.conf");
        let text = format!(
            "daemon off;\nworker_processes auto;\nworker_rlimit_nofile 20000;\npid {shown}/pid;\nerror_log stderr;\n\
             events {{ worker_connections 10000; }}\n\
             http {{\n  access_log off;\n  keepalive_requests 100000000;\n\
             client_body_temp_path {shown}/a;\n  proxy_temp_path {shown}/b;\n  fastcgi_temp_path {shown}/c;\n\
             uwsgi_temp_path {shown}/d;\n  scgi_temp_path {shown}/e;\n\
             upstream vllm {{ server {upstream}; keepalive 256; keepalive_requests 100000000; }}\n\
             server {{\n    listen {address};\n    client_max_body_size 64m;\n    location / {{\n\
             proxy_pass http://vllm;\n      proxy_http_version 1.1;\n      proxy_set_header Connection \"\";\n\
             proxy_buffering off;\n      proxy_read_timeout 1h;\n    }}\n  }}\n}}\n"
        );
        std::fs::write(&config, text)?;
        let mut command = Command::new(binary);
        command.arg("-p").arg(&home).arg("-e").arg("stderr").arg("-c").arg(&config);
        Self::start("nginx", address, &mut command, &home.join("log"), None)
    }

    pub(super) fn vllm_router(binary: &Path, upstream: SocketAddr, directory: &Path) -> anyhow::Result<Self> {
        let (address, prometheus) = (free_address()?, free_address()?);
        let mut command = Command::new(binary);
        command
            .args(["--worker-urls", &format!("http://{upstream}"), "--policy", "round_robin"])
            .args(["--host", &address.ip().to_string(), "--port", &address.port().to_string()])
            .args(["--prometheus-port", &prometheus.port().to_string(), "--log-level", "error"]);
        Self::start("vllm-router", address, &mut command, &directory.join("vllm-router.log"), None)
    }

    /// This very binary, with its defaults but for recording.
    pub(super) fn draftsmith(
        name: &'static str,
        upstream: SocketAddr,
        directory: &Path,
        records: bool,
    ) -> anyhow::Result<Self> {
        let (address, control) = (free_address()?, free_address()?);
        let home = directory.join(if records { "recording" } else { "not-recording" });
        std::fs::create_dir_all(&home)?;
        let data = home.join("data");
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["serve", "--upstream", &format!("http://{upstream}"), "--listen", &address.to_string()])
            .arg("--data")
            .arg(&data)
            .env("DRAFTSMITH_CONTROL__LISTEN", control.to_string())
            .env("DRAFTSMITH_RECORD__ENABLED", records.to_string());
        let recording = Recording { control: format!("http://{control}"), data: DataDir::new(&data) };
        Self::start(name, address, &mut command, &home.join("log"), Some(recording))
    }

    fn start(
        name: &'static str,
        address: SocketAddr,
        command: &mut Command,
        log: &Path,
        recording: Option<Recording>,
    ) -> anyhow::Result<Self> {
        let output = std::fs::File::create(log).with_context(|| log.display().to_string())?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let mut arm = Self { name, address, child: Some(child), recording };
        let started = Instant::now();
        while !arm.answers() {
            let ended = arm.child.as_mut().and_then(|child| child.try_wait().transpose()).transpose()?;
            let said = || std::fs::read_to_string(log).unwrap_or_default();
            if let Some(status) = ended {
                bail!("{name} ended with {status}: {}", said());
            }
            ensure!(started.elapsed() < START, "{name} does not answer: {}", said());
            // No event tells that a foreign program is ready.
            std::thread::park_timeout(Duration::from_millis(20));
        }
        Ok(arm)
    }

    /// Whether a whole answer comes: vllm-router listens before it knows its workers.
    fn answers(&self) -> bool {
        TcpStream::connect(self.address).is_ok()
            && super::load::answer(self.address, super::Kind::Json).is_ok()
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Of the process and its children.
    pub(super) fn usage(&self) -> anyhow::Result<Usage> {
        let mut usage = Usage::default();
        let Some(child) = &self.child else {
            return Ok(usage);
        };
        for process in family(child.id())? {
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
            // The name may hold spaces; what follows its bracket does not.
            let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
            let ticks: u64 =
                fields.iter().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
            usage.cpu += Duration::from_secs_f64(ticks as f64 / TICKS_PER_SECOND);
            let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
            let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kibibytes = peak.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
            usage.peak += kibibytes.unwrap_or_default() * 1024;
        }
        Ok(usage)
    }

    /// Has what was recorded parsed and sealed: until the process rests.
    pub(super) fn finish_work(&self) -> anyhow::Result<()> {
        let Some(recording) = &self.recording else {
            return Ok(());
        };
        let mut before = self.usage()?;
        loop {
            self.control(reqwest::Method::POST, &format!("{}/v1/flush", recording.control))?;
            std::thread::park_timeout(REST);
            let after = self.usage()?;
            if after.cpu - before.cpu <= RESTING {
                return Ok(());
            }
            before = after;
        }
    }

    /// Rows and exchanges that were given up because memory was full.
    pub(super) fn dropped_rows(&self) -> anyhow::Result<u64> {
        let Some(recording) = &self.recording else {
            return Ok(0);
        };
        let metrics = self.control(reqwest::Method::GET, &format!("{}/metrics", recording.control))?;
        let lines = metrics.lines().filter(|line| line.starts_with("draftsmith_record_dropped_total{"));
        Ok(lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum())
    }

    /// Rows that can be read.
    pub(super) fn recorded_rows(&self) -> anyhow::Result<u64> {
        let Some(recording) = &self.recording else {
            return Ok(0);
        };
        let stats = record::stats(&recording.data)?;
        Ok(stats.days.iter().map(|day| day.rows).sum())
    }

    fn control(&self, method: reqwest::Method, url: &str) -> anyhow::Result<String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let answer = crate::http::client()?.request(method, url).send().await?.error_for_status()?;
            Ok(answer.text().await?)
        })
    }
}

impl Drop for Arm {
    fn drop(&mut self) {
        let Some(child) = &mut self.child else { return };
        // Its children end with it: nginx's workers, on the loss of their master, by SIGTERM to it.
        let id = rustix::process::Pid::from_child(child);
        if let Err(error) = rustix::process::kill_process(id, rustix::process::Signal::TERM) {
            tracing::warn!(arm = self.name, %error, "cannot be ended");
        }
        if let Err(error) = child.wait() {
            tracing::warn!(arm = self.name, %error, "cannot be waited for");
        }
    }
}

/// The process and all below it.
fn family(root: u32) -> anyhow::Result<Vec<u32>> {
    let mut members = vec![root];
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(process) = name.to_str().and_then(|text| text.parse::<u32>().ok()) else { continue };
        // It may have ended since.
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{process}/stat")) else { continue };
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
        parents.push((process, parent.unwrap_or(0)));
    }
    let mut position = 0;
    while let Some(parent) = members.get(position).copied() {
        members.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(process, _)| *process));
        position += 1;
    }
    Ok(members)
}

/// A port that was free a moment ago.
fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}
