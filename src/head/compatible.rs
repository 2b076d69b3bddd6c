//! Whether a head can take the place of the one that vLLM is running.

use serde_json::Value;

use super::{HeadConfig, Rope};

/// The first difference that a swap cannot bridge.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "`{field}` is {candidate}, the head that vLLM was started with has {live}; a swap cannot change it: restart vLLM with the new head"
)]
pub struct Incompatible {
    pub field: String,
    pub live: String,
    pub candidate: String,
}

/// Compares every field that vLLM built its modules, its rope tables and its taps from. The draft vocabulary's size is
/// one; its map is a tensor, which a swap brings along.
pub fn check_swap(live: &HeadConfig, candidate: &HeadConfig) -> Result<(), Incompatible> {
    for (field, left, right) in [
        ("hidden_size", live.hidden_size, candidate.hidden_size),
        ("intermediate_size", live.intermediate_size, candidate.intermediate_size),
        ("num_attention_heads", live.num_attention_heads, candidate.num_attention_heads),
        ("num_key_value_heads", live.num_key_value_heads, candidate.num_key_value_heads),
        ("head_dim", live.head_dim, candidate.head_dim),
        ("vocab_size", live.vocab_size, candidate.vocab_size),
        ("draft_vocab_size", live.draft_vocab_size, candidate.draft_vocab_size),
        ("max_position_embeddings", live.max_position_embeddings, candidate.max_position_embeddings),
        ("num_verifier_layers", live.num_verifier_layers, candidate.num_verifier_layers),
    ] {
        same(field, &left, &right)?;
    }
    same("rms_norm_eps", &live.rms_norm_eps, &candidate.rms_norm_eps)?;
    same("rope_theta", &live.rope.theta, &candidate.rope.theta)?;
    let (old_scaling, new_scaling) = (scaling(&live.rope), scaling(&candidate.rope));
    if old_scaling != new_scaling {
        return Err(Incompatible {
            field: "rope_scaling".into(),
            live: old_scaling.to_string(),
            candidate: new_scaling.to_string(),
        });
    }
    same("aux_layer_ids", &live.aux_layer_ids, &candidate.aux_layer_ids)?;
    same("fc_norm", &live.fc_norm, &candidate.fc_norm)?;
    same("norm_output", &live.norm_output, &candidate.norm_output)?;
    same("norm_before_residual", &live.norm_before_residual, &candidate.norm_before_residual)
}

/// The scaling with one name for its kind: older configs say `type`, newer ones `rope_type`.
fn scaling(rope: &Rope) -> Value {
    let Some(Value::Object(object)) = &rope.scaling else {
        return rope.scaling.clone().unwrap_or(Value::Null);
    };
    let mut renamed = object.clone();
    if let Some(kind) = renamed.shift_remove("type") {
        renamed.entry("rope_type").or_insert(kind);
    }
    Value::Object(renamed)
}

fn same<T: PartialEq + std::fmt::Debug>(field: &str, live: &T, candidate: &T) -> Result<(), Incompatible> {
    if live == candidate {
        return Ok(());
    }
    Err(Incompatible { field: field.into(), live: format!("{live:?}"), candidate: format!("{candidate:?}") })
}
