//! `draftsmith states`

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::{Args, Subcommand};

use super::ConfigFlags;
use crate::backfill::{self, BackfillOptions, BackfillReport, FillFrom, ImportOptions};

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
        /// That vLLM's address (docs/operations.md says how to start it), or `local`: the weights in verifier.directory,
        /// on this machine's CPU
        #[arg(long, value_name = "URL|local")]
        from: String,
        /// That vLLM's shared_storage_path, as this machine sees it
        #[arg(long, value_name = "DIR")]
        transfer: Option<PathBuf>,
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
}

impl StatesCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.action {
            Action::Backfill { from, transfer, layers, concurrency, limit, config, json } => {
                let from = fill_from(from, transfer, concurrency)?;
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
        }
    }
}

/// A second vLLM has a transfer directory and requests in flight, the local verifier neither.
fn fill_from(
    from: String,
    transfer: Option<PathBuf>,
    concurrency: Option<usize>,
) -> anyhow::Result<FillFrom> {
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
