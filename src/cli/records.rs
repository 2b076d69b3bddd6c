//! `draftsmith records stats|verify`

use std::collections::HashMap;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;

use super::{ConfigFlags, PARTLY_DONE};
use crate::config::Config;
use crate::promote::Registry;
use crate::record::{self, FileCheck};
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
    /// Read every file and say what is torn, foreign or there twice; exit 3 if anything is
    Verify {
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
}

impl RecordsCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.action {
            Action::Stats { config, json } => stats(&config.load()?, json),
            Action::Verify { config, json } => verify(&config.load()?, json),
        }
    }
}

fn stats(config: &Config, json: bool) -> anyhow::Result<ExitCode> {
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
    println!("\n{:<12} {:<24} {:>10} {:>10} {:>18}", "day", "head", "rows", "drafts", "acceptance length");
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

fn verify(config: &Config, json: bool) -> anyhow::Result<ExitCode> {
    let checks = record::verify(&DataDir::new(&config.data.directory))?;
    let rows: u64 = checks.iter().map(|check| check.rows).sum();
    let duplicates: u64 = checks.iter().map(|check| check.duplicates).sum();
    let bad: Vec<&FileCheck> = checks.iter().filter(|check| !check.is_sound()).collect();
    let unreadable = bad.iter().filter(|check| check.error.is_some()).count();
    if json {
        let report = json!({
            "files": checks.len(), "rows": rows, "unreadable_files": unreadable, "duplicate_rows": duplicates,
            "bad_files": bad,
        });
        println!("{report:#}");
    } else {
        for check in &bad {
            if let Some(error) = &check.error {
                println!("{error}");
            }
            if check.duplicates > 0 {
                println!("{}: {} rows are there twice", check.path.display(), check.duplicates);
            }
        }
        println!(
            "{} files, {rows} rows; {unreadable} files torn, unreadable or foreign, {duplicates} duplicate rows",
            checks.len()
        );
    }
    Ok(if bad.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(PARTLY_DONE) })
}

/// The registered heads' ids by the digest of their model file. Heads from elsewhere have none.
fn ids_by_digest(data: &DataDir) -> anyhow::Result<HashMap<String, String>> {
    let heads = Registry::open(data)?.list()?.heads;
    Ok(heads.into_iter().map(|manifest| (manifest.model_digest, manifest.id)).collect())
}
