//! How a recorded request ended.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a recorded request ended; one word in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The whole answer came, and the model ended it itself.
    Ok,
    /// The whole answer came, ended by the length limit.
    Length,
    /// The client left before the answer's end.
    Cancelled,
    /// vLLM aborted the generation.
    Aborted,
    /// The request was refused (4xx).
    ClientError,
    /// vLLM failed (5xx, an error in the stream) or could not be reached.
    UpstreamError,
    /// The answer broke off, or outgrew what is captured.
    Truncated,
    /// The proxy ended while the request ran. Only the recorder sets it, when it reads its log back.
    ProxyRestart,
}

impl Status {
    pub const ALL: [Status; 8] = [
        Status::Ok,
        Status::Length,
        Status::Cancelled,
        Status::Aborted,
        Status::ClientError,
        Status::UpstreamError,
        Status::Truncated,
        Status::ProxyRestart,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Length => "length",
            Status::Cancelled => "cancelled",
            Status::Aborted => "aborted",
            Status::ClientError => "client_error",
            Status::UpstreamError => "upstream_error",
            Status::Truncated => "truncated",
            Status::ProxyRestart => "proxy_restart",
        }
    }

    /// Whether the engine ran the request, so that its hidden states and token ids may still arrive.
    pub fn engine_ran(self) -> bool {
        matches!(self, Status::Ok | Status::Length | Status::Cancelled | Status::Aborted | Status::Truncated)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// The word is no status.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error(
    "no status is named {0:?}; use one of ok, length, cancelled, aborted, client_error, upstream_error, truncated, proxy_restart"
)]
pub struct UnknownStatus(pub String);

impl FromStr for Status {
    type Err = UnknownStatus;

    fn from_str(word: &str) -> Result<Self, UnknownStatus> {
        Status::ALL
            .into_iter()
            .find(|status| status.as_str() == word)
            .ok_or_else(|| UnknownStatus(word.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for status in Status::ALL {
            assert_eq!(status.to_string().parse(), Ok(status));
        }
        assert!("fine".parse::<Status>().is_err());
    }
}
