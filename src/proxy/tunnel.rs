//! WebSocket connections (`/v1/realtime`): once vLLM has agreed, bytes go both ways as they come.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::task::JoinSet;

use super::body::Flight;
use super::headers::lists;
use super::upstream::Lease;

/// The open tunnels. hyper has let their connections go, so the server must end them itself.
#[derive(Default)]
pub(super) struct Tunnels(Mutex<JoinSet<()>>);

impl Tunnels {
    /// Joins both ends as soon as both are free, and counts what passes. The connection to vLLM never serves again.
    pub(super) fn open(&self, client: OnUpgrade, vllm: OnUpgrade, lease: Lease, mut flight: Flight) {
        let mut tunnels = self.lock();
        while tunnels.try_join_next().is_some() {}
        tunnels.spawn(async move {
            let _open_until_the_end = lease;
            let (client_end, vllm_end) = match tokio::try_join!(client, vllm) {
                Ok(ends) => ends,
                Err(error) => {
                    tracing::debug!(%error, "a connection was not upgraded");
                    return;
                }
            };
            let (mut client_io, mut vllm_io) = (TokioIo::new(client_end), TokioIo::new(vllm_end));
            match tokio::io::copy_bidirectional(&mut client_io, &mut vllm_io).await {
                Ok((_, to_client)) => {
                    flight.tunnelled(to_client);
                    flight.whole();
                }
                Err(error) => tracing::debug!(%error, "an upgraded connection broke off"),
            }
        });
    }

    /// Waits until every tunnel is closed.
    pub(super) async fn closed(&self) {
        std::future::poll_fn(|context| {
            let mut tunnels = self.lock();
            while let Poll::Ready(Some(_)) = tunnels.poll_join_next(context) {}
            if tunnels.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Ends those that are open; gives their number.
    pub(super) fn cut(&self) -> usize {
        let mut tunnels = self.lock();
        while tunnels.try_join_next().is_some() {}
        tunnels.abort_all();
        tunnels.len()
    }

    fn lock(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the head asks for a WebSocket, or agrees to one.
pub(super) fn is_websocket(headers: &HeaderMap) -> bool {
    let named =
        headers.get(header::UPGRADE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"));
    named && lists(headers, &header::CONNECTION, "upgrade")
}

/// Says to the next hop what the last one said to us.
pub(super) fn upgrade_headers() -> [(HeaderName, HeaderValue); 2] {
    [
        (header::CONNECTION, HeaderValue::from_static("upgrade")),
        (header::UPGRADE, HeaderValue::from_static("websocket")),
    ]
}
