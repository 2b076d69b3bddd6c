//! Accepting connections, and ending in good order.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::handler::Proxy;

/// A client that takes longer for its request's head, or leaves its connection idle longer, is let go.
const HEAD_TIMEOUT: Duration = Duration::from_secs(90);

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
    /// Serves HTTP/1.1 and HTTP/2 (prior knowledge) until `shutdown` is ready; then takes no more connections, lets open
    /// requests finish within the drain timeout, and cuts the rest, whose exchanges end as cancelled.
    pub async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        shutdown: impl Future<Output = ()>,
    ) -> Drained {
        let graceful = GracefulShutdown::new();
        let mut connections = JoinSet::new();
        let mut stop = std::pin::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut stop => break,
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => self.clone().spawn(stream, &graceful, &mut connections),
                    Err(error) => pause_after(&error).await,
                },
                Some(_) = connections.join_next(), if !connections.is_empty() => {}
            }
        }
        drop(listener);
        let drained = tokio::time::timeout(self.options.drain_timeout, graceful.shutdown()).await;
        let mut cut = 0;
        if drained.is_err() {
            while connections.try_join_next().is_some() {}
            cut = connections.len();
            connections.abort_all();
        }
        // An aborted task has dropped its requests once it is joined.
        while connections.join_next().await.is_some() {}
        if cut == 0 { Drained::Completely } else { Drained::Cut(cut) }
    }

    fn spawn(self: Arc<Self>, stream: TcpStream, graceful: &GracefulShutdown, connections: &mut JoinSet<()>) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a client left at once");
            return;
        }
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
        builder.http2().timer(TokioTimer::new());
        let service = service_fn(move |request| {
            let proxy = self.clone();
            async move { Ok::<_, Infallible>(proxy.handle(request).await) }
        });
        let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
        let watched = graceful.watch(connection);
        connections.spawn(async move {
            if let Err(error) = watched.await {
                tracing::debug!(%error, "a client connection ended early");
            }
        });
    }
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
