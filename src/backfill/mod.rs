//! States for records that have none: they are computed again, by a second vLLM that is stock or in this process, or
//! taken over from files of Speculators.
//!
//! Wires the records, the state store and a source of states together. A record with token ids is given to the source as
//! a prompt of ids, all but the last one (nothing is computed after it); what comes back must be for these very ids, and
//! passes the same checks as the plugin's files. The store's own index says what is there already, so a run that ended
//! early goes on where it was.
//!
//! The newest records come first, and no more of them than the quota holds: a store that is full of newer states is left
//! alone.

mod check;
mod import;
mod local;
mod sink;
mod source;
mod speculators;
mod stock;

pub use check::{CheckOptions, CheckReport, WrongSample, check};
pub use import::{ImportOptions, import};

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::config::Config;
use crate::record::{self, Row, Rows, Split};
use crate::states::{OutcomeStatus, SampleKey, StockSample, TransferFile};
use crate::store::DataDir;
use local::LocalSource;
use sink::{Room, Sink};
use source::{SourceError, StateSource};
use stock::StockServer;

const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// What to fill in, and from where.
#[derive(Clone, Debug)]
pub struct BackfillOptions {
    pub from: FillFrom,
    /// The layers that the source gives; None: those of a day-0 head and the last layer.
    pub layer_ids: Option<Vec<u32>>,
    /// At most so many records are sent.
    pub limit: Option<usize>,
}

/// Who computes the states.
#[derive(Clone, Debug)]
pub enum FillFrom {
    /// A second vLLM.
    Vllm {
        /// `http://HOST:PORT`.
        address: String,
        /// Its `shared_storage_path`, as this machine sees it. Nothing outside it is read or deleted.
        transfer_directory: PathBuf,
        /// Requests in flight.
        concurrency: usize,
    },
    /// This process, from the weights in `verifier.directory`, one record at a time.
    Local,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BackfillReport {
    pub stored: u64,
    /// By [`OutcomeStatus::as_str`].
    pub failed: BTreeMap<&'static str, u64>,
    /// Rows whose states were there.
    pub already_stored: u64,
    /// Rows without token ids, or with less than two tokens of answer, which training cannot use.
    pub without_ids: u64,
    /// Rows that are too old for the quota.
    pub beyond_quota: u64,
    /// Parquet files that could not be read to their end.
    pub unreadable_files: u64,
    /// Tokens whose states were stored.
    pub tokens: u64,
    pub seconds: f64,
    /// Why it ended before all records were looked at.
    pub ended_early: Option<String>,
}

impl BackfillReport {
    /// 0 all done, 3 partly done, 1 nothing done.
    pub fn exit_code(&self) -> u8 {
        if self.failed.is_empty() && self.unreadable_files == 0 && self.ended_early.is_none() {
            0
        } else if self.stored + self.already_stored > 0 {
            3
        } else {
            1
        }
    }
}

/// Fills in what is missing, until all is done or `stop` resolves; then what is in flight is finished.
pub async fn run(
    config: &Config,
    options: BackfillOptions,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<BackfillReport> {
    let began = Instant::now();
    let mut report = match &options.from {
        FillFrom::Vllm { address, transfer_directory, concurrency } => {
            ensure!(*concurrency > 0, "--concurrency is 0; give 1 or more");
            let server = StockServer::connect(address, transfer_directory.clone()).await?;
            let work = Backfill::open(config, &options)?;
            fill(work, server, *concurrency, stop).await?
        }
        FillFrom::Local => {
            let work = Backfill::open(config, &options)?;
            let verifier = LocalSource::open(sink::verifier_directory(config)?, &work.sink.layer_ids)?;
            // A prefill takes all cores already.
            fill(work, verifier, 1, stop).await?
        }
    };
    report.seconds = began.elapsed().as_secs_f64();
    Ok(report)
}

async fn fill(
    mut work: Backfill,
    source: impl StateSource,
    concurrency: usize,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<BackfillReport> {
    let source = Arc::new(source);
    let bar = crate::replay::progress_bar(work.limit);
    let mut log_tick = tokio::time::interval(LOG_INTERVAL);
    // The first one is due at once.
    log_tick.tick().await;
    let mut in_flight = JoinSet::new();
    let mut stop = pin!(stop);
    let mut stopping = false;
    loop {
        while in_flight.len() < concurrency
            && let Some((row, sample)) = work.next_sample()
        {
            let source = Arc::clone(&source);
            in_flight.spawn(async move {
                let result = source.states(sample, &row.record_id).await;
                (row, result)
            });
        }
        if in_flight.is_empty() {
            break;
        }
        tokio::select! {
            () = &mut stop, if !stopping => {
                stopping = true;
                work.sink.end("it was told to stop".to_owned());
            }
            Some(fetched) = in_flight.join_next() => {
                let (row, result) = fetched.context("a request's task ended early")?;
                work.settle(&row, result);
                bar.inc(1);
            }
            _ = log_tick.tick() => if bar.is_hidden() {
                let report = &work.sink.report;
                tracing::info!(stored = report.stored, failed = ?report.failed, "filling in states");
            }
        }
    }
    bar.finish_and_clear();
    work.sink.store.sync()?;
    Ok(work.sink.report)
}

/// What is still to do, and what was done.
struct Backfill {
    rows: Rows,
    sink: Sink,
    limit: Option<usize>,
    /// Records that were sent.
    sent: usize,
}

impl Backfill {
    fn open(config: &Config, options: &BackfillOptions) -> anyhow::Result<Self> {
        let sink = Sink::open(config, options.layer_ids.as_deref(), Room::WholeQuota)?;
        let rows = record::newest_rows(&DataDir::new(&config.data.directory))?;
        Ok(Self { rows, sink, limit: options.limit, sent: 0 })
    }

    /// The next record to send; None at the end.
    fn next_sample(&mut self) -> Option<(Row, StockSample)> {
        while self.limit.is_none_or(|limit| self.sent < limit) && self.sink.report.ended_early.is_none() {
            let row = match self.rows.next()? {
                Ok(row) => row,
                Err(error) => {
                    tracing::warn!("{error}");
                    self.sink.report.unreadable_files += 1;
                    continue;
                }
            };
            let Some(sample) = sample_of(&row, &self.sink.layer_ids) else {
                self.sink.report.without_ids += 1;
                continue;
            };
            let fits = self.sink.take_room(row.split == Split::HeldOut, sample.prefill().len());
            if self.sink.store.contains(&row.request_id, row.choice_index) {
                self.sink.report.already_stored += 1;
            } else if fits {
                self.sent += 1;
                return Some((row, sample));
            } else {
                self.sink.report.beyond_quota += 1;
            }
        }
        None
    }

    fn settle(&mut self, row: &Row, result: Result<TransferFile, SourceError>) {
        let status = match result {
            Ok(file) => {
                let key = SampleKey {
                    request_id: &row.request_id,
                    choice_index: row.choice_index,
                    conversation_id: row.conversation_id.as_deref().unwrap_or_default(),
                    source: row.source.as_str(),
                    held_out: row.split == Split::HeldOut,
                };
                self.sink.keep(key, &file)
            }
            Err(SourceError::Sample(status)) => status,
            Err(SourceError::Source(reason)) => {
                self.sink.end(reason);
                OutcomeStatus::Missing
            }
        };
        self.sink.count(&row.record_id, status);
    }
}

/// None where the record lacks ids, or where training could not use it: a draft needs a token after the first one.
fn sample_of(row: &Row, layer_ids: &[u32]) -> Option<StockSample> {
    let (prompt, output) = (row.prompt_token_ids.as_ref()?, row.output_token_ids.as_ref()?);
    if prompt.is_empty() || output.len() < 2 {
        return None;
    }
    let ids: Result<Vec<u32>, _> = prompt.iter().chain(output).map(|id| u32::try_from(*id)).collect();
    Some(StockSample { token_ids: ids.ok()?, prompt_length: prompt.len(), layer_ids: layer_ids.to_vec() })
}
