//! What the types cannot say about a configuration.

use std::fmt::Debug;

use super::{Config, ConfigError, PrivacyConfig, TokenIds, UpstreamAddress};

/// Of any time, in its unit; about thirty years in seconds.
const LONGEST: u64 = 1_000_000_000;
const MOST_THREADS: usize = 64;

/// Refuses the first value that cannot work, by its key.
pub(super) fn check(config: &Config) -> Result<(), ConfigError> {
    if let Err(error) = config.proxy.upstream.parse::<UpstreamAddress>() {
        return Err(refused("proxy.upstream", &config.proxy.upstream, &error.to_string()));
    }
    let proxy = &config.proxy;
    require(
        proxy.tls_certificate_file.is_some() == proxy.tls_key_file.is_some(),
        "proxy.tls_key_file",
        &proxy.tls_key_file,
        "set tls_certificate_file and tls_key_file together",
    )?;
    positive("proxy.connect_seconds", proxy.connect_seconds)?;
    let https = matches!(proxy.upstream.parse(), Ok(UpstreamAddress::Tcp { tls: true, .. }));
    require(
        proxy.upstream_ca_file.is_none() || https,
        "proxy.upstream_ca_file",
        &proxy.upstream_ca_file,
        "it is for an upstream of https://; leave it out",
    )?;

    for route in &config.proxy.allow_routes {
        let plain = route.starts_with('/') && !route.contains(['?', '#', '%']);
        let braces = route.replace("{}", "").contains(['{', '}']);
        require(
            plain && !braces,
            "proxy.allow_routes",
            route,
            "give each path as vLLM spells it: from its / on, without a query or percent signs, {} for one segment",
        )?;
    }

    // Beyond these no clock of the system reaches.
    for (key, value) in [
        ("proxy.connect_seconds", proxy.connect_seconds),
        ("proxy.first_byte_seconds", proxy.first_byte_seconds),
        ("proxy.between_chunks_seconds", proxy.between_chunks_seconds),
        ("proxy.client_body_seconds", proxy.client_body_seconds),
        ("proxy.sse_keep_alive_seconds", proxy.sse_keep_alive_seconds),
        ("proxy.drain_seconds", proxy.drain_seconds),
        ("record.flush_interval_ms", config.record.flush_interval_ms),
        ("record.seal_after_seconds", config.record.seal_after_seconds),
        ("record.join_timeout_seconds", config.record.join_timeout_seconds),
        ("record.merge_after_seconds", config.record.merge_after_seconds),
        ("states.unmatched_seconds", config.states.unmatched_seconds),
    ] {
        require(value <= LONGEST, key, &value, "choose at most 1000000000")?;
    }

    let control = config.control.listen;
    require(
        control.ip().is_loopback(),
        "control.listen",
        &control,
        "the control port must be on a loopback address",
    )?;
    // A wildcard takes the port of every address.
    let listen = config.proxy.listen;
    let one_address = control.ip() == listen.ip() || listen.ip().is_unspecified();
    let shared = one_address && control.port() == listen.port() && control.port() != 0;
    require(!shared, "control.listen", &control, "choose another port than proxy.listen")?;

    let fraction = config.data.held_out_fraction;
    require(
        (0.0..1.0).contains(&fraction),
        "data.held_out_fraction",
        &fraction,
        "choose from 0 up to, not including, 1",
    )?;

    require(proxy.threads <= MOST_THREADS, "proxy.threads", &proxy.threads, "choose from 0 to 64")?;
    positive("proxy.max_request_bytes", proxy.max_request_bytes as u64)?;
    positive("proxy.max_recorded_bytes", proxy.max_recorded_bytes as u64)?;
    let record = &config.record;
    positive("record.flush_bytes", record.flush_bytes as u64)?;
    positive("record.queue_bytes", record.queue_bytes as u64)?;
    positive("record.segment_bytes", record.segment_bytes)?;
    positive("record.seal_after_seconds", record.seal_after_seconds)?;

    let privacy = &config.privacy;
    require(
        (0.0..=1.0).contains(&privacy.sample_rate),
        "privacy.sample_rate",
        &privacy.sample_rate,
        "choose from 0 to 1",
    )?;
    let recordable = PrivacyConfig::default().routes;
    for route in &privacy.routes {
        let remedy = format!("choose from {}", recordable.join(", "));
        require(recordable.contains(route), "privacy.routes", route, &remedy)?;
    }
    for (name, pattern) in &privacy.patterns {
        let remedy = format!("give {name} a regular expression of the Rust regex crate");
        require(regex::Regex::new(pattern).is_ok(), "privacy.patterns", pattern, &remedy)?;
    }
    if let Some(name) = &privacy.tenant_header {
        let usable = hyper::header::HeaderName::try_from(name.as_str()).is_ok();
        require(usable, "privacy.tenant_header", name, "give the name of a request header")?;
    }

    let states = &config.states;
    positive("states.segment_bytes", states.segment_bytes)?;
    positive("states.unmatched_seconds", states.unmatched_seconds)?;
    let holds_two = states.quota_bytes >= 2 * states.segment_bytes;
    require(
        holds_two,
        "states.quota_bytes",
        &states.quota_bytes,
        "give room for at least two of states.segment_bytes",
    )?;

    let train = &config.train;
    require(
        (1..=16).contains(&train.unroll_steps),
        "train.unroll_steps",
        &train.unroll_steps,
        "choose from 1 to 16",
    )?;
    require(
        train.step_decay > 0.0 && train.step_decay <= 1.0,
        "train.step_decay",
        &train.step_decay,
        "choose from above 0 to 1",
    )?;
    for (key, value) in
        [("train.learning_rate", train.learning_rate), ("train.gradient_clip", train.gradient_clip)]
    {
        require(value.is_finite() && value > 0.0, key, &value, "choose a number above 0")?;
    }
    not_negative("train.weight_decay", train.weight_decay)?;
    positive("train.batch_documents", train.batch_documents as u64)?;
    positive("train.passes", train.passes as u64)?;
    positive("train.follow_samples", train.follow_samples as u64)?;
    require(
        (0.0..1.0).contains(&train.rehearsal_share),
        "train.rehearsal_share",
        &train.rehearsal_share,
        "choose from 0 up to, not including, 1",
    )?;
    not_negative("gate.min_gain", config.gate.min_gain)
}

/// What works, and is likely not meant.
pub(super) fn doubts(config: &Config) -> Vec<String> {
    let mut doubts = Vec::new();
    let record = &config.record;
    if record.enabled && record.token_ids == TokenIds::Plugin && config.states.transfer_directory.is_none() {
        doubts.push(
            "records will have no token ids, and nothing can be trained: set states.transfer_directory, with the plugin \
             in vLLM, or record.token_ids = \"request\" without it"
                .to_owned(),
        );
    }
    if config.states.transfer_directory.is_some() && config.verifier.directory.is_none() {
        doubts.push(
            "token ids will not be checked against the recorded text: set verifier.directory, which has the tokenizer"
                .to_owned(),
        );
    }
    doubts
}

fn not_negative(key: &'static str, value: f64) -> Result<(), ConfigError> {
    require(value.is_finite() && value >= 0.0, key, &value, "choose a number from 0 on")
}

fn positive(key: &'static str, value: u64) -> Result<(), ConfigError> {
    require(value > 0, key, &value, "must be above 0")
}

fn require(holds: bool, key: &'static str, value: &dyn Debug, remedy: &str) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(refused(key, value, remedy)) }
}

fn refused(key: &'static str, value: &dyn Debug, remedy: &str) -> ConfigError {
    ConfigError::Value { key, value: format!("{value:?}"), remedy: remedy.to_owned() }
}
