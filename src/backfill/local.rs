//! The verifier's own weights as a source, in this process.

use std::path::Path;
use std::sync::Arc;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::source::{SourceError, StateSource};
use crate::prefill::{LocalVerifier, PrefillError};
use crate::states::{OutcomeStatus, StateDtype, StockSample, TransferFile};

pub(super) struct LocalSource {
    verifier: Arc<LocalVerifier>,
}

impl LocalSource {
    /// Blocks for as long as the weights take to read.
    pub fn open(directory: &Path, layer_ids: &[u32]) -> Result<Self, PrefillError> {
        Ok(Self { verifier: Arc::new(LocalVerifier::open(directory, layer_ids)?) })
    }
}

impl StateSource for LocalSource {
    async fn states(&self, sample: StockSample, record_id: &str) -> Result<TransferFile, SourceError> {
        let verifier = Arc::clone(&self.verifier);
        let internal_id = record_id.to_owned();
        let prefill = tokio::task::spawn_blocking(move || prefill(&verifier, sample, internal_id));
        match prefill.await {
            Ok(Ok(file)) => Ok(file),
            Ok(Err(error @ PrefillError::Token { .. })) => {
                tracing::warn!(record_id, "{error}");
                Err(SourceError::Sample(OutcomeStatus::Vocabulary))
            }
            Ok(Err(error)) => Err(SourceError::Source(error.to_string())),
            Err(error) => Err(SourceError::Source(format!("a prefill ended early: {error}"))),
        }
    }
}

fn prefill(
    verifier: &LocalVerifier,
    sample: StockSample,
    internal_id: String,
) -> Result<TransferFile, PrefillError> {
    let values = verifier.prefill(sample.prefill())?;
    let dtype = verifier.stored_dtype();
    Ok(TransferFile {
        internal_id,
        layer_ids: verifier.layer_ids().to_vec(),
        prompt_length: sample.prompt_length,
        head_digest: None,
        head_swapped: false,
        drafting: None,
        rows: sample.prefill().len(),
        layers: verifier.layer_ids().len(),
        hidden: verifier.hidden_size(),
        dtype,
        token_ids: sample.token_ids,
        prefix_salt: String::new(),
        first_row: 0,
        states: encode(&values, dtype).into(),
    })
}

/// Little-endian; to bf16 by rounding to the nearest, ties to even.
fn encode(values: &[f32], dtype: StateDtype) -> Vec<u8> {
    if dtype != StateDtype::Bf16 {
        return values.iter().flat_map(|value| value.to_le_bytes()).collect();
    }
    let mut rounded = vec![bf16::ZERO; values.len()];
    rounded.convert_from_f32_slice(values);
    rounded.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_the_nearest_and_ties_go_to_even() {
        // One bf16 step above 1 is 2^-7.
        let step = 1.0 / 128.0;
        let values = [1.0 + 0.49 * step, 1.0 + 0.5 * step, 1.0 + 1.5 * step, -1.0 - 0.75 * step];
        let wanted = [1.0, 1.0, 1.0 + 2.0 * step, -1.0 - step];
        let bytes = encode(&values, StateDtype::Bf16);
        let found: Vec<f32> =
            bytes.as_chunks::<2>().0.iter().map(|pair| bf16::from_le_bytes(*pair).to_f32()).collect();
        assert_eq!(found, wanted);
        assert_eq!(encode(&values, StateDtype::F32).len(), 16);
    }
}
