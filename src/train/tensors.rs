//! The tensors of a head as a list, in one fixed order.

use crate::head::{HeadConfig, HeadTensors};

use super::TrainError;

/// Names and values; names are those of the Speculators checkpoint, without the `.weight`.
pub fn named<T>(tensors: &HeadTensors<T>) -> Vec<(String, &[T])> {
    let mut list: Vec<(String, &[T])> = vec![("fc".into(), &tensors.fc)];
    for (i, norm) in tensors.fc_norm.iter().enumerate() {
        list.push((format!("fc_norm.{i}"), norm));
    }
    let rest: [(&str, &[T]); 12] = [
        ("layers.0.input_layernorm", &tensors.input_layernorm),
        ("layers.0.hidden_norm", &tensors.hidden_norm),
        ("layers.0.self_attn.q_proj", &tensors.q_proj),
        ("layers.0.self_attn.k_proj", &tensors.k_proj),
        ("layers.0.self_attn.v_proj", &tensors.v_proj),
        ("layers.0.self_attn.o_proj", &tensors.o_proj),
        ("layers.0.post_attention_layernorm", &tensors.post_attention_layernorm),
        ("layers.0.mlp.gate_proj", &tensors.gate_proj),
        ("layers.0.mlp.up_proj", &tensors.up_proj),
        ("layers.0.mlp.down_proj", &tensors.down_proj),
        ("norm", &tensors.norm),
        ("lm_head", &tensors.lm_head),
    ];
    list.extend(rest.into_iter().map(|(name, values)| (name.to_owned(), values)));
    list
}

/// As [`named`], to change the values.
pub fn named_mut<T>(tensors: &mut HeadTensors<T>) -> Vec<(String, &mut Vec<T>)> {
    let mut list: Vec<(String, &mut Vec<T>)> = vec![("fc".into(), &mut tensors.fc)];
    for (i, norm) in tensors.fc_norm.iter_mut().enumerate() {
        list.push((format!("fc_norm.{i}"), norm));
    }
    let rest: [(&str, &mut Vec<T>); 12] = [
        ("layers.0.input_layernorm", &mut tensors.input_layernorm),
        ("layers.0.hidden_norm", &mut tensors.hidden_norm),
        ("layers.0.self_attn.q_proj", &mut tensors.q_proj),
        ("layers.0.self_attn.k_proj", &mut tensors.k_proj),
        ("layers.0.self_attn.v_proj", &mut tensors.v_proj),
        ("layers.0.self_attn.o_proj", &mut tensors.o_proj),
        ("layers.0.post_attention_layernorm", &mut tensors.post_attention_layernorm),
        ("layers.0.mlp.gate_proj", &mut tensors.gate_proj),
        ("layers.0.mlp.up_proj", &mut tensors.up_proj),
        ("layers.0.mlp.down_proj", &mut tensors.down_proj),
        ("norm", &mut tensors.norm),
        ("lm_head", &mut tensors.lm_head),
    ];
    list.extend(rest.into_iter().map(|(name, values)| (name.to_owned(), values)));
    list
}

/// All tensors of a head, filled with `T::default()`: 0.
pub fn zeros<T: Copy + Default>(config: &HeadConfig) -> HeadTensors<T> {
    let of = |length: usize| vec![T::default(); length];
    let h = config.hidden_size;
    let query = config.num_attention_heads * config.head_dim;
    let key = config.num_key_value_heads * config.head_dim;
    let mlp = config.intermediate_size * h;
    HeadTensors {
        fc: of(3 * h * h),
        fc_norm: if config.fc_norm { vec![of(h); 3] } else { Vec::new() },
        input_layernorm: of(h),
        hidden_norm: of(h),
        q_proj: of(query * 2 * h),
        k_proj: of(key * 2 * h),
        v_proj: of(key * 2 * h),
        o_proj: of(h * query),
        post_attention_layernorm: of(h),
        gate_proj: of(mlp),
        up_proj: of(mlp),
        down_proj: of(mlp),
        norm: of(h),
        lm_head: of(config.draft_vocab_size * h),
    }
}

/// Whether every tensor has the length that the configuration wants.
pub fn check_shapes<T>(config: &HeadConfig, tensors: &HeadTensors<T>) -> Result<(), TrainError> {
    let norms = if config.fc_norm { 3 } else { 0 };
    if tensors.fc_norm.len() != norms {
        return Err(TrainError::Shape {
            tensor: "fc_norm".into(),
            got: tensors.fc_norm.len(),
            wanted: norms,
        });
    }
    let h = config.hidden_size;
    let query = config.num_attention_heads * config.head_dim;
    let key = config.num_key_value_heads * config.head_dim;
    for (name, values) in named(tensors) {
        let wanted = match name.as_str() {
            "fc" => 3 * h * h,
            "layers.0.self_attn.q_proj" => query * 2 * h,
            "layers.0.self_attn.k_proj" | "layers.0.self_attn.v_proj" => key * 2 * h,
            "layers.0.self_attn.o_proj" => h * query,
            "layers.0.mlp.gate_proj" | "layers.0.mlp.up_proj" | "layers.0.mlp.down_proj" => {
                config.intermediate_size * h
            }
            "lm_head" => config.draft_vocab_size * h,
            _ => h,
        };
        if values.len() != wanted {
            return Err(TrainError::Shape { tensor: name, got: values.len(), wanted });
        }
    }
    Ok(())
}
