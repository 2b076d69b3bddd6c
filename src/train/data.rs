//! What the step reads: documents, what the verifier gives, and where samples come from.

use std::error::Error;

use crate::head::VerifierTensors;

use super::TrainError;

/// One recorded answer with its prompt.
#[derive(Clone, Copy, Debug)]
pub struct Document<'a> {
    /// [T + 1]
    pub token_ids: &'a [u32],
    /// How many of the tokens are the prompt's; at least 1.
    pub prompt_length: usize,
    /// [T, 4H]: low, middle and high aux state, then the last layer's output before the final norm.
    pub states: &'a [f32],
}

/// A [`Document`] that owns its data.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OwnedSample {
    /// [T + 1]
    pub token_ids: Vec<u32>,
    pub prompt_length: usize,
    /// [T, 4H]
    pub states: Vec<f32>,
}

impl OwnedSample {
    pub fn document(&self) -> Document<'_> {
        Document { token_ids: &self.token_ids, prompt_length: self.prompt_length, states: &self.states }
    }
}

/// Samples by number. `load` gives the same sample for the same number as long as a run lasts.
pub trait SampleSource: Sync {
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sample `index` < `len()`; None where it is gone since (evicted), and stays gone.
    fn load(&self, index: usize) -> Result<Option<OwnedSample>, Box<dyn Error + Send + Sync>>;
}

impl SampleSource for Vec<OwnedSample> {
    fn len(&self) -> usize {
        Vec::len(self)
    }

    fn load(&self, index: usize) -> Result<Option<OwnedSample>, Box<dyn Error + Send + Sync>> {
        let sample = self.get(index).cloned();
        sample.map(Some).ok_or_else(|| format!("there are only {} samples", Vec::len(self)).into())
    }
}

/// What the verifier gives to training, cut down to the draft vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftTarget<'a> {
    /// [Vd], ascending: verifier token of each draft token.
    pub draft_ids: Vec<u32>,
    /// [Vd, H], the verifier's output head at `draft_ids`.
    pub head_rows: Vec<f32>,
    /// [H], the verifier's final norm.
    pub norm: Vec<f32>,
    /// Of the verifier's norm.
    pub eps: f64,
    /// [V, H], the verifier's token embedding.
    pub embed: &'a [f32],
}

impl<'a> DraftTarget<'a> {
    /// Picks the rows of `draft_ids` out of the verifier's head.
    pub fn from_verifier(verifier: &'a VerifierTensors, draft_ids: Vec<u32>) -> Result<Self, TrainError> {
        let width = verifier.norm.len();
        let mut head_rows = Vec::with_capacity(draft_ids.len() * width);
        for id in &draft_ids {
            let start = *id as usize * width;
            let row = verifier.lm_head.get(start..start + width).ok_or_else(|| {
                let rows = verifier.lm_head.len() / width.max(1);
                TrainError::Config(format!(
                    "draft token {id} is not in the verifier's vocabulary of {rows} tokens"
                ))
            })?;
            head_rows.extend_from_slice(row);
        }
        Ok(Self {
            draft_ids,
            head_rows,
            norm: verifier.norm.clone(),
            eps: verifier.rms_norm_eps,
            embed: &verifier.embed_tokens,
        })
    }
}
