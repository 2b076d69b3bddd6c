//! `draftsmith states`

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::{Args, Subcommand};
use serde_json::json;

use super::{ConfigFlags, PARTLY_DONE};
use crate::backfill::{
    self, BackfillOptions, BackfillReport, CheckOptions, CheckReport, FillFrom, ImportOptions,
};
use crate::config::Config;
use crate::states::{Reader, StateStore, StoreOptions};
use crate::store::DataDir;

/// What `--from` says for the verifier in this process.
const LOCAL: &str = "local";
const DEFAULT_CONCURRENCY: usize = 4;

#[derive(Debug, Args)]
pub struct StatesCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Compute the states of recorded answers again, on a second vLLM that runs without the plugin or in this process
    Backfill {
        #[command(flatten)]
        source: SourceFlags,
        /// That vLLM's eagle_aux_hidden_state_layer_ids; without it those of a day-0 head and the last layer
        #[arg(long, value_name = "IDS", value_delimiter = ',')]
        layers: Option<Vec<u32>>,
        /// Requests in flight to that vLLM [default: 4]
        #[arg(long)]
        concurrency: Option<usize>,
        /// At most so many records, the newest first
        #[arg(long)]
        limit: Option<usize>,
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Take over states that Speculators' offline generation wrote
    Import {
        /// The directory of its hs_*.safetensors
        directory: PathBuf,
        /// The output of its prepare-data, which has the loss masks; without it the directory above
        #[arg(long, value_name = "DIR")]
        dataset: Option<PathBuf>,
        /// The layers in the files; without it those of a day-0 head and the last layer
        #[arg(long, value_name = "IDS", value_delimiter = ',')]
        layers: Option<Vec<u32>>,
        /// At most so many samples
        #[arg(long)]
        limit: Option<usize>,
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Compute some of the stored states again, elsewhere, and compare; exit 3 if any is not that of its tokens
    Check {
        #[command(flatten)]
        source: SourceFlags,
        /// So many of the samples
        #[arg(long, default_value_t = 0.01)]
        share: f64,
        /// Draws the same samples each time it is given; without it others each time
        #[arg(long)]
        seed: Option<String>,
        /// At most so many samples
        #[arg(long)]
        limit: Option<usize>,
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// What is stored, and how much room prefixes in common save
    Stats {
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Read every block and say what is damaged or missing; exit 3 if anything is
    Verify {
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Free the room of blocks that no sample needs, while nothing writes to the directory
    Compact {
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
}

/// Who computes states again.
#[derive(Debug, Args)]
struct SourceFlags {
    /// A second vLLM's address (docs/operations.md says how to start it), or `local`: the weights in verifier.directory,
    /// on this machine's CPU
    #[arg(long, value_name = "URL|local")]
    from: String,
    /// That vLLM's shared_storage_path, as this machine sees it
    #[arg(long, value_name = "DIR")]
    transfer: Option<PathBuf>,
}

impl StatesCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.action {
            Action::Backfill { source, layers, concurrency, limit, config, json } => {
                let from = source.fill_from(concurrency)?;
                let options = BackfillOptions { from, layer_ids: layers, limit };
                let runtime = super::runtime()?;
                let settings = config.load()?;
                super::existing_data(&settings)?;
                let report = runtime.block_on(backfill::run(&settings, options, super::interrupted()))?;
                show(&report, json)
            }
            Action::Import { directory, dataset, layers, limit, config, json } => {
                let settings = config.load()?;
                super::existing_data(&settings)?;
                let options = ImportOptions { directory, data_set: dataset, layer_ids: layers, limit };
                show(&backfill::import(&settings, &options)?, json)
            }
            Action::Check { source, share, seed, limit, config, json } => {
                let seed = seed.unwrap_or_else(|| jiff::Timestamp::now().to_string());
                let options = CheckOptions { from: source.fill_from(None)?, share, seed, limit };
                let runtime = super::runtime()?;
                let settings = config.load()?;
                super::existing_data(&settings)?;
                let checked = backfill::check(&settings, &options, super::interrupted());
                show_check(&runtime.block_on(checked)?, json)
            }
            Action::Stats { config, json } => stats(&super::existing_data(&config.load()?)?, json),
            Action::Verify { config, json } => verify(&super::existing_data(&config.load()?)?, json),
            Action::Compact { config, json } => compact(&config.load()?, json),
        }
    }
}

impl SourceFlags {
    /// A second vLLM has a transfer directory and requests in flight, the local verifier neither.
    fn fill_from(self, concurrency: Option<usize>) -> anyhow::Result<FillFrom> {
        let Self { from, transfer } = self;
        if from == LOCAL {
            ensure!(transfer.is_none(), "--transfer is a second vLLM's; leave it out with --from local");
            ensure!(
                concurrency.is_none(),
                "--concurrency is a second vLLM's; leave it out with --from local, which computes one record at a time"
            );
            return Ok(FillFrom::Local);
        }
        let transfer_directory = transfer.with_context(|| {
            format!(
                "--transfer is missing; give the shared_storage_path of the vLLM at {from}, or say --from local"
            )
        })?;
        let concurrency = concurrency.unwrap_or(DEFAULT_CONCURRENCY);
        Ok(FillFrom::Vllm { address: from, transfer_directory, concurrency })
    }
}

fn show(report: &BackfillReport, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        println!("{}", serde_json::to_string_pretty(report)?);
        return Ok(ExitCode::from(report.exit_code()));
    }
    println!(
        "{} stored, {} there before, {} without ids, {} beyond the quota; {} tokens in {:.0} s",
        report.stored,
        report.already_stored,
        report.without_ids,
        report.beyond_quota,
        report.tokens,
        report.seconds
    );
    for (reason, count) in &report.failed {
        println!("  failed, {reason}: {count}");
    }
    if report.unreadable_files > 0 {
        println!("  {} record files could not be read", report.unreadable_files);
    }
    if let Some(reason) = &report.ended_early {
        println!("  ended early: {reason}");
    }
    Ok(ExitCode::from(report.exit_code()))
}

fn show_check(report: &CheckReport, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        println!("{}", serde_json::to_string_pretty(report)?);
        return Ok(ExitCode::from(report.exit_code()));
    }
    for wrong in &report.wrong {
        println!(
            "choice {} of request {}: {} rows from row {} on are not those of their tokens (off by up to {:.3})",
            wrong.choice_index, wrong.request_id, wrong.rows, wrong.first_row, wrong.worst_error
        );
    }
    for (reason, count) in &report.failed {
        println!("  not computed, {reason}: {count}");
    }
    if let Some(reason) = &report.ended_early {
        println!("  ended early: {reason}");
    }
    println!(
        "{} samples compared, {} rows, {} samples wrong; the worst row is {:.1e} off; {} not comparable",
        report.samples,
        report.rows,
        report.wrong.len(),
        report.worst_error,
        report.not_comparable
    );
    Ok(ExitCode::from(report.exit_code()))
}

fn stats(data: &DataDir, json: bool) -> anyhow::Result<ExitCode> {
    let stats = Reader::open(&data.states())?.stats()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&stats)?);
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "{} samples ({} held out, {} without their first rows), {} tokens; {} bytes, {:.2} times less than each sample whole",
        stats.samples,
        stats.held_out_samples,
        stats.partial_samples,
        stats.tokens,
        stats.bytes,
        stats.whole_bytes as f64 / stats.bytes.max(1) as f64
    );
    Ok(ExitCode::SUCCESS)
}

fn verify(data: &DataDir, json: bool) -> anyhow::Result<ExitCode> {
    let report = Reader::open(&data.states())?.verify()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        for damage in &report.damaged {
            println!("{}, offset {}: {}", damage.path.display(), damage.offset, damage.reason);
        }
        println!(
            "{} samples, {} blocks of {} bytes in {} segments; {} damaged places",
            report.samples,
            report.blocks,
            report.bytes,
            report.segments,
            report.damaged.len()
        );
    }
    Ok(if report.damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(PARTLY_DONE) })
}

fn compact(config: &Config, json: bool) -> anyhow::Result<ExitCode> {
    let data = super::existing_data(config)?;
    let mut store = StateStore::open(&data.states(), StoreOptions::of(&config.states))?;
    let freed = store.compact()?;
    let stats = store.stats();
    if json {
        println!("{:#}", json!({ "freed_bytes": freed, "bytes": stats.bytes, "segments": stats.segments }));
    } else {
        println!("{freed} bytes freed; {} bytes in {} segments are left", stats.bytes, stats.segments);
    }
    Ok(ExitCode::SUCCESS)
}
