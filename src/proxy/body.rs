//! The answer's body on its way to the client, and the account of how it ended.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::HeaderMap;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use jiff::Timestamp;

use super::meters::Meters;
use super::observer::{Begun, Endpoint, Exchange, Observer, Source};
use super::routes::Route;
use super::silence::{COMMENT, Due, Silence};
use super::upstream::Lease;
use crate::openai::Status;
use crate::openai::ids::StreamRestorer;

/// One request in flight. However it ends, dropping this ends its account: as cancelled, if nothing else was said.
pub(super) struct Flight {
    route: Route,
    meters: Arc<Meters>,
    http_status: Option<u16>,
    transfer: Status,
    received_bytes: u64,
    sent_bytes: u64,
    recording: Option<Recording>,
}

/// What is gathered of a recorded request.
pub(super) struct Recording {
    pub observer: Arc<dyn Observer>,
    pub request_id: String,
    pub endpoint: Endpoint,
    pub received_at: Timestamp,
    pub request_headers: HeaderMap,
    pub request_body: Bytes,
    pub conversation_id: Option<String>,
    pub source: Source,
    pub capture_limit: usize,
    first_byte_at: Option<Timestamp>,
    response_headers: HeaderMap,
    captured: Vec<u8>,
    cut: bool,
}

impl Recording {
    pub(super) fn new(
        observer: Arc<dyn Observer>,
        request_id: String,
        endpoint: Endpoint,
        request_headers: HeaderMap,
        capture_limit: usize,
    ) -> Self {
        let received_at = Timestamp::now();
        observer.begin(Begun { request_id: &request_id, endpoint, received_at });
        Self {
            observer,
            request_id,
            endpoint,
            received_at,
            conversation_id: super::headers::text(&request_headers, super::headers::CONVERSATION),
            source: match super::headers::text(&request_headers, super::headers::SOURCE).as_deref() {
                Some("replay") => Source::Replay,
                _ => Source::Live,
            },
            request_headers,
            request_body: Bytes::new(),
            capture_limit,
            first_byte_at: None,
            response_headers: HeaderMap::new(),
            captured: Vec::new(),
            cut: false,
        }
    }

    fn capture(&mut self, bytes: &[u8]) {
        if self.first_byte_at.is_none() && !bytes.is_empty() {
            self.first_byte_at = Some(Timestamp::now());
        }
        let room = self.capture_limit - self.captured.len().min(self.capture_limit);
        let taken = bytes.len().min(room);
        // Copied: a small slice of hyper's read buffer would keep all of that buffer alive.
        self.captured.extend_from_slice(&bytes[..taken]);
        self.cut |= taken < bytes.len();
    }
}

impl Flight {
    pub(super) fn new(route: Route, meters: Arc<Meters>) -> Self {
        meters.of(route).in_flight.increment(1.0);
        Self {
            route,
            meters,
            http_status: None,
            transfer: Status::Cancelled,
            received_bytes: 0,
            sent_bytes: 0,
            recording: None,
        }
    }

    pub(super) fn record(&mut self, recording: Recording) {
        self.recording = Some(recording);
    }

    /// The client's body is whole.
    pub(super) fn request_body(&mut self, body: &Bytes) {
        if let Some(recording) = &mut self.recording {
            recording.request_body = body.clone();
        }
    }

    /// The head of an answer came from vLLM, or the proxy made one itself.
    pub(super) fn answered(&mut self, http_status: u16, headers: &HeaderMap) {
        self.http_status = Some(http_status);
        if let Some(recording) = &mut self.recording {
            recording.response_headers = headers.clone();
        }
    }

    /// Bytes came from vLLM.
    pub(super) fn received(&mut self, bytes: &[u8]) {
        self.received_bytes += bytes.len() as u64;
        if let Some(recording) = &mut self.recording {
            recording.capture(bytes);
        }
    }

    /// The proxy's own answer.
    pub(super) fn own_body(&mut self, bytes: &[u8]) {
        self.sent(bytes.len());
        if let Some(recording) = &mut self.recording {
            recording.captured = bytes.to_vec();
        }
    }

    /// Bytes go to the client.
    pub(super) fn sent(&mut self, count: usize) {
        self.sent_bytes += count as u64;
    }

    /// The answer's last byte has been passed on.
    pub(super) fn whole(&mut self) {
        self.transfer = match self.http_status {
            Some(400..=499) => Status::ClientError,
            Some(100..=399) => Status::Ok,
            _ => Status::UpstreamError,
        };
    }

    /// An upgraded connection carried so much to the client.
    pub(super) fn tunnelled(&mut self, to_client: u64) {
        self.received_bytes += to_client;
        self.sent_bytes += to_client;
    }

    pub(super) fn ended(&mut self, transfer: Status) {
        self.transfer = transfer;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let cut = self.recording.as_ref().is_some_and(|recording| recording.cut);
        if cut && self.transfer == Status::Ok {
            self.transfer = Status::Truncated;
        }
        let of_route = self.meters.of(self.route);
        of_route.in_flight.decrement(1.0);
        of_route.upstream_bytes.increment(self.received_bytes);
        of_route.client_bytes.increment(self.sent_bytes);
        self.meters.ended(self.route, self.http_status, self.transfer);
        let Some(recording) = self.recording.take() else {
            return;
        };
        recording.observer.finished(Exchange {
            request_id: recording.request_id,
            endpoint: recording.endpoint,
            received_at: recording.received_at,
            first_byte_at: recording.first_byte_at,
            finished_at: Timestamp::now(),
            http_status: self.http_status,
            transfer: self.transfer,
            request_body: recording.request_body,
            request_headers: recording.request_headers,
            response_headers: recording.response_headers,
            response_body: Bytes::from(recording.captured),
            response_cut: recording.cut,
            conversation_id: recording.conversation_id,
            source: recording.source,
        });
    }
}

/// The body that the client gets: made or restored here and whole, or passed on chunk by chunk.
pub(super) type ClientBody = Either<Full<Bytes>, Passing>;

/// Why an answer breaks off.
#[derive(Debug, thiserror::Error)]
pub(super) enum PassError {
    #[error("vLLM's answer broke off ({0})")]
    Upstream(#[from] hyper::Error),
    #[error("vLLM was silent for {0:?} in the middle of an answer")]
    Silent(Duration),
}

/// vLLM's answer on its way.
pub(super) struct Passing {
    upstream: Incoming,
    lease: Option<Lease>,
    restorer: Option<StreamRestorer>,
    silence: Option<Silence>,
    over: bool,
    flight: Flight,
}

impl Passing {
    pub(super) fn new(
        upstream: Incoming,
        lease: Lease,
        restorer: Option<StreamRestorer>,
        silence: Option<Silence>,
        flight: Flight,
    ) -> Self {
        Self { upstream, lease: Some(lease), restorer, silence, over: false, flight }
    }

    /// The answer is whole, so its connection is free.
    fn whole(&mut self) {
        self.over = true;
        self.flight.whole();
        if let Some(lease) = self.lease.take() {
            lease.give_back();
        }
    }

    /// What happens while vLLM says nothing.
    fn poll_silence(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, PassError>>> {
        let Some(silence) = &mut self.silence else {
            return Poll::Pending;
        };
        match ready!(silence.poll(context)) {
            Due::Comment => {
                self.flight.sent(COMMENT.len());
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))))
            }
            Due::End(limit) => {
                self.over = true;
                self.flight.ended(Status::UpstreamError);
                Poll::Ready(Some(Err(PassError::Silent(limit))))
            }
        }
    }
}

impl Body for Passing {
    type Data = Bytes;
    type Error = PassError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, PassError>>> {
        loop {
            if self.over {
                return Poll::Ready(None);
            }
            let frame = match Pin::new(&mut self.upstream).poll_frame(context) {
                Poll::Pending => return self.poll_silence(context),
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => {
                    self.over = true;
                    self.flight.ended(Status::Truncated);
                    return Poll::Ready(Some(Err(error.into())));
                }
                Poll::Ready(None) => {
                    self.whole();
                    let rest = self.restorer.as_mut().map(StreamRestorer::finish).unwrap_or_default();
                    if rest.is_empty() {
                        return Poll::Ready(None);
                    }
                    self.flight.sent(rest.len());
                    return Poll::Ready(Some(Ok(Frame::data(Bytes::from(rest)))));
                }
            };
            let Some(data) = frame.data_ref() else {
                return Poll::Ready(Some(Ok(frame)));
            };
            self.flight.received(data);
            if let Some(silence) = &mut self.silence {
                silence.heard(data);
            }
            let Some(restorer) = &mut self.restorer else {
                self.flight.sent(data.len());
                return Poll::Ready(Some(Ok(frame)));
            };
            let restored = restorer.push(data);
            if !restored.is_empty() {
                self.flight.sent(restored.len());
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from(restored)))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.over || (self.restorer.is_none() && self.upstream.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        if self.restorer.is_some() { SizeHint::default() } else { self.upstream.size_hint() }
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        // With a known length hyper asks for no frame after the last.
        if !self.over && self.upstream.is_end_stream() {
            self.whole();
        }
    }
}
