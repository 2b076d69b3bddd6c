//! The head of day 0: what training starts from when there is none.

use super::checkpoint::Head;
use super::config_file::{HeadFormat, KeptFields};
use super::error::HeadError;
use super::random::normal;
use super::verifier::VerifierShape;
use super::vocabulary::check_draft_ids;
use super::{HeadConfig, HeadTensors, VerifierTensors};

/// What the output head starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputHead {
    /// The verifier's rows for the draft vocabulary: learns faster.
    FromVerifier,
    Random,
}

#[derive(Clone, Debug, PartialEq)]
pub struct FreshOptions {
    pub seed: u64,
    pub output_head: OutputHead,
    /// None: [`VerifierShape::default_aux_layer_ids`].
    pub aux_layer_ids: Option<[usize; 3]>,
}

const DEVIATION: f64 = 0.02;
/// Of `fc`: small beside the state that it passes through.
const FC_DEVIATION: f64 = 0.01;

/// A new EAGLE-3.1 head (fc_norm, norm_output) for a verifier: normal(0, 0.02) weights, norms of one, the verifier's
/// final norm, and an `fc` that passes the highest of the three states through, near what the head must say, with
/// normal(0, 0.01) on top. The same seed gives the same head, on any number of threads. Vd is the length of `draft_ids`.
pub fn fresh_head(
    shape: &VerifierShape,
    draft_ids: Vec<u32>,
    options: &FreshOptions,
    verifier: &VerifierTensors,
) -> Result<Head, HeadError> {
    check_draft_ids(&draft_ids, shape.vocab_size)?;
    if draft_ids.is_empty() {
        return Err(HeadError::Vocabulary { problem: "no tokens; expected at least one".into() });
    }
    let hidden = shape.hidden_size;
    for (name, found, rows) in [
        ("embed_tokens", verifier.embed_tokens.len(), shape.vocab_size),
        ("lm_head", verifier.lm_head.len(), shape.vocab_size),
        ("norm", verifier.norm.len(), 1),
    ] {
        if found != rows * hidden {
            let (name, expected) = (format!("verifier's {name}"), rows * hidden);
            return Err(HeadError::BadLength { name, found, expected, shape: vec![rows, hidden] });
        }
    }
    let config = HeadConfig {
        hidden_size: hidden,
        intermediate_size: shape.intermediate_size,
        num_attention_heads: shape.num_attention_heads,
        num_key_value_heads: shape.num_key_value_heads,
        head_dim: shape.head_dim,
        vocab_size: shape.vocab_size,
        draft_vocab_size: draft_ids.len(),
        max_position_embeddings: shape.max_position_embeddings,
        rms_norm_eps: shape.rms_norm_eps,
        rope: shape.rope.clone(),
        aux_layer_ids: choose_layers(shape, options)?,
        num_verifier_layers: shape.num_hidden_layers,
        fc_norm: true,
        norm_output: true,
        norm_before_residual: false,
    };
    let mut tensors = HeadTensors { fc_norm: vec![Vec::new(); 3], ..HeadTensors::default() };
    let shapes = config.tensor_shapes(HeadFormat::Flat);
    for ((name, dimensions), tensor) in shapes.iter().zip(tensors.in_order_mut()) {
        let count = dimensions.iter().product();
        *tensor = if dimensions.len() == 1 {
            vec![1.0; count]
        } else {
            let deviation = if name == "fc.weight" { FC_DEVIATION } else { DEVIATION };
            normal(options.seed, name, count, deviation)
        };
    }
    tensors.norm.clone_from(&verifier.norm);
    for (feature, row) in tensors.fc.chunks_exact_mut(3 * hidden).enumerate() {
        row[2 * hidden + feature] += 1.0;
    }
    if options.output_head == OutputHead::FromVerifier {
        for (row, id) in tensors.lm_head.chunks_exact_mut(hidden).zip(&draft_ids) {
            let from = *id as usize * hidden;
            row.copy_from_slice(&verifier.lm_head[from..from + hidden]);
        }
    }
    let kept = KeptFields::default();
    Ok(Head { config, tensors, draft_ids, format: HeadFormat::Flat, embed_tokens: None, kept })
}

fn choose_layers(shape: &VerifierShape, options: &FreshOptions) -> Result<[usize; 3], HeadError> {
    let layers = shape.num_hidden_layers;
    let chosen = options.aux_layer_ids.or_else(|| shape.default_aux_layer_ids());
    match chosen {
        Some(ids) if ids[0] < ids[1] && ids[1] < ids[2] && ids[2] < layers => Ok(ids),
        _ => Err(HeadError::BadField {
            path: "config.json".into(),
            field: "aux_layer_ids".into(),
            found: format!("{chosen:?}"),
            expected: format!("three ascending layers below {layers}, the verifier's"),
        }),
    }
}
