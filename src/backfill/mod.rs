//! States for records that have none: a second vLLM, stock, with its own hidden-states connector, computes them again.
//!
//! Wires the records, the state store and vLLM together. A record with token ids is sent to that vLLM as a prompt of
//! ids, all but the last one (nothing is computed after it); what comes back must be for these very ids, and passes the
//! same checks as the plugin's files. The store's own index says what is there already, so a run that ended early goes
//! on where it was.
//!
//! The newest records come first, and no more of them than the quota holds: a store that is full of newer states is left
//! alone.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::config::Config;
use crate::head::VerifierShape;
use crate::record::{self, Row, Rows, Split};
use crate::states::{
    Expected, OutcomeStatus, Reader, SampleKey, StateStore, StockSample, StoreOptions, TransferFile,
    store_stock,
};
use crate::store::DataDir;
use crate::vllm::{Client, ClientError, Timeouts};

/// A run of failures this long means that the set-up is wrong rather than a record.
const GIVE_UP_AFTER: u64 = 20;
/// Of one value, until a file shows what it is.
const F32_BYTES: usize = 4;
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// What to fill in, and from where.
#[derive(Clone, Debug)]
pub struct BackfillOptions {
    /// The second vLLM: `http://HOST:PORT`.
    pub from: String,
    /// Its `shared_storage_path`, as this machine sees it. Nothing outside it is read or deleted.
    pub transfer_directory: PathBuf,
    /// Its `eagle_aux_hidden_state_layer_ids`; None: those of a day-0 head and the last layer.
    pub layer_ids: Option<Vec<u32>>,
    /// Requests in flight.
    pub concurrency: usize,
    /// At most so many records are sent.
    pub limit: Option<usize>,
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
    ensure!(options.concurrency > 0, "--concurrency is 0; give 1 or more");
    let began = Instant::now();
    let client = Client::new(&options.from, Timeouts::default())?;
    let model =
        client.models().await?.into_iter().next().context("the vLLM to fill in from names no model")?;
    let mut work = Backfill::open(config, &options)?;
    let server = Arc::new(Server { client, model: model.id, directory: options.transfer_directory });

    let bar = crate::replay::progress_bar(options.limit);
    let mut log_tick = tokio::time::interval(LOG_INTERVAL);
    // The first one is due at once.
    log_tick.tick().await;
    let mut in_flight = JoinSet::new();
    let mut stop = pin!(stop);
    let mut stopping = false;
    loop {
        while in_flight.len() < options.concurrency
            && let Some((row, sample)) = work.next_sample()
        {
            in_flight.spawn(fetch(Arc::clone(&server), row, sample));
        }
        if in_flight.is_empty() {
            break;
        }
        tokio::select! {
            () = &mut stop, if !stopping => {
                stopping = true;
                work.end("it was told to stop".to_owned());
            }
            Some(fetched) = in_flight.join_next() => {
                work.settle(fetched.context("a request's task ended early")?);
                bar.inc(1);
            }
            _ = log_tick.tick() => if bar.is_hidden() {
                tracing::info!(stored = work.report.stored, failed = ?work.report.failed, "filling in states");
            }
        }
    }
    bar.finish_and_clear();
    work.store.sync()?;
    work.report.seconds = began.elapsed().as_secs_f64();
    Ok(work.report)
}

/// The second vLLM.
struct Server {
    client: Client,
    model: String,
    directory: PathBuf,
}

/// What came of one request.
struct Fetched {
    row: Row,
    result: Result<TransferFile, Failure>,
}

enum Failure {
    File(OutcomeStatus),
    Server(ClientError),
}

async fn fetch(server: Arc<Server>, row: Row, sample: StockSample) -> Fetched {
    // The record's id, since all choices of a request share the request's.
    let request_id = row.record_id.clone();
    let answer = server.client.extract_states(&server.model, sample.prefill(), &request_id).await;
    let result = match answer {
        Ok(Some(reported)) => {
            let taken =
                tokio::task::spawn_blocking(move || sample.take(&server.directory, &reported, &request_id));
            taken.await.unwrap_or_else(|error| {
                tracing::error!("reading a states file: {error}");
                Err(OutcomeStatus::Unreadable)
            })
        }
        Ok(None) => {
            tracing::warn!("vLLM names no states file; was it started with extract_hidden_states?");
            Err(OutcomeStatus::Missing)
        }
        Err(error) => return Fetched { row, result: Err(Failure::Server(error)) },
    };
    Fetched { row, result: result.map_err(Failure::File) }
}

/// What is still to do, and what was done.
struct Backfill {
    rows: Rows,
    store: StateStore,
    expected: Expected,
    layer_ids: Vec<u32>,
    /// Records that may still be sent.
    remaining: usize,
    train: Budget,
    held_out: Budget,
    /// Bytes of one token's states; those of f32 until a file came.
    row_bytes: u64,
    failures_in_a_row: u64,
    report: BackfillReport,
}

/// How many bytes of the newest states fit one side of the split.
struct Budget {
    left: u64,
}

impl Budget {
    fn take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.left;
        // The first one that does not fit ends it: what comes after is older.
        self.left = if fits { self.left - bytes } else { 0 };
        fits
    }
}

impl Backfill {
    fn open(config: &Config, options: &BackfillOptions) -> anyhow::Result<Self> {
        let verifier = config.verifier.directory.as_deref();
        let verifier = verifier
            .context("verifier.directory is not set; give the directory of the model that vLLM serves")?;
        let shape = VerifierShape::read(verifier)?;
        let layer_ids = layers(&shape, options.layer_ids.as_deref())?;
        let data = DataDir::new(&config.data.directory);
        let bounds = StoreOptions::of(&config.states);
        let store = StateStore::open(&data.states(), bounds.clone()).context(
            "the state store cannot be written; `draftsmith serve` holds it while states.transfer_directory is set",
        )?;
        if let Some(entry) = Reader::open(&data.states())?.index().last() {
            ensure!(
                entry.header.layer_ids == layer_ids,
                "the store has states of layers {:?}, not {layer_ids:?}; start the second vLLM with those and say --layers, \
                 or move {} away",
                entry.header.layer_ids,
                data.states().display()
            );
        }
        // Less than what the store fills before it evicts.
        let budget = |quota: u64| Budget { left: quota - quota / 4 };
        Ok(Self {
            rows: record::newest_rows(&data)?,
            store,
            expected: Expected {
                layer_ids: Some(layer_ids.clone()),
                hidden_size: Some(shape.hidden_size),
                vocab_size: Some(shape.vocab_size),
            },
            remaining: options.limit.unwrap_or(usize::MAX),
            train: budget(bounds.quota_bytes - bounds.held_out_quota_bytes),
            held_out: budget(bounds.held_out_quota_bytes),
            row_bytes: (layer_ids.len() * shape.hidden_size * F32_BYTES) as u64,
            layer_ids,
            failures_in_a_row: 0,
            report: BackfillReport::default(),
        })
    }

    /// The next record to send; None at the end.
    fn next_sample(&mut self) -> Option<(Row, StockSample)> {
        while self.remaining > 0 && self.report.ended_early.is_none() {
            let row = match self.rows.next()? {
                Ok(row) => row,
                Err(error) => {
                    tracing::warn!("{error}");
                    self.report.unreadable_files += 1;
                    continue;
                }
            };
            let Some(sample) = sample_of(&row, &self.layer_ids) else {
                self.report.without_ids += 1;
                continue;
            };
            let budget = if row.split == Split::HeldOut { &mut self.held_out } else { &mut self.train };
            let fits = budget.take(sample.prefill().len() as u64 * self.row_bytes);
            if self.store.contains(&row.request_id, row.choice_index) {
                self.report.already_stored += 1;
            } else if fits {
                self.remaining -= 1;
                return Some((row, sample));
            } else {
                self.report.beyond_quota += 1;
            }
        }
        None
    }

    fn settle(&mut self, fetched: Fetched) {
        let Fetched { row, result } = fetched;
        let status = match result {
            Ok(file) => self.keep(&row, &file),
            Err(Failure::File(status)) => status,
            Err(Failure::Server(error)) => {
                let refused = matches!(error, ClientError::Refused { .. }) && !error.is_transient();
                if refused {
                    tracing::warn!(record_id = row.record_id, "{error}");
                } else {
                    self.end(error.to_string());
                }
                if refused { OutcomeStatus::Refused } else { OutcomeStatus::Missing }
            }
        };
        if status == OutcomeStatus::Stored {
            self.report.stored += 1;
            self.failures_in_a_row = 0;
            return;
        }
        tracing::warn!(record_id = row.record_id, reason = status.as_str(), "states refused");
        *self.report.failed.entry(status.as_str()).or_default() += 1;
        self.failures_in_a_row += 1;
        if self.failures_in_a_row == GIVE_UP_AFTER {
            self.end(format!(
                "{GIVE_UP_AFTER} records in a row gave no states, the last one by reason {}",
                status.as_str()
            ));
        }
    }

    fn keep(&mut self, row: &Row, file: &TransferFile) -> OutcomeStatus {
        let key = SampleKey {
            request_id: &row.request_id,
            choice_index: row.choice_index,
            conversation_id: row.conversation_id.as_deref().unwrap_or_default(),
            source: row.source.as_str(),
            held_out: row.split == Split::HeldOut,
        };
        let status = store_stock(&mut self.store, &mut self.expected, key, file);
        if status == OutcomeStatus::Stored {
            self.row_bytes = file.states.len() as u64 / file.rows as u64;
            self.report.tokens += file.rows as u64;
        }
        status
    }

    /// Sends no more. The first reason stays.
    fn end(&mut self, reason: String) {
        self.report.ended_early.get_or_insert(reason);
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

/// The layers that the second vLLM gives: three for the head, and the last one, which the target is made from.
fn layers(shape: &VerifierShape, given: Option<&[u32]>) -> anyhow::Result<Vec<u32>> {
    let last = u32::try_from(shape.num_hidden_layers)?;
    let layer_ids = match given {
        Some(given) => given.to_vec(),
        None => {
            let aux = shape.default_aux_layer_ids().context("the verifier has too few layers for a head")?;
            aux.iter().map(|layer| *layer as u32).chain([last]).collect()
        }
    };
    ensure!(
        layer_ids.len() == 4 && layer_ids.is_sorted_by(|one, next| one < next) && layer_ids[3] == last,
        "--layers {layer_ids:?}: give three ascending layers and then {last}, the verifier's last"
    );
    Ok(layer_ids)
}
