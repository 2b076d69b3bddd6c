//! `draftsmith records stats`

use std::collections::HashMap;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;

use super::ConfigFlags;
use crate::promote::Registry;
use crate::record;
use crate::store::DataDir;

#[derive(Debug, Args)]
pub struct RecordsCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Rows by day and status, acceptance length by day and head
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
        let data = DataDir::new(&config.data.directory);
        let stats = record::stats(&data)?;
        let total: u64 = stats.days.iter().map(|day| day.rows).sum();
        if json {
            let mut groups = Vec::new();
            for day in &stats.days {
                groups.push(json!({
                    "day": day.day, "status": day.status.as_str(), "rows": day.rows, "rows_with_ids": day.rows_with_ids,
                    "prompt_tokens": day.prompt_tokens, "completion_tokens": day.completion_tokens,
                }));
            }
            let mut acceptance = Vec::new();
            for day in &stats.acceptance {
                acceptance.push(json!({
                    "day": day.day, "draft_head": day.draft_head, "rows": day.rows, "drafts": day.drafts,
                    "drafted_tokens": day.drafted_tokens, "accepted_tokens": day.accepted_tokens,
                    "acceptance_length": day.acceptance_length(),
                }));
            }
            println!("{}", json!({ "rows": total, "groups": groups, "acceptance": acceptance }));
            return Ok(ExitCode::SUCCESS);
        }
        println!("{:<12} {:<15} {:>10} {:>10} {:>16}", "day", "status", "rows", "with ids", "output tokens");
        for day in &stats.days {
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
        if stats.acceptance.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        let ids = ids_by_digest(&data)?;
        println!(
            "\n{:<12} {:<24} {:>10} {:>10} {:>18}",
            "day", "head", "rows", "drafts", "acceptance length"
        );
        for day in &stats.acceptance {
            let head = match &day.draft_head {
                None => "unknown or swapped".to_owned(),
                Some(digest) => ids.get(digest).cloned().unwrap_or_else(|| digest.chars().take(12).collect()),
            };
            let length = day.acceptance_length().map_or("-".to_owned(), |length| format!("{length:.2}"));
            println!("{:<12} {:<24} {:>10} {:>10} {:>18}", day.day, head, day.rows, day.drafts, length);
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The registered heads' ids by the digest of their model file. Heads from elsewhere have none.
fn ids_by_digest(data: &DataDir) -> anyhow::Result<HashMap<String, String>> {
    let heads = Registry::open(data)?.list()?.heads;
    Ok(heads.into_iter().map(|manifest| (manifest.model_digest, manifest.id)).collect())
}
