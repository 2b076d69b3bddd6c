//! Put it in front of vLLM: it records traffic, trains the EAGLE-3 draft head on it, and swaps the better head in.

pub mod config;
pub mod control;
pub mod proxy;
pub mod openai;
pub mod record;
pub mod states;
pub mod head;
pub mod train;
pub mod compute;
pub mod promote;
pub mod vllm;
pub mod replay;
pub mod store;
pub mod cli;
