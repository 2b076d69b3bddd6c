//! EAGLE-3 heads: configuration, both checkpoint formats, vocabulary map, compatibility checks.
//!
//! What crosses this door: [`HeadConfig`] (what a swap can never change) and [`HeadTensors`] (what training changes),
//! together a [`Head`]; [`VerifierShape`] and [`VerifierTensors`], read from the verifier's directory.
//!
//! Promises: a head that was read is whole and understood. An unknown tensor, an unsupported flag, a wrong shape is an
//! error with its name, since vLLM would serve such a head without a word, and accept next to nothing.

mod checkpoint;
mod compatible;
mod config_file;
mod error;
mod fields;
mod fresh;
mod random;
mod rope;
mod tensor_file;
mod verifier;
mod vocabulary;

pub use checkpoint::{Head, HeadDtype, WriteOptions};
pub use compatible::{Incompatible, check_swap};
pub use config_file::{HeadFormat, KeptFields, VerifierReference};
pub use error::HeadError;
pub(crate) use fields::{Fields, read_object};
pub use fresh::{FreshOptions, OutputHead, fresh_head};
pub(crate) use random::normal;
pub use tensor_file::TensorSource;
pub use verifier::{VerifierIdentity, VerifierShape, file_digest};
pub use vocabulary::{check_draft_ids, default_draft_vocabulary_size, draft_vocabulary, vocabulary_digest};

use serde::{Deserialize, Serialize};

/// The shape and the flags of an EAGLE-3 head. A swap cannot change any of it.
///
/// Layer ids follow vLLM's meaning: id k is the residual stream after k layers; id N (the number of layers) is the last
/// layer's output before the final norm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadConfig {
    /// H.
    pub hidden_size: usize,
    /// I, the width of the MLP.
    pub intermediate_size: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    /// D; explicit, since heads * D need not be H.
    pub head_dim: usize,
    /// V, the verifier's vocabulary.
    pub vocab_size: usize,
    /// Vd, the draft vocabulary.
    pub draft_vocab_size: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    pub rope: Rope,
    /// The three layers whose states feed `fc`, ascending.
    pub aux_layer_ids: [usize; 3],
    /// N: the fourth captured state is this layer's, before the final norm. It feeds the training target alone.
    pub num_verifier_layers: usize,
    /// EAGLE-3.1: an RMSNorm for each aux state before `fc`.
    pub fc_norm: bool,
    /// EAGLE-3.1: the normed output is fed back to the next step, else the un-normed one.
    pub norm_output: bool,
    /// The residual is the normed hidden state instead of the plain one.
    pub norm_before_residual: bool,
}

/// Rotary embedding of the head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    pub theta: f64,
    /// The verifier's `rope_scaling` object as it is, or null; kept in the checkpoint for vLLM.
    pub scaling: Option<serde_json::Value>,
}

/// The weights of a head, row-major, generic over f32 (training) and f64 (gradient checks).
#[derive(Clone, Debug, PartialEq, Default)]
pub struct HeadTensors<T> {
    /// [H, 3H]
    pub fc: Vec<T>,
    /// Three of [H] with `fc_norm`, else none.
    pub fc_norm: Vec<Vec<T>>,
    /// [H], on the embedding.
    pub input_layernorm: Vec<T>,
    /// [H], on the hidden state.
    pub hidden_norm: Vec<T>,
    /// [heads * D, 2H]
    pub q_proj: Vec<T>,
    /// [kv_heads * D, 2H]
    pub k_proj: Vec<T>,
    /// [kv_heads * D, 2H]
    pub v_proj: Vec<T>,
    /// [H, heads * D]
    pub o_proj: Vec<T>,
    /// [H]
    pub post_attention_layernorm: Vec<T>,
    /// [I, H]
    pub gate_proj: Vec<T>,
    /// [I, H]
    pub up_proj: Vec<T>,
    /// [H, I]
    pub down_proj: Vec<T>,
    /// [H]
    pub norm: Vec<T>,
    /// [Vd, H]
    pub lm_head: Vec<T>,
}

/// What the head takes from its verifier and never trains.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifierTensors {
    /// [V, H], the token embedding.
    pub embed_tokens: Vec<f32>,
    /// [H], the final norm.
    pub norm: Vec<f32>,
    /// [V, H], the output head (the embedding itself where they are tied).
    pub lm_head: Vec<f32>,
    pub rms_norm_eps: f64,
}
