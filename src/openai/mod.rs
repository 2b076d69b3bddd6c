//! The wire shapes that we read: SSE frames, deltas, usage, errors. Lenient; unknown fields are kept.
//!
//! Promises: nothing here panics or fails on any input; what cannot be read is left out. A streamed answer and the same
//! answer in one body give the same [`Answer`]. Edits ([`ids`]) work on byte spans, so every other byte stays.

pub mod anthropic;
pub mod exchange;
pub mod ids;
mod piece;
pub mod request;
pub mod responses;
pub mod spans;
pub mod sse;
pub mod status;

pub use exchange::{Answer, AnswerBuilder, Choice, Dialect, Usage};
pub use request::RequestView;
pub use status::Status;
