//! `draftsmith bench train`

use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;

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
        let Action::Train(flags) = self.action;
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
