//! A head's way into a running vLLM; the same for a swap, a promotion and a roll-back.

use std::path::Path;

use serde::Serialize;

use super::error::PromoteError;
use super::registry::Registry;
use crate::head::{Fixed, Head, check_swap, file_digest};
use crate::vllm::Client;

/// What a swap did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Swapped {
    /// What vLLM calls the weights now.
    pub label: String,
    /// sha256 of the file, as vLLM confirmed it.
    pub digest: String,
    /// The longest that the engine stood still, in milliseconds.
    pub update_ms: f64,
    /// All calls, in milliseconds.
    pub total_ms: f64,
}

/// Puts the head of `directory` into vLLM, after checking that a swap can bridge it and the live one. `label`: a
/// registered head's id; the beginning of the file's digest without one. Records nothing: see [`Registry::promote`].
pub async fn swap_in(
    client: &Client,
    registry: &Registry,
    head: &Head,
    directory: &Path,
    label: Option<&str>,
) -> Result<Swapped, PromoteError> {
    // A damaged live head must not stand in the way of a roll-back; the plugin refuses a file that does not fit, too.
    if let Some(pointer) = registry.live()?
        && let Ok(live) = registry.show(&pointer.id)
    {
        let fixed = |config| Fixed { config, draft_ids: &head.draft_ids };
        check_swap(fixed(&live.config), fixed(&head.config), true)?;
    }
    let directory = directory.canonicalize().map_err(PromoteError::io(directory))?;
    let file = directory.join("model.safetensors");
    let digest = file_digest(&file).map_err(PromoteError::io(&file))?;
    let label = label.map_or_else(|| digest.chars().take(12).collect(), str::to_owned);
    let report = client.swap(&file, &digest, &label).await?;
    let milliseconds = |duration: std::time::Duration| duration.as_secs_f64() * 1e3;
    let (update_ms, total_ms) = (milliseconds(report.update), milliseconds(report.total));
    Ok(Swapped { label, digest, update_ms, total_ms })
}
