//! The client's body on its way in.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::Sleep;

/// Why a client's body does not come to its end.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum BodyFailure {
    #[error("the request body is larger than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("the request body stood still for {0:?}")]
    Silent(Duration),
    #[error("the request body broke off ({0})")]
    ClientLeft(String),
}

/// A body that ends with an error where the client stops sending for too long.
pub(super) struct Patient {
    body: Incoming,
    limit: Option<Duration>,
    /// Runs while nothing comes.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    pub(super) fn new(body: Incoming, limit: Option<Duration>) -> Self {
        Self { body, limit, waiting: None }
    }
}

impl Body for Patient {
    type Data = Bytes;
    type Error = BodyFailure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyFailure>>> {
        if let Poll::Ready(next) = Pin::new(&mut self.body).poll_frame(context) {
            self.waiting = None;
            return Poll::Ready(
                next.map(|frame| frame.map_err(|error| BodyFailure::ClientLeft(error.to_string()))),
            );
        }
        let Some(limit) = self.limit else {
            return Poll::Pending;
        };
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        waiting.as_mut().poll(context).map(|()| Some(Err(BodyFailure::Silent(limit))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The whole body, at most `limit` bytes. `waits_for_leave`: the client sends nothing before it is told to go on
/// (`Expect: 100-continue`), which reading does.
pub(super) async fn read_whole(
    mut body: Patient,
    limit: usize,
    waits_for_leave: bool,
) -> Result<Bytes, BodyFailure> {
    let too_large = BodyFailure::TooLarge { limit };
    // A client that is still sending when the connection is closed never reads the refusal. So a body that is somewhat
    // too large is read to its end, and thrown away.
    let most = if waits_for_leave { limit as u64 } else { (limit as u64).saturating_mul(2) };
    if body.size_hint().lower() > most {
        return Err(too_large);
    }
    let mut seen = 0u64;
    let mut kept = BytesMut::new();
    while let Some(next) = body.frame().await {
        let frame = next?;
        let Some(data) = frame.data_ref() else {
            continue;
        };
        seen += data.len() as u64;
        if seen > most {
            return Err(too_large);
        }
        // Copied: a slice of hyper's read buffer would keep all of that buffer alive.
        if seen <= limit as u64 {
            kept.extend_from_slice(data);
        }
    }
    if seen > limit as u64 {
        return Err(too_large);
    }
    Ok(kept.freeze())
}
