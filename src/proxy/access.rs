//! Who may ask, and in whose name vLLM is asked.

use std::path::{Path, PathBuf};

use hyper::Method;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};

use super::handler::{ProxyError, ProxyOptions};
use crate::config::Authorization;
use crate::keys::{API_KEY_HEADER, KeyFile};

/// What load balancers ask without a key, as they may of vLLM itself.
const OPEN_PATHS: [&str; 2] = ["/health", "/ping"];

/// The keys on both sides.
pub(super) struct Access {
    clients: Option<KeyFile>,
    keeps_client_credentials: bool,
    /// `Bearer KEY` for vLLM.
    upstream: Option<HeaderValue>,
}

impl Access {
    pub(super) fn open(options: &ProxyOptions) -> Result<Self, ProxyError> {
        let clients = options.client_keys.as_deref().map(KeyFile::open).transpose()?;
        let keeps_client_credentials = match options.authorization {
            Authorization::Pass => true,
            Authorization::Drop => false,
            // A key of ours is none of vLLM's.
            Authorization::Auto => clients.is_none(),
        };
        let upstream = options.upstream_key.as_deref().map(bearer).transpose()?;
        Ok(Self { clients, keeps_client_credentials, upstream })
    }

    pub(super) fn watched_files(&self) -> Vec<PathBuf> {
        self.clients.iter().map(|keys| keys.path().to_owned()).collect()
    }

    pub(super) fn reload(&self) {
        let Some(keys) = &self.clients else { return };
        match keys.reload() {
            Ok(true) => tracing::info!("the clients' keys were read again"),
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "the clients' keys of before stay in force"),
        }
    }

    /// A browser's preflight (`OPTIONS`) never bears a key.
    pub(super) fn admits(&self, method: &Method, path: &str, headers: &HeaderMap) -> bool {
        let Some(keys) = &self.clients else {
            return true;
        };
        *method == Method::OPTIONS || OPEN_PATHS.contains(&path) || keys.admits(headers)
    }

    pub(super) fn set_upstream_credentials(&self, headers: &mut HeaderMap) {
        if !self.keeps_client_credentials || self.upstream.is_some() {
            headers.remove(AUTHORIZATION);
            headers.remove(API_KEY_HEADER);
        }
        if let Some(value) = &self.upstream {
            headers.insert(AUTHORIZATION, value.clone());
        }
    }
}

fn bearer(path: &Path) -> Result<HeaderValue, ProxyError> {
    let failed = |reason: String| ProxyError::UpstreamKey { path: path.to_owned(), reason };
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let key = text.trim();
    let value = HeaderValue::try_from(format!("Bearer {key}")).ok().filter(|_| !key.is_empty());
    let mut checked = value.ok_or_else(|| failed("expected one line with vLLM's API key".to_owned()))?;
    checked.set_sensitive(true);
    Ok(checked)
}
