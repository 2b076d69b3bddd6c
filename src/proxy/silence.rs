//! What the proxy does while vLLM is silent in the middle of an answer. By default nothing: a reasoning model may think
//! for many minutes.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// A line that clients of server-sent events skip.
pub(super) const COMMENT: &[u8] = b": keep-alive\n\n";

/// What silence leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// A comment goes to the client.
    Comment,
    /// It lasted longer than this: the answer ends.
    End(Duration),
}

/// Measures silence.
pub(super) struct Silence {
    limit: Option<Duration>,
    comments: Option<Comments>,
    heard_at: Instant,
    timer: Pin<Box<Sleep>>,
}

struct Comments {
    every: Duration,
    last_sent: Instant,
    /// The last bytes, to know whether an event is over.
    tail: [u8; 4],
}

impl Silence {
    /// `comment_every` for a stream of events alone. None if silence leads to nothing.
    pub(super) fn new(limit: Option<Duration>, comment_every: Option<Duration>) -> Option<Self> {
        if limit.is_none() && comment_every.is_none() {
            return None;
        }
        let now = Instant::now();
        // No byte yet counts as between two events.
        let comments = comment_every.map(|every| Comments { every, last_sent: now, tail: *b"\n\n\n\n" });
        Some(Self { limit, comments, heard_at: now, timer: Box::pin(tokio::time::sleep_until(now)) })
    }

    /// vLLM sent bytes.
    pub(super) fn heard(&mut self, bytes: &[u8]) {
        self.heard_at = Instant::now();
        let Some(comments) = &mut self.comments else { return };
        comments.last_sent = self.heard_at;
        let kept = bytes.len().min(4);
        comments.tail.rotate_left(kept);
        comments.tail[4 - kept..].copy_from_slice(&bytes[bytes.len() - kept..]);
    }

    /// Ready once something is due. To be asked when vLLM has nothing to say.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Due> {
        loop {
            let now = Instant::now();
            let end = self.limit.map(|limit| (self.heard_at + limit, limit));
            if let Some((at, limit)) = end
                && at <= now
            {
                return Poll::Ready(Due::End(limit));
            }
            let mut next = end.map(|(at, _)| at);
            if let Some(comments) = &mut self.comments
                && comments.is_between_events()
            {
                let at = comments.last_sent + comments.every;
                if at <= now {
                    comments.last_sent = now;
                    return Poll::Ready(Due::Comment);
                }
                next = Some(next.map_or(at, |other| other.min(at)));
            }
            let Some(at) = next else {
                return Poll::Pending;
            };
            self.timer.as_mut().reset(at);
            ready!(self.timer.as_mut().poll(context));
        }
    }
}

impl Comments {
    /// In the middle of an event a comment would tear it apart.
    fn is_between_events(&self) -> bool {
        let tail = &self.tail;
        tail.ends_with(b"\n\n") || tail.ends_with(b"\r\r") || tail.ends_with(b"\r\n\r\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;

    const TICK: Duration = Duration::from_millis(20);

    async fn due(silence: &mut Silence) -> Due {
        poll_fn(|context| silence.poll(context)).await
    }

    #[tokio::test]
    async fn comments_come_between_events_alone() {
        for (heard, expected) in [
            (b"data: 1\n\n".as_slice(), true),
            (b"data: 1\r\n\r\n", true),
            (b"data: 1\r\r", true),
            (b"", true),
            (b"data: 1", false),
            (b"data: 1\n", false),
            (b"data: 1\n\ndata", false),
        ] {
            let mut silence = Silence::new(Some(5 * TICK), Some(TICK)).unwrap();
            for byte in heard {
                silence.heard(&[*byte]);
            }
            let first = due(&mut silence).await;
            assert_eq!(first == Due::Comment, expected, "{:?}", String::from_utf8_lossy(heard));
        }
    }

    #[tokio::test]
    async fn an_answer_ends_after_its_limit_though_comments_went_out() {
        let limit = 20 * TICK;
        let mut silence = Silence::new(Some(limit), Some(TICK)).unwrap();
        let started = Instant::now();
        assert_eq!(due(&mut silence).await, Due::Comment);
        while due(&mut silence).await == Due::Comment {}
        assert!(started.elapsed() >= limit);
        assert!(Silence::new(None, None).is_none());
    }
}
