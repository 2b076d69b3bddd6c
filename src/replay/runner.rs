//! Sending a dataset: concurrency, retries, the journal of what is done, the report.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::StreamExt;
use indicatif::{ProgressBar, ProgressStyle};
use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Response, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::{BadRow, Dataset, DatasetOptions, ReplayError, ReplayItem};
use crate::store::is_held_out;

const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// A server that asks for a longer pause is asked again after this one.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(120);
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Row r is sent by the shard with `r % of == index`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    pub index: usize,
    pub of: usize,
}

impl FromStr for Shard {
    type Err = ReplayError;

    fn from_str(text: &str) -> Result<Self, ReplayError> {
        let wrong = || ReplayError::Shard(text.to_string());
        let (index, of) = text.split_once('/').ok_or_else(wrong)?;
        let shard = Self { index: index.parse().map_err(|_| wrong())?, of: of.parse().map_err(|_| wrong())? };
        if shard.index < shard.of { Ok(shard) } else { Err(wrong()) }
    }
}

/// Which side of the held-out split is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    #[default]
    All,
    Train,
    HeldOut,
}

impl FromStr for Split {
    type Err = ReplayError;

    fn from_str(text: &str) -> Result<Self, ReplayError> {
        match text {
            "all" => Ok(Self::All),
            "train" => Ok(Self::Train),
            "held-out" => Ok(Self::HeldOut),
            _ => Err(ReplayError::Split(text.to_string())),
        }
    }
}

/// What is sent where, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct RunOptions {
    /// Base address, with or without `/v1`.
    pub to: String,
    pub dataset: PathBuf,
    /// See [`DatasetOptions::turns`].
    pub turns: usize,
    /// Requests in flight.
    pub concurrency: usize,
    /// At most so many rows, counted after split and shard; rows that are done already count, so that a second run with
    /// the same limit completes the first.
    pub limit: Option<usize>,
    pub shard: Option<Shard>,
    pub split: Split,
    /// The fraction that the sidecar holds out; only used with a split.
    pub held_out_fraction: f64,
    /// These overrule what a row says.
    pub max_tokens: Option<u64>,
    pub temperature: Option<f64>,
    /// None: the first one that the server names. A row's own model is not used, it belongs to another server.
    pub model: Option<String>,
    pub stream: bool,
    pub api_key: Option<String>,
    /// Bad rows and failures, one JSON object a line, written anew by each run. The journal stands beside it.
    pub error_file: PathBuf,
    /// Forget the journal and send everything again.
    pub fresh: bool,
    /// How often a request is sent at most.
    pub attempts: u32,
    /// The first pause before a retry; it doubles up to 30 s.
    pub first_delay: Duration,
    /// For one whole answer.
    pub time_out: Duration,
}

impl RunOptions {
    pub fn new(dataset: impl Into<PathBuf>, to: impl Into<String>, error_file: impl Into<PathBuf>) -> Self {
        Self {
            to: to.into(),
            dataset: dataset.into(),
            turns: 1,
            concurrency: 8,
            limit: None,
            shard: None,
            split: Split::All,
            held_out_fraction: 0.1,
            max_tokens: None,
            temperature: None,
            model: None,
            stream: false,
            api_key: None,
            error_file: error_file.into(),
            fresh: false,
            attempts: 6,
            first_delay: Duration::from_millis(500),
            time_out: Duration::from_secs(600),
        }
    }
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Rows that were begun.
    pub sent: u64,
    /// Rows that were answered wholly.
    pub ok: u64,
    /// Rows that failed for good, in the error file.
    pub failed: u64,
    /// Rows that could not be read, in the error file.
    pub bad_rows: u64,
    /// Rows that an earlier run had done.
    pub skipped: u64,
    /// Requests that were sent again.
    pub retries: u64,
    /// It was told to stop before the end.
    pub interrupted: bool,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub seconds: f64,
    /// Completion tokens per second.
    pub tokens_per_second: f64,
}

impl Report {
    /// 0: all done; 3: partly done, see the error file (or stopped before the end); 1: nothing was done.
    pub fn exit_code(&self) -> u8 {
        if self.failed == 0 && self.bad_rows == 0 && !self.interrupted {
            0
        } else if self.ok + self.skipped > 0 || self.interrupted {
            3
        } else {
            1
        }
    }
}

/// Where a run keeps the ids that are done.
pub fn journal_path(error_file: &Path) -> PathBuf {
    let mut name = error_file.file_name().unwrap_or_default().to_os_string();
    name.push(".done");
    error_file.with_file_name(name)
}

/// Replays a dataset. When `stop` resolves, nothing new is sent, and what is in flight is finished first.
pub async fn run(options: RunOptions, stop: impl Future<Output = ()>) -> Result<Report, ReplayError> {
    check(&options)?;
    let started = Instant::now();
    let dataset = Dataset::open(&options.dataset, DatasetOptions { turns: options.turns })?;
    let mut journal = Journal::open(&journal_path(&options.error_file), options.fresh)?;
    let mut errors = ErrorFile::create(&options.error_file)?;
    let client = crate::http::client_builder()
        .timeout(options.time_out)
        .pool_max_idle_per_host(options.concurrency)
        // vLLM closes idle connections after 5 s.
        .pool_idle_timeout(Duration::from_secs(4))
        .build()
        .map_err(|error| ReplayError::Model { url: options.to.clone(), reason: error.to_string() })?;
    let base = options.to.trim_end_matches('/').trim_end_matches("/v1").to_string();
    let model = match &options.model {
        Some(model) => model.clone(),
        None => ask_model(&client, &base, options.api_key.as_deref()).await?,
    };
    let (stopping_sender, stopping) = watch::channel(false);
    let sender =
        Arc::new(Sender { client, url: format!("{base}/v1/chat/completions"), model, options, stopping });
    let options = &sender.options;

    // Reading and skipping rows is file work, so it has a thread of its own.
    let (row_sender, mut rows) = mpsc::channel(options.concurrency * 2);
    let done = std::mem::take(&mut journal.done);
    let selection = Selection::new(options);
    let reading = tokio::task::spawn_blocking(move || read_rows(dataset, selection, done, &row_sender));

    let mut report = Report::default();
    let bar = progress_bar(options.limit);
    let mut log_tick = tokio::time::interval(LOG_INTERVAL);
    log_tick.tick().await;
    let mut in_flight = JoinSet::new();
    let mut stop = pin!(stop);
    let mut at_end = false;
    while !(at_end && in_flight.is_empty()) {
        tokio::select! {
            biased;
            () = &mut stop, if !report.interrupted => {
                report.interrupted = true;
                at_end = true;
                rows.close();
                let _ = stopping_sender.send(true);
                tracing::info!(in_flight = in_flight.len(), "stopping: finishing what is in flight");
            }
            Some(finished) = in_flight.join_next(), if !in_flight.is_empty() => {
                // A panic in a row's task is a fault of ours; it must not look like a row that was sent.
                match finished {
                    Ok(finished) => settle(finished, &mut report, &mut journal, &mut errors)?,
                    Err(error) => {
                        tracing::error!("a request's task ended early: {error}");
                        report.failed += 1;
                    }
                }
                bar.inc(1);
                bar.set_message(format!("{} failed, {} tokens", report.failed, report.completion_tokens));
            }
            row = rows.recv(), if !at_end && in_flight.len() < options.concurrency => match row {
                None => at_end = true,
                Some(Row::Done) => {
                    report.skipped += 1;
                    bar.inc(1);
                }
                Some(Row::Bad(bad)) => {
                    report.bad_rows += 1;
                    errors.write(bad.line, bad.id.as_deref(), None, &bad.reason)?;
                }
                Some(Row::Send(item)) => {
                    report.sent += 1;
                    let sender = Arc::clone(&sender);
                    in_flight.spawn(async move { sender.conversation(item).await });
                }
            },
            _ = log_tick.tick() => {
                if bar.is_hidden() {
                    let seconds = started.elapsed().as_secs();
                    let (ok, failed, tokens) = (report.ok, report.failed, report.completion_tokens);
                    tracing::info!(ok, failed, tokens, seconds, "replaying");
                }
            }
        }
    }
    drop(rows);
    if let Err(error) = reading.await {
        tracing::error!("the dataset's reader ended early: {error}");
        report.failed += 1;
    }
    bar.finish_and_clear();
    report.seconds = started.elapsed().as_secs_f64();
    if report.seconds > 0.0 {
        report.tokens_per_second = report.completion_tokens as f64 / report.seconds;
    }
    Ok(report)
}

fn check(options: &RunOptions) -> Result<(), ReplayError> {
    let wrong = |option, value: String, remedy| Err(ReplayError::Option { option, value, remedy });
    if options.concurrency == 0 {
        return wrong("concurrency", "0".to_string(), "give 1 or more");
    }
    if options.attempts == 0 {
        return wrong("attempts", "0".to_string(), "give 1 or more");
    }
    if !(0.0..=1.0).contains(&options.held_out_fraction) {
        return wrong(
            "held-out fraction",
            options.held_out_fraction.to_string(),
            "give a number from 0 to 1",
        );
    }
    if !options.to.starts_with("http://") {
        return wrong("to", options.to.clone(), "give an address that begins with http://");
    }
    Ok(())
}

/// Counts rows on a terminal.
pub(crate) fn progress_bar(limit: Option<usize>) -> ProgressBar {
    // Hidden by itself where standard error is no terminal.
    let (bar, template) = match limit {
        Some(limit) => (ProgressBar::new(limit as u64), "{elapsed_precise} {wide_bar} {pos}/{len} {msg}"),
        None => (ProgressBar::new_spinner(), "{elapsed_precise} {spinner} {pos} rows, {msg}"),
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// Takes a finished row into the report and the files.
fn settle(
    finished: Finished,
    report: &mut Report,
    journal: &mut Journal,
    errors: &mut ErrorFile,
) -> Result<(), ReplayError> {
    report.prompt_tokens += finished.usage.prompt_tokens;
    report.completion_tokens += finished.usage.completion_tokens;
    report.retries += finished.retries;
    let outcome = match &finished.result {
        Ok(()) => {
            report.ok += 1;
            journal.add(&finished.id)?;
            "ok"
        }
        Err(Failure::Stopped) => "stopped",
        Err(Failure::Failed { status, reason }) => {
            report.failed += 1;
            errors.write(finished.line, Some(&finished.id), *status, reason)?;
            "failed"
        }
    };
    metrics::counter!("draftsmith_replay_rows_total", "outcome" => outcome).increment(1);
    Ok(())
}

enum Row {
    Send(ReplayItem),
    Bad(BadRow),
    Done,
}

struct Selection {
    shard: Option<Shard>,
    split: Split,
    held_out_fraction: f64,
    limit: usize,
}

impl Selection {
    fn new(options: &RunOptions) -> Self {
        Self {
            shard: options.shard,
            split: options.split,
            held_out_fraction: options.held_out_fraction,
            limit: options.limit.unwrap_or(usize::MAX),
        }
    }

    fn wants(&self, conversation_id: &str) -> bool {
        match self.split {
            Split::All => true,
            Split::Train => !is_held_out(conversation_id, self.held_out_fraction),
            Split::HeldOut => is_held_out(conversation_id, self.held_out_fraction),
        }
    }
}

fn read_rows(dataset: Dataset, selection: Selection, done: HashSet<String>, sender: &mpsc::Sender<Row>) {
    let mut taken = 0;
    for (row, result) in dataset.enumerate() {
        if taken >= selection.limit {
            return;
        }
        if selection.shard.is_some_and(|shard| row % shard.of != shard.index) {
            continue;
        }
        let message = match result {
            Err(bad) => Row::Bad(bad),
            Ok(item) if !selection.wants(&item.conversation_id) => continue,
            Ok(item) => {
                taken += 1;
                if done.contains(&item.id) { Row::Done } else { Row::Send(item) }
            }
        };
        // Closed: the run was stopped.
        if sender.blocking_send(message).is_err() {
            return;
        }
    }
}

async fn ask_model(
    client: &reqwest::Client,
    base: &str,
    api_key: Option<&str>,
) -> Result<String, ReplayError> {
    let url = format!("{base}/v1/models");
    let failed = |reason: String| ReplayError::Model { url: url.clone(), reason };
    let mut request = client.get(&url);
    if let Some(key) = api_key {
        request = request.bearer_auth(key);
    }
    let response = request.send().await.map_err(|error| failed(causes(&error)))?;
    let status = response.status();
    if !status.is_success() {
        return Err(failed(format!("it answered {status}")));
    }
    let body: Value = response.json().await.map_err(|error| failed(causes(&error)))?;
    match body["data"][0]["id"].as_str() {
        Some(model) => Ok(model.to_string()),
        None => Err(failed("its list of models is empty".to_string())),
    }
}

#[derive(Clone, Copy, Default)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

enum Failure {
    /// Told to stop while it waited for a retry; a later run sends it again.
    Stopped,
    Failed {
        status: Option<u16>,
        reason: String,
    },
}

struct Finished {
    id: String,
    line: usize,
    usage: Usage,
    retries: u64,
    result: Result<(), Failure>,
}

/// A whole answer.
struct Answer {
    /// None where the model gave no text (a tool call).
    text: Option<String>,
    usage: Usage,
}

enum AttemptError {
    Retry { status: Option<u16>, reason: String, after: Option<Duration> },
    Final { status: u16, reason: String },
}

struct Sender {
    client: reqwest::Client,
    url: String,
    model: String,
    options: RunOptions,
    stopping: watch::Receiver<bool>,
}

impl Sender {
    /// Sends all turns of a row.
    async fn conversation(&self, item: ReplayItem) -> Finished {
        let mut finished = Finished {
            id: item.id.clone(),
            line: item.line,
            usage: Usage::default(),
            retries: 0,
            result: Ok(()),
        };
        let mut messages = item.messages.clone();
        let mut follow_ups = item.follow_ups.iter();
        loop {
            let body = self.body(&item, &messages);
            let answer = match self.request(&item.conversation_id, &body, &mut finished.retries).await {
                Ok(answer) => answer,
                Err(failure) => {
                    finished.result = Err(failure);
                    return finished;
                }
            };
            finished.usage.prompt_tokens += answer.usage.prompt_tokens;
            finished.usage.completion_tokens += answer.usage.completion_tokens;
            let (Some(text), Some(follow_up)) = (answer.text, follow_ups.next()) else { return finished };
            messages.push(json!({"role": "assistant", "content": text}));
            messages.push(follow_up.clone());
        }
    }

    fn body(&self, item: &ReplayItem, messages: &[Value]) -> Value {
        let mut body = item.parameters.clone();
        body.insert("model".to_string(), json!(self.model));
        body.insert("messages".to_string(), json!(messages));
        if let Some(max_tokens) = self.options.max_tokens {
            // The two names mean the same; both at once would leave the choice to the server.
            body.remove("max_completion_tokens");
            body.insert("max_tokens".to_string(), json!(max_tokens));
        }
        if let Some(temperature) = self.options.temperature {
            body.insert("temperature".to_string(), json!(temperature));
        }
        body.insert("stream".to_string(), json!(self.options.stream));
        if self.options.stream {
            body.insert("stream_options".to_string(), json!({"include_usage": true}));
        } else {
            body.remove("stream_options");
        }
        Value::Object(body)
    }

    /// Sends one request until it is answered, refused, or tried often enough.
    async fn request(
        &self,
        conversation_id: &str,
        body: &Value,
        retries: &mut u64,
    ) -> Result<Answer, Failure> {
        let mut attempt = 1;
        loop {
            let (status, reason, after) = match self.attempt(conversation_id, body).await {
                Ok(answer) => return Ok(answer),
                Err(AttemptError::Final { status, reason }) => {
                    return Err(Failure::Failed { status: Some(status), reason });
                }
                Err(AttemptError::Retry { status, reason, after }) => (status, reason, after),
            };
            if attempt >= self.options.attempts {
                return Err(Failure::Failed { status, reason: format!("{reason} (tried {attempt} times)") });
            }
            let delay = retry_delay(self.options.first_delay, attempt, after);
            tracing::debug!(attempt, ?delay, reason, "trying again");
            let mut stopping = self.stopping.clone();
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                _ = stopping.wait_for(|stopping| *stopping) => return Err(Failure::Stopped),
            }
            attempt += 1;
            *retries += 1;
        }
    }

    async fn attempt(&self, conversation_id: &str, body: &Value) -> Result<Answer, AttemptError> {
        let mut request = self
            .client
            .post(&self.url)
            .header("x-draftsmith-conversation", conversation_id)
            .header("x-draftsmith-source", "replay")
            // New for each attempt: states are matched by it.
            .header("x-request-id", uuid::Uuid::now_v7().to_string())
            .json(body);
        if let Some(key) = &self.options.api_key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.map_err(|error| broken(None, &error))?;
        let status = response.status();
        if !status.is_success() {
            let after = retry_after(response.headers());
            let text = response.text().await.unwrap_or_default();
            let reason = error_message(&text).unwrap_or_else(|| format!("the server answered {status}"));
            let retry = matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS
                    | StatusCode::BAD_GATEWAY
                    | StatusCode::SERVICE_UNAVAILABLE
                    | StatusCode::GATEWAY_TIMEOUT
            );
            return Err(if retry {
                AttemptError::Retry { status: Some(status.as_u16()), reason, after }
            } else {
                AttemptError::Final { status: status.as_u16(), reason }
            });
        }
        if self.options.stream { read_stream(response).await } else { read_whole(response).await }
    }
}

fn broken(status: Option<u16>, error: &reqwest::Error) -> AttemptError {
    AttemptError::Retry { status, reason: causes(error), after: None }
}

/// The error and what it came from; reqwest's own text says only that something failed.
fn causes(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text.push_str(&format!(": {inner}"));
        cause = inner.source();
    }
    text
}

async fn read_whole(response: Response) -> Result<Answer, AttemptError> {
    let status = response.status().as_u16();
    let bytes = response.bytes().await.map_err(|error| broken(Some(status), &error))?;
    let body: Value = serde_json::from_slice(&bytes)
        .map_err(|error| AttemptError::Final { status, reason: format!("the answer is no JSON: {error}") })?;
    let choice = &body["choices"][0];
    if choice.is_null() {
        return Err(AttemptError::Final { status, reason: "the answer has no choices".to_string() });
    }
    if choice["finish_reason"] == "abort" {
        return Err(AttemptError::Retry {
            status: Some(status),
            reason: "the answer was aborted".to_string(),
            after: None,
        });
    }
    Ok(Answer { text: choice["message"]["content"].as_str().map(str::to_string), usage: read_usage(&body) })
}

async fn read_stream(response: Response) -> Result<Answer, AttemptError> {
    let status = response.status().as_u16();
    let retry = |reason: String| AttemptError::Retry { status: Some(status), reason, after: None };
    let mut stream = response.bytes_stream();
    let (mut line, mut text, mut usage) = (Vec::new(), None::<String>, Usage::default());
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| broken(Some(status), &error))?;
        for byte in chunk {
            if byte != b'\n' {
                line.push(byte);
                continue;
            }
            let complete = std::mem::take(&mut line);
            let Some(data) = complete.trim_ascii().strip_prefix(b"data:") else { continue };
            let data = data.trim_ascii();
            if data == b"[DONE]" {
                return Ok(Answer { text, usage });
            }
            let Ok(event) = serde_json::from_slice::<Value>(data) else {
                return Err(retry("a frame of the stream is no JSON".to_string()));
            };
            if !event["error"].is_null() {
                return Err(retry(error_message(&event.to_string()).unwrap_or_else(|| event.to_string())));
            }
            if event["usage"].is_object() {
                usage = read_usage(&event);
            }
            let choice = &event["choices"][0];
            if choice["finish_reason"] == "abort" {
                return Err(retry("the answer was aborted".to_string()));
            }
            // Other choices of n > 1 are recorded by the sidecar; the conversation goes on with the first.
            if choice["index"].as_u64().unwrap_or(0) == 0
                && let Some(delta) = choice["delta"]["content"].as_str()
            {
                text.get_or_insert_default().push_str(delta);
            }
        }
    }
    Err(retry("the stream ended before [DONE]".to_string()))
}

fn read_usage(body: &Value) -> Usage {
    Usage {
        prompt_tokens: body["usage"]["prompt_tokens"].as_u64().unwrap_or(0),
        completion_tokens: body["usage"]["completion_tokens"].as_u64().unwrap_or(0),
    }
}

fn error_message(body: &str) -> Option<String> {
    let value: Value = serde_json::from_str(body).ok()?;
    let error = &value["error"];
    let message = error["message"].as_str().or(error.as_str()).or(value["message"].as_str())?;
    Some(message.to_string())
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let date = jiff::fmt::rfc2822::parse(text).ok()?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs_f64();
    Duration::try_from_secs_f64(date.timestamp().as_second() as f64 - now).ok()
}

/// The pause before attempt `attempt + 1`: doubled each time, with jitter so that the requests of a burst do not come
/// back together; never shorter than the server asks for.
fn retry_delay(first: Duration, attempt: u32, after: Option<Duration>) -> Duration {
    let doubled = first.saturating_mul(1 << (attempt - 1).min(16)).min(LONGEST_DELAY);
    let random = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
    let jittered = doubled.mul_f64(0.5 + 0.5 * random);
    match after {
        Some(after) => after.min(LONGEST_RETRY_AFTER) + jittered.mul_f64(0.5),
        None => jittered,
    }
}

/// The ids that are done: one JSON string a line, appended as they come.
struct Journal {
    path: PathBuf,
    file: File,
    done: HashSet<String>,
}

impl Journal {
    fn open(path: &Path, fresh: bool) -> Result<Self, ReplayError> {
        let failed = |source| ReplayError::Io { action: "cannot open", path: path.to_path_buf(), source };
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        let mut file = options.open(path).map_err(failed)?;
        if fresh {
            file.set_len(0).map_err(failed)?;
        }
        let mut done = HashSet::new();
        let mut ends_whole = true;
        let mut reader = BufReader::new(&file);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).map_err(failed)? > 0 {
            ends_whole = line.ends_with(b"\n");
            // A line torn by a crash is no id; its row is sent again.
            if let (true, Ok(id)) = (ends_whole, serde_json::from_slice(&line)) {
                done.insert(id);
            }
            line.clear();
        }
        if !ends_whole {
            file.write_all(b"\n").map_err(failed)?;
        }
        Ok(Self { path: path.to_path_buf(), file, done })
    }

    fn add(&mut self, id: &str) -> Result<(), ReplayError> {
        let line = format!("{}\n", json!(id));
        self.file.write_all(line.as_bytes()).map_err(|source| ReplayError::Io {
            action: "cannot append to",
            path: self.path.clone(),
            source,
        })
    }
}

struct ErrorFile {
    path: PathBuf,
    file: File,
}

impl ErrorFile {
    fn create(path: &Path) -> Result<Self, ReplayError> {
        let file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path).map_err(
                |source| ReplayError::Io { action: "cannot make", path: path.to_path_buf(), source },
            )?;
        Ok(Self { path: path.to_path_buf(), file })
    }

    fn write(
        &mut self,
        line: usize,
        id: Option<&str>,
        status: Option<u16>,
        error: &str,
    ) -> Result<(), ReplayError> {
        let entry = json!({"line": line, "id": id, "status": status, "error": error});
        self.file.write_all(format!("{entry}\n").as_bytes()).map_err(|source| ReplayError::Io {
            action: "cannot append to",
            path: self.path.clone(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_and_splits_are_parsed() {
        assert_eq!("3/4".parse::<Shard>().unwrap(), Shard { index: 3, of: 4 });
        for wrong in ["4/4", "1", "a/b", "0/0", "-1/2"] {
            assert!(wrong.parse::<Shard>().is_err(), "{wrong}");
        }
        assert_eq!("held-out".parse::<Split>().unwrap(), Split::HeldOut);
        assert!("test".parse::<Split>().is_err());
    }

    #[test]
    fn delays_grow_and_honour_the_server() {
        let first = Duration::from_millis(100);
        for _ in 0..100 {
            let second = retry_delay(first, 2, None);
            assert!(second >= first && second <= 2 * first, "{second:?}");
            assert!(retry_delay(first, 60, None) <= LONGEST_DELAY);
            assert!(retry_delay(first, 1, Some(Duration::from_secs(3))) >= Duration::from_secs(3));
            assert!(retry_delay(first, 1, Some(Duration::from_secs(9999))) < Duration::from_secs(130));
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let read = |text: &str| retry_after(&HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]));
        assert_eq!(read("2"), Some(Duration::from_secs(2)));
        assert_eq!(read("soon"), None);
        assert_eq!(read("-1"), None);
        assert!(read("Fri, 31 Dec 2100 23:59:59 GMT").unwrap() > Duration::from_secs(3600));
    }

    #[test]
    fn a_torn_journal_is_repaired() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("errors.jsonl.done");
        std::fs::write(&path, "\"a\"\n\"b\nc\"\n\"d\"\n\"e").unwrap();
        let mut journal = Journal::open(&path, false).unwrap();
        assert_eq!(journal.done, HashSet::from(["a".to_string(), "d".to_string()]));
        journal.add("e\n\"").unwrap();
        let again = Journal::open(&path, false).unwrap();
        assert!(again.done.contains("e\n\"") && again.done.len() == 3);
        assert!(Journal::open(&path, true).unwrap().done.is_empty());
    }

    #[test]
    fn exit_codes() {
        let report = Report { ok: 2, ..Default::default() };
        assert_eq!(report.exit_code(), 0);
        assert_eq!(Report { failed: 1, ..report.clone() }.exit_code(), 3);
        assert_eq!(Report { interrupted: true, ..report }.exit_code(), 3);
        assert_eq!(Report { failed: 1, ..Default::default() }.exit_code(), 1);
    }
}
