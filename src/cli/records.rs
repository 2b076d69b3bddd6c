//! `draftsmith records stats`

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;

use super::ConfigFlags;
use crate::record;
use crate::store::DataDir;

#[derive(Debug, Args)]
pub struct RecordsCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Rows by day and status
    Stats {
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
}

impl RecordsCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Action::Stats { config, json } = self.action;
        let config = config.load()?;
        let days = record::stats(&DataDir::new(&config.data.directory))?;
        let total: u64 = days.iter().map(|day| day.rows).sum();
        if json {
            let mut groups = Vec::new();
            for day in &days {
                groups.push(json!({
                    "day": day.day, "status": day.status.as_str(), "rows": day.rows, "rows_with_ids": day.rows_with_ids,
                    "prompt_tokens": day.prompt_tokens, "completion_tokens": day.completion_tokens,
                }));
            }
            println!("{}", json!({ "rows": total, "groups": groups }));
            return Ok(ExitCode::SUCCESS);
        }
        println!("{:<12} {:<15} {:>10} {:>10} {:>16}", "day", "status", "rows", "with ids", "output tokens");
        for day in &days {
            println!(
                "{:<12} {:<15} {:>10} {:>10} {:>16}",
                day.day,
                day.status.as_str(),
                day.rows,
                day.rows_with_ids,
                day.completion_tokens
            );
        }
        println!("{total} rows");
        Ok(ExitCode::SUCCESS)
    }
}
