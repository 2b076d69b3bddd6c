//! One process of `draftsmith serve`: wires the proxy, the recorder, the states collector and the control port together.
//!
//! ```text
//! proxy --exchange--> rows --> recorder (WAL, Parquet)
//!                       \--> collector --ids, drafting and outcome--> recorder
//! ```
//!
//! Everything that could wait stands behind a bounded hand-off; the request path never does. All files are read first
//! ([`Inputs`]), then the ports are bound, and only then anything starts: what cannot work ends the process with nothing
//! half done.

mod inputs;
mod proxy_options;
mod reload;
mod rows;
mod signals;

use std::collections::{HashSet, VecDeque};
use std::fs::DirBuilder;
use std::future::Future;
use std::os::unix::fs::DirBuilderExt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};

use crate::config::{Config, PrivacyConfig, TokenIds};
use crate::control::{self, Controlled, PartReport};
use crate::handoff::Handoff;
use crate::proxy::{Begun, Exchange, Observer, Proxy};
use crate::record::{Join, Privacy, Recorder, RecorderHandle, RecorderOptions, Selection};
use crate::states::{Collector, CollectorOptions, Forgetter, RequestSummary, StateStore, StoreOptions};
use crate::store::{DataDir, is_drawn};
pub use inputs::Inputs;
use inputs::VerifierFiles;
use rows::{RowOptions, rows, signed_ids};
use signals::Signals;
pub(crate) use signals::shutdown_signal;

/// A client's word on the recording of its own request: anything but `on` is no.
const RECORD_HEADER: &str = "x-draftsmith-record";
const CONVERSATION_HEADER: &str = "x-draftsmith-conversation";
/// What may wait to be parsed; more is dropped and counted.
const PARSE_QUEUE: usize = 4096;
/// The parser lets so much time pass for more to come, and no more than a quarter of the flush interval.
const MOST_LINGER: Duration = Duration::from_millis(5);
/// How long vLLM may take to answer the readiness probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves until SIGTERM or SIGINT, then drains streams, seals the records and returns. A second signal ends this at once
/// with an error; what was recorded is then sealed by the next start.
pub async fn serve(config: Config) -> anyhow::Result<()> {
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let (stop, stopped) = oneshot::channel();
    let told_twice = async {
        signals.next().await;
        tracing::info!("draining; a second signal ends at once");
        // Nobody receives if serving could not begin; then the other branch ends this.
        let _ = stop.send(());
        signals.next().await;
    };
    tokio::select! {
        ended = serve_until(config, stopped) => ended,
        () = told_twice => anyhow::bail!("ended at once by a second signal; open streams were cut"),
    }
}

async fn serve_until(config: Config, stopped: oneshot::Receiver<()>) -> anyhow::Result<()> {
    raise_open_files_limit();
    let inputs = Inputs::read(&config)?;
    for doubt in config.doubts().into_iter().chain(inputs.doubts(&config)) {
        tracing::warn!("{doubt}");
    }
    let Inputs { proxy: prepared, control_keys, verifier } = inputs;
    let data = DataDir::new(&config.data.directory);
    data.create().with_context(|| format!("data.directory = {}", data.root().display()))?;
    if let Some(directory) = &config.states.transfer_directory {
        // One that is there keeps its mode: it may be shared.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.with_context(|| format!("states.transfer_directory = {}", directory.display()))?;
    }
    let privacy = Privacy::new(&config.privacy, &data.tenant_salt())?;
    let listener = bind("proxy.listen", config.proxy.listen).await?;
    let control_listener = bind("control.listen", config.control.listen).await?;
    let metrics = control::install_metrics()?;

    let ids_from_plugin =
        config.record.token_ids == TokenIds::Plugin && config.states.transfer_directory.is_some();
    let recorder = start_recorder(&config, &data, ids_from_plugin)?;
    let collector = match &config.states.transfer_directory {
        Some(directory) => Some(start_collector(&config, &data, directory, verifier, recorder.clone())?),
        None => None,
    };
    let forgetter = collector.as_ref().map(Collector::forgetter);
    let row_options = RowOptions {
        held_out_fraction: config.data.held_out_fraction,
        keep_raw: config.record.keep_raw,
        ids_from_plugin,
        privacy,
        tenant_header: config.privacy.tenant_header.clone(),
    };
    let observer = start_observer(recorder.clone(), collector, row_options, &config)?;

    let proxy = Arc::new(prepared.observed_by(observer.clone()));
    let _watcher = reload::watch(proxy.clone(), control_keys.clone())?;

    let draining = Arc::new(AtomicBool::new(false));
    let controlled = Arc::new(Parts {
        proxy: proxy.clone(),
        draining: draining.clone(),
        observer: observer.clone(),
        recorder: recorder.clone(),
        data: data.clone(),
        forgetter,
        store_options: StoreOptions::of(&config.states),
    });
    let (listen, control) = (listener.local_addr()?, control_listener.local_addr()?);
    let (stop_control, mut control_stopped) = watch::channel(false);
    let control_task = tokio::spawn(async move {
        let stopped = async {
            // An error means that the sender is gone, which is the end as well.
            let _ = control_stopped.changed().await;
        };
        control::serve(control_listener, controlled, metrics, control_keys, stopped).await;
    });
    tracing::info!(%listen, %control, upstream = config.proxy.upstream, "serving");
    let stop_serving = async {
        // An error means that the sender is gone, which is the end as well.
        let _ = stopped.await;
        draining.store(true, Relaxed);
    };
    let drained =
        proxy.clone().serve(listener, stop_serving).await.context("cannot start the proxy's threads")?;
    tracing::info!(?drained, "no more requests; sealing what was recorded");
    drop(proxy);
    tokio::task::spawn_blocking(move || {
        observer.finish();
        recorder.shutdown()
    })
    .await?
    .context("sealing what was recorded")?;
    let _ = stop_control.send(true);
    control_task.await?;
    Ok(())
}

async fn bind(key: &str, address: std::net::SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| {
        format!("cannot bind {key} = {address}; choose a free port and an address of this machine")
    })
}

/// Each stream takes two descriptors; the soft limit is low on many systems for the sake of old programs.
fn raise_open_files_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit on open files stays as it was");
    }
}

fn start_recorder(config: &Config, data: &DataDir, expect_join: bool) -> anyhow::Result<RecorderHandle> {
    let options = RecorderOptions {
        memory_bytes: config.record.queue_bytes,
        flush_interval: Duration::from_millis(config.record.flush_interval_ms),
        flush_bytes: config.record.flush_bytes,
        segment_bytes: config.record.segment_bytes,
        segment_age: Duration::from_secs(config.record.seal_after_seconds),
        expect_join,
        join_timeout: Duration::from_secs(config.record.join_timeout_seconds),
        merge_after: Some(config.record.merge_after_seconds)
            .filter(|seconds| *seconds > 0)
            .map(Duration::from_secs),
        object_store: config.record.object_store.clone(),
        ..RecorderOptions::default()
    };
    Ok(Recorder::start(data, options)?)
}

fn start_collector(
    config: &Config,
    data: &DataDir,
    transfer_directory: &std::path::Path,
    verifier: Option<VerifierFiles>,
    recorder: RecorderHandle,
) -> anyhow::Result<Collector> {
    let mut options = CollectorOptions::new(transfer_directory);
    options.time_out = Duration::from_secs(config.states.unmatched_seconds);
    let mut tokenizer = None;
    if let Some(files) = verifier {
        options.expected.hidden_size = Some(files.shape.hidden_size);
        options.expected.vocab_size = Some(files.shape.vocab_size);
        tokenizer = files.tokenizer;
    }
    let store = StateStore::open(&data.states(), StoreOptions::of(&config.states))?;
    let collector = Collector::start(options, store, tokenizer, move |outcome| {
        recorder.join(Join {
            request_id: outcome.request_id,
            choice_index: u32::try_from(outcome.choice_index).unwrap_or(u32::MAX),
            prompt_token_ids: signed_ids(&outcome.prompt_ids),
            output_token_ids: signed_ids(&outcome.output_ids),
            draft_head: outcome.head_digest,
            drafts: outcome.drafting.map(|drafting| drafting.drafts),
            drafted_tokens: outcome.drafting.map(|drafting| drafting.drafted_tokens),
            accepted_tokens: outcome.drafting.map(|drafting| drafting.accepted_tokens),
            states_status: outcome.status.as_str().to_owned(),
        });
    })?;
    Ok(collector)
}

/// Takes finished exchanges off the request path and parses them on a thread of its own.
struct Tee {
    recorder: RecorderHandle,
    privacy: PrivacyConfig,
    enabled: bool,
    /// Hidden states come here, of requests that are not recorded too.
    collects: bool,
    waiting: Arc<Waiting>,
    /// The bound on the bytes that wait.
    most_waiting_bytes: usize,
    parser: std::sync::Mutex<Option<std::thread::JoinHandle<()>>>,
}

/// What was handed to the parser.
struct Waiting {
    messages: Handoff<Message>,
    count: AtomicUsize,
    /// Of the exchanges.
    bytes: AtomicUsize,
}

enum Message {
    /// With the bytes that it counts for.
    Finished(Box<Exchange>, usize),
    /// A request of a recorded route that is not recorded: its states are to be deleted as they come.
    Unwanted(String),
    /// All before it is worked off.
    Settled(SyncSender<()>),
    Stop,
}

fn start_observer(
    recorder: RecorderHandle,
    collector: Option<Collector>,
    options: RowOptions,
    config: &Config,
) -> anyhow::Result<Arc<Tee>> {
    let waiting = Arc::new(Waiting {
        messages: Handoff::new(MOST_LINGER.min(Duration::from_millis(config.record.flush_interval_ms) / 4)),
        count: AtomicUsize::new(0),
        bytes: AtomicUsize::new(0),
    });
    let collects = collector.is_some();
    let writer = recorder.clone();
    let received = waiting.clone();
    let models = config.privacy.models.clone();
    let parser = std::thread::Builder::new()
        .name("rows".to_owned())
        .spawn(move || parse_until_stopped(&received, &writer, collector, &options, &models))
        .context("cannot start the thread that makes rows")?;
    Ok(Arc::new(Tee {
        recorder,
        privacy: config.privacy.clone(),
        enabled: config.record.enabled,
        collects,
        waiting,
        most_waiting_bytes: config.record.queue_bytes,
        parser: std::sync::Mutex::new(Some(parser)),
    }))
}

fn parse_until_stopped(
    waiting: &Waiting,
    recorder: &RecorderHandle,
    collector: Option<Collector>,
    options: &RowOptions,
    models: &[String],
) {
    let unwanted = |request_id: String| {
        if let Some(collector) = &collector {
            collector.expect(RequestSummary { request_id, ..RequestSummary::default() });
        }
    };
    let _shut_at_the_end = ShutAtTheEnd(waiting);
    let mut messages = VecDeque::new();
    loop {
        let Some(message) = messages.pop_front() else {
            messages = waiting.messages.take(None);
            continue;
        };
        waiting.count.fetch_sub(1, Relaxed);
        let (exchange, bytes) = match message {
            Message::Finished(exchange, bytes) => (exchange, bytes),
            Message::Unwanted(request_id) => {
                unwanted(request_id);
                continue;
            }
            Message::Settled(reply) => {
                // Whoever asked may have left.
                let _ = reply.send(());
                continue;
            }
            Message::Stop => break,
        };
        let (records, summary) = rows(&exchange, options);
        waiting.bytes.fetch_sub(bytes, Relaxed);
        let model = records.first().and_then(|record| record.model.as_ref());
        if !models.is_empty() && !model.is_some_and(|model| models.contains(model)) {
            skipped("model");
            recorder.abandon(exchange.request_id.clone());
            unwanted(summary.request_id);
            continue;
        }
        recorder.record(records);
        if let Some(collector) = &collector {
            collector.expect(summary);
        }
    }
    if let Some(collector) = collector {
        collector.stop();
    }
}

/// Whatever ends the parser, nobody waits for it any more, and what it did not take is counted.
struct ShutAtTheEnd<'a>(&'a Waiting);

impl Drop for ShutAtTheEnd<'_> {
    fn drop(&mut self) {
        for message in self.0.messages.shut() {
            if matches!(message, Message::Finished(..)) {
                metrics::counter!("draftsmith_record_dropped_total", "what" => "exchange", "reason" => "stopped")
                    .increment(1);
            }
        }
    }
}

/// Counts a request that is not recorded on purpose.
fn skipped(reason: &'static str) {
    metrics::counter!("draftsmith_record_skipped_total", "reason" => reason).increment(1);
}

/// Why a request is not recorded on purpose, if it is not.
fn reason_to_skip(
    privacy: &PrivacyConfig,
    enabled: bool,
    begun: Begun<'_>,
    headers: &hyper::HeaderMap,
) -> Option<&'static str> {
    if !enabled {
        return Some("disabled");
    }
    if headers.get_all(RECORD_HEADER).iter().any(|value| value != "on") {
        return Some("opt_out");
    }
    if !privacy.routes.iter().any(|route| route == begun.endpoint.path()) {
        return Some("route");
    }
    let conversation = headers.get(CONVERSATION_HEADER).and_then(|value| value.to_str().ok());
    let key = format!("sample {}", conversation.unwrap_or(begun.request_id));
    (!is_drawn(&key, privacy.sample_rate)).then_some("sampling")
}

impl Tee {
    /// False when there is no room, or when the parser has stopped.
    fn hand_over(&self, message: Message) -> bool {
        let fits = |waiting: usize| Some(waiting + 1).filter(|count| *count <= PARSE_QUEUE);
        if self.waiting.count.fetch_update(Relaxed, Relaxed, fits).is_err() {
            return false;
        }
        self.waiting.messages.push(message).is_ok()
    }

    /// Waits until all that was handed over so far has become rows. Blocks the thread.
    fn settle(&self) {
        let (reply, settled) = sync_channel(1);
        self.waiting.count.fetch_add(1, Relaxed);
        if self.waiting.messages.push_urgent(Message::Settled(reply)).is_ok() {
            // An error means that the thread has stopped: then nothing waits.
            let _ = settled.recv();
        }
    }

    /// Works off what was handed over, so that the recorder can be shut down after it.
    fn finish(&self) {
        self.waiting.count.fetch_add(1, Relaxed);
        // An error means that it was told already.
        let _ = self.waiting.messages.close(Message::Stop);
        let parser = self.parser.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(thread) = parser
            && thread.join().is_err()
        {
            tracing::error!("the thread that makes rows ended with a panic");
        }
    }
}

impl Drop for Tee {
    fn drop(&mut self) {
        // An error means that it was told before.
        let _ = self.waiting.messages.close(Message::Stop);
    }
}

impl Observer for Tee {
    fn wants(&self, begun: Begun<'_>, headers: &hyper::HeaderMap) -> bool {
        let Some(reason) = reason_to_skip(&self.privacy, self.enabled, begun, headers) else { return true };
        skipped(reason);
        if self.collects {
            // A full queue: the collector deletes the files after its time-out.
            self.hand_over(Message::Unwanted(begun.request_id.to_owned()));
        }
        false
    }

    fn begin(&self, begun: Begun<'_>) {
        self.recorder.begin(begun.request_id, begun.endpoint.path(), begun.received_at.as_microsecond());
    }

    fn finished(&self, exchange: Exchange) {
        let request_id = exchange.request_id.clone();
        let bytes = exchange.request_body.len() + exchange.response_body.len();
        let fits = |waiting: usize| waiting.checked_add(bytes).filter(|sum| *sum <= self.most_waiting_bytes);
        let has_room = self.waiting.bytes.fetch_update(Relaxed, Relaxed, fits).is_ok();
        if has_room && self.hand_over(Message::Finished(Box::new(exchange), bytes)) {
            return;
        }
        if has_room {
            self.waiting.bytes.fetch_sub(bytes, Relaxed);
        }
        metrics::counter!("draftsmith_record_dropped_total", "what" => "exchange", "reason" => "overload")
            .increment(1);
        self.recorder.abandon(request_id);
    }
}

/// What the control port reports on.
struct Parts {
    proxy: Arc<Proxy>,
    draining: Arc<AtomicBool>,
    observer: Arc<Tee>,
    recorder: RecorderHandle,
    data: DataDir,
    /// None: states are not collected here.
    forgetter: Option<Forgetter>,
    store_options: StoreOptions,
}

impl Controlled for Parts {
    fn readiness(&self) -> Pin<Box<dyn Future<Output = Vec<PartReport>> + Send>> {
        let proxy = self.proxy.clone();
        let draining = self.draining.load(Relaxed);
        let recorder = self.recorder.stats();
        let (wal, sealing) = self.recorder.health();
        let object_store = self.recorder.object_store_health();
        Box::pin(async move {
            let (healthy, health) = match tokio::time::timeout(PROBE_TIMEOUT, proxy.probe()).await {
                Ok(Ok(status)) => (status.is_success(), format!("health answers {status}")),
                Ok(Err(error)) => (false, error),
                Err(_) => (false, format!("health gave no answer within {PROBE_TIMEOUT:?}")),
            };
            let serving = if draining { "drains: open requests end, new ones are refused" } else { "serves" };
            let mut parts = vec![
                PartReport { part: "proxy", ready: !draining, detail: serving.to_owned() },
                PartReport { part: "vllm", ready: healthy, detail: health },
                PartReport {
                    part: "recorder",
                    // Serving goes on without recording, so a failing disk is told, not turned into "not ready".
                    ready: true,
                    detail: format!(
                        "WAL {wal}; sealing {sealing}; {} rows, {} dropped {:?}, {} disk errors, {} bytes held",
                        recorder.rows,
                        recorder.dropped_rows,
                        recorder.dropped_rows_by_reason,
                        recorder.disk_errors,
                        recorder.held_bytes
                    ),
                },
            ];
            if let Some(state) = object_store {
                let detail = format!("{state}; {} files copied", recorder.copied_files);
                parts.push(PartReport { part: "object_store", ready: true, detail });
            }
            parts
        })
    }

    fn measure(&self) {
        self.recorder.health();
        self.recorder.object_store_health();
    }

    fn forget(
        &self,
        selection: bytes::Bytes,
    ) -> Pin<Box<dyn Future<Output = Result<serde_json::Value, String>> + Send>> {
        let (observer, recorder, data) = (self.observer.clone(), self.recorder.clone(), self.data.clone());
        let (forgetter, options) = (self.forgetter.clone(), self.store_options.clone());
        Box::pin(async move {
            let work = move || -> anyhow::Result<serde_json::Value> {
                let selection: Selection = serde_json::from_slice(&selection).context("no selection")?;
                observer.settle();
                let states = |requests: HashSet<String>| match forgetter {
                    Some(forgetter) => forgetter.forget(requests),
                    None => StateStore::open(&data.states(), options)?
                        .forget(|request_id| requests.contains(request_id)),
                };
                let report = crate::forget::forget(&data, &recorder, states, &selection)?;
                Ok(serde_json::to_value(report)?)
            };
            let done = tokio::task::spawn_blocking(work).await.map_err(|error| error.to_string())?;
            done.map_err(|error| crate::told(&error))
        })
    }

    fn flush(&self) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> {
        let (observer, recorder) = (self.observer.clone(), self.recorder.clone());
        Box::pin(async move {
            let sealed = tokio::task::spawn_blocking(move || {
                // Else a row whose answer the client has read already could be missing.
                observer.settle();
                recorder.seal()
            })
            .await;
            match sealed {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => Err(error.to_string()),
                Err(error) => Err(error.to_string()),
            }
        })
    }
}
