//! The local verifier: what it refuses, and its states beside those of transformers.

// Clippy takes helpers outside #[test] functions for library code.
#![allow(clippy::unwrap_used)]

mod common {
    pub mod environment;
}

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::environment::environment;
use draftsmith::head::VerifierShape;
use draftsmith::prefill::LocalVerifier;
use draftsmith::record::{Record, Recorder, RecorderOptions, Status, now_micros};
use draftsmith::states::{Reader, StateDtype};
use draftsmith::store::DataDir;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

const HIDDEN: usize = 8;
const VOCABULARY: usize = 11;
const LAYERS: usize = 4;

/// The directory of a model of four layers with all weights alike; `changes` go into its config.json.
fn small_model(directory: &Path, changes: &[(&str, Value)]) {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": HIDDEN,
        "num_attention_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "dtype": "bfloat16",
    });
    for (key, value) in changes {
        config[key] = value.clone();
    }
    fs::write(directory.join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN])];
    for layer in 0..LAYERS {
        for name in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), vec![HIDDEN, HIDDEN]));
        }
        for name in ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), vec![HIDDEN, HIDDEN]));
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), vec![HIDDEN]));
        }
    }
    let bytes = [0x3c; VOCABULARY * HIDDEN * 2];
    let mut tensors = Vec::new();
    for (name, shape) in &shapes {
        let length = shape.iter().product::<usize>() * 2;
        tensors.push((name, TensorView::new(Dtype::BF16, shape.clone(), &bytes[..length]).unwrap()));
    }
    fs::write(directory.join("model.safetensors"), safetensors::serialize(tensors, None).unwrap()).unwrap();
}

fn refusal(changes: &[(&str, Value)], layer_ids: &[u32]) -> String {
    let directory = tempfile::tempdir().unwrap();
    small_model(directory.path(), changes);
    LocalVerifier::open(directory.path(), layer_ids).unwrap_err().to_string()
}

#[test]
fn what_is_not_followed_is_refused_by_its_key() {
    for (key, value, told) in [
        ("architectures", json!(["MistralForCausalLM"]), "MistralForCausalLM"),
        ("rope_scaling", json!({"rope_type": "longrope", "factor": 4.0}), "longrope"),
        ("hidden_act", json!("gelu"), "gelu"),
        ("attention_bias", json!(true), "true"),
        ("mlp_bias", json!(true), "true"),
        ("use_sliding_window", json!(true), "true"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "sliding_attention"),
        ("quantization_config", json!({"quant_method": "fp8"}), "fp8"),
        ("partial_rotary_factor", json!(0.5), "0.5"),
    ] {
        let message = refusal(&[(key, value)], &[1, 2]);
        assert!(message.contains(key) && message.contains(told), "{message}");
    }
    for layer_ids in [&[1, 5][..], &[0, 1], &[2, 1], &[1, 1], &[]] {
        let message = refusal(&[], layer_ids);
        assert!(message.contains(&format!("{layer_ids:?}")) && message.contains("from 1 to 4"), "{message}");
    }
    // Qwen2 has biases; this checkpoint has none.
    let message = refusal(&[("architectures", json!(["Qwen2ForCausalLM"]))], &[2]);
    assert!(message.contains("model.layers.0.self_attn.q_proj.bias"), "{message}");
}

#[test]
fn ids_are_checked_and_a_row_depends_on_no_later_one() {
    let directory = tempfile::tempdir().unwrap();
    small_model(directory.path(), &[]);
    let verifier = LocalVerifier::open(directory.path(), &[1, 2]).unwrap();
    assert!(verifier.prefill(&[]).unwrap_err().to_string().contains("no token ids"));
    assert!(verifier.prefill(&[1, 11]).unwrap_err().to_string().contains("vocabulary of 11"));
    // Longer than a block of rows.
    let ids: Vec<u32> = (0..300).map(|position| position * 7 % 11).collect();
    let all = verifier.prefill(&ids).unwrap();
    let first = verifier.prefill(&ids[..200]).unwrap();
    assert_eq!((all.len(), first.len()), (300 * 2 * HIDDEN, 200 * 2 * HIDDEN));
    for (one, other) in all.iter().zip(&first) {
        assert!((one - other).abs() <= 1e-5 * one.abs(), "{one} {other}");
    }
}

#[test]
fn records_are_filled_in_without_a_vllm() {
    let site = tempfile::tempdir().unwrap();
    let path = |name: &str| site.path().join(name);
    fs::create_dir(path("verifier")).unwrap();
    small_model(&path("verifier"), &[]);
    fs::write(path("draftsmith.toml"), format!("[verifier]\ndirectory = {:?}\n", path("verifier"))).unwrap();
    let data = DataDir::new(path("data"));
    let recorder = Recorder::start(&data, RecorderOptions::default()).unwrap();
    let record = |request_id: &str, output: &[i32]| Record {
        status: Status::Ok,
        prompt_token_ids: Some(vec![1, 2, 3]),
        output_token_ids: Some(output.to_vec()),
        ..Record::new(request_id, "/v1/chat/completions", now_micros())
    };
    recorder.record(vec![record("good", &[4, 5, 6]), record("odd", &[VOCABULARY as i32, 5, 6])]);
    recorder.shutdown().unwrap();
    let backfill = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_draftsmith"));
        command.args(["states", "backfill", "--json", "--config"]).arg(path("draftsmith.toml"));
        command.arg("--data").arg(path("data")).args(more).output().unwrap()
    };

    let output = backfill(&["--from", "local"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["stored"]), (Some(3), &json!(1)), "{report}");
    assert_eq!(report["failed"], json!({"vocabulary": 1}));
    let reader = Reader::open(&data.states()).unwrap();
    let sample = reader.load(0).unwrap();
    // The layers of a day-0 head of four layers, and the last one; in the dtype of the weights.
    assert_eq!((&sample.header.layer_ids, sample.header.dtype), (&vec![1, 2, 3, 4], StateDtype::Bf16));
    assert_eq!((sample.header.rows, sample.header.prompt_length), (5, 3));
    let verifier = LocalVerifier::open(&path("verifier"), &[1, 2, 3, 4]).unwrap();
    let computed = verifier.prefill(&sample.token_ids[..5]).unwrap();
    let rounded: Vec<f32> = computed.iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect();
    assert_eq!(sample.states, rounded);

    for (flags, told) in [
        (&["--from", "local", "--transfer", "/nowhere"][..], "--transfer is a second vLLM's"),
        (&["--from", "local", "--concurrency", "2"], "--concurrency is a second vLLM's"),
        (&["--from", "http://127.0.0.1:1"], "--transfer is missing"),
    ] {
        let refused = backfill(flags);
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(1) && message.contains(told), "{message}");
    }
}

// ---- beside transformers ----

/// Ids that the model may well see: of English text where there is a tokenizer, else any. What comes out of a trained
/// model for nonsense is far more sensitive to rounding, in transformers too.
fn token_ids(model: &Path, vocab_size: usize) -> Vec<u32> {
    match tokenizers::Tokenizer::from_file(model.join("tokenizer.json")) {
        Ok(tokenizer) => {
            let text = include_str!("../LICENSE");
            tokenizer.encode(text, false).unwrap().get_ids().to_vec()
        }
        Err(_) => (0..1000).map(|position| position * position % vocab_size as u32).collect(),
    }
}

/// Rows of every layer for prompts of several lengths, one file each, as tests/stock_vllm/reference.py reads them.
fn write_states(model: &Path, directory: &Path) -> Vec<PathBuf> {
    let shape = VerifierShape::read(model).unwrap();
    let layer_ids: Vec<u32> = (1..=shape.num_hidden_layers as u32).collect();
    let verifier = LocalVerifier::open(model, &layer_ids).unwrap();
    let all_ids = token_ids(model, shape.vocab_size);
    let mut files = Vec::new();
    for length in [1, 17, 400] {
        let ids = &all_ids[..=length];
        let states = verifier.prefill(&ids[..length]).unwrap();
        let states: Vec<u8> = states.iter().flat_map(|value| value.to_le_bytes()).collect();
        let ids: Vec<u8> = ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
        let layers: Vec<u8> = layer_ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
        let wide = vec![length, layer_ids.len(), shape.hidden_size];
        let tensors = [
            ("hidden_states", TensorView::new(Dtype::F32, wide, &states).unwrap()),
            ("token_ids", TensorView::new(Dtype::I64, vec![length + 1], &ids).unwrap()),
            ("layer_ids", TensorView::new(Dtype::I64, vec![layer_ids.len()], &layers).unwrap()),
        ];
        let path = directory.join(format!("{length}.safetensors"));
        fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
        files.push(path);
    }
    files
}

/// What a script beside the tests printed.
fn python(environment: &Path, script: &str, arguments: &[&Path]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    let mut command = Command::new(environment.join("venv/bin/python"));
    let output = command.arg(script).args(arguments).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[ignore = "transformers: a minute or three, once installed"]
fn states_are_those_that_transformers_computes() {
    let environment = environment();
    let directory = tempfile::tempdir().unwrap();
    let made = python(&environment, "tiny_models/make_models.py", &[directory.path()]);
    let mut models = vec![environment.join("smollm2-135m")];
    models.extend(made.split_whitespace().map(|name| directory.path().join(name)));
    assert_eq!(models.len(), 6);
    for model in &models {
        let files = write_states(model, directory.path());
        let mut arguments = vec![model.as_path()];
        arguments.extend(files.iter().map(PathBuf::as_path));
        let largest: f64 =
            python(&environment, "stock_vllm/reference.py", &arguments).trim().parse().unwrap();
        println!("{}: largest relative error of a row {largest:.1e}", model.display());
        assert!(largest <= 2e-5, "{largest}");
    }
}
