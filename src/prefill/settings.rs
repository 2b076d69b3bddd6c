//! Which of a verifier's settings the prefill follows, and which it refuses.

use std::path::Path;

use serde_json::Value;

use crate::compute::RopeTable;
use crate::head::{Fields, HeadError, VerifierShape, read_object};
use crate::states::StateDtype;

/// The families that differ in what surrounds the attention, and in nothing else that matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Architecture {
    Llama,
    /// Biases on queries, keys and values.
    Qwen2,
    /// A norm over each head of queries and keys.
    Qwen3,
}

/// What the prefill needs to know besides the weights.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub architecture: Architecture,
    pub shape: VerifierShape,
    /// No position in use yet; each prefill reserves its own in a copy.
    pub rope: RopeTable<f32>,
    pub stored_dtype: StateDtype,
}

/// Flags that add something to the computation which is not followed.
const FLAGS_THAT_MUST_BE_OFF: [&str; 3] = ["attention_bias", "mlp_bias", "use_sliding_window"];

impl Settings {
    pub fn read(directory: &Path, shape: VerifierShape) -> Result<Self, HeadError> {
        let path = directory.join("config.json");
        let object = read_object(&path)?;
        let fields = Fields { path: &path, prefix: "", object: &object };
        let architecture = architecture(fields, &shape)?;
        for flag in FLAGS_THAT_MUST_BE_OFF {
            if fields.flag(flag, false)? {
                return Err(fields.unsupported(flag, true, "the local verifier computes without it"));
            }
        }
        if let Some(activation) = fields.optional_text("hidden_act")?
            && activation != "silu"
        {
            return Err(fields.unsupported("hidden_act", activation, "the local verifier knows silu alone"));
        }
        for kind in fields.texts("layer_types")? {
            if kind != "full_attention" {
                let reason = "the local verifier attends to everything, in every layer";
                return Err(fields.unsupported("layer_types", kind, reason));
            }
        }
        if let Some(quantization) = fields.value("quantization_config") {
            let reason =
                "the local verifier reads plain weights; give the directory of the model before quantization";
            return Err(fields.unsupported("quantization_config", quantization, reason));
        }
        check_whole_rotation(fields)?;
        if let Some(object) = fields.optional_object("rope_parameters")? {
            check_whole_rotation(Fields { path: &path, prefix: "rope_parameters.", object })?;
        }
        let rope = RopeTable::new(shape.head_dim, shape.rope.theta, shape.rope.scaling.as_ref());
        let rope = rope.map_err(|error| {
            let found = shape.rope.scaling.clone().unwrap_or_default();
            fields.unsupported("rope_scaling", found, &error.to_string())
        })?;
        let dtype = fields.optional_text("dtype")?.or(fields.optional_text("torch_dtype")?);
        let stored_dtype = if dtype == Some("bfloat16") { StateDtype::Bf16 } else { StateDtype::F32 };
        Ok(Self { architecture, shape, rope, stored_dtype })
    }
}

fn architecture(fields: Fields<'_>, shape: &VerifierShape) -> Result<Architecture, HeadError> {
    let name = shape.architectures.first().map_or("", String::as_str);
    match name {
        "LlamaForCausalLM" => Ok(Architecture::Llama),
        "Qwen2ForCausalLM" => Ok(Architecture::Qwen2),
        "Qwen3ForCausalLM" => Ok(Architecture::Qwen3),
        _ => {
            let found = Value::from(shape.architectures.clone());
            let reason = "the local verifier knows LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM; \
                          compute the states on a second vLLM instead";
            Err(fields.unsupported("architectures", found, reason))
        }
    }
}

fn check_whole_rotation(fields: Fields<'_>) -> Result<(), HeadError> {
    match fields.optional_number("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(part) => {
            Err(fields.unsupported("partial_rotary_factor", part, "the local verifier turns whole heads"))
        }
    }
}
