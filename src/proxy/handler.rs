//! What happens to one request.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use jiff::Timestamp;

use super::body::{ClientBody, Flight, Passing, Recording};
use super::errors::error_response;
use super::headers::{self, REQUEST_ID};
use super::ids::RequestIds;
use super::observer::{Begun, Endpoint, Observer};
use super::routes::{Route, route};
use super::upstream::{Head, Upstream};
use crate::config::Routes;
use crate::openai::exchange::is_event_stream;
use crate::openai::ids::{StreamRestorer, ask_for_ids, restore_json};
use crate::openai::{Dialect, Status};

/// How the proxy is set up.
#[derive(Clone, Debug, PartialEq)]
pub struct ProxyOptions {
    /// vLLM's address, `http://host:port`; a path goes before each request's path.
    pub upstream: Uri,
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
    /// How long open requests may still run after the shutdown signal.
    pub drain_timeout: Duration,
}

impl ProxyOptions {
    /// The defaults: 32 MiB requests, 64 MiB captured, 5 s to connect, 30 s to drain, inference routes alone.
    pub fn new(upstream: Uri) -> Self {
        Self {
            upstream,
            routes: Routes::Inference,
            allow_routes: Vec::new(),
            inject_token_ids: false,
            max_request_bytes: 32 << 20,
            max_capture_bytes: 64 << 20,
            connect_timeout: Duration::from_secs(5),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

/// Why the proxy cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    #[error("the upstream {0:?} is no plain HTTP address; give it as http://host:port")]
    Upstream(String),
}

/// The proxy. Cheap to share behind an `Arc`; it binds nothing until [`Proxy::serve`].
pub struct Proxy {
    pub(super) options: ProxyOptions,
    observer: Arc<dyn Observer>,
    upstream: Upstream,
    host: HeaderValue,
    ids: RequestIds,
}

/// Why the client's body could not be read whole.
enum BodyFailure {
    TooLarge,
    ClientLeft(hyper::Error),
}

impl Proxy {
    pub fn new(options: ProxyOptions, observer: Arc<dyn Observer>) -> Result<Self, ProxyError> {
        let refused = || ProxyError::Upstream(options.upstream.to_string());
        if options.upstream.scheme_str() != Some("http") || options.upstream.query().is_some() {
            return Err(refused());
        }
        let given = options.upstream.authority().ok_or_else(refused)?;
        // Credentials in the address would end up in the Host header.
        if given.as_str().contains('@') {
            return Err(refused());
        }
        let host = HeaderValue::from_str(given.as_str()).map_err(|_| refused())?;
        let prefix = options.upstream.path().trim_end_matches('/').to_owned();
        let upstream = Upstream::new(given.clone(), prefix, options.connect_timeout);
        Ok(Self { options, observer, upstream, host, ids: RequestIds::default() })
    }

    pub(super) async fn handle(&self, request: Request<Incoming>) -> Response<ClientBody> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        let found = route(&parts.method, path, self.options.routes, &self.options.allow_routes);
        let flight = Flight::new(found);
        if found == Route::Refused {
            let message = format!(
                "{path} is not served on the client port, which passes vLLM's inference routes; \
                 call vLLM itself, or name the path in proxy.allow_routes"
            );
            return own_answer(flight, StatusCode::FORBIDDEN, &message, Status::ClientError);
        }
        let target = Some(&parts.uri).filter(|_| parts.method != Method::CONNECT);
        let Some(uri) = target.and_then(|uri| self.upstream.uri_for(uri)) else {
            let message =
                format!("the request target {} has no path; ask for a path on this server", parts.uri);
            return own_answer(flight, StatusCode::BAD_REQUEST, &message, Status::ClientError);
        };
        let mut head = Head {
            method: parts.method.clone(),
            uri,
            headers: headers::for_upstream(&parts.headers, &self.host),
        };
        if let Route::Recorded(endpoint) = found {
            return self.handle_recorded(endpoint, parts, body, head, flight).await;
        }
        if parts.method == Method::POST {
            // Other routes that generate would else be free to take the id of a recorded request.
            set_request_id(&mut head.headers, &self.ids.choose(&parts.headers));
        }
        self.pass(&head, body, flight).await
    }

    /// Both bodies stream through, and nothing is kept.
    async fn pass(&self, head: &Head, body: Incoming, flight: Flight) -> Response<ClientBody> {
        let upstream_body = if body.is_end_stream() { whole(Bytes::new()) } else { Either::Right(body) };
        match self.upstream.send(head, upstream_body).await {
            Ok(response) => pass_on(response, None, flight),
            Err(error) => self.unreachable(flight, &error),
        }
    }

    async fn handle_recorded(
        &self,
        endpoint: Endpoint,
        parts: Parts,
        body: Incoming,
        mut head: Head,
        mut flight: Flight,
    ) -> Response<ClientBody> {
        let request_id = self.ids.choose(&parts.headers);
        set_request_id(&mut head.headers, &request_id);
        let begun = Begun { request_id: &request_id, endpoint, received_at: Timestamp::now() };
        if !self.observer.wants(begun, &parts.headers) {
            return self.pass(&head, body, flight).await;
        }
        // The record needs the answer as text.
        head.headers.remove(header::ACCEPT_ENCODING);
        // Set anew from the body that is sent.
        head.headers.remove(header::CONTENT_LENGTH);
        let observer = self.observer.clone();
        flight.record(Recording::new(
            observer,
            request_id,
            endpoint,
            parts.headers,
            self.options.max_capture_bytes,
        ));
        let client_body = match read_whole(body, self.options.max_request_bytes).await {
            Ok(bytes) => bytes,
            Err(BodyFailure::TooLarge) => {
                let message = format!(
                    "the request body is larger than {} bytes; send a smaller one, or raise the proxy's request limit",
                    self.options.max_request_bytes
                );
                return own_answer(flight, StatusCode::PAYLOAD_TOO_LARGE, &message, Status::ClientError);
            }
            Err(BodyFailure::ClientLeft(error)) => {
                tracing::debug!(%error, "the client's request body broke off");
                // Most often nobody is left to read this; then the account says cancelled.
                return own_answer(
                    flight,
                    StatusCode::BAD_REQUEST,
                    "the request body broke off",
                    Status::Cancelled,
                );
            }
        };
        flight.request_body(&client_body);
        let encoded = head.headers.contains_key(header::CONTENT_ENCODING);
        let injected = if self.options.inject_token_ids && endpoint.dialect() == Dialect::Choices && !encoded
        {
            ask_for_ids(&client_body)
        } else {
            None
        };
        let Some(edited) = injected else {
            return match self.upstream.send(&head, whole(client_body)).await {
                Ok(response) => pass_on(response, None, flight),
                Err(error) => self.unreachable(flight, &error),
            };
        };
        let response = match self.upstream.send(&head, whole(Bytes::from(edited))).await {
            Ok(response) => response,
            Err(error) => return self.unreachable(flight, &error),
        };
        if matches!(response.status(), StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY) {
            // vLLM's words on a bad request speak of its fields ("dict of 2 items", byte positions): let it judge the
            // client's own body.
            drop(response);
            return match self.upstream.send(&head, whole(client_body)).await {
                Ok(second) => pass_on(second, None, flight),
                Err(error) => self.unreachable(flight, &error),
            };
        }
        let encoded_answer = response.headers().contains_key(header::CONTENT_ENCODING);
        if response.status() != StatusCode::OK || encoded_answer {
            return pass_on(response, None, flight);
        }
        if is_event_stream(content_type(response.headers())) {
            let restorer = StreamRestorer::new(self.options.max_capture_bytes);
            return pass_on(response, Some(restorer), flight);
        }
        restore_whole(response, flight).await
    }

    fn unreachable(&self, flight: Flight, error: &hyper_util::client::legacy::Error) -> Response<ClientBody> {
        let authority = self.upstream.authority();
        let cause = innermost(error);
        tracing::warn!(upstream = %authority, error = %cause, "vLLM gave no answer");
        let message = if error.is_connect() {
            format!(
                "vLLM at {authority} cannot be reached ({cause}); see that it runs and that the upstream address is right"
            )
        } else {
            format!("vLLM at {authority} closed the connection before it answered ({cause}); see vLLM's log")
        };
        own_answer(flight, StatusCode::BAD_GATEWAY, &message, Status::UpstreamError)
    }
}

/// Passes vLLM's answer on, chunk by chunk.
fn pass_on(
    response: Response<Incoming>,
    restorer: Option<StreamRestorer>,
    mut flight: Flight,
) -> Response<ClientBody> {
    let (parts, body) = response.into_parts();
    flight.answered(parts.status.as_u16(), &parts.headers);
    let mut kept = headers::end_to_end(&parts.headers);
    if restorer.is_some() {
        kept.remove(header::CONTENT_LENGTH);
    }
    // An answer to HEAD ends with its head though its length speaks of more.
    answer(parts.status, kept, Either::Right(Passing::new(body, restorer, flight)))
}

/// Takes the ids out of an answer that comes whole; its length changes, so it must be whole first.
async fn restore_whole(response: Response<Incoming>, mut flight: Flight) -> Response<ClientBody> {
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
    let restored = restore_json(&received);
    let mut kept = headers::end_to_end(&parts.headers);
    kept.remove(header::CONTENT_LENGTH);
    flight.sent(restored.len());
    flight.whole();
    answer(parts.status, kept, whole(Bytes::from(restored)))
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

async fn read_whole(mut body: Incoming, limit: usize) -> Result<Bytes, BodyFailure> {
    // A client that is still sending when the connection is closed never reads the refusal. So a body that is somewhat
    // too large is read to its end, and thrown away.
    let most = (limit as u64).saturating_mul(2);
    if body.size_hint().lower() > most {
        return Err(BodyFailure::TooLarge);
    }
    let mut seen = 0u64;
    let mut kept = BytesMut::new();
    while let Some(next) = body.frame().await {
        let frame = next.map_err(BodyFailure::ClientLeft)?;
        let Some(data) = frame.data_ref() else {
            continue;
        };
        seen += data.len() as u64;
        if seen > most {
            return Err(BodyFailure::TooLarge);
        }
        if seen <= limit as u64 {
            kept.extend_from_slice(data);
        }
    }
    if seen > limit as u64 {
        return Err(BodyFailure::TooLarge);
    }
    Ok(kept.freeze())
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut current = error;
    while let Some(source) = current.source() {
        current = source;
    }
    current.to_string()
}
