//! The registry of heads, the gate, promotion and roll-back.
//!
//! What crosses this door: a [`Registry`] of heads under `data/heads/`, each with its [`Manifest`]; the pointer to the
//! live one ([`LivePointer`]); the gate, [`decide`]; and the way into a running vLLM, [`swap_in`]. What vLLM runs is asked of
//! vLLM: [`check_running, import_running`] takes a head that it does not know into the registry.
//!
//! Promises: a head that the registry lists is whole (written aside, renamed as one directory). A promotion is one
//! renamed file: a crash leaves the old pointer or the new one. The last good heads stay at hand for a roll-back.

mod error;
mod gate;
mod live;
mod manifest;
mod registry;
mod swap;

pub use error::PromoteError;
pub use gate::{ConversationScore, Decision, GateError, HeldOutScore, Verdict, decide};
pub use live::{LivePointer, PastHead};
pub use manifest::{MANIFEST_SCHEMA, Manifest, Origin, TrainingSummary};
pub use registry::{Candidate, Listing, Registry};
pub use swap::{Swapped, check_running, import_running, swap_in};
