//! vLLM's control routes, and the plugin that this binary carries.
//!
//! What it promises: vLLM is used through its documented doors alone; every call has a time limit; a swap that returns
//! without an error was read back from the server, and a refused head leaves the live one as it was.
//!
//! What crosses this door: [`Client`] (health, metrics, swap, status), [`plugin::write`] (the Python files), and
//! [`launch`] (the command that starts vLLM with them).

mod args;
mod client;
mod metrics;
pub mod plugin;

pub use args::{Launch, LaunchOptions, launch};
pub use client::{
    Client, ClientError, Model, PluginStatus, StagingState, StagingStatus, SwapReport, TapCounters, Timeouts,
};
pub use metrics::{Metrics, SpecCounters};
