//! Whether a head can take the place of the one that vLLM is running.

use serde_json::Value;

use super::{HeadConfig, Rope};

/// The first difference that a swap cannot bridge.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "`{field}` is {candidate}, the live head has {live}; a swap cannot change it: restart vLLM with the new head"
)]
pub struct Incompatible {
    pub field: String,
    pub live: String,
    pub candidate: String,
}

/// What of a head vLLM fixes when it starts.
#[derive(Clone, Copy, Debug)]
pub struct Fixed<'a> {
    pub config: &'a HeadConfig,
    pub draft_ids: &'a [u32],
}

/// Compares every field that vLLM built its modules, its rope tables and its taps from. The draft vocabulary's map is a
/// tensor: `vocabulary_may_change` says whether this server takes a new one with a swap (its size never changes).
pub fn check_swap(
    live: Fixed<'_>,
    candidate: Fixed<'_>,
    vocabulary_may_change: bool,
) -> Result<(), Incompatible> {
    let (old, new) = (live.config, candidate.config);
    for (field, left, right) in [
        ("hidden_size", old.hidden_size, new.hidden_size),
        ("intermediate_size", old.intermediate_size, new.intermediate_size),
        ("num_attention_heads", old.num_attention_heads, new.num_attention_heads),
        ("num_key_value_heads", old.num_key_value_heads, new.num_key_value_heads),
        ("head_dim", old.head_dim, new.head_dim),
        ("vocab_size", old.vocab_size, new.vocab_size),
        ("draft_vocab_size", old.draft_vocab_size, new.draft_vocab_size),
        ("max_position_embeddings", old.max_position_embeddings, new.max_position_embeddings),
        ("num_verifier_layers", old.num_verifier_layers, new.num_verifier_layers),
    ] {
        same(field, &left, &right)?;
    }
    same("rms_norm_eps", &old.rms_norm_eps, &new.rms_norm_eps)?;
    same("rope_theta", &old.rope.theta, &new.rope.theta)?;
    let (old_scaling, new_scaling) = (scaling(&old.rope), scaling(&new.rope));
    if old_scaling != new_scaling {
        return Err(Incompatible {
            field: "rope_scaling".into(),
            live: old_scaling.to_string(),
            candidate: new_scaling.to_string(),
        });
    }
    same("aux_layer_ids", &old.aux_layer_ids, &new.aux_layer_ids)?;
    same("fc_norm", &old.fc_norm, &new.fc_norm)?;
    same("norm_output", &old.norm_output, &new.norm_output)?;
    same("norm_before_residual", &old.norm_before_residual, &new.norm_before_residual)?;
    if vocabulary_may_change {
        return Ok(());
    }
    let different = live.draft_ids.iter().zip(candidate.draft_ids).position(|(left, right)| left != right);
    if let Some(index) = different {
        let field = format!("d2t[{index}]");
        return same(&field, &live.draft_ids[index], &candidate.draft_ids[index]);
    }
    Ok(())
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
