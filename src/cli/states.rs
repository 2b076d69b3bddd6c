//! `draftsmith states backfill`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::ConfigFlags;
use crate::backfill::{self, BackfillOptions};

#[derive(Debug, Args)]
pub struct StatesCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Compute the states of recorded answers again, on a second vLLM that runs without the plugin
    Backfill {
        /// That vLLM's address; docs/operations.md says how to start it
        #[arg(long, value_name = "URL")]
        from: String,
        /// Its shared_storage_path, as this machine sees it
        #[arg(long, value_name = "DIR")]
        transfer: PathBuf,
        /// Its eagle_aux_hidden_state_layer_ids; without it those of a day-0 head and the last layer
        #[arg(long, value_name = "IDS", value_delimiter = ',')]
        layers: Option<Vec<u32>>,
        /// Requests in flight
        #[arg(long, default_value_t = 4)]
        concurrency: usize,
        /// At most so many records, the newest first
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
        let Action::Backfill { from, transfer, layers, concurrency, limit, config, json } = self.action;
        let options =
            BackfillOptions { from, transfer_directory: transfer, layer_ids: layers, concurrency, limit };
        let runtime = super::runtime()?;
        let settings = config.load()?;
        super::existing_data(&settings)?;
        let report = runtime.block_on(backfill::run(&settings, options, super::interrupted()))?;
        if json {
            println!("{}", serde_json::to_string_pretty(&report)?);
            return Ok(ExitCode::from(report.exit_code()));
        }
        println!(
            "{} stored, {} there before, {} without ids, {} too old for the quota; {} tokens in {:.0} s",
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
}
