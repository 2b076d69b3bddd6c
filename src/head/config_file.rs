//! A head's config.json, in both formats.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::HeadConfig;
use super::checkpoint::WriteOptions;
use super::error::HeadError;
use super::fields::Fields;
use super::rope::read_rope;
use super::verifier::VerifierShape;

/// Which of the two checkpoint formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadFormat {
    /// `LlamaForCausalLMEagle3`: one object, tensors `midlayer.*`. EAGLE, SpecForge, SGLang, vLLM.
    Flat,
    /// `Eagle3Speculator`: an object around `transformer_layer_config`, tensors `layers.0.*`. speculators, vLLM.
    Speculators,
}

/// Fields that we do not understand; kept, so that reading and writing a head loses nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeptFields {
    /// Of the speculators object. The flat format carries them in `speculators_fields`.
    pub outer: Map<String, Value>,
    /// Of the flat object, or of `transformer_layer_config`.
    pub layer: Map<String, Value>,
}

/// How the speculators format names the verifier; the flat format does not name it.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifierReference {
    pub name_or_path: String,
    pub architectures: Vec<String>,
    /// How many tokens vLLM drafts when it is started from the head alone.
    pub speculative_tokens: usize,
}

/// Our own field: N, for heads that name three layers only. Others ignore it.
const OWN_LAYERS: &str = "num_verifier_layers";
const CARRIED: &str = "speculators_fields";

/// Fields of the flat object and of `transformer_layer_config` that we read and write ourselves.
const LAYER_FIELDS: [&str; 32] = [
    "architectures",
    "model_type",
    "vocab_size",
    "draft_vocab_size",
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "num_aux_hidden_states",
    "fc_norm",
    "norm_output",
    "norm_before_residual",
    "norm_before_fc",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "logit_scale",
    CARRIED,
    OWN_LAYERS,
];

/// Fields of the speculators object that we read and write ourselves.
const OUTER_FIELDS: [&str; 14] = [
    "architectures",
    "speculators_model_type",
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "transformer_layer_config",
    "num_hidden_layers",
];

const FLAT_ARCHITECTURES: [&str; 3] =
    ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3Model"];
const SPECULATORS_ARCHITECTURES: [&str; 2] = ["Eagle3Speculator", "Eagle3DraftModel"];

impl HeadConfig {
    /// Reads the object of a config.json in either format. `from` is named in errors. Heads that name three layers need the
    /// verifier's shape.
    pub fn from_json(
        from: &Path,
        object: &Map<String, Value>,
        verifier: Option<&VerifierShape>,
    ) -> Result<Self, HeadError> {
        Ok(parse(from, object, verifier)?.0)
    }
}

/// Reads a config.json's object.
///
/// Heads from elsewhere often name three layers; then N, and the ids too where they are left out, come from `verifier`.
pub(crate) fn parse(
    path: &Path,
    object: &Map<String, Value>,
    verifier: Option<&VerifierShape>,
) -> Result<(HeadConfig, HeadFormat, KeptFields), HeadError> {
    let outer = Fields { path, prefix: "", object };
    let speculators =
        object.contains_key("speculators_model_type") || object.contains_key("transformer_layer_config");
    if speculators {
        return parse_speculators(outer, verifier);
    }
    check_architecture(outer, &FLAT_ARCHITECTURES)?;
    let config = parse_layer(outer, outer, false, verifier)?;
    let mut kept = KeptFields { outer: Map::new(), layer: kept_layer(outer)? };
    if let Some(carried) = outer.optional_object(CARRIED)? {
        kept.outer = carried.clone();
    }
    Ok((config, HeadFormat::Flat, kept))
}

fn parse_speculators(
    outer: Fields<'_>,
    verifier: Option<&VerifierShape>,
) -> Result<(HeadConfig, HeadFormat, KeptFields), HeadError> {
    check_architecture(outer, &SPECULATORS_ARCHITECTURES)?;
    match outer.optional_text("speculators_model_type")? {
        Some("eagle3") => {}
        Some(other) => {
            return Err(outer.unsupported("speculators_model_type", other, "only eagle3 heads are"));
        }
        None => return Err(outer.missing("speculators_model_type", "\"eagle3\"")),
    }
    let Some(object) = outer.optional_object("transformer_layer_config")? else {
        return Err(outer.missing("transformer_layer_config", "the layer's llama config"));
    };
    let layer = Fields { path: outer.path, prefix: "transformer_layer_config.", object };
    let config = parse_layer(outer, layer, true, verifier)?;
    let mut kept_outer = outer.object.clone();
    kept_outer.retain(|name, _| !OUTER_FIELDS.contains(&name.as_str()));
    Ok((config, HeadFormat::Speculators, KeptFields { outer: kept_outer, layer: kept_layer(layer)? }))
}

fn kept_layer(layer: Fields<'_>) -> Result<Map<String, Value>, HeadError> {
    let mut kept = layer.object.clone();
    kept.retain(|name, _| !LAYER_FIELDS.contains(&name.as_str()));
    if let Some(eagle) = layer.optional_object("eagle_config")? {
        let mut rest = eagle.clone();
        rest.retain(|name, _| name != "eagle_aux_hidden_state_layer_ids" && name != "use_aux_hidden_state");
        if !rest.is_empty() {
            kept.insert("eagle_config".into(), Value::Object(rest));
        }
    }
    Ok(kept)
}

fn check_architecture(fields: Fields<'_>, known: &[&str]) -> Result<(), HeadError> {
    let architectures = fields.texts("architectures")?;
    match architectures.first() {
        Some(name) if known.contains(&name.as_str()) => Ok(()),
        Some(name) => {
            Err(fields.unsupported("architectures", name, &format!("expected one of {}", known.join(", "))))
        }
        None => Err(fields.missing("architectures", format!("one of {}", known.join(", ")))),
    }
}

/// `head` holds the flags, `layer` the shape; the same object in the flat format.
fn parse_layer(
    head: Fields<'_>,
    layer: Fields<'_>,
    speculators: bool,
    verifier: Option<&VerifierShape>,
) -> Result<HeadConfig, HeadError> {
    refuse_unsupported(head, layer)?;
    let hidden_size = layer.size("hidden_size")?;
    if let Some(target) = head.optional_size("target_hidden_size")?
        && target != hidden_size
    {
        let reason = format!("the head's hidden size is {hidden_size}; both must be the same");
        return Err(head.unsupported("target_hidden_size", target, &reason));
    }
    let num_attention_heads = layer.size("num_attention_heads")?;
    let num_key_value_heads = layer.optional_size("num_key_value_heads")?.unwrap_or(num_attention_heads);
    if !num_attention_heads.is_multiple_of(num_key_value_heads) {
        let expected = format!("a divisor of num_attention_heads ({num_attention_heads})");
        let field = layer.name("num_key_value_heads");
        return Err(HeadError::bad_field(layer.path, &field, num_key_value_heads, expected));
    }
    let head_dim = match layer.optional_size("head_dim")? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
        None => {
            return Err(
                layer.missing("head_dim", "a whole number: the hidden size does not divide by the heads")
            );
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(HeadError::bad_field(
            layer.path,
            &layer.name("head_dim"),
            head_dim,
            "an even number, for rope",
        ));
    }
    let vocab_size = layer.size("vocab_size")?;
    let draft_vocab_size = head.optional_size("draft_vocab_size")?.unwrap_or(vocab_size);
    if draft_vocab_size > vocab_size {
        let expected = format!("at most vocab_size ({vocab_size})");
        return Err(HeadError::bad_field(
            head.path,
            &head.name("draft_vocab_size"),
            draft_vocab_size,
            expected,
        ));
    }
    let (aux_layer_ids, num_verifier_layers) = layer_ids(head, layer, verifier)?;
    let config = HeadConfig {
        hidden_size,
        intermediate_size: layer.size("intermediate_size")?,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        vocab_size,
        draft_vocab_size,
        // The defaults are transformers' own, since vLLM would serve the head with them.
        max_position_embeddings: layer.optional_size("max_position_embeddings")?.unwrap_or(2048),
        rms_norm_eps: layer.optional_number("rms_norm_eps")?.unwrap_or(1e-6),
        rope: read_rope(layer)?,
        aux_layer_ids,
        num_verifier_layers,
        fc_norm: head.flag("fc_norm", false)?,
        norm_output: head.flag("norm_output", false)?,
        // The formats differ here: the same weights under the other flag draft next to nothing.
        norm_before_residual: head.flag("norm_before_residual", speculators)?,
    };
    if let Some(shape) = verifier {
        check_verifier(layer, &config, shape)?;
    }
    Ok(config)
}

fn check_verifier(layer: Fields<'_>, config: &HeadConfig, shape: &VerifierShape) -> Result<(), HeadError> {
    let pairs = [
        ("hidden_size", config.hidden_size, shape.hidden_size),
        ("vocab_size", config.vocab_size, shape.vocab_size),
    ];
    for (field, found, expected) in pairs {
        if found != expected {
            let text = format!("{expected}, the verifier's");
            return Err(HeadError::bad_field(layer.path, &layer.name(field), found, text));
        }
    }
    Ok(())
}

fn refuse_unsupported(head: Fields<'_>, layer: Fields<'_>) -> Result<(), HeadError> {
    for fields in [head, layer] {
        if let Some(layers) = fields.optional_size("num_hidden_layers")?
            && layers != 1
        {
            return Err(fields.unsupported("num_hidden_layers", layers, "heads have exactly one layer here"));
        }
        for (flag, reason) in [
            ("norm_before_fc", "use fc_norm (EAGLE-3.1) instead"),
            ("attention_bias", "the step has no biases"),
            ("mlp_bias", "the step has no biases"),
            ("parallel_drafting", "heads draft one token after another here"),
        ] {
            if fields.flag(flag, false)? {
                return Err(fields.unsupported(flag, true, reason));
            }
        }
        for field in ["logit_scale", "partial_rotary_factor"] {
            if let Some(value) = fields.optional_number(field)?
                && value != 1.0
            {
                return Err(fields.unsupported(field, value, "only 1 is"));
            }
        }
        if let Some(value) = fields.value("quantization_config") {
            return Err(fields.unsupported("quantization_config", value, "give the unquantized head"));
        }
    }
    match layer.optional_text("model_type")? {
        None | Some("llama") => {}
        Some(other) => return Err(layer.unsupported("model_type", other, "only llama-shaped heads are")),
    }
    match layer.optional_text("hidden_act")? {
        None | Some("silu") => {}
        Some(other) => return Err(layer.unsupported("hidden_act", other, "only silu is")),
    }
    let windows = "the head attends to everything here; training would differ from serving past the window";
    let kinds = layer.texts("layer_types")?;
    if let Some(kind) = kinds.iter().find(|kind| *kind != "full_attention") {
        return Err(layer.unsupported("layer_types", kind, windows));
    }
    if layer.flag("use_sliding_window", false)? {
        return Err(layer.unsupported("use_sliding_window", true, windows));
    }
    let explicitly_off = layer.object.get("use_sliding_window") == Some(&Value::Bool(false));
    if let Some(window) = layer.value("sliding_window")
        && kinds.is_empty()
        && !explicitly_off
    {
        return Err(layer.unsupported("sliding_window", window, windows));
    }
    if let Some(object) = layer.optional_object("eagle_config")? {
        let eagle = Fields { path: layer.path, prefix: "eagle_config.", object };
        if !eagle.flag("use_aux_hidden_state", true)? {
            return Err(eagle.unsupported(
                "use_aux_hidden_state",
                false,
                "heads are fed by three layers here",
            ));
        }
        if eagle.flag("norm_before_fc", false)? {
            return Err(eagle.unsupported("norm_before_fc", true, "use fc_norm (EAGLE-3.1) instead"));
        }
    }
    Ok(())
}

/// The three ids that feed the head, and N. A fourth id, the last layer's, makes vLLM hand out the state for the target.
fn layer_ids(
    head: Fields<'_>,
    layer: Fields<'_>,
    verifier: Option<&VerifierShape>,
) -> Result<([usize; 3], usize), HeadError> {
    let field = "eagle_aux_hidden_state_layer_ids";
    let mut named = head.optional_sizes(field)?;
    let mut in_eagle_config = false;
    if let Some(object) = layer.optional_object("eagle_config")? {
        let eagle = Fields { path: layer.path, prefix: "eagle_config.", object };
        if let Some(inner) = eagle.optional_sizes(field)? {
            if let Some(outer) = &named
                && *outer != inner
            {
                let expected = format!("{outer:?}, as at the top");
                return Err(HeadError::bad_field(
                    eagle.path,
                    &eagle.name(field),
                    format!("{inner:?}"),
                    expected,
                ));
            }
            in_eagle_config = true;
            named = Some(inner);
        }
    }
    let count = layer.optional_size("num_aux_hidden_states")?;
    if let Some(count) = count
        && count != 3
    {
        return Err(layer.unsupported("num_aux_hidden_states", count, "heads are fed by three layers here"));
    }
    let Some(ids) = named.filter(|ids| !ids.is_empty()) else {
        // Left out, it means vLLM's default for the verifier.
        let default =
            verifier.and_then(|shape| Some((shape.default_aux_layer_ids()?, shape.num_hidden_layers)));
        return default
            .ok_or_else(|| head.missing(field, "three or four layer ids, or name the verifier's directory"));
    };
    let found = format!("{ids:?}");
    if ids.len() != 3 && ids.len() != 4 {
        let expected = "three layers, or those and the last layer";
        return Err(HeadError::bad_field(head.path, &head.name(field), found, expected));
    }
    if !ids.is_sorted_by(|left, right| left < right) {
        // vLLM hands the states out in the order of the layers, whatever the order of the ids.
        return Err(HeadError::bad_field(
            head.path,
            &head.name(field),
            found,
            "ascending layer ids, each once",
        ));
    }
    if ids.len() == 4 && in_eagle_config && count.is_none() {
        return Err(
            layer.missing("num_aux_hidden_states", "3: with four layer ids vLLM would build a wider fc")
        );
    }
    let own = layer.optional_size(OWN_LAYERS)?;
    let named_layers = match (ids.get(3).copied(), own) {
        (Some(last), Some(count)) if last != count => {
            let expected = format!("a fourth id of {count}, as {OWN_LAYERS} says");
            return Err(HeadError::bad_field(head.path, &head.name(field), found, expected));
        }
        (last, count) => last.or(count),
    };
    let layers = match (named_layers, verifier) {
        (Some(last), Some(shape)) if last != shape.num_hidden_layers => {
            let expected = format!("a fourth id of {}, the verifier's layers", shape.num_hidden_layers);
            return Err(HeadError::bad_field(head.path, &head.name(field), found, expected));
        }
        (Some(last), _) => last,
        (None, Some(shape)) => shape.num_hidden_layers,
        (None, None) => {
            let expected = "a fourth id, the verifier's number of layers, or name the verifier's directory";
            return Err(HeadError::bad_field(head.path, &head.name(field), found, expected));
        }
    };
    if ids[2] >= layers {
        // The last layer's state is the target's; vLLM takes no id twice.
        let expected = format!("three ids below {layers}, the verifier's layers");
        return Err(HeadError::bad_field(head.path, &head.name(field), found, expected));
    }
    Ok(([ids[0], ids[1], ids[2]], layers))
}

/// Makes the config.json's object. The verifier is needed for the speculators format unless the kept fields name it
/// already.
pub(crate) fn render(
    path: &Path,
    config: &HeadConfig,
    kept: &KeptFields,
    options: &WriteOptions,
) -> Result<Map<String, Value>, HeadError> {
    let (format, dtype) = (options.format, options.dtype.name());
    let mut layers = config.aux_layer_ids.to_vec();
    if options.target_layer {
        layers.push(config.num_verifier_layers);
    }
    // Named twice: some runners read the first place alone.
    let ids = json!(layers);
    let mut layer = kept.layer.clone();
    let kept_eagle = layer.shift_remove("eagle_config");
    let mut set = |name: &str, value: Value| {
        layer.insert(name.into(), value);
    };
    if format == HeadFormat::Flat {
        set("architectures", json!(["LlamaForCausalLMEagle3"]));
    }
    set("model_type", json!("llama"));
    set("vocab_size", json!(config.vocab_size));
    set("hidden_size", json!(config.hidden_size));
    set("intermediate_size", json!(config.intermediate_size));
    set("num_hidden_layers", json!(1));
    set("num_attention_heads", json!(config.num_attention_heads));
    set("num_key_value_heads", json!(config.num_key_value_heads));
    set("head_dim", json!(config.head_dim));
    set("hidden_act", json!("silu"));
    set("max_position_embeddings", json!(config.max_position_embeddings));
    set("rms_norm_eps", json!(config.rms_norm_eps));
    set("rope_theta", json!(config.rope.theta));
    if let Some(scaling) = &config.rope.scaling {
        set("rope_scaling", scaling.clone());
    }
    set("attention_bias", json!(false));
    set("mlp_bias", json!(false));
    set("tie_word_embeddings", json!(false));
    set("torch_dtype", json!(dtype));
    set("num_aux_hidden_states", json!(3));
    set(OWN_LAYERS, json!(config.num_verifier_layers));

    let mut flags = Map::new();
    flags.insert("draft_vocab_size".into(), json!(config.draft_vocab_size));
    flags.insert("fc_norm".into(), json!(config.fc_norm));
    flags.insert("norm_output".into(), json!(config.norm_output));
    flags.insert("norm_before_residual".into(), json!(config.norm_before_residual));
    flags.insert("norm_before_fc".into(), json!(false));
    flags.insert("eagle_aux_hidden_state_layer_ids".into(), ids.clone());
    let mut eagle = Map::new();
    eagle.insert("eagle_aux_hidden_state_layer_ids".into(), ids);
    eagle.insert("use_aux_hidden_state".into(), json!(true));
    if let Some(Value::Object(rest)) = kept_eagle {
        eagle.extend(rest);
    }
    layer.insert("eagle_config".into(), Value::Object(eagle));

    if format == HeadFormat::Flat {
        layer.extend(flags);
        if !kept.outer.is_empty() {
            layer.insert(CARRIED.into(), Value::Object(kept.outer.clone()));
        }
        return Ok(layer);
    }
    let mut outer = kept.outer.clone();
    outer.insert("architectures".into(), json!(["Eagle3Speculator"]));
    outer.insert("speculators_model_type".into(), json!("eagle3"));
    outer.extend(flags);
    outer.insert("tie_word_embeddings".into(), json!(false));
    outer.insert("torch_dtype".into(), json!(dtype));
    if let Some(verifier) = &options.verifier {
        // A head that names its verifier already keeps what it says.
        outer.entry("speculators_config").or_insert_with(|| speculators_config(verifier));
    }
    if !outer.contains_key("speculators_config") {
        return Err(HeadError::MissingField {
            path: path.to_path_buf(),
            field: "speculators_config".into(),
            expected: "the verifier's name: the speculators format cannot be written without it".into(),
        });
    }
    outer.entry("speculators_version").or_insert_with(|| json!("0.5.0"));
    outer.insert("transformer_layer_config".into(), Value::Object(layer));
    Ok(outer)
}

fn speculators_config(verifier: &VerifierReference) -> Value {
    json!({
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{
            "proposal_type": "greedy",
            "speculative_tokens": verifier.speculative_tokens,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }],
        "verifier": { "name_or_path": verifier.name_or_path, "architectures": verifier.architectures },
    })
}
