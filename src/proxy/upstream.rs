//! Sends requests to vLLM over kept connections.

use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::http::uri::PathAndQuery;
use hyper::{HeaderMap, Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;

use super::connect::Connector;
use super::request_body::{BodyFailure, Patient};
use super::tls::TlsError;
use super::workers;
use crate::config::UpstreamAddress;

/// vLLM closes a connection that was idle for 5 s; we let go before, so that it is seldom closed under a request.
const MOST_IDLE: Duration = Duration::from_secs(4);

/// A request's body on its way to vLLM: whole, so that it can be sent a second time, or passed on as it comes.
pub(super) type UpstreamBody = Either<Full<Bytes>, Patient>;

/// What is sent, apart from the body.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub method: Method,
    pub target: PathAndQuery,
    pub headers: HeaderMap,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    #[error("cannot be reached ({0})")]
    Connect(io::Error),
    #[error("gave no answer within {0:?}")]
    Silent(Duration),
    #[error("closed the connection before it answered ({0})")]
    Closed(String),
    /// The request could not be sent whole.
    #[error(transparent)]
    Body(BodyFailure),
}

/// The way to vLLM.
pub(super) struct Upstream {
    connector: Connector,
    /// One for each worker, and one for other threads: a connection is driven by the thread that opened it.
    pools: Vec<Arc<Pool>>,
    first_byte_timeout: Option<Duration>,
}

impl Upstream {
    pub(super) fn new(
        address: UpstreamAddress,
        ca_file: Option<&Path>,
        connect_timeout: Duration,
        first_byte_timeout: Option<Duration>,
        workers: usize,
    ) -> Result<Self, TlsError> {
        let connector = Connector::new(address, ca_file, connect_timeout)?;
        let pools = (0..=workers).map(|_| Arc::default()).collect();
        Ok(Self { connector, pools, first_byte_timeout })
    }

    pub(super) fn address(&self) -> &UpstreamAddress {
        self.connector.address()
    }

    /// The threads that it has pools for.
    pub(super) fn workers(&self) -> usize {
        self.pools.len() - 1
    }

    /// Closes connections that were idle for long.
    pub(super) fn close_idle(&self) {
        for pool in &self.pools {
            pool.lock().retain(Idle::is_usable);
        }
    }

    /// Sends a request and waits for the head of its answer. Once more, over a new connection, if a kept one was closed
    /// without a byte: then vLLM had let that connection go.
    pub(super) async fn send(
        &self,
        head: Head,
        body: UpstreamBody,
    ) -> Result<(Response<Incoming>, Lease), SendError> {
        let Some(kept) = self.pool().take() else {
            return self.send_over(self.open().await?, head, body).await.map_err(|failed| failed.error);
        };
        let spare = match &body {
            Either::Left(whole) => Some((head.clone(), Either::Left(whole.clone()))),
            Either::Right(_) => None,
        };
        let failed = match self.send_over(kept, head, body).await {
            Ok(answered) => return Ok(answered),
            Err(failed) => failed,
        };
        // What was not sent at all can go again even if its body streams.
        let again = match failed.unsent {
            Some(request) => Some(request),
            None => spare.filter(|_| failed.gave_nothing),
        };
        let Some((again_head, again_body)) = again else {
            return Err(failed.error);
        };
        tracing::debug!(error = %failed.error, "a kept connection to vLLM was closed; sending the request again");
        metrics::counter!("draftsmith_proxy_upstream_retries_total").increment(1);
        let fresh = self.open().await?;
        self.send_over(fresh, again_head, again_body).await.map_err(|failed| failed.error)
    }

    async fn open(&self) -> Result<Lease, SendError> {
        let stream = self.connector.open().await.map_err(SendError::Connect)?;
        let answered = stream.answered();
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| SendError::Connect(io::Error::other(error)))?;
        metrics::counter!("draftsmith_proxy_upstream_connections_total").increment(1);
        tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a connection to vLLM ended early");
            }
        });
        Ok(Lease { sender, answered, pool: self.pool().clone() })
    }

    fn pool(&self) -> &Arc<Pool> {
        // The last is for threads that are no workers.
        &self.pools[workers::index().unwrap_or(self.workers())]
    }

    async fn send_over(
        &self,
        mut lease: Lease,
        head: Head,
        body: UpstreamBody,
    ) -> Result<(Response<Incoming>, Lease), Failed> {
        let mut request = Request::new(body);
        *request.method_mut() = head.method;
        *request.uri_mut() = Uri::from(head.target);
        *request.headers_mut() = head.headers;
        let sending = lease.sender.try_send_request(request);
        let sent = match self.first_byte_timeout {
            None => sending.await,
            Some(limit) => match tokio::time::timeout(limit, sending).await {
                Ok(sent) => sent,
                Err(_) => return Err(Failed::finally(SendError::Silent(limit))),
            },
        };
        let mut error = match sent {
            Ok(response) => return Ok((response, lease)),
            Err(error) => error,
        };
        let unsent = error.take_message().map(|request| {
            let (parts, body) = request.into_parts();
            let target = parts.uri.into_parts().path_and_query.unwrap_or(PathAndQuery::from_static("/"));
            (Head { method: parts.method, target, headers: parts.headers }, body)
        });
        let gave_nothing = !lease.answered.load(Ordering::Relaxed);
        Err(Failed { error: reason(&error.into_error()), unsent, gave_nothing })
    }
}

/// A request that has no answer.
struct Failed {
    error: SendError,
    /// The request, if nothing of it went out.
    unsent: Option<(Head, UpstreamBody)>,
    /// vLLM sent no byte after the request.
    gave_nothing: bool,
}

impl Failed {
    fn finally(error: SendError) -> Self {
        Self { error, unsent: None, gave_nothing: false }
    }
}

/// A connection in use. Dropping it closes it: an answer that was not read to its end would be in the way of the next.
pub(super) struct Lease {
    sender: SendRequest<UpstreamBody>,
    answered: Arc<AtomicBool>,
    pool: Arc<Pool>,
}

impl Lease {
    /// The answer has come to its end; the connection may serve again.
    pub(super) fn give_back(self) {
        if self.sender.is_closed() {
            return;
        }
        let pool = self.pool.clone();
        pool.lock().push(Idle { sender: self.sender, answered: self.answered, since: Instant::now() });
    }
}

/// Connections that wait for a request, the one used last at the end: so that the others grow old.
#[derive(Default)]
struct Pool(Mutex<Vec<Idle>>);

struct Idle {
    sender: SendRequest<UpstreamBody>,
    answered: Arc<AtomicBool>,
    since: Instant,
}

impl Idle {
    fn is_usable(&self) -> bool {
        !self.sender.is_closed() && self.since.elapsed() < MOST_IDLE
    }
}

impl Pool {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Idle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection used last that can take a request now. One whose last request is still on its way out (vLLM may
    /// answer before it has read all) is left to become ready.
    fn take(self: &Arc<Self>) -> Option<Lease> {
        let mut idle = self.lock();
        let mut position = idle.len();
        while position > 0 {
            position -= 1;
            if !idle[position].is_usable() {
                idle.remove(position);
            } else if idle[position].sender.is_ready() {
                let found = idle.remove(position);
                return Some(Lease { sender: found.sender, answered: found.answered, pool: self.clone() });
            }
        }
        None
    }
}

/// The cause at the bottom: what the layers above it say is no news to an operator.
fn reason(error: &hyper::Error) -> SendError {
    let mut current: &dyn Error = error;
    while let Some(source) = current.source() {
        current = source;
    }
    match current.downcast_ref::<BodyFailure>() {
        Some(failure) => SendError::Body(failure.clone()),
        None => SendError::Closed(current.to_string()),
    }
}
