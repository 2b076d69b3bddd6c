//! The client that speaks to vLLM.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::http::Extensions;
use hyper::http::uri::{Authority, Scheme};
use hyper::{HeaderMap, Method, Request, Response, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// vLLM closes a connection that was idle for 5 s; we let go before, so that it is seldom closed under a request.
const POOL_IDLE: Duration = Duration::from_secs(4);

/// A request's body on its way to vLLM: whole, so that it can be sent a second time, or passed on as it comes.
pub(super) type UpstreamBody = Either<Full<Bytes>, Incoming>;

/// What is sent, apart from the body.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub method: Method,
    pub uri: Uri,
    pub headers: HeaderMap,
}

/// The pooled client.
#[derive(Debug)]
pub(super) struct Upstream {
    client: Client<CountingConnector, UpstreamBody>,
    authority: Authority,
    /// Goes before each path; empty or without a trailing slash.
    prefix: String,
}

impl Upstream {
    pub(super) fn new(authority: Authority, prefix: String, connect_timeout: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect_timeout));
        let mut builder = Client::builder(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE)
            .set_host(false);
        Self { client: builder.build(CountingConnector { inner: connector }), authority, prefix }
    }

    pub(super) fn authority(&self) -> &Authority {
        &self.authority
    }

    /// vLLM's address for a request target. None if it has no path (`*`, the authority form).
    pub(super) fn uri_for(&self, target: &Uri) -> Option<Uri> {
        let path_and_query = target.path_and_query()?.as_str();
        if !path_and_query.starts_with('/') && !path_and_query.starts_with('?') {
            return None;
        }
        let slash = if path_and_query.starts_with('?') { "/" } else { "" };
        let whole = format!("{}{slash}{path_and_query}", self.prefix);
        Uri::builder()
            .scheme(Scheme::HTTP)
            .authority(self.authority.clone())
            .path_and_query(whole)
            .build()
            .ok()
    }

    /// Sends a request and waits for the head of its answer. It is sent once more if it went out on a connection that
    /// had served before and was closed without a byte: then vLLM had let that connection go.
    pub(super) async fn send(
        &self,
        head: &Head,
        body: UpstreamBody,
    ) -> Result<Response<Incoming>, hyper_util::client::legacy::Error> {
        let mut next = body;
        loop {
            let spare = match &next {
                Either::Left(whole) => Some(whole.clone()),
                Either::Right(_) => None,
            };
            let mut request = Request::new(next);
            *request.method_mut() = head.method.clone();
            *request.uri_mut() = head.uri.clone();
            *request.headers_mut() = head.headers.clone();
            let error = match self.client.request(request).await {
                Ok(response) => {
                    if let Some(usage) = response.extensions().get::<ConnectionUse>() {
                        usage.0.served.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(response);
                }
                Err(error) => error,
            };
            let Some(again) = spare.filter(|_| !error.is_connect() && closed_while_idle(&error)) else {
                return Err(error);
            };
            // Each round uses up one pooled connection, so this ends.
            tracing::debug!(%error, "a reused connection to vLLM was closed; sending the request again");
            metrics::counter!("draftsmith_proxy_upstream_retries_total").increment(1);
            next = Either::Left(again);
        }
    }
}

fn closed_while_idle(error: &hyper_util::client::legacy::Error) -> bool {
    let Some(connected) = error.connect_info() else {
        return false;
    };
    let mut extensions = Extensions::new();
    connected.get_extras(&mut extensions);
    let Some(usage) = extensions.get::<ConnectionUse>() else {
        return false;
    };
    usage.0.served.load(Ordering::Relaxed) > 0 && !usage.0.answered.load(Ordering::Relaxed)
}

/// What a connection has done, shared with the responses and errors that it gives.
#[derive(Clone, Debug, Default)]
struct ConnectionUse(Arc<UseCounts>);

#[derive(Debug, Default)]
struct UseCounts {
    /// Answers whose head came.
    served: AtomicU64,
    /// A byte came since something was last written.
    answered: AtomicBool,
}

/// Opens connections that know what they have done.
#[derive(Clone, Debug)]
struct CountingConnector {
    inner: HttpConnector,
}

type ConnectError = Box<dyn std::error::Error + Send + Sync>;
type Connecting = Pin<Box<dyn Future<Output = Result<TokioIo<CountedStream>, ConnectError>> + Send>>;

impl tower_service::Service<Uri> for CountingConnector {
    type Response = TokioIo<CountedStream>;
    type Error = ConnectError;
    type Future = Connecting;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, target: Uri) -> Connecting {
        let connecting = self.inner.call(target);
        Box::pin(async move {
            let stream = connecting.await?.into_inner();
            Ok(TokioIo::new(CountedStream { stream, usage: ConnectionUse::default() }))
        })
    }
}

#[derive(Debug)]
struct CountedStream {
    stream: TcpStream,
    usage: ConnectionUse,
}

impl Connection for CountedStream {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(self.usage.clone())
    }
}

impl AsyncRead for CountedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let room = buffer.remaining();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.remaining() < room {
            self.usage.0.answered.store(true, Ordering::Relaxed);
        }
        polled
    }
}

impl AsyncWrite for CountedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.usage.0.answered.store(false, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.usage.0.answered.store(false, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
