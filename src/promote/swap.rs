//! A head's way into a running vLLM; the same for a swap, a promotion and a roll-back.
//!
//! What a swap cannot change is compared with what vLLM itself says of the head that it was started with, never with what
//! we remember: vLLM may have been restarted, or been given a head by somebody else.

use std::path::Path;

use serde::Serialize;

use super::error::PromoteError;
use super::registry::Registry;
use crate::head::{
    Head, HeadConfig, VerifierIdentity, VerifierShape, VerifierTensors, check_swap, file_digest,
};
use crate::vllm::{Client, PluginStatus};

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

/// Puts the head of `directory` into vLLM, after checking that a swap can bridge it and the head that vLLM was started
/// with. `label`: a registered head's id; the beginning of the file's digest without one. `verifier`: only needed where
/// vLLM was started with a head that names three layers. Records nothing: see [`Registry::promote`].
pub async fn swap_in(
    client: &Client,
    head: &Head,
    directory: &Path,
    label: Option<&str>,
    verifier: Option<&VerifierShape>,
) -> Result<Swapped, PromoteError> {
    check_swap(&started_with(&client.status().await?, verifier)?, &head.config)?;
    let directory = directory.canonicalize().map_err(PromoteError::io(directory))?;
    let file = directory.join("model.safetensors");
    let digest = file_digest(&file).map_err(PromoteError::io(&file))?;
    let label = label.map_or_else(|| digest.chars().take(12).collect(), str::to_owned);
    let report = client.swap(&file, &digest, &label).await?;
    let milliseconds = |duration: std::time::Duration| duration.as_secs_f64() * 1e3;
    let (update_ms, total_ms) = (milliseconds(report.update), milliseconds(report.total));
    Ok(Swapped { label, digest, update_ms, total_ms })
}

fn started_with(status: &PluginStatus, verifier: Option<&VerifierShape>) -> Result<HeadConfig, PromoteError> {
    let config = status.config.as_ref().ok_or(PromoteError::OldPlugin)?;
    Ok(HeadConfig::from_json(Path::new("the head that vLLM was started with"), config, verifier)?)
}

/// Refuses where vLLM runs the head by other rules than the head's own config has: somebody put the file in past our
/// swap, and what is scored here would not be what runs there.
pub fn check_running(
    status: &PluginStatus,
    running: &HeadConfig,
    verifier: Option<&VerifierShape>,
) -> Result<(), PromoteError> {
    Ok(check_swap(&started_with(status, verifier)?, running)?)
}

/// Imports the head that vLLM runs where the registry does not have it, such as the head of day 0 or one that was swapped
/// in from a directory, so that it can be scored, and rolled back to.
pub fn import_running(
    registry: &Registry,
    status: &PluginStatus,
    shape: &VerifierShape,
    identity: &VerifierIdentity,
    tensors: &VerifierTensors,
) -> Result<String, PromoteError> {
    let Some(digest) = &status.digest else { return Err(PromoteError::RunningUnknown) };
    let file = status.file.as_deref().ok_or(PromoteError::RunningUnknown)?;
    let now = file_digest(file).map_err(PromoteError::io(file))?;
    if now != *digest {
        return Err(PromoteError::RunningChanged { file: file.to_path_buf() });
    }
    let directory = file.parent().ok_or(PromoteError::RunningUnknown)?;
    Ok(registry.import(directory, shape, identity, Some(tensors))?.id)
}
