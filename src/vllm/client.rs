//! The control client: health, models, metrics, the draft-head swap, and the plugin's own status.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use super::metrics::Metrics;

/// Time limits of one call. vLLM lets control calls hang for ever when its engine dies, so there is always one.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    pub connect: Duration,
    /// Health, version, models, metrics.
    pub read: Duration,
    /// Each call of a swap: it waits for the running engine step, then reads the whole head.
    pub control: Duration,
    /// A prompt's states: it waits in vLLM's queue, then for the whole prefill.
    pub prefill: Duration,
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            connect: Duration::from_secs(3),
            read: Duration::from_secs(10),
            control: Duration::from_secs(120),
            prefill: Duration::from_secs(600),
        }
    }
}

/// The route of the plugin's own calls.
const WORKER_CALL: &str = "/collective_rpc";
/// Between two looks at a head that is being staged: a worker tells nobody when it is done.
const STAGING_POLL: Duration = Duration::from_millis(100);

/// Why a call of vLLM gave no result.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("vLLM's URL {url:?} cannot be used: {reason}")]
    Url { url: String, reason: String },
    #[error("cannot reach vLLM at {url}: {source}; is it running?")]
    Unreachable { url: String, source: reqwest::Error },
    #[error("vLLM did not answer {url} within {} s; its engine may be gone", limit.as_secs())]
    Timeout { url: String, limit: Duration },
    #[error("{url} does not exist; start vLLM as `draftsmith vllm args` prints (VLLM_SERVER_DEV_MODE=1)")]
    NoRoute { url: String },
    /// vLLM answered with an error. `message` is its own.
    #[error("vLLM refused {url} with status {status}: {message}")]
    Refused { url: String, status: u16, message: String },
    #[error("{url} gave an answer that cannot be read: {reason}")]
    Unreadable { url: String, reason: String },
    /// The plugin's own words. The live head stays.
    #[error("the head was not staged: {reason}")]
    Staging { reason: String },
    /// The swap calls went through, but the server then named another head.
    #[error("after the swap vLLM names head {found:?}, not {wanted}; send the last good head again")]
    Unverified { wanted: String, found: Option<String> },
}

impl ClientError {
    /// True where the same call may succeed later: vLLM is away or slow, rather than unwilling.
    pub fn is_transient(&self) -> bool {
        match self {
            ClientError::Unreachable { .. } | ClientError::Timeout { .. } => true,
            ClientError::Refused { status, .. } => *status == 503,
            _ => false,
        }
    }
}

/// One model of /v1/models.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Model {
    /// The name that requests use.
    pub id: String,
    /// Where vLLM loaded it from.
    #[serde(default)]
    pub root: Option<String>,
    /// Tokens.
    #[serde(default)]
    pub max_model_len: Option<usize>,
}

/// What the plugin says of itself.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct PluginStatus {
    /// sha256 (hex) of the file of the head last loaded whole. None: not known.
    pub digest: Option<String>,
    /// That file, as vLLM sees it. None: not known, or not one local file.
    #[serde(default)]
    pub file: Option<PathBuf>,
    /// config.json of the head that the server started with, which no swap changes. None: a plugin of an older draftsmith.
    #[serde(default)]
    pub config: Option<serde_json::Map<String, Value>>,
    /// Seconds since the epoch. None: the head that the server started with.
    pub loaded_at: Option<f64>,
    /// Swaps done since the start.
    pub swaps: u64,
    /// Files refused since the start.
    pub refusals: u64,
    pub tap: TapCounters,
    /// None: the server's weight-transfer backend is not ours.
    pub staging: Option<StagingStatus>,
}

/// The tap's counters since the server started.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TapCounters {
    /// False: the server runs without the connector.
    pub enabled: bool,
    /// Steps that ran the model.
    pub steps: u64,
    /// Of these, steps whose states were taken.
    pub captured_steps: u64,
    /// Steps whose states vLLM never handed over. What ran in one is not exported.
    pub missed_steps: u64,
    /// Steps whose states came while those before them still waited for the host. What ran in one is not exported.
    pub overrun_steps: u64,
    /// Requests whose states were written.
    pub exported: u64,
    /// Requests that the sampling rate left out.
    pub not_sampled: u64,
    /// Requests not written since the host's memory budget was used up while they ran.
    pub over_budget: u64,
    /// Requests not written since a row was missing.
    pub incomplete: u64,
    /// Requests not written for lack of room for the file.
    pub dropped: u64,
    /// Requests that failed to be written.
    pub failed: u64,
    pub bytes_written: u64,
    /// Host memory for rows.
    pub host_bytes: u64,
    /// GPU memory for rows on their way to the host.
    pub device_bytes: u64,
}

/// A head on its way to vLLM's device.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct StagingStatus {
    pub state: StagingState,
    /// sha256 (hex) of the file, as the caller named it.
    pub digest: Option<String>,
    /// Why it failed.
    pub error: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StagingState {
    None,
    Running,
    Ready,
    Failed,
}

/// How long the parts of a swap took.
#[derive(Clone, Copy, Debug)]
pub struct SwapReport {
    /// The one call in which the engine stands still.
    pub update: Duration,
    /// All calls, with the check after.
    pub total: Duration,
}

/// Talks to one vLLM server. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    /// Without a slash at its end.
    base: String,
    timeouts: Timeouts,
}

impl Client {
    /// `base` is the server's root, such as `http://127.0.0.1:8100`. Nothing is sent yet.
    pub fn new(base: &str, timeouts: Timeouts) -> Result<Client, ClientError> {
        let wrong = |reason: String| ClientError::Url { url: base.to_owned(), reason };
        let url = reqwest::Url::parse(base).map_err(|error| wrong(error.to_string()))?;
        if url.scheme() != "http" {
            return Err(wrong("control calls go over plain http, on loopback".to_owned()));
        }
        let http = crate::http::client_builder()
            .connect_timeout(timeouts.connect)
            // vLLM closes idle connections after 5 s; a call on one of them would fail
            .pool_idle_timeout(Duration::from_secs(2))
            .no_proxy()
            .build()
            .map_err(|error| wrong(error.to_string()))?;
        Ok(Client { http, base: base.trim_end_matches('/').to_owned(), timeouts })
    }

    /// Ok where the server is ready for requests.
    pub async fn health(&self) -> Result<(), ClientError> {
        self.get("/health").await.map(|_| ())
    }

    /// vLLM's version, such as `0.32.0`.
    pub async fn version(&self) -> Result<String, ClientError> {
        #[derive(Deserialize)]
        struct Version {
            version: String,
        }
        let body = self.get("/version").await?;
        Ok(self.read::<Version>("/version", &body)?.version)
    }

    /// The models that the server offers; the base model comes first.
    pub async fn models(&self) -> Result<Vec<Model>, ClientError> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Model>,
        }
        let body = self.get("/v1/models").await?;
        Ok(self.read::<Models>("/v1/models", &body)?.data)
    }

    /// A scrape of /metrics.
    pub async fn metrics(&self) -> Result<Metrics, ClientError> {
        let body = self.get("/metrics").await?;
        Ok(Metrics::parse(&body))
    }

    /// What the plugin says of the live head and the tap. `Refused` where the server runs without the plugin.
    pub async fn status(&self) -> Result<PluginStatus, ClientError> {
        let results = self.worker_statuses().await?;
        let unreadable =
            |reason: &str| ClientError::Unreadable { url: self.url(WORKER_CALL), reason: reason.to_owned() };
        let digests_differ =
            results.windows(2).any(|pair| pair[0].swaps > 0 && pair[0].digest != pair[1].digest);
        if digests_differ {
            return Err(unreadable("the workers hold different heads; send the last good head again"));
        }
        // rank 0, which has the tap, comes first
        results.into_iter().next().ok_or_else(|| unreadable("no worker answered"))
    }

    /// One for each worker.
    async fn worker_statuses(&self) -> Result<Vec<PluginStatus>, ClientError> {
        #[derive(Deserialize)]
        struct Results {
            results: Vec<PluginStatus>,
        }
        let body = self.post(WORKER_CALL, &json!({"method": "draftsmith_status", "timeout": 30})).await?;
        Ok(self.read::<Results>(WORKER_CALL, &body)?.results)
    }

    /// Has every worker read the file, check it and copy it to its device, while requests run, and waits for that.
    async fn stage(&self, path: &Path, digest: &str) -> Result<(), ClientError> {
        let call =
            json!({"method": "draftsmith_stage", "args": [path.to_string_lossy(), digest], "timeout": 30});
        self.post(WORKER_CALL, &call).await?;
        let begun = Instant::now();
        loop {
            let mut running = false;
            for staging in self.worker_statuses().await?.into_iter().filter_map(|status| status.staging) {
                if staging.digest.as_deref() != Some(digest) {
                    return Err(ClientError::Staging {
                        reason: "another head was staged meanwhile".to_owned(),
                    });
                }
                if staging.state == StagingState::Failed {
                    return Err(ClientError::Staging { reason: staging.error.unwrap_or_default() });
                }
                running |= staging.state == StagingState::Running;
            }
            if !running {
                return Ok(());
            }
            if begun.elapsed() > self.timeouts.control {
                return Err(ClientError::Timeout {
                    url: self.url(WORKER_CALL),
                    limit: self.timeouts.control,
                });
            }
            tokio::time::sleep(STAGING_POLL).await;
        }
    }

    /// Makes the head of the safetensors file `path` live, while requests run, and reads back that it is.
    ///
    /// `path` must be absolute and be readable by vLLM. `digest` is the file's sha256 in hex; the plugin refuses a file
    /// of another. A refused head (`Staging`, `Refused`) leaves the live one as it was. After `Timeout` or `Unverified` ask
    /// [`Client::status`]. `label` becomes vLLM's weight_version.
    pub async fn swap(&self, path: &Path, digest: &str, label: &str) -> Result<SwapReport, ClientError> {
        let begun = Instant::now();
        self.stage(path, digest).await?;
        let start = "/start_draft_weight_update";
        let started = self.post(start, &json!({})).await;
        let left_open = matches!(&started, Err(ClientError::Refused { message, .. }) if message.contains("already active"));
        if left_open {
            // whoever opened that session is gone; our engine does nothing on finish
            self.post("/finish_weight_update", &json!({})).await?;
            self.post(start, &json!({})).await?;
        } else {
            started?;
        }
        let update_begun = Instant::now();
        let info = json!({"update_info": {"path": path.to_string_lossy(), "digest": digest}});
        // an error here closes the session on vLLM's side
        self.post("/update_weights", &info).await?;
        let update = update_begun.elapsed();
        self.post("/finish_weight_update", &json!({"weight_version": label})).await?;
        let found = self.status().await?.digest;
        if found.as_deref() != Some(digest) {
            return Err(ClientError::Unverified { wanted: digest.to_owned(), found });
        }
        Ok(SwapReport { update, total: begun.elapsed() })
    }

    /// Computes the states of a prompt, given as ids. The path of the file that vLLM's own connector writes, as vLLM sees
    /// it; None where the server runs without one.
    ///
    /// `request_id` becomes part of the file's name.
    pub async fn extract_states(
        &self,
        model: &str,
        prompt: &[u32],
        request_id: &str,
    ) -> Result<Option<PathBuf>, ClientError> {
        #[derive(Deserialize)]
        struct Completion {
            kv_transfer_params: Option<Transfer>,
        }
        #[derive(Deserialize)]
        struct Transfer {
            hidden_states_path: Option<PathBuf>,
        }
        let route = "/v1/completions";
        // One token is the least that vLLM generates; its row is not written.
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0});
        let request = self.http.post(self.url(route)).header("x-request-id", request_id).json(&body);
        let answer = self.send(route, request, self.timeouts.prefill).await?;
        let completion: Completion = self.read(route, &answer)?;
        Ok(completion.kv_transfer_params.and_then(|transfer| transfer.hidden_states_path))
    }

    /// Drops the prefix cache: the draft head's part of it was computed with the head before, which lowers
    /// its acceptance on old prefixes but harms nothing.
    pub async fn reset_prefix_cache(&self) -> Result<(), ClientError> {
        self.post("/reset_prefix_cache", &Value::Null).await.map(|_| ())
    }

    fn url(&self, route: &str) -> String {
        format!("{}{route}", self.base)
    }

    async fn get(&self, route: &str) -> Result<String, ClientError> {
        self.send(route, self.http.get(self.url(route)), self.timeouts.read).await
    }

    /// A null `body` sends none.
    async fn post(&self, route: &str, body: &Value) -> Result<String, ClientError> {
        let mut request = self.http.post(self.url(route));
        if !body.is_null() {
            request = request.json(body);
        }
        self.send(route, request, self.timeouts.control).await
    }

    async fn send(
        &self,
        route: &str,
        request: reqwest::RequestBuilder,
        limit: Duration,
    ) -> Result<String, ClientError> {
        let failed = |error: reqwest::Error| {
            let url = self.url(route);
            if error.is_timeout() {
                return ClientError::Timeout { url, limit };
            }
            ClientError::Unreachable { url, source: error.without_url() }
        };
        let response = request.timeout(limit).send().await.map_err(failed)?;
        let status = response.status();
        let body = response.text().await.map_err(failed)?;
        if status.is_success() {
            return Ok(body);
        }
        let url = self.url(route);
        if status == reqwest::StatusCode::NOT_FOUND {
            return Err(ClientError::NoRoute { url });
        }
        Err(ClientError::Refused { url, status: status.as_u16(), message: error_message(&body) })
    }

    fn read<T: serde::de::DeserializeOwned>(&self, route: &str, body: &str) -> Result<T, ClientError> {
        serde_json::from_str(body)
            .map_err(|error| ClientError::Unreadable { url: self.url(route), reason: error.to_string() })
    }
}

/// vLLM's own words: the message that the worker raised, without the frame that the engine puts around it.
fn error_message(body: &str) -> String {
    let parsed: Value = serde_json::from_str(body).unwrap_or(Value::Null);
    let message = match &parsed["error"]["message"] {
        Value::String(message) => message,
        _ => return body.chars().take(500).collect(),
    };
    let inner = message
        .split_once("Worker failed with error '")
        .and_then(|(_, rest)| rest.rsplit_once("', please check the stack trace"));
    inner.map_or(message.as_str(), |(words, _)| words).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    /// Answers each connection with the next body and status, and gives the requests back.
    async fn server(answers: Vec<(u16, &'static str)>) -> (Client, tokio::task::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move {
            let mut requests = Vec::new();
            for (status, body) in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = String::new();
                loop {
                    let mut buffer = [0; 4096];
                    let length = stream.read(&mut buffer).await.unwrap();
                    request.push_str(std::str::from_utf8(&buffer[..length]).unwrap());
                    let Some((head, sent)) = request.split_once("\r\n\r\n") else { continue };
                    let wanted = head
                        .lines()
                        .find_map(|line| {
                            line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok()
                        })
                        .unwrap_or(0);
                    if sent.len() >= wanted || length == 0 {
                        break;
                    }
                }
                requests.push(request);
                let length = body.len();
                let answer = format!(
                    "HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
                );
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
            requests
        });
        (Client::new(&base, Timeouts::default()).unwrap(), task)
    }

    const STATUS: &str = r#"{"results":[{"digest":"abc","loaded_at":1.5,"swaps":1,"refusals":0,"tap":{"enabled":true,"steps":2,
        "captured_steps":2,"missed_steps":0,"overrun_steps":0,"exported":1,"not_sampled":0,"over_budget":0,"incomplete":0,
        "dropped":0,"failed":0,"bytes_written":9,"host_bytes":8,"device_bytes":8},"staging":null}]}"#;
    /// [`STATUS`] with a head on its way.
    fn staging(state: &str, digest: &str) -> &'static str {
        let told = format!(r#"{{"state":"{state}","digest":"{digest}","error":"fc.weight: missing"}}"#);
        STATUS.replace("null}", &format!("{told}}}")).leak()
    }
    const OPEN: &str = r#"{"error":{"message":"Call to collective_rpc method failed: Worker failed with error 'start_weight_update called while a weight update is already active. Call finish_weight_update first.', please check the stack trace above for the root cause","code":500}}"#;

    #[tokio::test]
    async fn swap_stages_makes_the_three_calls_and_reads_the_digest_back() {
        let staged = [(200, "{}"), (200, staging("running", "abc")), (200, staging("ready", "abc"))];
        let swapped = [(200, "{}"), (200, "{}"), (200, "{}"), (200, STATUS)];
        let (client, task) = server([&staged[..], &swapped[..]].concat()).await;
        client.swap(Path::new("/heads/a.safetensors"), "abc", "head-a").await.unwrap();
        let requests = task.await.unwrap();
        let routes: Vec<&str> = requests.iter().filter_map(|request| request.split(' ').nth(1)).collect();
        let wanted =
            ["/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/collective_rpc"];
        assert_eq!(routes[..3], ["/collective_rpc"; 3]);
        assert_eq!(routes[3..], wanted);
        assert!(requests[0].contains(r#""method":"draftsmith_stage""#), "{}", requests[0]);
        assert!(requests[4].ends_with(r#"{"update_info":{"path":"/heads/a.safetensors","digest":"abc"}}"#));
        assert!(requests[5].ends_with(r#"{"weight_version":"head-a"}"#));
    }

    #[tokio::test]
    async fn swap_tells_when_another_head_is_live() {
        let staged = [(200, "{}"), (200, STATUS)];
        let swapped = [(200, "{}"), (200, "{}"), (200, "{}"), (200, STATUS)];
        let (client, _task) = server([&staged[..], &swapped[..]].concat()).await;
        let error = client.swap(Path::new("/a"), "def", "x").await.unwrap_err();
        assert!(matches!(error, ClientError::Unverified { found: Some(found), .. } if found == "abc"));
    }

    #[tokio::test]
    async fn swap_closes_a_session_that_was_left_open() {
        let staged = [(200, "{}"), (200, STATUS)];
        let swapped = [(500, OPEN), (200, "{}"), (200, "{}"), (200, "{}"), (200, "{}"), (200, STATUS)];
        let (client, task) = server([&staged[..], &swapped[..]].concat()).await;
        client.swap(Path::new("/a"), "abc", "x").await.unwrap();
        assert_eq!(task.await.unwrap().len(), 8);
    }

    #[tokio::test]
    async fn a_refused_head_gives_the_plugins_words() {
        let body = r#"{"error":{"message":"Call to collective_rpc method failed: Worker failed with error 'fc.weight: missing', please check the stack trace above for the root cause","code":500}}"#;
        let (client, _task) = server(vec![(200, "{}"), (200, STATUS), (200, "{}"), (500, body)]).await;
        match client.swap(Path::new("/a"), "abc", "x").await.unwrap_err() {
            ClientError::Refused { status: 500, message, .. } => assert_eq!(message, "fc.weight: missing"),
            other => panic!("{other}"),
        }
    }

    #[tokio::test]
    async fn a_head_that_is_not_staged_is_not_swapped_in() {
        let cases = [("failed", "abc", "fc.weight: missing"), ("ready", "other", "meanwhile")];
        for (state, digest, words) in cases {
            let (client, _task) = server(vec![(200, "{}"), (200, staging(state, digest))]).await;
            match client.swap(Path::new("/a"), "abc", "x").await.unwrap_err() {
                ClientError::Staging { reason } => assert!(reason.contains(words), "{reason}"),
                other => panic!("{other}"),
            }
        }
    }

    #[tokio::test]
    async fn missing_route_missing_server_and_silence_are_told_apart() {
        let (client, _task) = server(vec![(404, r#"{"detail":"Not Found"}"#)]).await;
        assert!(matches!(client.status().await.unwrap_err(), ClientError::NoRoute { .. }));

        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let timeouts = Timeouts { read: Duration::from_millis(50), ..Timeouts::default() };
        let client = Client::new(&base, timeouts).unwrap();
        let silent = client.health().await.unwrap_err();
        assert!(matches!(silent, ClientError::Timeout { .. }) && silent.is_transient());
        drop(listener);
        assert!(matches!(client.health().await.unwrap_err(), ClientError::Unreachable { .. }));
        assert!(Client::new("ftp://x", timeouts).is_err());
    }
}
