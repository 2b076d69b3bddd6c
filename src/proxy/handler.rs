//! What happens to one request.

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::PathAndQuery;
use hyper::upgrade::OnUpgrade;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use jiff::Timestamp;

use super::access::Access;
use super::body::{ClientBody, Flight, Passing, Recording};
use super::errors::error_response;
use super::headers::{self, REQUEST_ID};
use super::ids::RequestIds;
use super::meters::Meters;
use super::observer::{Begun, Endpoint, Observer};
use super::request_body::{BodyFailure, Patient, read_whole};
use super::routes::{Route, route};
use super::silence::Silence;
use super::tls::{ServerTls, TlsError, TlsFiles};
use super::tunnel::{Tunnels, is_websocket, upgrade_headers};
use super::upstream::{Head, Lease, SendError, Upstream};
use super::workers::worker_count;
use crate::config::{Authorization, Routes, UpstreamAddress};
use crate::keys::KeysError;
use crate::openai::exchange::is_event_stream;
use crate::openai::ids::{StreamRestorer, ask_for_ids, restore_json};
use crate::openai::{Dialect, Status};

/// Reading and editing this much JSON takes less than a millisecond.
const MOST_BYTES_AT_ONCE: usize = 256 << 10;

/// How the proxy is set up.
#[derive(Clone, Debug, PartialEq)]
pub struct ProxyOptions {
    pub upstream: UpstreamAddress,
    /// Certificates of authorities for an upstream behind TLS, in place of the system's.
    pub upstream_ca: Option<PathBuf>,
    /// A file with the key that vLLM was started with; it takes the place of the clients' own.
    pub upstream_key: Option<PathBuf>,
    /// TLS on the client port.
    pub tls: Option<TlsFiles>,
    /// The key file of the clients. None: no client needs a key.
    pub client_keys: Option<PathBuf>,
    /// What becomes of the clients' `Authorization`.
    pub authorization: Authorization,
    /// Which of vLLM's routes pass.
    pub routes: Routes,
    /// More paths that pass, as vLLM spells them; `{}` stands for one segment.
    pub allow_routes: Vec<String>,
    /// Ask vLLM for token ids on the client's behalf and take them out of the answer: the mode without the plugin.
    pub inject_token_ids: bool,
    /// The largest body of a recorded request, in bytes.
    pub max_request_bytes: usize,
    /// How much of an answer is captured, in bytes. The client always gets all of it.
    pub max_capture_bytes: usize,
    pub connect_timeout: Duration,
    /// How long a client may be silent within its request's body.
    pub client_body_timeout: Option<Duration>,
    /// How long vLLM may take to begin an answer.
    pub first_byte_timeout: Option<Duration>,
    /// How long vLLM may be silent within an answer.
    pub between_chunks_timeout: Option<Duration>,
    /// How often a silent stream of events gets a comment, against idle timeouts on the way to the client.
    pub sse_keep_alive: Option<Duration>,
    /// How long open requests may still run after the shutdown signal.
    pub drain_timeout: Duration,
    /// Threads that serve connections. None: one for each processor, eight at most.
    pub threads: Option<NonZero<usize>>,
}

impl ProxyOptions {
    /// The defaults: 32 MiB requests, 64 MiB captured, 5 s to connect, 90 s for a silent client, vLLM may be silent for
    /// ever, 30 s to drain, inference routes alone, no TLS and no keys, as many threads as there are processors.
    pub fn new(upstream: UpstreamAddress) -> Self {
        Self {
            upstream,
            upstream_ca: None,
            upstream_key: None,
            tls: None,
            client_keys: None,
            authorization: Authorization::Auto,
            routes: Routes::Inference,
            allow_routes: Vec::new(),
            inject_token_ids: false,
            max_request_bytes: 32 << 20,
            max_capture_bytes: 64 << 20,
            connect_timeout: Duration::from_secs(5),
            client_body_timeout: Some(Duration::from_secs(90)),
            first_byte_timeout: None,
            between_chunks_timeout: None,
            sse_keep_alive: None,
            drain_timeout: Duration::from_secs(30),
            threads: None,
        }
    }
}

/// Why the proxy cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("proxy.client_keys_file: {0}")]
    Keys(#[from] KeysError),
    #[error("proxy.upstream_key_file = {path}: {reason}")]
    UpstreamKey { path: PathBuf, reason: String },
}

/// The proxy. Cheap to share behind an `Arc`; it binds nothing until [`Proxy::serve`].
pub struct Proxy {
    pub(super) options: ProxyOptions,
    pub(super) tls: Option<ServerTls>,
    pub(super) tunnels: Tunnels,
    pub(super) upstream: Upstream,
    observer: Arc<dyn Observer>,
    access: Access,
    host: HeaderValue,
    ids: RequestIds,
    meters: Arc<Meters>,
}

/// A proxy whose files are read, and that lacks its observer.
pub struct PreparedProxy {
    options: ProxyOptions,
    tls: Option<ServerTls>,
    upstream: Upstream,
    access: Access,
    host: HeaderValue,
}

impl PreparedProxy {
    /// Reads the files that the options name; an error names the setting of the one that cannot be used.
    pub fn new(options: ProxyOptions) -> Result<Self, ProxyError> {
        let upstream = Upstream::new(
            options.upstream.clone(),
            options.upstream_ca.as_deref(),
            options.connect_timeout,
            options.first_byte_timeout,
            worker_count(options.threads),
        )?;
        let host_header = options.upstream.host_header();
        let host = HeaderValue::try_from(&host_header).map_err(|_| TlsError::Name(host_header))?;
        Ok(Self {
            tls: options.tls.clone().map(ServerTls::open).transpose()?,
            upstream,
            access: Access::open(&options)?,
            host,
            options,
        })
    }

    /// The whole proxy.
    pub fn observed_by(self, observer: Arc<dyn Observer>) -> Proxy {
        Proxy {
            options: self.options,
            tls: self.tls,
            tunnels: Tunnels::default(),
            upstream: self.upstream,
            observer,
            access: self.access,
            host: self.host,
            ids: RequestIds::default(),
            meters: Arc::default(),
        }
    }
}

impl Proxy {
    /// The files that [`Proxy::reload`] reads.
    pub fn watched_files(&self) -> Vec<PathBuf> {
        let mut files = self.access.watched_files();
        if let Some(tls) = &self.tls {
            files.extend([tls.files().certificate.clone(), tls.files().key.clone()]);
        }
        files
    }

    /// Reads keys and certificates again; open connections go on. What cannot be used leaves what was there in force.
    pub fn reload(&self) {
        self.access.reload();
        let Some(tls) = &self.tls else { return };
        match tls.reload() {
            Ok(true) => tracing::info!("new connections get the new certificate"),
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "the certificate of before stays in force"),
        }
    }

    /// Asks vLLM how it is: the status of `GET /health`, or why there is none.
    pub async fn probe(&self) -> Result<StatusCode, String> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, self.host.clone());
        let head = Head { method: Method::GET, target: PathAndQuery::from_static("/health"), headers };
        match self.upstream.send(head, whole(Bytes::new())).await {
            Ok((response, _)) => Ok(response.status()),
            Err(error) => Err(error.to_string()),
        }
    }

    pub(super) async fn handle(&self, mut request: Request<Incoming>) -> Response<ClientBody> {
        let asks_for_websocket = request.method() == Method::GET && is_websocket(request.headers());
        let upgrade = asks_for_websocket.then(|| hyper::upgrade::on(&mut request));
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        let found = route(&parts.method, path, self.options.routes, &self.options.allow_routes);
        if !self.access.admits(&parts.method, path, &parts.headers) {
            return unauthorized(Flight::new(Route::Refused, self.meters.clone()));
        }
        let flight = Flight::new(found, self.meters.clone());
        if found == Route::Refused {
            let message = format!(
                "{path} is not served on the client port, which passes vLLM's inference routes; \
                 call vLLM itself, or name the path in proxy.allow_routes"
            );
            return own_answer(flight, StatusCode::FORBIDDEN, &message, Status::ClientError);
        }
        let Some(target) = Some(&parts).filter(|_| parts.method != Method::CONNECT).and_then(target_of)
        else {
            let message =
                format!("the request target {} has no path; ask for a path on this server", parts.uri);
            return own_answer(flight, StatusCode::BAD_REQUEST, &message, Status::ClientError);
        };
        let mut head = Head {
            method: parts.method.clone(),
            target,
            headers: headers::for_upstream(&parts.headers, &self.host, parts.version),
        };
        self.access.set_upstream_credentials(&mut head.headers);
        let client_body = Patient::new(body, self.options.client_body_timeout);
        if let Route::Recorded(endpoint) = found {
            return self.handle_recorded(endpoint, parts, client_body, head, flight).await;
        }
        if parts.method == Method::POST {
            // Other routes that generate would else be free to take the id of a recorded request.
            set_request_id(&mut head.headers, &self.ids.choose(&parts.headers));
        }
        match upgrade {
            Some(client) => self.upgrade(client, head, flight).await,
            None => self.pass(head, client_body, flight).await,
        }
    }

    /// Both bodies stream through, and nothing is kept.
    async fn pass(&self, head: Head, body: Patient, flight: Flight) -> Response<ClientBody> {
        let upstream_body = if body.is_end_stream() { whole(Bytes::new()) } else { Either::Right(body) };
        match self.upstream.send(head, upstream_body).await {
            Ok(answered) => self.pass_on(answered, None, flight),
            Err(error) => self.unreachable(flight, &error),
        }
    }

    /// Asks vLLM for a WebSocket on the client's behalf.
    async fn upgrade(&self, client: OnUpgrade, mut head: Head, flight: Flight) -> Response<ClientBody> {
        head.headers.extend(upgrade_headers());
        let (mut response, lease) = match self.upstream.send(head, whole(Bytes::new())).await {
            Ok(answered) => answered,
            Err(error) => return self.unreachable(flight, &error),
        };
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return self.pass_on((response, lease), None, flight);
        }
        let vllm = hyper::upgrade::on(&mut response);
        let mut kept = headers::end_to_end(response.headers());
        kept.extend(upgrade_headers());
        let mut upgraded = flight;
        upgraded.answered(StatusCode::SWITCHING_PROTOCOLS.as_u16(), response.headers());
        self.tunnels.open(client, vllm, lease, upgraded);
        answer(StatusCode::SWITCHING_PROTOCOLS, kept, whole(Bytes::new()))
    }

    async fn handle_recorded(
        &self,
        endpoint: Endpoint,
        parts: Parts,
        body: Patient,
        mut head: Head,
        mut flight: Flight,
    ) -> Response<ClientBody> {
        let request_id = self.ids.choose(&parts.headers);
        set_request_id(&mut head.headers, &request_id);
        let begun = Begun { request_id: &request_id, endpoint, received_at: Timestamp::now() };
        if !self.observer.wants(begun, &parts.headers) {
            return self.pass(head, body, flight).await;
        }
        // The record needs the answer as text.
        head.headers.remove(header::ACCEPT_ENCODING);
        // Set anew from the body that is sent.
        head.headers.remove(header::CONTENT_LENGTH);
        // Whatever came after the body is not kept, as the body is sent anew.
        head.headers.remove(header::TRAILER);
        let waits_for_leave = parts.headers.contains_key(header::EXPECT);
        let observer = self.observer.clone();
        flight.record(Recording::new(
            observer,
            request_id,
            endpoint,
            parts.headers,
            self.options.max_capture_bytes,
        ));
        let client_body = match read_whole(body, self.options.max_request_bytes, waits_for_leave).await {
            Ok(bytes) => bytes,
            Err(failure) => return body_failed(flight, &failure),
        };
        flight.request_body(&client_body);
        let encoded = head.headers.contains_key(header::CONTENT_ENCODING);
        let injected = if self.options.inject_token_ids && endpoint.dialect() == Dialect::Choices && !encoded
        {
            let body = client_body.clone();
            aside(body.len(), move || ask_for_ids(&body)).await
        } else {
            None
        };
        let Some(edited) = injected else {
            return match self.upstream.send(head, whole(client_body)).await {
                Ok(answered) => self.pass_on(answered, None, flight),
                Err(error) => self.unreachable(flight, &error),
            };
        };
        let (response, lease) = match self.upstream.send(head.clone(), whole(Bytes::from(edited))).await {
            Ok(answered) => answered,
            Err(error) => return self.unreachable(flight, &error),
        };
        if matches!(response.status(), StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY) {
            // vLLM's words on a bad request speak of its fields ("dict of 2 items", byte positions): let it judge the
            // client's own body.
            drop((response, lease));
            return match self.upstream.send(head, whole(client_body)).await {
                Ok(second) => self.pass_on(second, None, flight),
                Err(error) => self.unreachable(flight, &error),
            };
        }
        let encoded_answer = response.headers().contains_key(header::CONTENT_ENCODING);
        if response.status() != StatusCode::OK || encoded_answer {
            return self.pass_on((response, lease), None, flight);
        }
        if is_event_stream(content_type(response.headers())) {
            let restorer = StreamRestorer::new(self.options.max_capture_bytes);
            return self.pass_on((response, lease), Some(restorer), flight);
        }
        restore_whole(response, lease, flight).await
    }

    /// Passes vLLM's answer on, chunk by chunk.
    fn pass_on(
        &self,
        (response, lease): (Response<Incoming>, Lease),
        restorer: Option<StreamRestorer>,
        mut flight: Flight,
    ) -> Response<ClientBody> {
        let (parts, body) = response.into_parts();
        flight.answered(parts.status.as_u16(), &parts.headers);
        let mut kept = headers::end_to_end(&parts.headers);
        let takes_comments = is_event_stream(content_type(&parts.headers))
            && !parts.headers.contains_key(header::CONTENT_ENCODING);
        let comment_every = self.options.sse_keep_alive.filter(|_| takes_comments);
        if restorer.is_some() || comment_every.is_some() {
            kept.remove(header::CONTENT_LENGTH);
        }
        let silence = Silence::new(self.options.between_chunks_timeout, comment_every);
        // An answer to HEAD ends with its head though its length speaks of more.
        answer(parts.status, kept, Either::Right(Passing::new(body, lease, restorer, silence, flight)))
    }

    fn unreachable(&self, flight: Flight, error: &SendError) -> Response<ClientBody> {
        if let SendError::Body(failure) = error {
            return body_failed(flight, failure);
        }
        tracing::warn!(upstream = %self.upstream.address(), %error, "vLLM gave no answer");
        let (status, remedy) = match error {
            SendError::Connect(_) => {
                (StatusCode::BAD_GATEWAY, "see that it runs and that the upstream address is right")
            }
            SendError::Silent(_) => (StatusCode::GATEWAY_TIMEOUT, "raise proxy.first_byte_seconds"),
            SendError::Closed(_) | SendError::Body(_) => (StatusCode::BAD_GATEWAY, "see vLLM's log"),
        };
        // Not its address, which is a path of this machine for some: that is in the log.
        let message = format!("vLLM {error}; {remedy}");
        own_answer(flight, status, &message, Status::UpstreamError)
    }
}

/// vLLM's name for a request's target. None if it has no path (`*`, the authority form).
fn target_of(parts: &Parts) -> Option<PathAndQuery> {
    let found = parts.uri.path_and_query()?;
    if found.as_str().starts_with('?') {
        return format!("/{}", found.as_str()).parse().ok();
    }
    found.as_str().starts_with('/').then(|| found.clone())
}

fn unauthorized(flight: Flight) -> Response<ClientBody> {
    let message = "no valid API key was given; send one as `Authorization: Bearer KEY`";
    let mut refusal = own_answer(flight, StatusCode::UNAUTHORIZED, message, Status::ClientError);
    refusal.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    refusal
}

/// The answer to a request whose body did not come whole.
fn body_failed(flight: Flight, failure: &BodyFailure) -> Response<ClientBody> {
    tracing::debug!(%failure, "a request's body was not taken");
    let (status, remedy, transfer) = match failure {
        BodyFailure::TooLarge { .. } => (
            StatusCode::PAYLOAD_TOO_LARGE,
            "send a smaller one, or raise proxy.max_request_bytes",
            Status::ClientError,
        ),
        BodyFailure::Silent(_) => (
            StatusCode::REQUEST_TIMEOUT,
            "send it without pauses, or raise proxy.client_body_seconds",
            Status::ClientError,
        ),
        // Most often nobody is left to read this; then the account says cancelled.
        BodyFailure::ClientLeft(_) => (StatusCode::BAD_REQUEST, "send it whole", Status::Cancelled),
    };
    own_answer(flight, status, &format!("{failure}; {remedy}"), transfer)
}

/// Takes the ids out of an answer that comes whole; its length changes, so it must be whole first.
async fn restore_whole(
    response: Response<Incoming>,
    lease: Lease,
    mut flight: Flight,
) -> Response<ClientBody> {
    let (parts, mut body) = response.into_parts();
    flight.answered(parts.status.as_u16(), &parts.headers);
    let mut received = BytesMut::new();
    while let Some(next) = body.frame().await {
        match next {
            Ok(frame) => {
                if let Some(data) = frame.data_ref() {
                    flight.received(data);
                    received.extend_from_slice(data);
                }
            }
            Err(error) => {
                tracing::warn!(%error, "vLLM's answer broke off");
                let message = format!("vLLM's answer broke off ({error}); see vLLM's log");
                flight.ended(Status::Truncated);
                let (head, content) = error_response(StatusCode::BAD_GATEWAY, &message).into_parts();
                flight.sent(content.len());
                return answer(head.status, head.headers, whole(content));
            }
        }
    }
    lease.give_back();
    let restored = aside(received.len(), move || restore_json(&received)).await;
    let mut kept = headers::end_to_end(&parts.headers);
    kept.remove(header::CONTENT_LENGTH);
    flight.sent(restored.len());
    flight.whole();
    answer(parts.status, kept, whole(Bytes::from(restored)))
}

/// Works on so many bytes here, or on a thread of its own if they would hold up the other streams of this one.
async fn aside<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    if bytes <= MOST_BYTES_AT_ONCE {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The thread's loop is ending, and this task with it.
            Err(_) => std::future::pending().await,
        },
    }
}

/// An answer that the proxy itself gives.
fn own_answer(
    mut flight: Flight,
    status: StatusCode,
    message: &str,
    transfer: Status,
) -> Response<ClientBody> {
    let (parts, content) = error_response(status, message).into_parts();
    flight.answered(status.as_u16(), &parts.headers);
    flight.own_body(&content);
    flight.ended(transfer);
    answer(parts.status, parts.headers, whole(content))
}

fn answer(status: StatusCode, kept: HeaderMap, body: ClientBody) -> Response<ClientBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = kept;
    response
}

/// A body that is all there.
fn whole<R>(bytes: Bytes) -> Either<Full<Bytes>, R> {
    Either::Left(Full::new(bytes))
}

fn set_request_id(kept: &mut HeaderMap, request_id: &str) {
    if let Ok(value) = HeaderValue::from_str(request_id) {
        kept.insert(REQUEST_ID, value);
    }
}

fn content_type(kept: &HeaderMap) -> Option<&str> {
    kept.get(header::CONTENT_TYPE)?.to_str().ok()
}
