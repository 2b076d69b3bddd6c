//! The proxy's options from the configuration.

use std::num::NonZero;
use std::time::Duration;

use anyhow::Context;

use crate::config::{Config, TokenIds};
use crate::proxy::{ProxyOptions, TlsFiles};

pub(super) fn proxy_options(config: &Config) -> anyhow::Result<ProxyOptions> {
    let settings = &config.proxy;
    let certificate = settings.tls_certificate_file.clone();
    Ok(ProxyOptions {
        upstream: settings.upstream.parse().context("proxy.upstream")?,
        upstream_ca: settings.upstream_ca_file.clone(),
        upstream_key: settings.upstream_key_file.clone(),
        tls: certificate
            .zip(settings.tls_key_file.clone())
            .map(|(certificate, key)| TlsFiles { certificate, key }),
        client_keys: settings.client_keys_file.clone(),
        authorization: settings.authorization,
        routes: settings.routes,
        allow_routes: settings.allow_routes.clone(),
        inject_token_ids: config.record.enabled && config.record.token_ids == TokenIds::Request,
        max_request_bytes: settings.max_request_bytes,
        max_capture_bytes: settings.max_recorded_bytes,
        connect_timeout: Duration::from_secs(settings.connect_seconds),
        client_body_timeout: unless_zero(settings.client_body_seconds),
        first_byte_timeout: unless_zero(settings.first_byte_seconds),
        between_chunks_timeout: unless_zero(settings.between_chunks_seconds),
        sse_keep_alive: unless_zero(settings.sse_keep_alive_seconds),
        drain_timeout: Duration::from_secs(settings.drain_seconds),
        threads: NonZero::new(settings.threads),
    })
}

fn unless_zero(seconds: u64) -> Option<Duration> {
    Some(Duration::from_secs(seconds)).filter(|time| !time.is_zero())
}
