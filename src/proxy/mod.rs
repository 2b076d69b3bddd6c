//! The request path: server, upstream client, header rules, streaming, cancellation.
//!
//! Promises: the body that vLLM sent is the body that the client gets, chunk by chunk; the one exception is
//! `inject_token_ids`, which takes out again what it asked for. No request waits for the observer. A client that leaves
//! cancels its request in vLLM. vLLM's inference routes pass, and nothing else unless it is allowed.
//!
//! What crosses this door: [`Proxy`] with its [`ProxyOptions`] in, one [`Exchange`] for each recorded request out, to
//! the [`Observer`].

mod body;
mod errors;
mod handler;
mod headers;
mod ids;
mod observer;
mod routes;
mod server;
mod upstream;

pub use handler::{Proxy, ProxyError, ProxyOptions};
pub use observer::{Begun, Endpoint, Exchange, Observer, Parsed, Source};
pub use server::Drained;

pub use crate::config::Routes;
pub use crate::openai::Status;
