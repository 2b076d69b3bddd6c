//! The verifier in this process: the hidden states of token ids by one prefill on the CPU, without any vLLM.
//!
//! For machines that have the verifier's weights and no second vLLM to spare. Everything is computed in f32, whatever the
//! weights are stored in, so that the states are at least as good as those of a vLLM that computes in bf16.
//!
//! Promises: a configuration that is not followed to the letter is refused by the name of its key. States of a model that
//! was nearly understood would look like any others, and a head trained on them would be worthless.

mod layer;
mod settings;

use std::path::Path;

use candle_core::{Device, Tensor};

use crate::head::{HeadError, TensorSource, VerifierShape};
use crate::states::StateDtype;
use layer::{Layer, Positions};
use settings::Settings;

/// What can go wrong with a local verifier.
#[derive(Debug, thiserror::Error)]
pub enum PrefillError {
    #[error(transparent)]
    Verifier(#[from] HeadError),
    #[error("layers {given:?}: give ascending ids from 1 to {layers}, the number of the verifier's layers")]
    Layers { given: Vec<u32>, layers: usize },
    #[error("there are no token ids to prefill; give at least one")]
    NoTokens,
    #[error("token id {id} is not in the verifier's vocabulary of {vocab_size}; the ids are another model's")]
    Token { id: u32, vocab_size: usize },
    #[error("the prefill of {tokens} tokens failed: {source}")]
    Compute { tokens: usize, source: candle_core::Error },
}

/// A verifier whose weights are in memory, up to the last layer that is asked for.
#[derive(Debug)]
pub struct LocalVerifier {
    settings: Settings,
    /// [V, H]
    embedding: Tensor,
    layers: Vec<Layer>,
    layer_ids: Vec<u32>,
}

impl LocalVerifier {
    /// Reads the weights of a verifier's directory. Four bytes a parameter, whatever they are stored in.
    ///
    /// Layer id k is the residual stream after k layers, so the id of the last layer is its output before the final norm.
    pub fn open(directory: &Path, layer_ids: &[u32]) -> Result<Self, PrefillError> {
        let shape = VerifierShape::read(directory)?;
        let settings = Settings::read(directory, shape)?;
        let layers = settings.shape.num_hidden_layers;
        let refused = || PrefillError::Layers { given: layer_ids.to_vec(), layers };
        let last = *layer_ids.last().ok_or_else(refused)? as usize;
        if layer_ids[0] == 0 || last > layers || !layer_ids.is_sorted_by(|one, next| one < next) {
            return Err(refused());
        }
        let mut weights = Weights { source: TensorSource::open(directory)? };
        let embedding = weights
            .read("model.embed_tokens.weight", &[settings.shape.vocab_size, settings.shape.hidden_size])?;
        let mut loaded = Vec::with_capacity(last);
        for index in 0..last {
            loaded.push(Layer::read(&mut weights, &settings, index)?);
        }
        Ok(Self { settings, embedding, layers: loaded, layer_ids: layer_ids.to_vec() })
    }

    /// The states of every id: [T, L, H], row-major.
    pub fn prefill(&self, token_ids: &[u32]) -> Result<Vec<f32>, PrefillError> {
        if token_ids.is_empty() {
            return Err(PrefillError::NoTokens);
        }
        let vocab_size = self.settings.shape.vocab_size;
        if let Some(id) = token_ids.iter().find(|id| **id as usize >= vocab_size) {
            return Err(PrefillError::Token { id: *id, vocab_size });
        }
        self.compute(token_ids).map_err(|source| PrefillError::Compute { tokens: token_ids.len(), source })
    }

    fn compute(&self, token_ids: &[u32]) -> candle_core::Result<Vec<f32>> {
        let positions = Positions::new(&self.settings, token_ids.len())?;
        let ids = Tensor::new(token_ids, &Device::Cpu)?;
        let mut residual = self.embedding.index_select(&ids, 0)?;
        let mut captured = Vec::with_capacity(self.layer_ids.len());
        for (index, layer) in self.layers.iter().enumerate() {
            residual = layer.forward(&residual, &positions, &self.settings)?;
            if self.layer_ids.contains(&(index as u32 + 1)) {
                captured.push(residual.clone());
            }
        }
        Tensor::stack(&captured, 1)?.flatten_all()?.to_vec1()
    }

    /// What the weights are stored in, as far as states can be: bf16, else f32.
    pub fn stored_dtype(&self) -> StateDtype {
        self.settings.stored_dtype
    }

    pub fn layer_ids(&self) -> &[u32] {
        &self.layer_ids
    }

    /// H.
    pub fn hidden_size(&self) -> usize {
        self.settings.shape.hidden_size
    }
}

/// The tensors on disk, as tensors of f32.
struct Weights {
    source: TensorSource,
}

impl Weights {
    fn read(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, PrefillError> {
        let values = self.source.read_f32(name, shape, true)?;
        Tensor::from_vec(values, shape, &Device::Cpu)
            .map_err(|source| PrefillError::Compute { tokens: 0, source })
    }
}
