//! `draftsmith states import`: what Speculators' offline generation wrote becomes samples of the store.

// Clippy takes helpers outside #[test] functions for library code.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::report::report;
use draftsmith::states::{Reader, StateDtype};
use draftsmith::store::is_held_out;
use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

mod common {
    pub mod report;
}

const HIDDEN: usize = 4;
const LAYERS: usize = 4;

/// The output of prepare-data (tests/fixtures/speculators), with `hidden_states` in it, and a sidecar's data.
struct Site {
    directory: tempfile::TempDir,
}

impl Site {
    fn new() -> Self {
        let site = Self { directory: tempfile::tempdir().unwrap() };
        for name in ["prepared", "prepared/hidden_states", "verifier", "data"] {
            fs::create_dir(site.path(name)).unwrap();
        }
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/speculators");
        for name in ["state.json", "data-00000-of-00002.arrow", "data-00001-of-00002.arrow"] {
            fs::copy(fixture.join(name), site.path("prepared").join(name)).unwrap();
        }
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
            "num_attention_heads": 2, "num_hidden_layers": 8, "vocab_size": 1000, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "rope_theta": 1e4,
        });
        fs::write(site.path("verifier/config.json"), config.to_string()).unwrap();
        let settings = format!("[verifier]\ndirectory = {:?}\n", site.path("verifier"));
        fs::write(site.path("draftsmith.toml"), settings).unwrap();
        site
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// What the offline generation moves to its place: vLLM's own file, a row for each id.
    fn write_states(&self, number: usize, ids: std::ops::Range<i64>, dtype: Dtype) {
        let rows = ids.clone().count();
        let values = (0..rows * LAYERS * HIDDEN).map(|number| number as f32);
        let states: Vec<u8> = match dtype {
            Dtype::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
            Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
            other => panic!("{other:?}"),
        };
        let ids: Vec<u8> = ids.flat_map(i64::to_le_bytes).collect();
        let tensors = [
            ("hidden_states", TensorView::new(dtype, vec![rows, LAYERS, HIDDEN], &states).unwrap()),
            ("token_ids", TensorView::new(Dtype::I64, vec![rows], &ids).unwrap()),
        ];
        let path = self.path("prepared/hidden_states").join(format!("hs_{number}.safetensors"));
        fs::write(path, safetensors::serialize(tensors, None).unwrap()).unwrap();
    }

    fn import(&self, directory: &str, more: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_draftsmith"))
            .args(["states", "import", "--json"])
            .arg(self.path(directory))
            .arg("--config")
            .arg(self.path("draftsmith.toml"))
            .arg("--data")
            .arg(self.path("data"))
            .args(more)
            .output()
            .unwrap()
    }
}

#[test]
fn files_become_samples_with_the_prompt_that_the_loss_mask_tells() {
    let site = Site::new();
    // Rows are in the order of the data set: prompts of 2, 3, 4, 3 and 1 ids.
    site.write_states(0, 20..24, Dtype::BF16);
    site.write_states(1, 40..44, Dtype::BF16);
    site.write_states(2, 30..37, Dtype::BF16);
    site.write_states(4, 10..15, Dtype::F32);
    site.write_states(9, 0..6, Dtype::BF16);
    let (code, first) = report(&site.import("prepared/hidden_states", &[]));
    assert_eq!((code, &first["stored"], &first["tokens"]), (3, &json!(2), &json!(3 + 4)), "{first}");
    // One token of answer; fewer ids than the data set's row; no row 9.
    assert_eq!((&first["without_ids"], &first["failed"]), (&json!(1), &json!({"shape": 1, "unmatched": 1})));

    let reader = Reader::open(&site.path("data/states")).unwrap();
    assert_eq!(reader.index().len(), 2);
    let mut names = Vec::new();
    for index in 0..2 {
        let sample = reader.load(index).unwrap();
        let header = &sample.header;
        let bf16 = header.request_id.starts_with("hs_0-");
        let wanted = if bf16 { (2, 3, StateDtype::Bf16) } else { (1, 4, StateDtype::F32) };
        assert_eq!((header.prompt_length, header.rows, header.dtype), wanted);
        assert_eq!(sample.token_ids, if bf16 { vec![20, 21, 22, 23] } else { vec![10, 11, 12, 13, 14] });
        // The last id's row is left out: nothing comes after it.
        let states: Vec<f32> = (0..header.rows * LAYERS * HIDDEN).map(|number| number as f32).collect();
        assert_eq!(sample.states, states);
        assert_eq!((header.source.as_str(), &header.layer_ids), ("import", &vec![2, 4, 5, 8]));
        assert_eq!(header.conversation_id, header.request_id);
        assert_eq!(header.held_out, is_held_out(&header.request_id, 0.125));
        names.push(header.request_id.clone());
    }
    names.sort();
    assert!(names[1].starts_with("hs_4-"), "{names:?}");

    let (_, again) = report(&site.import("prepared/hidden_states", &[]));
    assert_eq!((&again["stored"], &again["already_stored"]), (&json!(0), &json!(2)), "{again}");
}

#[test]
fn what_cannot_be_imported_is_told_with_what_to_do() {
    let site = Site::new();
    let message = |output: Output| {
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let empty = message(site.import("prepared/hidden_states", &[]));
    assert!(empty.contains("no hs_*.safetensors"), "{empty}");
    fs::write(site.path("prepared/hidden_states/data_0.pt"), "").unwrap();
    let pickles = message(site.import("prepared/hidden_states", &[]));
    assert!(pickles.contains("1 .pt files") && pickles.contains("Speculators 0.9"), "{pickles}");

    site.write_states(0, 20..24, Dtype::BF16);
    let elsewhere = site.path("verifier");
    let without = message(site.import("prepared/hidden_states", &["--dataset", elsewhere.to_str().unwrap()]));
    assert!(without.contains("state.json") && without.contains("--dataset"), "{without}");
    let (code, other) = report(&site.import("prepared/hidden_states", &["--layers", "1,2,3,8"]));
    assert_eq!((code, &other["stored"]), (0, &json!(1)));
    let contradicting = message(site.import("prepared/hidden_states", &[]));
    assert!(contradicting.contains("[1, 2, 3, 8]"), "{contradicting}");
}
