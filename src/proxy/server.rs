//! Accepting connections, and ending in good order.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::connect::Duplex;
use super::handler::Proxy;
use super::workers::{Place, Workers};

/// A client that takes longer for its request's head, or leaves its connection idle longer, is let go.
const HEAD_TIMEOUT: Duration = Duration::from_secs(90);

/// A client that takes longer to agree on TLS is let go.
const TLS_TIMEOUT: Duration = Duration::from_secs(10);

/// A peer that vanished without a word is found by probes: the first after this silence...
const PROBE_AFTER: Duration = Duration::from_secs(30);
/// ...then one each time this passed; three without an answer end the connection.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// How often connections to vLLM are looked through for idle ones.
const IDLE_CHECK: Duration = Duration::from_secs(1);

/// After a failed accept (most often: no file descriptor is free), the time until the next attempt. No event tells of a
/// free descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How the server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every open request came to its end.
    Completely,
    /// The drain timeout passed; this many connections were cut.
    Cut(usize),
}

impl Proxy {
    /// Serves HTTP/1.1 and HTTP/2 (over TLS, or by prior knowledge) until `shutdown` is ready; then takes no more
    /// connections, lets open requests finish within the drain timeout, and cuts the rest, whose exchanges end as
    /// cancelled. An error: its threads cannot be started.
    pub async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        shutdown: impl Future<Output = ()>,
    ) -> io::Result<Drained> {
        let workers = Workers::start(self.upstream.workers())?;
        let graceful = GracefulShutdown::new();
        let mut connections = JoinSet::new();
        let mut idle_check = tokio::time::interval(IDLE_CHECK);
        let mut stop = std::pin::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut stop => break,
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        let place = workers.place();
                        let handle = place.handle.clone();
                        connections.spawn_on(self.clone().serve_stream(stream, place, graceful.watcher()), &handle);
                    }
                    Err(error) => pause_after(&error).await,
                },
                Some(_) = connections.join_next(), if !connections.is_empty() => {}
                _ = idle_check.tick() => self.upstream.close_idle(),
            }
        }
        drop(listener);
        let ended = async {
            graceful.shutdown().await;
            self.tunnels.closed().await;
        };
        let drained = tokio::time::timeout(self.options.drain_timeout, ended).await;
        let mut cut = 0;
        if drained.is_err() {
            while connections.try_join_next().is_some() {}
            cut = connections.len() + self.tunnels.cut();
            connections.abort_all();
        }
        // An aborted task has dropped its requests once it is joined.
        while connections.join_next().await.is_some() {}
        if drained.is_err() {
            // Those that were opened while the rest was cut.
            self.tunnels.cut();
        }
        self.tunnels.closed().await;
        // Streams of HTTP/2 are tasks of their own: they end with their thread.
        workers.end().await;
        Ok(if cut == 0 { Drained::Completely } else { Drained::Cut(cut) })
    }

    async fn serve_stream(self: Arc<Self>, accepted: TcpStream, _open: Place, watcher: Watcher) {
        // It was accepted on another thread's event loop.
        let stream = match accepted.into_std().and_then(TcpStream::from_std) {
            Ok(stream) => stream,
            Err(error) => return tracing::warn!(%error, "a connection cannot be served"),
        };
        if let Err(error) = stream.set_nodelay(true).and_then(|()| keep_probing(&stream)) {
            tracing::debug!(%error, "a client left at once");
            return;
        }
        let Some(tls) = &self.tls else {
            return self.serve_connection(stream, watcher).await;
        };
        match tokio::time::timeout(TLS_TIMEOUT, tls.acceptor().accept(stream)).await {
            Ok(Ok(secured)) => self.serve_connection(secured, watcher).await,
            Ok(Err(error)) => tracing::debug!(%error, "a client did not agree on TLS"),
            Err(_) => tracing::debug!("a client took too long to agree on TLS"),
        }
    }

    async fn serve_connection(self: Arc<Self>, stream: impl Duplex + 'static, watcher: Watcher) {
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(PROBE_AFTER)
            .keep_alive_timeout(3 * PROBE_INTERVAL);
        let service = service_fn(move |request| {
            let proxy = self.clone();
            async move { Ok::<_, Infallible>(proxy.handle(request).await) }
        });
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
        if let Err(error) = watcher.watch(connection.into_owned()).await {
            tracing::debug!(%error, "a client connection ended early");
        }
    }
}

/// Has the kernel find out when the peer is gone without a word, however long both sides are silent.
pub(super) fn keep_probing(stream: &TcpStream) -> io::Result<()> {
    let probes = TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_INTERVAL).with_retries(3);
    SockRef::from(stream).set_tcp_keepalive(&probes)
}

async fn pause_after(error: &io::Error) {
    let of_one_client = matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    );
    if of_one_client {
        return;
    }
    tracing::warn!(%error, "no connection can be accepted; trying again");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}
