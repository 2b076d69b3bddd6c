//! The request path: server, upstream client, header rules, streaming, cancellation.
//!
//! Promises: the body that vLLM sent is the body that the client gets, chunk by chunk; the exceptions are asked for:
//! `inject_token_ids` takes out again what it asked vLLM for, `sse_keep_alive` adds comments. No request waits for the
//! observer. A client that leaves cancels its request in vLLM. vLLM's inference routes pass, and nothing else unless it
//! is allowed.
//!
//! What crosses this door: [`Proxy`] with its [`ProxyOptions`] in (by way of [`PreparedProxy`], which reads its files), one [`Exchange`] for each recorded request out, to
//! the [`Observer`].

mod access;
mod body;
mod connect;
mod errors;
mod handler;
mod headers;
mod ids;
mod meters;
mod observer;
mod request_body;
mod routes;
mod server;
mod silence;
mod tls;
mod tunnel;
mod upstream;
mod workers;

pub use handler::{PreparedProxy, Proxy, ProxyError, ProxyOptions};
pub use observer::{Begun, Endpoint, Exchange, Observer, Parsed, Source};
pub use server::Drained;
pub use tls::{TlsError, TlsFiles};

pub use crate::config::{Authorization, Routes, UpstreamAddress};
pub use crate::openai::Status;
