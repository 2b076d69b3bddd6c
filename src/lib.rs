//! Put it in front of vLLM: it records traffic, trains the EAGLE-3 draft head on it, and swaps the better head in.

pub mod backfill;
pub mod bench;
pub mod cli;
pub mod compute;
pub mod config;
pub mod control;
pub mod demo;
mod event_loop;
pub mod forget;
pub mod handoff;
pub mod head;
pub mod http;
pub mod keys;
pub mod learn;
pub mod openai;
pub mod prefill;
pub mod promote;
pub mod proxy;
pub mod record;
pub mod replay;
pub mod sidecar;
pub mod states;
pub mod store;
pub mod train;
pub mod vllm;

/// An error and its causes, for people. Many of our errors have their cause's words in their own: those are told once.
pub(crate) fn told(error: &anyhow::Error) -> String {
    let mut words = String::new();
    for cause in error.chain() {
        let more = cause.to_string();
        if words.contains(&more) {
            continue;
        }
        if !words.is_empty() {
            words.push_str(": ");
        }
        words.push_str(&more);
    }
    words
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    #[test]
    fn a_cause_that_the_error_tells_itself_is_told_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("file x: {source}; give another")]
        struct Bad {
            source: std::io::Error,
        }
        let cause = std::io::Error::other("gone");
        let error = Err::<(), _>(Bad { source: cause }).context("verifier.directory").unwrap_err();
        assert_eq!(super::told(&error), "verifier.directory: file x: gone; give another");
    }
}
