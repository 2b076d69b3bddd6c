//! Heads and their registry, on small heads and verifiers made here.

// clippy.toml allows it in test functions; these are their helpers.
#![allow(clippy::unwrap_used)]

mod common {
    pub mod environment;
}

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use draftsmith::head::{
    FreshOptions, Head, HeadDtype, HeadFormat, OutputHead, VerifierIdentity, VerifierReference,
    VerifierShape, VerifierTensors, WriteOptions, check_swap, draft_vocabulary, file_digest, fresh_head,
};
use draftsmith::promote::{Candidate, HeldOutScore, Origin, PromoteError, Registry, TrainingSummary};
use draftsmith::store::DataDir;
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};

const HIDDEN: usize = 8;
const VOCAB: usize = 12;
const LAYERS: usize = 8;

type Tensor = (Dtype, Vec<usize>, Vec<u8>);

fn plain_config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 10,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "eos_token_id": [2, 3],
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "llama3", "factor": 8.0},
    })
}

/// What a Kimi-K2.5 config looks like: the language model nested, latent attention, experts, yarn.
fn nested_config() -> Value {
    json!({
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "tie_word_embeddings": false,
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        "text_config": {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 61, "vocab_size": 163840,
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "eos_token_id": 163585,
            "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
        },
    })
}

fn shape_of(config: &Value) -> Result<VerifierShape, String> {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    VerifierShape::read(directory.path()).map_err(|error| error.to_string())
}

fn bf16_tensor(shape: &[usize], start: f32) -> Tensor {
    let count: usize = shape.iter().product();
    let bytes =
        (0..count).flat_map(|index| bf16::from_f32(start + index as f32 / 16.0).to_le_bytes()).collect();
    (Dtype::BF16, shape.to_vec(), bytes)
}

fn write_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>) {
    let views: Vec<(&String, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()))
        .collect();
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn read_tensors(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, view)| (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect()
}

fn edit_tensors(directory: &Path, edit: impl FnOnce(&mut BTreeMap<String, Tensor>)) {
    let path = directory.join("model.safetensors");
    let mut tensors = read_tensors(&path);
    edit(&mut tensors);
    write_tensors(&path, &tensors);
}

fn config_of(directory: &Path) -> Map<String, Value> {
    serde_json::from_slice(&fs::read(directory.join("config.json")).unwrap()).unwrap()
}

fn edit_config(directory: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    let mut object = config_of(directory);
    edit(&mut object);
    fs::write(directory.join("config.json"), Value::Object(object).to_string()).unwrap();
}

fn verifier_tensors() -> VerifierTensors {
    let ramp = |count: usize, start: f32| (0..count).map(|index| start + index as f32 / 64.0).collect();
    VerifierTensors {
        embed_tokens: ramp(VOCAB * HIDDEN, -0.5),
        norm: ramp(HIDDEN, 0.75),
        lm_head: ramp(VOCAB * HIDDEN, 0.25),
        rms_norm_eps: 1e-5,
    }
}

fn small_head_with(output_head: OutputHead, seed: u64) -> Head {
    let shape = shape_of(&plain_config()).unwrap();
    let options = FreshOptions { seed, output_head, aux_layer_ids: None };
    fresh_head(&shape, vec![1, 2, 5, 11], &options, &verifier_tensors()).unwrap()
}

fn small_head() -> Head {
    small_head_with(OutputHead::Random, 7)
}

fn options(format: HeadFormat, dtype: HeadDtype) -> WriteOptions {
    let verifier = VerifierReference {
        name_or_path: "some/verifier".into(),
        architectures: vec!["LlamaForCausalLM".into()],
        speculative_tokens: 3,
    };
    WriteOptions { format, dtype, verifier: Some(verifier), target_layer: true }
}

/// A head's directory to spoil.
fn written(format: HeadFormat) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("head");
    small_head().write(&path, &options(format, HeadDtype::F32)).unwrap();
    (directory, path)
}

fn refusal(directory: &Path) -> String {
    Head::read(directory, None).unwrap_err().to_string()
}

fn assert_all(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` not in: {text}");
    }
}

#[test]
fn both_formats_round_trip_in_f32() {
    for format in [HeadFormat::Flat, HeadFormat::Speculators] {
        let (_keep, path) = written(format);
        let back = Head::read(&path, None).unwrap();
        let head = small_head();
        assert_eq!(back.format, format);
        assert_eq!(back.config, head.config);
        assert_eq!(back.tensors, head.tensors);
        assert_eq!(back.draft_ids, head.draft_ids);
    }
}

#[test]
fn flat_to_speculators_and_back_is_the_same_file() {
    let (keep, first) = written(HeadFormat::Flat);
    edit_config(&first, |object| {
        object.insert("trained_by".into(), json!({"someone": [1, 2]}));
        object["eagle_config"]["their_field"] = json!(5);
    });
    let (second, third) = (keep.path().join("second"), keep.path().join("third"));
    let flat = Head::read(&first, None).unwrap();
    flat.write(&second, &options(HeadFormat::Speculators, HeadDtype::F32)).unwrap();
    let speculators = Head::read(&second, None).unwrap();
    let nested = &config_of(&second)["transformer_layer_config"];
    assert_eq!(nested["trained_by"], json!({"someone": [1, 2]}));
    speculators.write(&third, &options(HeadFormat::Flat, HeadDtype::F32)).unwrap();
    assert_eq!(
        read_tensors(&first.join("model.safetensors")),
        read_tensors(&third.join("model.safetensors"))
    );
    let (before, mut after) = (config_of(&first), config_of(&third));
    let carried = after.shift_remove("speculators_fields").unwrap();
    assert_eq!(carried["speculators_config"]["verifier"]["name_or_path"], "some/verifier");
    assert_eq!(before, after);
    assert_eq!(after["eagle_config"]["their_field"], 5);
}

#[test]
fn speculators_fields_survive_the_flat_format() {
    let (keep, first) = written(HeadFormat::Speculators);
    edit_config(&first, |object| {
        object.insert("embed_requires_grad".into(), json!(false));
        object["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = json!(5);
    });
    let (second, third) = (keep.path().join("second"), keep.path().join("third"));
    Head::read(&first, None).unwrap().write(&second, &options(HeadFormat::Flat, HeadDtype::F32)).unwrap();
    let flat = Head::read(&second, None).unwrap();
    flat.write(
        &third,
        &WriteOptions {
            format: HeadFormat::Speculators,
            dtype: HeadDtype::F32,
            verifier: None,
            target_layer: true,
        },
    )
    .unwrap();
    assert_eq!(config_of(&first), config_of(&third));
}

#[test]
fn what_vllm_reads_is_written() {
    let (_keep, path) = written(HeadFormat::Flat);
    let config = config_of(&path);
    // Four ids in both places, three of them for the head.
    assert_eq!(config["eagle_aux_hidden_state_layer_ids"], json!([2, 4, 5, 8]));
    assert_eq!(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], json!([2, 4, 5, 8]));
    assert_eq!(config["num_aux_hidden_states"], 3);
    assert_eq!(config["architectures"], json!(["LlamaForCausalLMEagle3"]));
    assert_eq!((&config["head_dim"], &config["rope_theta"]), (&json!(2), &json!(50000.0)));
    assert_eq!(config["rope_scaling"], json!({"rope_type": "llama3", "factor": 8.0}));
    let tensors = read_tensors(&path.join("model.safetensors"));
    assert_eq!(tensors["midlayer.self_attn.k_proj.weight"].1, [4, 16]);
    assert_eq!(tensors["fc.weight"].1, [8, 24]);
    // Offsets of tokens 1, 2, 5, 11.
    let offsets: Vec<u8> = [1i64, 1, 3, 8].iter().flat_map(|offset| offset.to_le_bytes()).collect();
    assert_eq!(tensors["d2t"], (Dtype::I64, vec![4], offsets));
    assert_eq!(tensors["t2d"], (Dtype::BOOL, vec![12], vec![0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1]));

    let (_keep, path) = written(HeadFormat::Speculators);
    let config = config_of(&path);
    assert_eq!(config["architectures"], json!(["Eagle3Speculator"]));
    assert_eq!(config["speculators_model_type"], "eagle3");
    // The format's default is true: it must be said.
    assert_eq!(config["norm_before_residual"], false);
    assert_eq!(config["fc_norm"], true);
    assert_eq!(config["speculators_config"]["verifier"]["name_or_path"], "some/verifier");
    assert!(read_tensors(&path.join("model.safetensors")).contains_key("layers.0.mlp.down_proj.weight"));
}

#[test]
fn bf16_rounds_to_nearest_and_reads_back_exactly() {
    let directory = tempfile::tempdir().unwrap();
    let head = small_head();
    head.write(directory.path(), &options(HeadFormat::Flat, HeadDtype::Bf16)).unwrap();
    let back = Head::read(directory.path(), None).unwrap();
    for (before, after) in head.tensors.in_order().into_iter().zip(back.tensors.in_order()) {
        let rounded: Vec<f32> = before.iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
        assert_eq!(rounded, *after);
    }
    assert_eq!(config_of(directory.path())["torch_dtype"], "bfloat16");
}

#[test]
fn whole_vocabulary_needs_no_map() {
    let shape = shape_of(&plain_config()).unwrap();
    let fresh = FreshOptions { seed: 1, output_head: OutputHead::Random, aux_layer_ids: None };
    let head = fresh_head(&shape, (0..VOCAB as u32).collect(), &fresh, &verifier_tensors()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    head.write(directory.path(), &options(HeadFormat::Flat, HeadDtype::F32)).unwrap();
    assert!(!read_tensors(&directory.path().join("model.safetensors")).contains_key("d2t"));
    assert_eq!(Head::read(directory.path(), None).unwrap().draft_ids, head.draft_ids);
}

#[test]
fn missing_flags_take_each_formats_own_default() {
    for (format, default) in [(HeadFormat::Flat, false), (HeadFormat::Speculators, true)] {
        let (_keep, path) = written(format);
        edit_config(&path, |object| {
            object.shift_remove("norm_before_residual");
        });
        assert_eq!(Head::read(&path, None).unwrap().config.norm_before_residual, default, "{format:?}");
    }
}

#[test]
fn head_without_the_3_1_flags_is_read() {
    let (_keep, path) = written(HeadFormat::Flat);
    edit_config(&path, |object| {
        object.shift_remove("fc_norm");
        object.shift_remove("norm_output");
    });
    assert_all(&refusal(&path), &["`fc_norm.0.weight`", "not part of this head"]);
    edit_tensors(&path, |tensors| tensors.retain(|name, _| !name.starts_with("fc_norm")));
    let head = Head::read(&path, None).unwrap();
    assert!(!head.config.fc_norm && !head.config.norm_output && head.tensors.fc_norm.is_empty());
}

#[test]
fn either_layer_name_is_read_in_either_format() {
    let (_keep, path) = written(HeadFormat::Flat);
    edit_tensors(&path, |tensors| {
        *tensors = std::mem::take(tensors)
            .into_iter()
            .map(|(name, tensor)| (name.replace("midlayer.", "layers.0."), tensor))
            .collect();
    });
    assert_eq!(Head::read(&path, None).unwrap().tensors, small_head().tensors);
}

#[test]
fn three_layer_ids_need_the_verifier() {
    let (_keep, path) = written(HeadFormat::Flat);
    edit_config(&path, |object| {
        object["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([2, 4, 5]);
        object.shift_remove("eagle_aux_hidden_state_layer_ids");
        object.shift_remove("num_verifier_layers");
    });
    assert_all(&refusal(&path), &["eagle_aux_hidden_state_layer_ids", "[2, 4, 5]", "verifier's directory"]);
    let shape = shape_of(&plain_config()).unwrap();
    assert_eq!(Head::read(&path, Some(&shape)).unwrap().config, small_head().config);
    edit_config(&path, |object| {
        object.shift_remove("eagle_config");
    });
    // Named nowhere: vLLM's default for the verifier.
    assert_eq!(Head::read(&path, Some(&shape)).unwrap().config.aux_layer_ids, [2, 4, 5]);
}

#[test]
fn head_of_another_verifier_is_refused() {
    let (_keep, path) = written(HeadFormat::Flat);
    let mut shape = shape_of(&plain_config()).unwrap();
    shape.vocab_size = 99;
    let text = Head::read(&path, Some(&shape)).unwrap_err().to_string();
    assert_all(&text, &["`vocab_size` is 12", "expected 99, the verifier's"]);
    shape.vocab_size = VOCAB;
    shape.num_hidden_layers = 9;
    assert_all(
        &Head::read(&path, Some(&shape)).unwrap_err().to_string(),
        &["[2, 4, 5, 8]", "fourth id of 9"],
    );
}

#[test]
fn spoiled_tensors_are_refused_by_name() {
    type Spoil = fn(&mut BTreeMap<String, Tensor>);
    let cases: [(Spoil, &[&str]); 10] = [
        (
            |t| drop(t.remove("midlayer.mlp.up_proj.weight")),
            &["`midlayer.mlp.up_proj.weight` is missing", "[10, 8]"],
        ),
        (|t| drop(t.remove("d2t")), &["`d2t` is missing", "[4]"]),
        (
            |t| drop(t.insert("midlayer.self_attn.q_norm.weight".into(), bf16_tensor(&[2], 0.0))),
            &["`midlayer.self_attn.q_norm.weight` [2]", "not part"],
        ),
        (
            |t| drop(t.insert("fc.weight".into(), bf16_tensor(&[8, 32], 0.0))),
            &["`fc.weight` has shape [8, 32]", "expected [8, 24]"],
        ),
        (
            |t| drop(t.insert("norm.weight".into(), (Dtype::F16, vec![8], vec![0; 16]))),
            &["`norm.weight` has dtype F16", "BF16 or F32"],
        ),
        (
            |t| drop(t.insert("norm.weight".into(), (Dtype::F32, vec![8], f32::NAN.to_le_bytes().repeat(8)))),
            &["`norm.weight` holds NaN", "element 0"],
        ),
        (
            |t| {
                drop(t.insert(
                    "d2t".into(),
                    (Dtype::I64, vec![4], [-1i64, 0, 0, 0].iter().flat_map(|n| n.to_le_bytes()).collect()),
                ))
            },
            &["d2t[0] = -1"],
        ),
        (
            |t| {
                drop(t.insert(
                    "d2t".into(),
                    (Dtype::I64, vec![4], [3i64, 0, 0, 0].iter().flat_map(|n| n.to_le_bytes()).collect()),
                ))
            },
            &["token 1 after 3", "ascending"],
        ),
        (
            |t| {
                drop(t.insert(
                    "d2t".into(),
                    (Dtype::I64, vec![4], [0i64, 0, 0, 9].iter().flat_map(|n| n.to_le_bytes()).collect()),
                ))
            },
            &["token 12", "below 12"],
        ),
        (
            |t| drop(t.insert("t2d".into(), (Dtype::BOOL, vec![12], vec![1; 12]))),
            &["t2d marks 12 tokens", "disagree"],
        ),
    ];
    for (spoil, parts) in cases {
        let (_keep, path) = written(HeadFormat::Flat);
        edit_tensors(&path, spoil);
        assert_all(&refusal(&path), parts);
    }
}

#[test]
fn unsupported_fields_are_refused_by_name() {
    let cases = [
        ("norm_before_fc", json!(true), "fc_norm (EAGLE-3.1)"),
        ("num_hidden_layers", json!(2), "exactly one layer"),
        ("attention_bias", json!(true), "no biases"),
        ("mlp_bias", json!(true), "no biases"),
        ("logit_scale", json!(0.5), "only 1"),
        ("sliding_window", json!(2048), "past the window"),
        ("layer_types", json!(["sliding_attention"]), "past the window"),
        ("model_type", json!("qwen3"), "only llama-shaped"),
        ("hidden_act", json!("gelu"), "only silu"),
        ("target_hidden_size", json!(16), "must be the same"),
        ("quantization_config", json!({"quant_method": "fp8"}), "unquantized"),
        ("architectures", json!(["MedusaModel"]), "LlamaForCausalLMEagle3"),
        ("num_aux_hidden_states", json!(4), "three layers"),
    ];
    for (field, value, part) in cases {
        let (_keep, path) = written(HeadFormat::Flat);
        edit_config(&path, |object| drop(object.insert(field.into(), value.clone())));
        assert_all(&refusal(&path), &[field, "not supported", part]);
    }
    let (_keep, path) = written(HeadFormat::Speculators);
    edit_config(&path, |object| drop(object.insert("speculators_model_type".into(), json!("dflash"))));
    assert_all(&refusal(&path), &["speculators_model_type", "dflash", "only eagle3"]);
}

#[test]
fn bad_fields_are_refused_with_what_was_expected() {
    let cases = [
        ("hidden_size", json!("8"), "whole number above 0"),
        ("num_key_value_heads", json!(3), "divisor of num_attention_heads (4)"),
        ("fc_norm", json!(1), "true or false"),
        ("draft_vocab_size", json!(13), "at most vocab_size (12)"),
        ("eagle_aux_hidden_state_layer_ids", json!([2, 4, 6, 8]), "as at the top"),
        ("head_dim", json!(3), "even number"),
    ];
    for (field, value, part) in cases {
        let (_keep, path) = written(HeadFormat::Flat);
        edit_config(&path, |object| drop(object.insert(field.into(), value.clone())));
        assert_all(&refusal(&path), &[field, part]);
    }
    for (ids, part) in
        [(json!([4, 2, 5, 8]), "ascending"), (json!([2, 4]), "three layers"), (json!([2, 4, 8]), "below 8")]
    {
        let (_keep, path) = written(HeadFormat::Flat);
        edit_config(&path, |object| {
            object.insert("eagle_aux_hidden_state_layer_ids".into(), ids.clone());
            object["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids.clone();
        });
        let shape = shape_of(&plain_config()).unwrap();
        assert_all(&Head::read(&path, Some(&shape)).unwrap_err().to_string(), &[part]);
    }
    let (_keep, path) = written(HeadFormat::Flat);
    edit_config(&path, |object| drop(object.shift_remove("num_aux_hidden_states")));
    assert_all(&refusal(&path), &["num_aux_hidden_states", "wider fc"]);
}

#[test]
fn cut_file_is_refused() {
    let (_keep, path) = written(HeadFormat::Flat);
    let model = path.join("model.safetensors");
    let bytes = fs::read(&model).unwrap();
    fs::write(&model, &bytes[..bytes.len() - 4]).unwrap();
    assert_all(&refusal(&path), &["model.safetensors", "not a valid safetensors file", "copy it again"]);
    fs::remove_file(&model).unwrap();
    assert_all(&refusal(&path), &["no model.safetensors"]);
}

#[test]
fn own_embedding_is_dropped_if_it_is_the_verifiers() {
    let (_keep, path) = written(HeadFormat::Flat);
    let verifier = verifier_tensors();
    let bytes = verifier.embed_tokens.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
    edit_tensors(&path, |tensors| {
        tensors.insert("embed_tokens.weight".into(), (Dtype::BF16, vec![VOCAB, HIDDEN], bytes));
    });
    let mut head = Head::read(&path, None).unwrap();
    let mut other = verifier.clone();
    other.embed_tokens[3] += 1.0;
    assert_all(
        &head.share_embedding(&path, &other).unwrap_err().to_string(),
        &["embed_tokens.weight", "element 3"],
    );
    head.share_embedding(&path, &verifier).unwrap();
    assert_eq!(head.embed_tokens, None);
}

#[test]
fn plain_and_nested_verifier_configs_are_read() {
    let plain = shape_of(&plain_config()).unwrap();
    assert_eq!((plain.head_dim, plain.num_key_value_heads, plain.num_hidden_layers), (2, 2, LAYERS));
    assert_eq!(plain.rope.theta, 50000.0);
    assert_eq!(plain.rope.scaling, Some(json!({"rope_type": "llama3", "factor": 8.0})));
    assert_eq!(plain.eos_token_ids, [2, 3]);

    let nested = shape_of(&nested_config()).unwrap();
    assert_eq!(nested.architectures, ["KimiK25ForConditionalGeneration"]);
    assert_eq!((nested.hidden_size, nested.vocab_size, nested.num_hidden_layers), (7168, 163840, 61));
    // Latent attention: 7168 / 64 is not the dimension of a head.
    assert_eq!((nested.num_attention_heads, nested.num_key_value_heads, nested.head_dim), (64, 64, 128));
    assert_eq!(nested.intermediate_size, 18432);
    assert_eq!(nested.rope.scaling.unwrap()["factor"], 64.0);
    assert_eq!(nested.eos_token_ids, [163585]);
    assert_eq!(shape_of(&nested_config()).unwrap().default_aux_layer_ids(), Some([2, 30, 58]));
}

#[test]
fn verifier_config_variants() {
    let edited = |edit: fn(&mut Value)| {
        let mut config = plain_config();
        edit(&mut config);
        shape_of(&config)
    };
    let default_rope =
        edited(|config| config["rope_parameters"] = json!({"rope_theta": 7.0, "rope_type": "default"}))
            .unwrap();
    assert_eq!((default_rope.rope.theta, default_rope.rope.scaling), (7.0, None));
    assert_eq!(edited(|config| config["head_dim"] = json!(6)).unwrap().head_dim, 6);
    assert_eq!(edited(|config| config["intermediate_size"] = Value::Null).unwrap().intermediate_size, 24);
    type Edit = fn(&mut Value);
    let refusals: [(Edit, &[&str]); 5] = [
        (
            |config| config["model_type"] = json!("gemma3_text"),
            &["model_type", "gemma3_text", "wrong target"],
        ),
        (|config| config["logits_scaling"] = json!(8.0), &["logits_scaling", "8"]),
        (|config| config["rms_norm_eps"] = Value::Null, &["rms_norm_eps", "missing"]),
        (|config| config["num_attention_heads"] = json!(3), &["head_dim", "does not divide"]),
        (|config| config["vocab_size"] = json!(-1), &["vocab_size", "-1"]),
    ];
    for (edit, parts) in refusals {
        assert_all(&edited(edit).unwrap_err(), parts);
    }
}

#[test]
fn verifier_tensors_from_one_file_from_shards_and_tied() {
    let names = [
        ("model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ];
    let matrix = [VOCAB, HIDDEN];
    for (prefix, head_name) in names {
        let directory = tempfile::tempdir().unwrap();
        let mut shape = shape_of(&plain_config()).unwrap();
        let embedding = (format!("{prefix}embed_tokens.weight"), bf16_tensor(&matrix, 0.0));
        let norm = (format!("{prefix}norm.weight"), bf16_tensor(&[HIDDEN], 2.0));
        let output = (head_name.to_owned(), bf16_tensor(&matrix, 40.0));
        write_tensors(&directory.path().join("model-1.safetensors"), &BTreeMap::from([embedding.clone()]));
        write_tensors(
            &directory.path().join("model-3.safetensors"),
            &BTreeMap::from([norm.clone(), output.clone()]),
        );
        // The shard of the layers is not there; it is not needed.
        let index = json!({"weight_map": {
            embedding.0.clone(): "model-1.safetensors", format!("{prefix}layers.0.mlp.up_proj.weight"): "model-2.safetensors",
            norm.0.clone(): "model-3.safetensors", output.0.clone(): "model-3.safetensors",
        }});
        fs::write(directory.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        let sharded = VerifierTensors::read(directory.path(), &shape).unwrap();
        assert_eq!((sharded.embed_tokens[17], sharded.norm[1], sharded.lm_head[16]), (1.0625, 2.0625, 41.0));
        assert_eq!(sharded.rms_norm_eps, 1e-5);

        write_tensors(&directory.path().join("model.safetensors"), &BTreeMap::from([embedding, norm]));
        let missing = VerifierTensors::read(directory.path(), &shape).unwrap_err().to_string();
        assert_all(&missing, &["`lm_head.weight` is missing", "[12, 8]"]);
        shape.tie_word_embeddings = true;
        let tied = VerifierTensors::read(directory.path(), &shape).unwrap();
        assert_eq!(tied.lm_head, sharded.embed_tokens);
    }
}

#[test]
fn verifier_tensors_of_other_dtypes() {
    let directory = tempfile::tempdir().unwrap();
    let shape = shape_of(&plain_config()).unwrap();
    let halves = [0.5f32; HIDDEN].iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect();
    let mut tensors = BTreeMap::from([
        ("model.embed_tokens.weight".to_owned(), bf16_tensor(&[VOCAB, HIDDEN], 0.0)),
        ("model.norm.weight".to_owned(), (Dtype::F16, vec![HIDDEN], halves)),
        (
            "lm_head.weight".to_owned(),
            (Dtype::F32, vec![VOCAB, HIDDEN], 2.0f32.to_le_bytes().repeat(VOCAB * HIDDEN)),
        ),
    ]);
    let path = directory.path().join("model.safetensors");
    write_tensors(&path, &tensors);
    let read = VerifierTensors::read(directory.path(), &shape).unwrap();
    assert_eq!((read.norm[7], read.lm_head[95]), (0.5, 2.0));
    tensors.insert("lm_head.weight".into(), (Dtype::F8_E4M3, vec![VOCAB, HIDDEN], vec![0; VOCAB * HIDDEN]));
    write_tensors(&path, &tensors);
    let text = VerifierTensors::read(directory.path(), &shape).unwrap_err().to_string();
    assert_all(&text, &["`lm_head.weight` has dtype F8_E4M3", "BF16, F16 or F32"]);
}

#[test]
fn index_cannot_lead_outside_its_directory() {
    let directory = tempfile::tempdir().unwrap();
    let index = json!({"weight_map": {"model.embed_tokens.weight": "../other.safetensors"}});
    fs::write(directory.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let shape = shape_of(&plain_config()).unwrap();
    let text = VerifierTensors::read(directory.path(), &shape).unwrap_err().to_string();
    assert_all(&text, &["weight_map.model.embed_tokens.weight", "../other.safetensors"]);
}

#[test]
fn fresh_head_is_decided_by_its_seed() {
    let head = small_head();
    assert_eq!(head, small_head());
    assert_ne!(head.tensors.fc, small_head_with(OutputHead::Random, 8).tensors.fc);
    assert_eq!(head.tensors.input_layernorm, [1.0; HIDDEN]);
    assert_eq!(head.tensors.norm, verifier_tensors().norm);
    assert_ne!(head.tensors.gate_proj, head.tensors.up_proj);
    let copied = small_head_with(OutputHead::FromVerifier, 7).tensors.lm_head;
    // Draft id 2 stands for token 5.
    assert_eq!(copied[2 * HIDDEN..3 * HIDDEN], verifier_tensors().lm_head[5 * HIDDEN..6 * HIDDEN]);
    // fc passes the highest of the three states through: row i of [H, 3H] is 1 at 2H + i, nearly 0 elsewhere.
    let hidden = head.config.hidden_size;
    for (i, value) in head.tensors.fc.iter().enumerate() {
        let wanted = if i % (3 * hidden) == 2 * hidden + i / (3 * hidden) { 1.0 } else { 0.0 };
        assert!((value - wanted).abs() < 0.06, "element {i}: {value}");
    }
}

#[test]
fn fresh_head_needs_usable_layers_and_tokens() {
    let shape = shape_of(&plain_config()).unwrap();
    let make = |ids: Vec<u32>, layers| {
        let fresh = FreshOptions { seed: 1, output_head: OutputHead::Random, aux_layer_ids: layers };
        fresh_head(&shape, ids, &fresh, &verifier_tensors()).map_err(|error| error.to_string())
    };
    assert_eq!(make(vec![1], Some([0, 3, 7])).unwrap().config.aux_layer_ids, [0, 3, 7]);
    assert_all(&make(vec![1], Some([2, 4, 8])).unwrap_err(), &["[2, 4, 8]", "below 8"]);
    assert_all(&make(vec![12], None).unwrap_err(), &["token 12"]);
    assert_all(&make(vec![], None).unwrap_err(), &["no tokens"]);
}

#[test]
fn swap_is_refused_for_every_fixed_field() {
    let live = small_head();
    let check = |edit: fn(&mut Head)| {
        let mut candidate = live.clone();
        edit(&mut candidate);
        check_swap(&live.config, &candidate.config)
    };
    type Edit = fn(&mut Head);
    let cases: [(&str, Edit); 15] = [
        ("hidden_size", |head| head.config.hidden_size += 1),
        ("intermediate_size", |head| head.config.intermediate_size += 1),
        ("num_attention_heads", |head| head.config.num_attention_heads += 1),
        ("num_key_value_heads", |head| head.config.num_key_value_heads += 1),
        ("head_dim", |head| head.config.head_dim += 1),
        ("vocab_size", |head| head.config.vocab_size += 1),
        ("draft_vocab_size", |head| head.config.draft_vocab_size += 1),
        ("max_position_embeddings", |head| head.config.max_position_embeddings += 1),
        ("num_verifier_layers", |head| head.config.num_verifier_layers += 1),
        ("rms_norm_eps", |head| head.config.rms_norm_eps *= 2.0),
        ("rope_theta", |head| head.config.rope.theta *= 2.0),
        ("rope_scaling", |head| head.config.rope.scaling = None),
        ("aux_layer_ids", |head| head.config.aux_layer_ids[1] = 3),
        ("fc_norm", |head| head.config.fc_norm = false),
        ("norm_output", |head| head.config.norm_output = false),
    ];
    for (field, edit) in cases {
        assert_eq!(check(edit).unwrap_err().field, field);
    }
    assert_eq!(
        check(|head| head.config.norm_before_residual = true).unwrap_err().field,
        "norm_before_residual"
    );
    assert!(check(|head| head.draft_ids[3] = 7).is_ok());
    // An older name for the same thing, and weights, are no difference.
    let renamed = |head: &mut Head| {
        head.config.rope.scaling = Some(json!({"factor": 8.0, "type": "llama3"}));
        head.tensors.fc[0] += 1.0;
    };
    assert!(check(renamed).is_ok());
}

struct Shop {
    _keep: tempfile::TempDir,
    root: PathBuf,
    registry: Registry,
    verifier: VerifierIdentity,
}

fn shop() -> Shop {
    let keep = tempfile::tempdir().unwrap();
    let root = keep.path().to_path_buf();
    fs::write(root.join("config.json"), plain_config().to_string()).unwrap();
    fs::write(root.join("tokenizer.json"), "{}").unwrap();
    let shape = VerifierShape::read(&root).unwrap();
    let verifier = VerifierIdentity::read(&root, "some/verifier", &shape).unwrap();
    let registry = Registry::of(&DataDir::new(root.join("data")));
    Shop { _keep: keep, root, registry, verifier }
}

impl Shop {
    fn add(&self, seed: u64, parent: Option<String>) -> String {
        let head = small_head_with(OutputHead::Random, seed);
        let candidate = Candidate {
            head: &head,
            verifier: &self.verifier,
            origin: Origin::Trained,
            parent,
            training: Some(TrainingSummary {
                steps: 10,
                tokens_seen: 1000,
                samples: 5,
                loss: 2.5,
                run: None,
                newest_sample: None,
            }),
            score: None,
            format: HeadFormat::Flat,
            dtype: HeadDtype::F32,
        };
        self.registry.add(&candidate).unwrap().id
    }
}

#[test]
fn registered_head_has_a_manifest_and_reads_back() {
    let shop = shop();
    let first = shop.add(1, None);
    let second = shop.add(2, Some(first.clone()));
    let (head, manifest) = shop.registry.load(&second).unwrap();
    assert_eq!(head.tensors, small_head_with(OutputHead::Random, 2).tensors);
    assert_eq!(manifest.parent.as_ref(), Some(&first));
    assert_eq!(manifest.verifier.name, "some/verifier");
    // sha256 of "{}"
    let expected = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";
    assert_eq!(manifest.verifier.tokenizer_digest.as_deref(), Some(expected));
    assert_eq!(manifest.config, head.config);
    let score = HeldOutScore::new("set", 10, vec![0.5]);
    shop.registry.set_score(&second, score.clone()).unwrap();
    let listing = shop.registry.list().unwrap();
    let ids: Vec<&str> = listing.heads.iter().map(|manifest| manifest.id.as_str()).collect();
    assert_eq!(ids, [first.as_str(), second.as_str()]);
    assert_eq!(listing.heads[1].score, Some(score));
    assert!(listing.broken.is_empty());
    // Nothing half-written is left, and what is there belongs to its owner alone.
    let names: Vec<String> = fs::read_dir(shop.registry.path(&second))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn changed_weights_and_half_written_heads_are_noticed() {
    let shop = shop();
    let good = shop.add(1, None);
    let changed = shop.add(2, None);
    edit_tensors(&shop.registry.path(&changed), |tensors| {
        tensors.insert("norm.weight".into(), bf16_tensor(&[HIDDEN], 0.0));
    });
    assert!(matches!(shop.registry.load(&changed), Err(PromoteError::Digest { .. })));
    assert!(matches!(shop.registry.promote(&changed, "test"), Err(PromoteError::Digest { .. })));
    let heads = shop.root.join("data/heads");
    fs::create_dir(heads.join(".half.tmp")).unwrap();
    fs::create_dir(heads.join("strange")).unwrap();
    let listing = shop.registry.list().unwrap();
    assert_eq!(listing.heads.len(), 2);
    assert_eq!(listing.broken.len(), 1);
    assert_eq!(listing.broken[0].0, "strange");
    edit_config(&shop.registry.path(&good), |object| drop(object.insert("norm_output".into(), json!(false))));
    assert_all(&shop.registry.load(&good).unwrap_err().to_string(), &[&good, "config.json"]);
}

#[test]
fn import_and_export_in_either_format() {
    let shop = shop();
    let source = shop.root.join("source");
    small_head().write(&source, &options(HeadFormat::Speculators, HeadDtype::Bf16)).unwrap();
    let shape = VerifierShape::read(&shop.root).unwrap();
    let tensors = verifier_tensors();
    let manifest = shop.registry.import(&source, &shape, &shop.verifier, Some(&tensors)).unwrap();
    let from = source.display().to_string();
    let digest = file_digest(&source.join("model.safetensors")).unwrap();
    assert_eq!(manifest.origin, Origin::Imported { from, digest: Some(digest.clone()) });
    // Under the name of the file that it came from, and under its own.
    assert_eq!(shop.registry.find(&digest).unwrap(), Some(manifest.id.clone()));
    assert_eq!(shop.registry.find(&manifest.model_digest).unwrap(), Some(manifest.id.clone()));
    assert_eq!(shop.registry.find("0").unwrap(), None);
    assert_eq!(manifest.format, HeadFormat::Speculators);
    for format in [HeadFormat::Flat, HeadFormat::Speculators] {
        let target = shop.root.join(format!("{format:?}"));
        shop.registry.export(&manifest.id, &target, format, HeadDtype::Bf16, false).unwrap();
        let back = Head::read(&target, Some(&shape)).unwrap();
        assert_eq!(back.format, format);
        // Three ids: what a stock vLLM can run. N is not lost.
        let config = config_of(&target);
        assert_eq!(config["eagle_aux_hidden_state_layer_ids"], json!([2, 4, 5]));
        assert_eq!(Head::read(&target, None).unwrap().config.num_verifier_layers, LAYERS);
        assert_eq!(back.tensors, Head::read(&source, None).unwrap().tensors);
        let again = shop.registry.export(&manifest.id, &target, format, HeadDtype::Bf16, false);
        assert!(matches!(again, Err(PromoteError::Exists { .. })));
    }
    let mut other = shape.clone();
    other.hidden_size = 16;
    assert!(matches!(
        shop.registry.import(&source, &other, &shop.verifier, None),
        Err(PromoteError::Head(_))
    ));
    assert_eq!(shop.registry.list().unwrap().heads.len(), 1);
}

#[test]
fn promote_and_roll_back() {
    let shop = shop();
    let registry = &shop.registry;
    assert!(registry.live().unwrap().is_none());
    assert!(matches!(registry.roll_back(), Err(PromoteError::NothingLive)));
    let ids = [shop.add(1, None), shop.add(2, None), shop.add(3, None)];
    registry.promote(&ids[0], "test").unwrap();
    assert!(matches!(registry.roll_back(), Err(PromoteError::NoPrevious { .. })));
    registry.promote(&ids[1], "test").unwrap();
    registry.promote(&ids[1], "test").unwrap();
    registry.promote(&ids[2], "test").unwrap();
    let live = registry.live().unwrap().unwrap();
    let previous: Vec<&String> = live.previous.iter().map(|past| &past.id).collect();
    assert_eq!((live.id, previous), (ids[2].clone(), vec![&ids[1], &ids[0]]));
    assert_eq!(registry.fallback().unwrap().id, ids[1]);
    let back = registry.roll_back().unwrap();
    assert_eq!(back.id, ids[1]);
    assert_eq!(back.rolled_back.unwrap().id, ids[2]);
    assert_eq!(registry.resolve("live").unwrap(), ids[1]);
    // The head that was taken out is no fallback.
    assert_eq!(registry.fallback().unwrap().id, ids[0]);
}

#[test]
fn damaged_fallback_leaves_the_pointer_alone() {
    let shop = shop();
    let ids = [shop.add(1, None), shop.add(2, None)];
    shop.registry.promote(&ids[0], "test").unwrap();
    shop.registry.promote(&ids[1], "test").unwrap();
    fs::remove_file(shop.registry.path(&ids[0]).join("model.safetensors")).unwrap();
    assert!(shop.registry.roll_back().is_err());
    assert_eq!(shop.registry.live().unwrap().unwrap().id, ids[1]);
}

#[test]
fn names_resolve_and_cannot_escape() {
    let shop = shop();
    let ids = [shop.add(1, None), shop.add(2, None)];
    assert_eq!(shop.registry.resolve(&ids[0]).unwrap(), ids[0]);
    assert!(matches!(shop.registry.resolve("2"), Err(PromoteError::Ambiguous { count: 2, .. })));
    assert!(matches!(shop.registry.resolve("nothing"), Err(PromoteError::NoSuchHead { .. })));
    assert!(matches!(shop.registry.resolve("../../etc"), Err(PromoteError::BadId { .. })));
    assert!(matches!(shop.registry.show(".lock"), Err(PromoteError::BadId { .. })));
}

#[test]
fn pruning_keeps_what_a_roll_back_needs() {
    let shop = shop();
    let ids: Vec<String> = (0..5).map(|seed| shop.add(seed, None)).collect();
    shop.registry.promote(&ids[0], "test").unwrap();
    shop.registry.promote(&ids[2], "test").unwrap();
    let mut removed = shop.registry.prune(1).unwrap();
    removed.sort();
    let mut expected = vec![ids[1].clone(), ids[3].clone()];
    expected.sort();
    assert_eq!(removed, expected);
    assert!(!shop.registry.path(&ids[1]).exists());
    shop.registry.load(&ids[0]).unwrap();
}

#[test]
fn newer_manifest_is_refused_as_such() {
    let shop = shop();
    let id = shop.add(1, None);
    let path = shop.registry.path(&id).join("manifest.json");
    fs::write(&path, r#"{"schema": 2, "everything": "else"}"#).unwrap();
    assert_all(&shop.registry.show(&id).unwrap_err().to_string(), &["schema 2", "upgrade"]);
}

#[test]
fn promotions_at_once_lose_none() {
    let shop = shop();
    let ids: Vec<String> = (0..6).map(|seed| shop.add(seed, None)).collect();
    std::thread::scope(|scope| {
        for id in &ids {
            scope.spawn(|| shop.registry.promote(id, "test").unwrap());
        }
    });
    let live = shop.registry.live().unwrap().unwrap();
    let mut seen: Vec<String> = live.previous.into_iter().map(|past| past.id).collect();
    seen.push(live.id);
    seen.sort();
    let mut all = ids.clone();
    all.sort();
    assert_eq!(seen, all);
}

/// Each way of writing a head, for a verifier as Hugging Face tools wrote it.
#[test]
#[ignore = "real verifier: seconds, once vLLM's environment is installed"]
fn heads_for_a_real_verifier() {
    let verifier = common::environment::environment().join("smollm2-135m");
    let shape = VerifierShape::read(&verifier).unwrap();
    assert_eq!((shape.hidden_size, shape.vocab_size, shape.num_hidden_layers), (576, 49_152, 30));
    let tensors = VerifierTensors::read(&verifier, &shape).unwrap();
    let counts = vec![0u64; shape.vocab_size];
    let ids = draft_vocabulary(&counts, 8192, &shape.eos_token_ids).unwrap();
    let fresh = FreshOptions { seed: 1, output_head: OutputHead::FromVerifier, aux_layer_ids: None };
    let head = fresh_head(&shape, ids, &fresh, &tensors).unwrap();
    let reference = VerifierReference {
        name_or_path: verifier.display().to_string(),
        architectures: shape.architectures.clone(),
        speculative_tokens: 3,
    };
    for (format, target_layer) in [
        (HeadFormat::Flat, true),
        (HeadFormat::Speculators, true),
        (HeadFormat::Flat, false),
        (HeadFormat::Speculators, false),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let write =
            WriteOptions { format, dtype: HeadDtype::Bf16, verifier: Some(reference.clone()), target_layer };
        head.write(directory.path(), &write).unwrap();
        let read = Head::read(directory.path(), Some(&shape)).unwrap();
        assert_eq!((&read.config, &read.draft_ids), (&head.config, &head.draft_ids));
        // The verifier's own rows are bfloat16, so nothing is lost of them.
        assert_eq!(read.tensors.lm_head, head.tensors.lm_head);
    }
}
