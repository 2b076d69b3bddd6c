//! Measures the proxy beside others under the same load, all of them in one run on one machine.
//!
//! ```text
//! load ──► nginx | vllm-router | draftsmith, recording on or off | nothing ──► upstream, as fast as it can
//! ```
//!
//! Load and upstream live in this process, on a thread each; what is compared runs as processes of its own, so its CPU
//! time and memory are its own. All share the machine's cores, so only ratios mean something. Arms take turns within each
//! round, and the median of the rounds counts, since a machine's pace changes within minutes.

mod arms;
mod load;
mod upstream;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};

use arms::{Arm, Usage};
use load::Pace;
pub use upstream::Kind;

/// What is measured.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The nginx binary; none: that arm is left out.
    pub nginx: Option<PathBuf>,
    /// The vllm-router binary; none: that arm is left out.
    pub vllm_router: Option<PathBuf>,
    pub rounds: usize,
    /// How long each arm runs in each round.
    pub lap: Duration,
    /// Connections that always have a request open.
    pub connections: usize,
    /// Slow streams open at once; 0 leaves them out.
    pub streams: usize,
    /// How long those last.
    pub slow: Duration,
}

/// Everything that was measured.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    pub throughput: Vec<Throughput>,
    pub latency: Vec<Latency>,
    pub slow_streams: Option<SlowStreams>,
}

/// One arm under as much load as it takes.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Throughput {
    pub kind: &'static str,
    pub arm: &'static str,
    /// The median of the rounds.
    pub answers_per_second: f64,
    /// The arm's own CPU time; recording's includes sealing.
    pub cpu_microseconds_per_answer: f64,
    /// The most that the arm's processes held so far, together.
    pub peak_mib: f64,
    /// Rows that were recorded but for those that the recorder dropped and counted.
    pub dropped: u64,
}

/// One arm at half of what draftsmith takes with recording on.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Latency {
    pub arm: &'static str,
    pub requests_per_second: f64,
    pub median_microseconds: f64,
    pub p99_microseconds: f64,
}

/// Many slow streams through draftsmith at once, recording on.
#[derive(Clone, Debug, serde::Serialize)]
pub struct SlowStreams {
    pub streams: usize,
    pub seconds: f64,
    pub errors: usize,
    pub peak_mib: f64,
    /// Growth of the process over the streams.
    pub bytes_per_stream: f64,
    pub rows: u64,
    pub dropped: u64,
}

/// Runs it all. Needs no vLLM.
pub fn run(options: &BenchOptions) -> anyhow::Result<Report> {
    let directory = tempdir()?;
    let result = run_in(options, &directory);
    std::fs::remove_dir_all(&directory).with_context(|| directory.display().to_string())?;
    result
}

fn run_in(options: &BenchOptions, directory: &std::path::Path) -> anyhow::Result<Report> {
    let upstream = upstream::start()?;
    let mut arms = vec![Arm::direct(upstream)];
    if let Some(binary) = &options.nginx {
        arms.push(Arm::nginx(binary, upstream, directory)?);
    }
    if let Some(binary) = &options.vllm_router {
        arms.push(Arm::vllm_router(binary, upstream, directory)?);
    }
    arms.push(Arm::draftsmith("draftsmith, not recording", upstream, directory, false)?);
    arms.push(Arm::draftsmith(RECORDING, upstream, directory, true)?);
    for arm in &arms {
        for kind in [Kind::Json, Kind::Events] {
            let answer = load::answer(arm.address(), kind).with_context(|| arm.name())?;
            ensure!(answer == kind.body(), "{} does not pass on what the upstream sends", arm.name());
        }
    }
    let mut throughput = Vec::new();
    for kind in [Kind::Json, Kind::Events] {
        throughput.extend(measure_throughput(options, &arms, kind)?);
    }
    let full = throughput.iter().find(|found| found.arm == RECORDING && found.kind == Kind::Json.name());
    let rate = full.map_or(1000.0, |found| found.answers_per_second / 2.0);
    let latency = measure_latency(options, &arms, rate)?;
    drop(arms);
    let slow_streams = match options.streams {
        0 => None,
        _ => Some(measure_slow_streams(options, upstream, directory)?),
    };
    Ok(Report { throughput, latency, slow_streams })
}

const RECORDING: &str = "draftsmith, recording";

fn measure_throughput(options: &BenchOptions, arms: &[Arm], kind: Kind) -> anyhow::Result<Vec<Throughput>> {
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); arms.len()];
    let mut answers = vec![0u64; arms.len()];
    let mut cpu = vec![Duration::ZERO; arms.len()];
    for _ in 0..options.rounds {
        for (index, arm) in arms.iter().enumerate() {
            let before = arm.usage()?;
            let lap = load::closed_loop(arm.address(), kind, options.connections, options.lap)?;
            ensure!(lap.errors == 0, "{}: {} answers failed", arm.name(), lap.errors);
            rates[index].push(lap.answers as f64 / lap.elapsed.as_secs_f64());
            answers[index] += lap.answers;
            // What was put off (parsing, sealing) belongs to this arm, and must not run beside the next one.
            arm.finish_work()?;
            cpu[index] += arm.usage()?.cpu.saturating_sub(before.cpu);
        }
    }
    let mut rows = Vec::new();
    for (index, arm) in arms.iter().enumerate() {
        rows.push(Throughput {
            kind: kind.name(),
            arm: arm.name(),
            answers_per_second: median(&mut rates[index]),
            cpu_microseconds_per_answer: cpu[index].as_secs_f64() * 1e6 / answers[index] as f64,
            peak_mib: arm.usage()?.peak_mib(),
            dropped: arm.dropped_rows()?,
        });
    }
    Ok(rows)
}

fn measure_latency(options: &BenchOptions, arms: &[Arm], rate: f64) -> anyhow::Result<Vec<Latency>> {
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); arms.len()];
    for _ in 0..options.rounds {
        for (index, arm) in arms.iter().enumerate() {
            let pace = Pace { requests_per_second: rate, connections: 8 };
            samples[index].extend(load::paced(arm.address(), pace, options.lap)?);
            arm.finish_work()?;
        }
    }
    let mut rows = Vec::new();
    for (arm, list) in arms.iter().zip(&mut samples) {
        list.sort_by(f64::total_cmp);
        rows.push(Latency {
            arm: arm.name(),
            requests_per_second: rate,
            median_microseconds: quantile(list, 0.5) * 1e6,
            p99_microseconds: quantile(list, 0.99) * 1e6,
        });
    }
    Ok(rows)
}

fn measure_slow_streams(
    options: &BenchOptions,
    upstream: std::net::SocketAddr,
    directory: &std::path::Path,
) -> anyhow::Result<SlowStreams> {
    let arm = Arm::draftsmith(RECORDING, upstream, &directory.join("slow"), true)?;
    // The first answer makes the process as large as it is without streams.
    load::answer(arm.address(), Kind::Json)?;
    arm.finish_work()?;
    let before = arm.usage()?;
    let rows_before = arm.recorded_rows()?;
    let lap = load::slow_streams(arm.address(), options.streams, options.slow)?;
    arm.finish_work()?;
    let after: Usage = arm.usage()?;
    Ok(SlowStreams {
        streams: options.streams,
        seconds: lap.elapsed.as_secs_f64(),
        errors: lap.errors,
        peak_mib: after.peak_mib(),
        bytes_per_stream: after.peak.saturating_sub(before.peak) as f64 / options.streams as f64,
        rows: arm.recorded_rows()?.saturating_sub(rows_before),
        dropped: arm.dropped_rows()?,
    })
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    quantile(values, 0.5)
}

/// Of sorted values; 0 of none.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or_default()
}

fn tempdir() -> anyhow::Result<PathBuf> {
    let path = std::env::temp_dir().join(format!("draftsmith-bench-{}", std::process::id()));
    std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
    Ok(path)
}
