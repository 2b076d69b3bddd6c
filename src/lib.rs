//! Put it in front of vLLM: it records traffic, trains the EAGLE-3 draft head on it, and swaps the better head in.

pub mod backfill;
pub mod bench;
pub mod cli;
pub mod compute;
pub mod config;
pub mod control;
pub mod demo;
pub mod forget;
pub mod head;
pub mod keys;
pub mod learn;
pub mod openai;
pub mod promote;
pub mod proxy;
pub mod record;
pub mod replay;
pub mod sidecar;
pub mod states;
pub mod store;
pub mod train;
pub mod vllm;
