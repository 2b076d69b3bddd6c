//! `draftsmith records stats|verify|export|compact|forget`

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use serde_json::json;

use super::{ConfigFlags, PARTLY_DONE};
use crate::config::Config;
use crate::forget::forget_anywhere;
use crate::promote::Registry;
use crate::record::{self, FileCheck, Recorder, RecorderOptions, Selection, Split};
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
    /// Write recorded conversations as JSON lines of `messages`, the answer last
    Export {
        #[command(flatten)]
        config: ConfigFlags,
        /// The file to write; - for standard output
        #[arg(long, value_name = "FILE", default_value = "-")]
        out: String,
        /// Of one side of the split alone
        #[arg(long, value_parser = ["train", "held_out"])]
        split: Option<String>,
    },
    /// Merge the small files of all hours that are over, while nothing records into the directory
    Compact {
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove rows and the hidden states of their requests for good, and name the heads that learned from them
    #[command(group(clap::ArgGroup::new("which").required(true).multiple(true).args(["tenant", "tenant_hash", "before"])))]
    Forget {
        #[command(flatten)]
        config: ConfigFlags,
        /// The tenant as the header named it; its hash needs the salt in the data directory
        #[arg(long, value_name = "NAME", conflicts_with = "tenant_hash")]
        tenant: Option<String>,
        /// The tenant as the records name it
        #[arg(long, value_name = "HASH")]
        tenant_hash: Option<String>,
        /// Requests that started before this: 2026-11-01 (UTC) or 2026-11-01T12:00:00Z; now if it is not given
        #[arg(long, value_name = "TIME", value_parser = time)]
        before: Option<jiff::Timestamp>,
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
            Action::Stats { config, json } => stats(&super::existing_data(&config.load()?)?, json),
            Action::Verify { config, json } => verify(&super::existing_data(&config.load()?)?, json),
            Action::Export { config, out, split } => {
                export(&super::existing_data(&config.load()?)?, &out, split.as_deref())
            }
            Action::Compact { config, json } => {
                let config = config.load()?;
                compact(&super::existing_data(&config)?, config.record.object_store, json)
            }
            Action::Forget { config, tenant, tenant_hash, before, json } => {
                let config = config.load()?;
                let data = super::existing_data(&config)?;
                let tenant_hash = match tenant {
                    Some(name) => Some(record::tenant_hash(&name, &data.tenant_salt())?),
                    None => tenant_hash,
                };
                let before = before.unwrap_or_else(jiff::Timestamp::now).as_microsecond();
                forget(&config, Selection { tenant_hash, before }, json)
            }
        }
    }
}

/// A day stands for its first moment in UTC.
fn time(text: &str) -> Result<jiff::Timestamp, String> {
    let wrong = |error: jiff::Error| format!("{error}; give 2026-11-01 or 2026-11-01T12:00:00Z");
    if let Ok(day) = text.parse::<jiff::civil::Date>()
        && !text.contains(['T', ' '])
    {
        return Ok(day.to_zoned(jiff::tz::TimeZone::UTC).map_err(wrong)?.timestamp());
    }
    text.parse().map_err(wrong)
}

fn export(data: &DataDir, out: &str, split: Option<&str>) -> anyhow::Result<ExitCode> {
    let split = split.and_then(Split::parse);
    let lines = if out == "-" {
        let mut output = BufWriter::new(std::io::stdout().lock());
        let lines = record::export(data, split, &mut output)?;
        output.flush()?;
        lines
    } else {
        let opened = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(out);
        let mut output = BufWriter::new(opened.with_context(|| format!("cannot write {out}"))?);
        let lines = record::export(data, split, &mut output)?;
        output.flush()?;
        lines
    };
    eprintln!("{lines} conversations");
    Ok(ExitCode::SUCCESS)
}

fn compact(data: &DataDir, object_store: Option<String>, json: bool) -> anyhow::Result<ExitCode> {
    let recorder = Recorder::start(data, RecorderOptions { object_store, ..RecorderOptions::default() })?;
    let done = recorder.compact()?;
    let copied = recorder.settle_object_store();
    recorder.shutdown()?;
    copied.context("the files are merged here")?;
    if json {
        println!("{}", serde_json::to_string(&done)?);
    } else {
        println!("{} hours: {} files became {}", done.hours, done.files_before, done.files_after);
    }
    Ok(ExitCode::SUCCESS)
}

fn forget(config: &Config, selection: Selection, json: bool) -> anyhow::Result<ExitCode> {
    let report = super::runtime()?.block_on(forget_anywhere(config, selection))?;
    let outcome = match report.object_store_left {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::from(PARTLY_DONE),
    };
    if json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(outcome);
    }
    println!(
        "{} rows of {} requests and {} samples of hidden states were removed",
        report.records.rows, report.requests, report.samples
    );
    if report.records.damaged_segments_deleted > 0 {
        println!("{} damaged WAL segments were deleted", report.records.damaged_segments_deleted);
    }
    if !report.heads.is_empty() {
        println!("heads that learned from them, and stay:");
        for head in &report.heads {
            println!("  {head}");
        }
    }
    if let Some(reason) = &report.object_store_left {
        println!("an object store may still have such rows: {reason}");
    }
    Ok(outcome)
}

fn stats(data: &DataDir, json: bool) -> anyhow::Result<ExitCode> {
    let stats = record::stats(data)?;
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
    let ids = ids_by_digest(data)?;
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

fn verify(data: &DataDir, json: bool) -> anyhow::Result<ExitCode> {
    let checks = record::verify(data)?;
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

/// The registered heads' ids by the digests of their model files. Heads from elsewhere have none.
fn ids_by_digest(data: &DataDir) -> anyhow::Result<HashMap<String, String>> {
    let heads = Registry::of(data).list()?.heads;
    let named =
        heads.iter().flat_map(|head| head.digests().map(|digest| (digest.to_owned(), head.id.clone())));
    Ok(named.collect())
}
