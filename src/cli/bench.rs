//! `draftsmith bench train|proxy|states`

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;

use crate::bench;
use crate::config::StateEncoding;
use crate::states::{self, measure_store};
use crate::train::{
    BenchOptions, BenchReport, compare_with_cpu, config_by_name, measure_on_cpu, measure_on_gpu,
};

#[derive(Debug, Args)]
pub struct BenchCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Time whole training steps on random data: forward, backward, clipping, update
    Train(TrainFlags),
    /// Compare the proxy with nginx and vllm-router under the same load
    Proxy(ProxyFlags),
    /// Time hidden states on their way into the store and out of it, on one core
    States(StatesFlags),
}

#[derive(Debug, Args)]
struct StatesFlags {
    /// Hidden size; four layers, bf16
    #[arg(long, default_value_t = 4096)]
    hidden: usize,
    /// Tokens of a sample
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Samples; all of them should fit the page cache twice
    #[arg(long, default_value_t = 32)]
    samples: usize,
    /// Where a directory for this is made, and deleted; the system's temporary one without
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ProxyFlags {
    /// The nginx binary; left out without
    #[arg(long)]
    nginx: Option<PathBuf>,
    /// The vllm-router binary; left out without
    #[arg(long)]
    vllm_router: Option<PathBuf>,
    /// Turns of each arm; the median counts
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of each turn
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Connections that always have a request open
    #[arg(long, default_value_t = 16)]
    connections: usize,
    /// Slow streams open at once; 0 leaves them out
    #[arg(long, default_value_t = 4000)]
    streams: usize,
    /// Seconds that those last
    #[arg(long, default_value_t = 120)]
    slow_seconds: u64,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Device {
    Cpu,
    Cuda,
}

#[derive(Debug, Args)]
struct TrainFlags {
    /// What to measure
    #[arg(long, value_enum, default_value_t = Device::Cuda)]
    device: Device,
    /// The head's shape: 8b, k2 or smollm2
    #[arg(long, default_value = "8b")]
    shape: String,
    /// Tokens of a batch
    #[arg(long, default_value_t = 8192)]
    tokens: usize,
    /// Documents of a batch
    #[arg(long, default_value_t = 8)]
    documents: usize,
    /// Share of each document that is in the loss: its end
    #[arg(long, default_value_t = 1.0)]
    supervised: f64,
    /// Steps of the unroll
    #[arg(long, default_value_t = 3)]
    unroll: usize,
    /// Keep the output head as it is, as Speculators does
    #[arg(long)]
    freeze_lm_head: bool,
    /// Steps that are timed
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Number of the GPU
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Compare losses, gradients and an update with the CPU's on small shapes, and time nothing
    #[arg(long)]
    check: bool,
    #[arg(long)]
    json: bool,
}

impl BenchCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let flags = match self.action {
            Action::Train(flags) => flags,
            Action::Proxy(flags) => return bench_proxy(&flags),
            Action::States(flags) => return bench_states(&flags),
        };
        if flags.check {
            return check(&flags);
        }
        let config = config_by_name(&flags.shape)
            .with_context(|| format!("--shape {} is unknown; expected 8b, k2 or smollm2", flags.shape))?;
        let options = BenchOptions {
            config,
            tokens: flags.tokens,
            documents: flags.documents,
            supervised: flags.supervised,
            unroll: flags.unroll,
            train_lm_head: !flags.freeze_lm_head,
            steps: flags.steps,
        };
        let report = match flags.device {
            Device::Cpu => measure_on_cpu(&options)?,
            Device::Cuda => measure_on_gpu(flags.gpu, &options)?,
        };
        if flags.json {
            println!("{}", as_json(&flags, &report));
        } else {
            print(&flags, &report);
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn bench_proxy(flags: &ProxyFlags) -> anyhow::Result<ExitCode> {
    let report = bench::run(&bench::BenchOptions {
        nginx: flags.nginx.clone(),
        vllm_router: flags.vllm_router.clone(),
        rounds: flags.rounds,
        lap: Duration::from_secs(flags.seconds),
        connections: flags.connections,
        streams: flags.streams,
        slow: Duration::from_secs(flags.slow_seconds),
    })?;
    if flags.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(ExitCode::SUCCESS);
    }
    let mut kind = "";
    for row in &report.throughput {
        if kind != row.kind {
            kind = row.kind;
            println!("{kind:<26}  answers/s  of nginx  CPU us/answer  peak MiB  rows dropped");
        }
        let mut same_kind = report.throughput.iter().filter(|other| other.kind == row.kind);
        let nginx = same_kind.find(|other| other.arm == "nginx");
        let share = nginx.map_or_else(
            || "-".to_owned(),
            |other| format!("{:.2}", row.answers_per_second / other.answers_per_second),
        );
        println!(
            "{:<26} {:>10.0} {share:>9} {:>14.1} {:>9.0} {:>13}",
            row.arm, row.answers_per_second, row.cpu_microseconds_per_answer, row.peak_mib, row.dropped
        );
    }
    println!("at half load                requests/s  median us  P99 us");
    for row in &report.latency {
        println!(
            "{:<26} {:>11.0} {:>10.0} {:>7.0}",
            row.arm, row.requests_per_second, row.median_microseconds, row.p99_microseconds
        );
    }
    if let Some(slow) = &report.slow_streams {
        println!(
            "{} slow streams for {:.0} s: {} errors, {} rows, {} dropped, {:.0} MiB at most, {:.0} bytes a stream",
            slow.streams,
            slow.seconds,
            slow.errors,
            slow.rows,
            slow.dropped,
            slow.peak_mib,
            slow.bytes_per_stream
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn bench_states(flags: &StatesFlags) -> anyhow::Result<ExitCode> {
    for (flag, number) in
        [("--hidden", flags.hidden), ("--tokens", flags.tokens), ("--samples", flags.samples)]
    {
        anyhow::ensure!(number > 0, "{flag} is 0; give 1 or more");
    }
    let parent = flags.directory.clone().unwrap_or_else(std::env::temp_dir);
    let directory = parent.join(format!("draftsmith-bench-{}", std::process::id()));
    if !flags.json {
        println!(
            "{:<12} bytes a token   written: tokens/s  GB/s (file, checksum, store)   read: tokens/s  GB/s",
            ""
        );
    }
    for encoding in [StateEncoding::AsReceived, StateEncoding::Fp8] {
        let report = measure_store(
            &directory,
            &states::BenchOptions {
                hidden: flags.hidden,
                rows: flags.tokens,
                samples: flags.samples,
                rounds: 3,
                encoding,
            },
        )?;
        if flags.json {
            println!("{}", serde_json::to_string(&report)?);
            continue;
        }
        println!(
            "{:<12} {:>13.0} {:>19.0} {:>5.2} ({:>4.0}%, {:>6.0}%, {:>4.0}%) {:>16.0} {:>5.2}",
            format!("{encoding:?}"),
            report.stored_row_bytes,
            report.write_tokens_per_second,
            report.write_received_bytes_per_second / 1e9,
            report.read_file * 100.0,
            report.checksum * 100.0,
            report.check_and_store * 100.0,
            report.read_tokens_per_second,
            report.read_stored_bytes_per_second / 1e9
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn check(flags: &TrainFlags) -> anyhow::Result<ExitCode> {
    let list = compare_with_cpu(flags.gpu)?;
    let mut agrees = true;
    let mut case = "";
    for item in &list {
        let fits = item.error <= item.limit;
        agrees &= fits;
        if flags.json {
            println!(
                "{}",
                json!({ "case": item.case, "name": item.name, "error": item.error, "limit": item.limit })
            );
            continue;
        }
        if case != item.case {
            println!("{}", item.case);
            case = &item.case;
        }
        println!("  {:9.2e} {} {}", item.error, if fits { "ok   " } else { "WRONG" }, item.name);
    }
    Ok(if agrees { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn as_json(flags: &TrainFlags, report: &BenchReport) -> serde_json::Value {
    let laps: Vec<_> = report
        .laps
        .iter()
        .map(|lap| json!({ "name": lap.name, "calls": lap.calls, "milliseconds": lap.milliseconds }))
        .collect();
    json!({
        "device": report.device,
        "shape": flags.shape,
        "tokens": flags.tokens,
        "documents": flags.documents,
        "supervised": flags.supervised,
        "unroll": flags.unroll,
        "lm_head_trained": !flags.freeze_lm_head,
        "milliseconds": report.milliseconds,
        "tokens_per_second": report.tokens_per_second,
        "step_tflop": report.step_operations / 1e12,
        "peak_tflop_per_second": report.peak / 1e12,
        "share_of_peak": share(report),
        "gib_allocated": report.memory.map(|memory| gib(memory.allocated)),
        "gib_in_use": report.memory.map(|memory| gib(memory.in_use)),
        "first_loss": report.first_loss,
        "last_loss": report.last_loss,
        "gradient_norm": report.gradient_norm,
        "laps": laps,
    })
}

fn share(report: &BenchReport) -> f64 {
    report.step_operations / (report.milliseconds / 1e3) / report.peak
}

fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn print(flags: &TrainFlags, report: &BenchReport) {
    println!(
        "{}, {}, {} tokens of {} documents, {} in the loss, S = {}, lm_head {}",
        report.device,
        flags.shape,
        flags.tokens,
        flags.documents,
        flags.supervised,
        flags.unroll,
        if flags.freeze_lm_head { "frozen" } else { "trained" }
    );
    println!(
        "{:.2} ms a step, {:.0} tokens/s; {:.2} TFLOP of products, {:.0}% of a peak of {:.2} TFLOP/s",
        report.milliseconds,
        report.tokens_per_second,
        report.step_operations / 1e12,
        share(report) * 100.0,
        report.peak / 1e12
    );
    if let Some(memory) = report.memory {
        let (allocated, in_use) = (gib(memory.allocated), gib(memory.in_use));
        println!("{allocated:.1} GiB of buffers, {in_use:.1} GiB of the GPU in use");
    }
    println!(
        "loss {:.4} to {:.4}, gradient norm {:.3}",
        report.first_loss, report.last_loss, report.gradient_norm
    );
    for lap in &report.laps {
        println!("  {:8.3} ms {:4} x {}", lap.milliseconds, lap.calls, lap.name);
    }
}
