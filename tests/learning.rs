//! The learning commands, as processes, on a small verifier and samples made here: interrupted runs, following the store,
//! promotion through the gate into a fake vLLM.

// Clippy takes helpers outside #[test] functions for library code.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use draftsmith::head::file_digest;
use draftsmith::states::{NewSample, SampleHeader, StateDtype, StateStore, StoreOptions};
use rustix::process::{Pid, Signal, kill_process};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

const HIDDEN: usize = 16;
const VOCAB: usize = 40;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A directory with a verifier, a configuration and a data directory.
struct Lab {
    keep: tempfile::TempDir,
    store: StateStore,
    appended: u64,
    /// [VOCAB, HIDDEN], the output head as well.
    embedding: Vec<f32>,
}

impl Lab {
    fn new(train: &str) -> Self {
        let keep = tempfile::tempdir().unwrap();
        let verifier = keep.path().join("verifier");
        fs::create_dir(&verifier).unwrap();
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
            "intermediate_size": 24, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": VOCAB, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
            "eos_token_id": 1,
        });
        fs::write(verifier.join("config.json"), config.to_string()).unwrap();
        let mut random = Random(1);
        let embedding = random.floats(VOCAB * HIDDEN);
        let (embedding_bytes, norm) = (bytes(&embedding), bytes(&[1.0; HIDDEN]));
        let views = [
            (
                "model.embed_tokens.weight",
                TensorView::new(Dtype::F32, vec![VOCAB, HIDDEN], &embedding_bytes).unwrap(),
            ),
            ("model.norm.weight", TensorView::new(Dtype::F32, vec![HIDDEN], &norm).unwrap()),
        ];
        fs::write(verifier.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
        let data = keep.path().join("data");
        let text = format!(
            "[data]\ndirectory = {data:?}\n[verifier]\ndirectory = {verifier:?}\n[train]\nwarmup_steps = 2\n{train}\n"
        );
        fs::write(keep.path().join("draftsmith.toml"), text).unwrap();
        let store = StateStore::open(&data.join("states"), StoreOptions::default()).unwrap();
        Self { keep, store, appended: 0, embedding }
    }

    fn data(&self) -> PathBuf {
        self.keep.path().join("data")
    }

    fn append(&mut self, count: usize, held_out: bool) {
        self.append_of_layers(count, held_out, [2, 4, 5, 8]);
    }

    fn append_of_layers(&mut self, count: usize, held_out: bool, layer_ids: [u32; 4]) {
        for _ in 0..count {
            self.appended += 1;
            let mut random = Random(self.appended);
            let rows = 20;
            let header = SampleHeader {
                request_id: format!("request-{}", self.appended),
                choice_index: 0,
                conversation_id: format!("conversation-{}", self.appended),
                source: "live".into(),
                held_out,
                prompt_length: 4,
                rows,
                missing_rows: 0,
                layers: 4,
                hidden: HIDDEN,
                dtype: StateDtype::F32,
                layer_ids: layer_ids.to_vec(),
                // The same few tokens come with other states each time: they must not be taken for the same rows.
                prefix_salt: format!("request-{}", self.appended),
                head_digest: None,
                drafting: None,
                captured_at: self.appended as i64,
            };
            // A short cycle of tokens, which a head can learn.
            let start = random.bits() % 5;
            let ids: Vec<u32> = (0..=rows as u64).map(|index| 3 + ((start + index) % 5) as u32).collect();
            let mut states = random.floats(rows * 4 * HIDDEN);
            // The last layer says which token comes next.
            for (row, next) in ids[1..].iter().enumerate() {
                let says = &self.embedding[*next as usize * HIDDEN..][..HIDDEN];
                states[(row * 4 + 3) * HIDDEN..][..HIDDEN].copy_from_slice(says);
            }
            let sample =
                NewSample { header: &header, token_ids: &ids, first_row: 0, states: &bytes(&states) };
            self.store.append(sample).unwrap();
        }
        self.store.sync().unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_draftsmith"));
        command.args(arguments).arg("--config").arg(self.keep.path().join("draftsmith.toml"));
        // Gradient sums depend on nothing else, but two processes of a small machine would get in each other's way.
        command.env("RAYON_NUM_THREADS", "1");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn start(&self, arguments: &[&str]) -> (Child, BufReader<ChildStderr>) {
        let mut child = self
            .command(arguments)
            .stderr(Stdio::piped())
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        (child, stderr)
    }

    /// Steps of a run with everything but the clock, as text: equal to the bit or not at all.
    fn metrics(&self, run: &str) -> Vec<String> {
        let text = fs::read_to_string(self.data().join("runs").join(run).join("metrics.jsonl")).unwrap();
        let mut lines = Vec::new();
        for line in text.lines() {
            let mut object: serde_json::Map<String, Value> = serde_json::from_str(line).unwrap();
            assert!(object.remove("seconds").unwrap().as_f64().unwrap() > 0.0);
            lines.push(Value::Object(object).to_string());
        }
        lines
    }

    /// A fresh head's directory, with a draft vocabulary of 20.
    fn day_0(&self, name: &str) -> PathBuf {
        let directory = self.keep.path().join(name);
        let mut init = Command::new(env!("CARGO_BIN_EXE_draftsmith"));
        init.args(["heads", "init", "--draft-vocab", "20", "--verifier"])
            .arg(self.keep.path().join("verifier"));
        assert!(init.arg("--out").arg(&directory).status().unwrap().success());
        directory
    }

    fn live(&self) -> Value {
        serde_json::from_slice(&fs::read(self.data().join("heads/live.json")).unwrap()).unwrap()
    }

    fn model_digest(&self, head: &str) -> Value {
        self.json(&["heads", "show", head])["model_digest"].clone()
    }
}

fn first_line_with(stderr: &mut impl BufRead, word: &str) -> String {
    let mut seen = String::new();
    loop {
        let mut line = String::new();
        assert!(stderr.read_line(&mut line).unwrap() > 0, "no `{word}` in: {seen}");
        if line.contains(word) {
            return line;
        }
        seen.push_str(&line);
    }
}

const STEPS: &str = "4000";

#[test]
fn a_run_that_was_killed_and_stopped_ends_like_one_that_was_not() {
    // A learning rate that no short decimal is, so that the options must come back to the bit.
    let mut lab = Lab::new("learning_rate = 0.0033333333333333335\ncheckpoint_every = 300");
    lab.append(12, false);
    lab.append(3, true);
    let arguments = ["train", "--head", "scratch", "--draft-vocab", "20", "--steps", STEPS, "--json"];
    let whole = lab.json(&arguments);

    let (mut killed, mut stderr) = lab.start(&arguments);
    first_line_with(&mut stderr, "acceptance length");
    killed.kill().unwrap();
    killed.wait().unwrap();
    // What comes meanwhile changes nothing.
    lab.append(4, false);

    let (mut stopped, mut stderr) = lab.start(&["train", "--resume"]);
    first_line_with(&mut stderr, "acceptance length");
    kill_process(Pid::from_child(&stopped), Signal::TERM).unwrap();
    let told = first_line_with(&mut stderr, "--resume");
    assert_eq!(stopped.wait().unwrap().code(), Some(3));
    let run = told.trim().trim_end_matches('`').rsplit(' ').next().unwrap().to_owned();

    let other = lab.run(&["train", "--resume", "nonsense"]);
    assert!(String::from_utf8_lossy(&other.stderr).contains("no run `nonsense`"));
    let resumed = lab.json(&["train", "--json", "--resume", &run]);
    assert_eq!(resumed["run"], json!(run));
    let (wanted, found) = (lab.metrics(whole["run"].as_str().unwrap()), lab.metrics(&run));
    assert_eq!(wanted.len().to_string(), STEPS);
    let different = wanted.iter().zip(&found).find(|(wanted, found)| wanted != found);
    assert_eq!((different, found.len()), (None, wanted.len()));
    assert_eq!(resumed["score"], whole["score"]);
    assert_eq!(resumed["curve"].as_array().unwrap().len(), whole["curve"].as_array().unwrap().len());
    let digest = |report: &Value| lab.model_digest(report["head"].as_str().unwrap());
    assert_eq!(digest(&resumed), digest(&whole));

    let again = lab.run(&["train", "--resume", &run]);
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("is finished"));
}

#[test]
fn following_trains_a_round_when_enough_is_new_and_starts_from_the_last_candidate() {
    let mut lab = Lab::new("follow_samples = 6\npasses = 2\nbatch_documents = 2");
    let nothing = lab.run(&["train", "--follow"]);
    assert_eq!(nothing.status.code(), Some(1));
    let message = String::from_utf8_lossy(&nothing.stderr).into_owned();
    assert!(message.contains("no head is live") && message.contains("train --head scratch"), "{message}");

    lab.append(8, false);
    lab.append(3, true);
    let first = lab.json(&["train", "--head", "scratch", "--draft-vocab", "20", "--json"]);
    let first = first["head"].as_str().unwrap().to_owned();
    assert!(lab.run(&["heads", "promote", &first, "--no-swap", "--force"]).status.success());
    // Samples 1 to 8 are the live head's; these are a round's worth with the ones to come.
    lab.append(4, false);
    let (mut child, mut stderr) = lab.start(&["train", "--follow", "--json"]);
    let mut reports =
        serde_json::Deserializer::from_reader(child.stdout.take().unwrap()).into_iter::<Value>();
    lab.append(2, false);
    let one = reports.next().unwrap().unwrap();
    lab.append(6, false);
    let two = reports.next().unwrap().unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert!(reports.next().is_none());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert!(!rest.contains("--resume"), "{rest}");

    // Six new ones and as many old ones: 12 documents, two at a time, twice.
    for report in [&one, &two] {
        assert_eq!((&report["samples"], &report["steps"]), (&json!(12), &json!(12)));
    }
    let manifest = |report: &Value| lab.json(&["heads", "show", report["head"].as_str().unwrap()]);
    assert_eq!(manifest(&one)["parent"], json!(first));
    assert_eq!(manifest(&two)["parent"], one["head"]);
    assert!(manifest(&two)["score"]["acceptance_length"].as_f64().unwrap() >= 1.0);
    assert_eq!(manifest(&two)["training"]["newest_sample"], json!(lab.appended));
    // The optimizer went on from run to run: 8 documents in fours, twice, then 12 steps each.
    let run = lab.data().join("runs").join(two["run"].as_str().unwrap());
    let checkpoint: Value = serde_json::from_slice(&fs::read(run.join("checkpoint.json")).unwrap()).unwrap();
    assert_eq!((&checkpoint["updates"], &checkpoint["progress"]["step"]), (&json!(8 + 12 + 12), &json!(12)));
    assert!(!lab.data().join("runs").join(one["run"].as_str().unwrap()).join("checkpoint.json").exists());
}

/// Answers as vLLM with the plugin does that was started with the head of `directory`, whatever head it is given; gives the
/// digests of those and ends with the test.
fn fake_vllm(directory: &Path) -> (String, std::sync::mpsc::Receiver<String>) {
    fake_vllm_of(directory, false)
}

/// `old`: with a plugin that does not tell of its head.
fn fake_vllm_of(directory: &Path, old: bool) -> (String, std::sync::mpsc::Receiver<String>) {
    let config: Value = serde_json::from_slice(&fs::read(directory.join("config.json")).unwrap()).unwrap();
    let mut file = directory.join("model.safetensors");
    let mut digest = file_digest(&file).unwrap();
    let mut loaded_at = None;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, path, body) = read_request(stream.unwrap());
            if path == "/update_weights" {
                digest = body["update_info"]["digest"].as_str().unwrap().to_owned();
                file = PathBuf::from(body["update_info"]["path"].as_str().unwrap());
                loaded_at = Some(1.5);
                // The test may be over.
                let _ = sender.send(digest.clone());
            }
            let mut status = json!({
                "digest": digest, "file": file, "config": config, "loaded_at": loaded_at, "swaps": 1, "refusals": 0,
                "tap": { "enabled": true, "steps": 0, "captured_steps": 0, "missed_steps": 0, "overrun_steps": 0, "exported": 0,
                    "not_sampled": 0, "over_budget": 0, "incomplete": 0, "dropped": 0, "failed": 0, "bytes_written": 0,
                    "host_bytes": 8, "device_bytes": 0 },
            });
            if old {
                status.as_object_mut().unwrap().remove("config");
                status.as_object_mut().unwrap().remove("file");
            }
            let answer = json!({ "results": [status] }).to_string();
            let length = answer.len();
            write!(
                stream,
                "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{answer}"
            )
            .unwrap();
        }
    });
    (url, receiver)
}

fn read_request(stream: TcpStream) -> (TcpStream, String, Value) {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let path = line.split(' ').nth(1).unwrap().to_owned();
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    (reader.into_inner(), path, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

#[test]
fn promote_asks_the_gate_swaps_and_rolls_back() {
    let mut lab = Lab::new("learning_rate = 0.01\n[gate]\nmin_gain = 0.5");
    lab.append(12, false);
    lab.append(4, true);
    let train = |steps: &str| {
        let report =
            lab.json(&["train", "--head", "scratch", "--draft-vocab", "20", "--steps", steps, "--json"]);
        report["head"].as_str().unwrap().to_owned()
    };
    let (weak, strong) = (train("1"), train("300"));
    let (url, digests) = fake_vllm(&lab.data().join("heads").join(&weak));
    let live = Lab::live;

    let nothing = lab.run(&["heads", "rollback", "--upstream", &url]);
    assert_eq!(nothing.status.code(), Some(1));
    // Nothing is live as far as the registry knows: the gate asks for more than no drafting gives.
    let nothing = lab.run(&["heads", "promote", &weak, "--no-swap"]);
    assert_eq!(nothing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nothing.stderr).contains("1.000 without a head"), "{nothing:?}");
    let report = lab.json(&["heads", "promote", &weak, "--no-swap", "--force", "--json"]);
    assert_eq!(
        (&report["promoted"], &report["swap"], &report["forced"]),
        (&json!(true), &Value::Null, &json!(true))
    );
    assert!(digests.try_recv().is_err());

    // Another held-out set than the manifests know: both are scored anew.
    let old_set = lab.json(&["heads", "show", &weak])["score"]["set_digest"].clone();
    let report = lab.json(&["heads", "promote", &strong, "--upstream", &url, "--json"]);
    assert_eq!(report["comparison"]["live"]["score"]["set_digest"], old_set);
    assert!(report["comparison"]["decision"]["gain"].as_f64().unwrap() > 0.1, "{report}");
    assert_eq!(json!(digests.recv().unwrap()), lab.model_digest(&strong));
    assert_eq!(live(&lab)["id"], json!(strong));
    assert!(live(&lab)["grounds"].as_str().unwrap().starts_with("gate: acceptance length"));

    lab.append(2, true);
    fs::write(lab.data().join("heads").join(&weak).join("manifest.json"), {
        let mut manifest = lab.json(&["heads", "show", &weak]);
        manifest["score"] = Value::Null;
        manifest.to_string()
    })
    .unwrap();
    let refused = lab.run(&["heads", "promote", &weak, "--upstream", &url]);
    assert_eq!(refused.status.code(), Some(1));
    let (out, err) = (String::from_utf8(refused.stdout).unwrap(), String::from_utf8(refused.stderr).unwrap());
    assert!(out.contains(&weak) && out.contains(&strong) && out.contains("acceptance length"), "{out}");
    assert!(err.contains("stays a candidate") && err.contains("--force"), "{err}");
    let (one, other) = (
        lab.json(&["heads", "show", &weak])["score"].clone(),
        lab.json(&["heads", "show", &strong])["score"].clone(),
    );
    assert_eq!(one["set_digest"], other["set_digest"]);
    assert_ne!(one["set_digest"], old_set);
    assert_eq!(live(&lab)["id"], json!(strong));
    assert!(digests.try_recv().is_err(), "a refused head never reaches vLLM");

    assert!(lab.run(&["heads", "promote", &weak, "--force", "--upstream", &url]).status.success());
    assert_eq!(json!(digests.recv().unwrap()), lab.model_digest(&weak));
    assert!(live(&lab)["grounds"].as_str().unwrap().starts_with("forced: "));
    let back = lab.json(&["heads", "rollback", "--upstream", &url, "--json"]);
    assert_eq!((&back["head"], &back["rolled_back"]["id"]), (&json!(strong), &json!(weak)));
    assert_eq!(json!(digests.recv().unwrap()), lab.model_digest(&strong));
    assert_eq!(live(&lab)["id"], json!(strong));
}

/// The registry knows nothing of the head of day 0, nor of one that was swapped in from a directory.
#[test]
fn a_candidate_must_beat_what_vllm_runs_whoever_put_it_there() {
    let mut lab = Lab::new("learning_rate = 0.01");
    lab.append(12, false);
    lab.append(4, true);
    let day_0 = lab.day_0("day-0");
    let (url, digests) = fake_vllm(&day_0);
    let train = |steps: &str| {
        let report =
            lab.json(&["train", "--head", "scratch", "--draft-vocab", "20", "--steps", steps, "--json"]);
        report["head"].as_str().unwrap().to_owned()
    };
    let (weak, strong) = (train("40"), train("300"));
    let promote = |head: &str| lab.run(&["heads", "promote", head, "--upstream", &url, "--json"]);

    // The file that vLLM loaded holds another head by now, so what vLLM runs cannot be scored.
    let file = day_0.join("model.safetensors");
    let kept = fs::read(&file).unwrap();
    fs::write(&file, [kept.as_slice(), b" "].concat()).unwrap();
    let unknown = promote(&weak);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&unknown.stderr).contains("not the file that vLLM loaded"),
        "{unknown:?}"
    );
    fs::write(&file, kept).unwrap();

    let first: Value = serde_json::from_slice(&promote(&weak).stdout).unwrap();
    let adopted = first["comparison"]["live"]["head"].as_str().unwrap().to_owned();
    let manifest = lab.json(&["heads", "show", &adopted]);
    assert_eq!(manifest["origin"]["from"], json!(day_0));
    assert_eq!((&first["promoted"], &first["forced"]), (&json!(true), &json!(false)), "{first}");
    assert_eq!(json!(digests.recv().unwrap()), lab.model_digest(&weak));
    assert_eq!(lab.live()["previous"][0]["id"], json!(adopted));

    // By hand, as it was exported: a candidate must beat this one, and does not. Nothing changes then.
    let by_hand = lab.keep.path().join("by-hand");
    let directory = by_hand.to_str().unwrap();
    assert!(lab.run(&["heads", "export", &strong, directory]).status.success());
    let swapped = lab.run(&["swap", directory, "--upstream", &url]);
    assert!(String::from_utf8_lossy(&swapped.stderr).contains(&weak), "live.json names another: {swapped:?}");
    assert_eq!(digests.recv().unwrap(), file_digest(&by_hand.join("model.safetensors")).unwrap());
    let refused = promote(&weak);
    assert_eq!(refused.status.code(), Some(1));
    let second: Value = serde_json::from_slice(&refused.stdout).unwrap();
    assert_eq!(second["comparison"]["live"]["head"], json!(strong), "an exported head is known again");
    assert!(digests.try_recv().is_err());
    assert_eq!(lab.live()["id"], json!(weak));

    // That swap was a mistake: rolling back leads to the head that was marked live, not past it.
    let back = lab.json(&["heads", "rollback", "--upstream", &url, "--json"]);
    assert_eq!((&back["head"], &back["rolled_back"]), (&json!(weak), &Value::Null));
    assert_eq!(json!(digests.recv().unwrap()), lab.model_digest(&weak));
    assert_eq!(lab.live()["id"], json!(weak));
}

#[test]
fn a_roll_back_goes_back_and_never_forward() {
    let mut lab = Lab::new("learning_rate = 0.01");
    lab.append(12, false);
    lab.append(4, true);
    let train = |steps: &str| {
        let report =
            lab.json(&["train", "--head", "scratch", "--draft-vocab", "20", "--steps", steps, "--json"]);
        report["head"].as_str().unwrap().to_owned()
    };
    let (first, second) = (train("1"), train("2"));
    let place = |head: &str| lab.data().join("heads").join(head);
    let (url, digests) = fake_vllm(&place(&first));
    let promote = |head: &str| lab.run(&["heads", "promote", head, "--force", "--upstream", &url]);
    let back = || lab.json(&["heads", "rollback", "--upstream", &url, "--json"]);
    assert!(promote(&first).status.success() && promote(&second).status.success());
    assert_eq!(digests.try_iter().count(), 1, "the first one ran already");

    // Cut off after its swap: the pointer is what is left to do.
    assert!(lab.run(&["swap", place(&first).to_str().unwrap(), "--upstream", &url]).status.success());
    digests.recv().unwrap();
    let report = back();
    assert_eq!(
        (&report["head"], &report["rolled_back"]["id"], &report["swap"]),
        (&json!(first), &json!(second), &Value::Null)
    );
    assert!(digests.try_recv().is_err());
    assert_eq!(lab.live()["id"], json!(first));

    // Marked for the next start, and not wanted any more.
    assert!(lab.run(&["heads", "promote", &second, "--force", "--no-swap"]).status.success());
    assert_eq!(back()["head"], json!(first));
    assert!(digests.try_recv().is_err());

    // The live head is damaged, in its manifest or as a whole.
    assert!(promote(&second).status.success());
    digests.recv().unwrap();
    fs::write(place(&second).join("manifest.json"), "{").unwrap();
    assert_eq!(back()["head"], json!(first));
    assert_eq!(json!(digests.recv().unwrap()), lab.model_digest(&first));
}

/// vLLM starts with the head that its operator named, whatever was live before.
#[test]
fn after_a_restart_of_vllm_a_candidate_need_not_beat_the_head_of_day_0_alone() {
    let mut lab = Lab::new("learning_rate = 0.01");
    lab.append(12, false);
    lab.append(4, true);
    let day_0 = lab.day_0("day-0");
    let report = lab.json(&["train", "--head", "scratch", "--draft-vocab", "20", "--steps", "40", "--json"]);
    let head = report["head"].as_str().unwrap().to_owned();
    let other = lab.json(&["train", "--head", "scratch", "--draft-vocab", "20", "--steps", "60", "--json"]);
    assert!(lab.run(&["heads", "promote", &head, "--force", "--no-swap"]).status.success());
    let before = lab.live();

    let (url, digests) = fake_vllm(&day_0);
    let refused = lab.run(&["heads", "promote", other["head"].as_str().unwrap(), "--upstream", &url]);
    assert_eq!(refused.status.code(), Some(1));
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(message.contains("restarted") && message.contains("swap live"), "{message}");
    assert_eq!(lab.live(), before);
    assert!(lab.run(&["swap", "live", "--upstream", &url]).status.success());
    assert_eq!(json!(digests.recv().unwrap()), lab.model_digest(&head));

    let (old, _) = fake_vllm_of(&day_0, true);
    let refused = lab.run(&["swap", "live", "--upstream", &old]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("draftsmith vllm plugin"), "{refused:?}");
}

/// Names, shapes and dtypes are the same in all of these: only vLLM's own word on its head tells them apart.
#[test]
fn a_head_that_vllm_would_run_by_other_rules_is_refused() {
    let lab = Lab::new("");
    let day_0 = lab.day_0("day-0");
    let (url, digests) = fake_vllm(&day_0);
    let other = lab.day_0("other");
    let config: Value = serde_json::from_slice(&fs::read(other.join("config.json")).unwrap()).unwrap();
    let swap = || lab.run(&["swap", other.to_str().unwrap(), "--upstream", &url]);
    for (field, value) in [
        ("norm_output", json!(false)),
        ("norm_before_residual", json!(true)),
        ("rms_norm_eps", json!(1e-4)),
        ("rope_theta", json!(20_000.0)),
    ] {
        let mut changed = config.clone();
        assert_ne!(changed[field], value);
        changed[field] = value;
        fs::write(other.join("config.json"), changed.to_string()).unwrap();
        let refused = swap();
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{message}");
        assert!(message.contains(&format!("`{field}`")) && message.contains("restart vLLM"), "{message}");
    }
    assert!(digests.try_recv().is_err(), "none of them reached vLLM");
    fs::write(other.join("config.json"), config.to_string()).unwrap();
    assert!(swap().status.success());
}

/// A swap cannot change the size: what is trained must fit what vLLM was started with.
#[test]
fn heads_from_init_and_from_scratch_have_draft_vocabularies_of_one_size() {
    let mut lab = Lab::new("");
    lab.append(2, false);
    lab.append(1, true);
    let day_0 = lab.keep.path().join("day-0");
    let mut init = Command::new(env!("CARGO_BIN_EXE_draftsmith"));
    init.args(["heads", "init", "--verifier"]).arg(lab.keep.path().join("verifier")).arg("--out").arg(&day_0);
    assert!(init.status().unwrap().success());
    let trained = lab.json(&["train", "--head", "scratch", "--steps", "1", "--json"]);
    for head in [day_0, lab.data().join("heads").join(trained["head"].as_str().unwrap())] {
        let config: Value = serde_json::from_slice(&fs::read(head.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["draft_vocab_size"], json!(VOCAB), "{}", head.display());
    }
}

#[test]
fn records_verify_exits_with_3_when_something_is_wrong() {
    let lab = Lab::new("");
    let sound = lab.json(&["records", "verify", "--json"]);
    assert_eq!(sound["files"], json!(0));
    let bad = lab.data().join("records/dt=2026-11-29/hour=17/bad.parquet");
    fs::create_dir_all(bad.parent().unwrap()).unwrap();
    fs::write(&bad, "torn").unwrap();
    let output = lab.run(&["records", "verify", "--json"]);
    assert_eq!(output.status.code(), Some(3));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["files"], &report["unreadable_files"]), (&json!(1), &json!(1)));
    assert!(report["bad_files"][0]["path"].as_str().map(Path::new).unwrap().ends_with("hour=17/bad.parquet"));
}

/// States of other layers have the same shape: a head must never learn from them.
#[test]
fn a_head_learns_from_states_of_its_own_layers_alone() {
    let mut lab = Lab::new("passes = 1");
    lab.append(4, false);
    lab.append(2, true);
    let first = lab.json(&["train", "--head", "scratch", "--draft-vocab", "16", "--json"]);
    assert_eq!([&first["samples"], &first["held_out_samples"]], [4, 2]);

    // vLLM was started anew with a head of higher layers.
    lab.append_of_layers(3, false, [4, 6, 7, 8]);
    lab.append_of_layers(1, true, [4, 6, 7, 8]);
    let second = lab.json(&["train", "--head", "scratch", "--draft-vocab", "16", "--json"]);
    assert_eq!([&second["samples"], &second["held_out_samples"]], [3, 1]);
    let config = lab.data().join("heads").join(second["head"].as_str().unwrap()).join("config.json");
    let config: Value = serde_json::from_str(&fs::read_to_string(config).unwrap()).unwrap();
    assert_eq!(config["eagle_aux_hidden_state_layer_ids"], json!([4, 6, 7, 8]));

    let more = lab.json(&["train", "--head", first["head"].as_str().unwrap(), "--json"]);
    assert_eq!([&more["samples"], &more["held_out_samples"]], [4, 2]);
}
