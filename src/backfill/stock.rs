//! A second vLLM as a source: stock, with its own hidden-states connector.

use std::path::PathBuf;

use anyhow::Context;

use super::source::{SourceError, StateSource};
use crate::states::{OutcomeStatus, StockSample, TransferFile};
use crate::vllm::{Client, ClientError, Timeouts};

pub(super) struct StockServer {
    client: Client,
    model: String,
    directory: PathBuf,
}

impl StockServer {
    pub async fn connect(address: &str, directory: PathBuf) -> anyhow::Result<Self> {
        let client = Client::new(address, Timeouts::default())?;
        let model =
            client.models().await?.into_iter().next().context("the vLLM to fill in from names no model")?;
        Ok(Self { client, model: model.id, directory })
    }
}

impl StateSource for StockServer {
    async fn states(&self, sample: StockSample, record_id: &str) -> Result<TransferFile, SourceError> {
        // The record's id, since all choices of a request share the request's.
        let request_id = record_id.to_owned();
        match self.client.extract_states(&self.model, sample.prefill(), &request_id).await {
            Ok(Some(reported)) => {
                let directory = self.directory.clone();
                let taken =
                    tokio::task::spawn_blocking(move || sample.take(&directory, &reported, &request_id));
                let file = taken.await.unwrap_or_else(|error| {
                    tracing::error!("reading a states file: {error}");
                    Err(OutcomeStatus::Unreadable)
                });
                file.map_err(SourceError::Sample)
            }
            Ok(None) => {
                tracing::warn!("vLLM names no states file; was it started with extract_hidden_states?");
                Err(SourceError::Sample(OutcomeStatus::Missing))
            }
            Err(error) if matches!(error, ClientError::Refused { .. }) && !error.is_transient() => {
                tracing::warn!(record_id, "{error}");
                Err(SourceError::Sample(OutcomeStatus::Refused))
            }
            Err(error) => Err(SourceError::Source(error.to_string())),
        }
    }
}
