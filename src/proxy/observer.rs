//! What the proxy hands over for each recorded request.

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::CONTENT_TYPE;
use jiff::Timestamp;

use crate::openai::{Answer, Choice, Dialect, RequestView, Status};
pub use crate::record::Source;

/// Is told of recorded requests. It is called on the request path: it must not block and must not panic.
pub trait Observer: Send + Sync + 'static {
    /// Whether this request is to be recorded. If not, it passes as those of other routes do, and nothing more is said
    /// of it.
    fn wants(&self, _begun: Begun<'_>, _headers: &HeaderMap) -> bool {
        true
    }

    /// A recorded request goes to vLLM. Once for each id.
    fn begin(&self, begun: Begun<'_>);

    /// The request has ended, in whatever way. Once for each `begin`.
    fn finished(&self, exchange: Exchange);
}

/// A recorded request as it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun<'a> {
    /// The id that vLLM sees.
    pub request_id: &'a str,
    pub endpoint: Endpoint,
    pub received_at: Timestamp,
}

/// The recorded routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    ChatCompletions,
    Completions,
    Responses,
    Messages,
}

impl Endpoint {
    pub const ALL: [Endpoint; 4] =
        [Endpoint::ChatCompletions, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages];

    pub fn path(self) -> &'static str {
        match self {
            Endpoint::ChatCompletions => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Responses => "/v1/responses",
            Endpoint::Messages => "/v1/messages",
        }
    }

    pub fn dialect(self) -> Dialect {
        match self {
            Endpoint::ChatCompletions | Endpoint::Completions => Dialect::Choices,
            Endpoint::Responses => Dialect::Responses,
            Endpoint::Messages => Dialect::Messages,
        }
    }

    /// Whether vLLM makes its own id of the request's from `X-Request-Id`. For Responses it does not, so their hidden
    /// states cannot be told apart.
    pub fn keeps_request_id(self) -> bool {
        self != Endpoint::Responses
    }
}

/// The raw pieces of one recorded request. Parsing is left to the observer's own thread: see [`Exchange::parse`].
#[derive(Clone, Debug)]
pub struct Exchange {
    pub request_id: String,
    pub endpoint: Endpoint,
    pub received_at: Timestamp,
    /// When the first byte of the answer's body came from vLLM.
    pub first_byte_at: Option<Timestamp>,
    pub finished_at: Timestamp,
    /// The answer's status: vLLM's or, where it gave none, the proxy's own. None if the client left before either.
    pub http_status: Option<u16>,
    /// How the transfer ended: ok, cancelled, client_error, upstream_error or truncated. [`Parsed::status_of`] refines
    /// it for each choice.
    pub transfer: Status,
    /// The client's body, before any flag was added. Empty if the client left before it was whole.
    pub request_body: Bytes,
    /// The client's headers, credentials among them: a recorder may hash them, never keep them.
    pub request_headers: HeaderMap,
    pub response_headers: HeaderMap,
    /// vLLM's body with the ids that were asked for on the client's behalf, up to the capture limit.
    pub response_body: Bytes,
    /// The answer outgrew the capture limit; `transfer` is then truncated.
    pub response_cut: bool,
    /// `x-draftsmith-conversation`.
    pub conversation_id: Option<String>,
    pub source: Source,
}

/// An exchange, read.
#[derive(Clone, Debug, PartialEq)]
pub struct Parsed {
    pub request: RequestView,
    pub answer: Answer,
    transfer: Status,
}

impl Exchange {
    /// Reads both bodies; never fails. Costs time in proportion to them, so not on the request path.
    pub fn parse(&self) -> Parsed {
        let content_type = self.response_headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        Parsed {
            request: RequestView::read(self.endpoint.dialect(), &self.request_body),
            answer: Answer::read(
                self.endpoint.dialect(),
                self.http_status.unwrap_or_default(),
                content_type,
                &self.response_body,
            ),
            transfer: self.transfer,
        }
    }
}

impl Parsed {
    /// How this choice ended; with none, how the request ended that gave no choice.
    pub fn status_of(&self, choice: Option<&Choice>) -> Status {
        self.answer.status_of(choice, self.transfer)
    }
}
