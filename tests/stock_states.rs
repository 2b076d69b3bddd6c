//! States from vLLM's own connector: its lock protocol, what is refused, and `draftsmith states backfill`; with a vLLM
//! that is made up here, and with a real one.

// Clippy takes helpers outside #[test] functions for library code.
#![allow(clippy::unwrap_used)]

mod common {
    pub mod environment;
    pub mod ports;
    pub mod report;
    pub mod sidecar;
    pub mod vllm;
}

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use common::report::report;
use common::sidecar::Sidecar;
use common::vllm::Vllm;
use draftsmith::record::{Record, Recorder, RecorderOptions, Source, Split, Status, now_micros};
use draftsmith::states::{
    Expected, OutcomeStatus, Reader, SampleKey, StateDtype, StateStore, StockSample, StoreOptions,
    store_stock,
};
use draftsmith::store::DataDir;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

const LAYERS: [u32; 4] = [2, 4, 5, 8];
const HIDDEN: usize = 4;
const VOCABULARY: usize = 1000;
const FILE: &str = "cmpl-mine-0-0123abcd.safetensors";

/// What vLLM's connector writes for a prompt.
fn stock_file(ids: &[u32], rows: usize, layers: usize) -> Vec<u8> {
    let ids: Vec<u8> = ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
    let states: Vec<u8> =
        (0..rows * layers * HIDDEN).flat_map(|number| (number as f32 * 0.5).to_le_bytes()).collect();
    let tensors = [
        ("hidden_states", TensorView::new(Dtype::F32, vec![rows, layers, HIDDEN], &states).unwrap()),
        ("token_ids", TensorView::new(Dtype::I64, vec![ids.len() / 8], &ids).unwrap()),
    ];
    safetensors::serialize(tensors, None).unwrap()
}

fn sample() -> StockSample {
    StockSample { token_ids: vec![7, 8, 9, 10, 11], prompt_length: 3, layer_ids: LAYERS.to_vec() }
}

fn lock_path(directory: &Path) -> PathBuf {
    directory.join(format!("{FILE}.lock"))
}

fn entries(directory: &Path) -> usize {
    fs::read_dir(directory).unwrap().count()
}

/// A process that holds the lock, as vLLM does, until its standard input ends; that input becomes the file.
fn writer(directory: &Path) -> Child {
    let mut child = Command::new("flock")
        .arg("--no-fork")
        .arg(lock_path(directory))
        .args(["sh", "-c", r#"exec 9> "$0"; echo locked; exec cat >&9"#])
        .arg(directory.join(FILE))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "locked\n");
    child
}

#[test]
fn a_file_is_read_once_its_writer_lets_go_of_the_lock() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = writer(directory.path());
    let mut pipe = child.stdin.take().unwrap();
    let bytes = stock_file(sample().prefill(), 4, 4);
    let (half, rest) = bytes.split_at(bytes.len() / 2);
    pipe.write_all(half).unwrap();
    pipe.flush().unwrap();

    let (sender, taken) = channel();
    let path = directory.path().to_owned();
    std::thread::spawn(move || {
        // vLLM may see the directory under another path: the name alone counts.
        let reported = Path::new("/somewhere/in/a/container").join(FILE);
        sender.send(sample().take(&path, &reported, "mine")).unwrap();
    });
    assert_eq!(taken.recv_timeout(Duration::from_millis(500)).unwrap_err(), RecvTimeoutError::Timeout);
    pipe.write_all(rest).unwrap();
    drop(pipe);
    let file = taken.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
    assert_eq!((file.rows, file.layers, file.hidden, file.dtype), (4, 4, HIDDEN, StateDtype::F32));
    assert_eq!((file.token_ids, file.prompt_length), (vec![7, 8, 9, 10, 11], 3));
    assert_eq!(file.layer_ids, LAYERS);
    assert_eq!(entries(directory.path()), 0);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_writer_that_was_killed_ends_the_wait() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = writer(directory.path());
    child.stdin.as_mut().unwrap().write_all(b"half a").unwrap();
    let (sender, taken) = channel();
    let path = directory.path().to_owned();
    std::thread::spawn(move || sender.send(sample().take(&path, Path::new(FILE), "mine")).unwrap());
    assert_eq!(taken.recv_timeout(Duration::from_millis(200)).unwrap_err(), RecvTimeoutError::Timeout);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(taken.recv_timeout(Duration::from_secs(20)).unwrap().unwrap_err(), OutcomeStatus::Format);
    assert_eq!(entries(directory.path()), 0);
}

#[test]
fn each_fault_has_its_reason_and_both_files_go() {
    let check = |wanted: OutcomeStatus, bytes: &[u8]| {
        let directory = tempfile::tempdir().unwrap();
        File::create(lock_path(directory.path())).unwrap();
        fs::write(directory.path().join(FILE), bytes).unwrap();
        assert_eq!(sample().take(directory.path(), Path::new(FILE), "mine").unwrap_err(), wanted);
        assert_eq!(entries(directory.path()), 0, "{wanted:?}");
    };
    let ids = [7, 8, 9, 10];
    check(OutcomeStatus::Format, b"no safetensors");
    // A row too few, a layer too few, other ids, and all ids of the sample: the last one was not sent.
    check(OutcomeStatus::Shape, &stock_file(&ids, 3, 4));
    check(OutcomeStatus::Shape, &stock_file(&ids, 4, 3));
    check(OutcomeStatus::Shape, &stock_file(&[7, 8, 9, 11], 4, 4));
    check(OutcomeStatus::Shape, &stock_file(&[7, 8, 9, 10, 11], 5, 4));
    let half = [0u8; 2 * 4 * 4 * HIDDEN];
    let raw: Vec<u8> = ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
    let tensors = [
        ("hidden_states", TensorView::new(Dtype::F16, vec![4, 4, HIDDEN], &half).unwrap()),
        ("token_ids", TensorView::new(Dtype::I64, vec![4], &raw).unwrap()),
    ];
    check(OutcomeStatus::Format, &safetensors::serialize(tensors, None).unwrap());
}

#[test]
fn nothing_but_the_requests_own_file_is_touched() {
    let outside = tempfile::tempdir().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let other = outside.path().join(FILE);
    fs::write(&other, stock_file(sample().prefill(), 4, 4)).unwrap();

    // Without a lock the file may be half written.
    fs::copy(&other, directory.path().join(FILE)).unwrap();
    assert_eq!(
        sample().take(directory.path(), Path::new(FILE), "mine").unwrap_err(),
        OutcomeStatus::Unreadable
    );
    assert_eq!(entries(directory.path()), 0);

    File::create(lock_path(directory.path())).unwrap();
    symlink(&other, directory.path().join(FILE)).unwrap();
    assert_eq!(sample().take(directory.path(), &other, "mine").unwrap_err(), OutcomeStatus::Unreadable);
    assert_eq!(entries(directory.path()), 0);
    assert!(other.exists());

    for name in [FILE, "notes.txt", ".."] {
        let path = directory.path().join(name);
        if name != ".." {
            fs::write(&path, b"mine").unwrap();
        }
        assert_eq!(
            sample().take(directory.path(), &path, "another").unwrap_err(),
            OutcomeStatus::BadName,
            "{name}"
        );
    }
    assert_eq!(entries(directory.path()), 2);
}

#[test]
fn states_pass_the_checks_of_the_plugins_files() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    let transfer = tempfile::tempdir().unwrap();
    let take = || {
        File::create(lock_path(transfer.path())).unwrap();
        fs::write(transfer.path().join(FILE), stock_file(sample().prefill(), 4, 4)).unwrap();
        sample().take(transfer.path(), Path::new(FILE), "mine").unwrap()
    };
    let expected = || Expected {
        layer_ids: Some(LAYERS.to_vec()),
        hidden_size: Some(HIDDEN),
        vocab_size: Some(VOCABULARY),
    };
    let key = SampleKey {
        request_id: "asked",
        choice_index: 1,
        conversation_id: "c",
        source: "live",
        held_out: true,
    };
    let mut put = |expected: &mut Expected, file| store_stock(&mut store, expected, key, &file);
    let narrow = Expected { vocab_size: Some(11), ..expected() };
    assert_eq!(put(&mut narrow.clone(), take()), OutcomeStatus::Vocabulary);
    assert_eq!(put(&mut Expected { hidden_size: Some(8), ..expected() }, take()), OutcomeStatus::HiddenSize);
    let mut broken = take();
    let mut states = broken.states.to_vec();
    states[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    broken.states = states.into();
    assert_eq!(put(&mut expected(), broken), OutcomeStatus::NotFinite);
    assert_eq!(put(&mut expected(), take()), OutcomeStatus::Stored);
    assert_eq!(put(&mut expected(), take()), OutcomeStatus::Duplicate);
    let reader = Reader::open(directory.path()).unwrap();
    let stored = reader.load(0).unwrap();
    assert_eq!((stored.header.request_id.as_str(), stored.header.choice_index), ("asked", 1));
    assert!(stored.header.held_out);
    assert_eq!((stored.token_ids, stored.states.len()), (vec![7, 8, 9, 10, 11], 4 * 4 * HIDDEN));
}

// ---- the command, with a vLLM that is made up ----

/// How the made-up vLLM answers a prompt that begins with this id.
const REFUSED: u32 = 400;
const WITHOUT_FILE: u32 = 401;
const OTHER_IDS: u32 = 402;

fn serve_stock(transfer: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let transfer = transfer.clone();
            std::thread::spawn(move || answer(stream.unwrap(), &transfer));
        }
    });
    address
}

fn answer(mut stream: TcpStream, transfer: &Path) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        lines.push(line.trim().to_owned());
    }
    let header = |name: &str| lines.iter().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let mut reply = (200, json!({"data": [{"id": "base"}]}));
    if lines[0].starts_with("POST /v1/completions ") {
        let mut body = vec![0; header("content-length: ").unwrap().parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((&body["model"], &body["max_tokens"]), (&json!("base"), &json!(1)));
        let mut ids: Vec<u32> = serde_json::from_value(body["prompt"].clone()).unwrap();
        let name = format!("cmpl-{}-0-0123abcd.safetensors", header("x-request-id: ").unwrap());
        reply = match ids[0] {
            REFUSED => (400, json!({"error": {"message": "too long"}})),
            WITHOUT_FILE => (200, json!({"kv_transfer_params": null})),
            _ => (200, json!({"kv_transfer_params": {"hidden_states_path": format!("/elsewhere/{name}")}})),
        };
        if reply.0 == 200 && ids[0] != WITHOUT_FILE {
            if ids[0] == OTHER_IDS {
                ids.reverse();
            }
            let lock = File::create(transfer.join(format!("{name}.lock"))).unwrap();
            lock.lock().unwrap();
            fs::write(transfer.join(&name), stock_file(&ids, ids.len(), 4)).unwrap();
        }
    }
    let (status, body) = (reply.0, reply.1.to_string());
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}")
        .unwrap();
}

/// A data directory with records, a verifier's directory, and where the second vLLM writes.
struct Site {
    directory: tempfile::TempDir,
}

impl Site {
    fn new(records: Vec<Record>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let site = Self { directory };
        fs::create_dir(site.transfer()).unwrap();
        fs::create_dir(site.path("verifier")).unwrap();
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
            "num_attention_heads": 2, "num_hidden_layers": 8, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "rope_theta": 1e4,
        });
        fs::write(site.path("verifier/config.json"), config.to_string()).unwrap();
        let verifier = format!("[verifier]\ndirectory = {:?}\n", site.path("verifier"));
        fs::write(site.path("draftsmith.toml"), verifier).unwrap();
        let recorder = Recorder::start(&site.data(), RecorderOptions::default()).unwrap();
        recorder.record(records);
        recorder.shutdown().unwrap();
        site
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn transfer(&self) -> PathBuf {
        self.path("transfer")
    }

    fn data(&self) -> DataDir {
        DataDir::new(self.path("data"))
    }

    fn backfill(&self, from: &str, more: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_draftsmith"))
            .args(["states", "backfill", "--json", "--from", from, "--transfer"])
            .arg(self.transfer())
            .arg("--config")
            .arg(self.path("draftsmith.toml"))
            .arg("--data")
            .arg(self.path("data"))
            .args(more)
            .output()
            .unwrap()
    }
}

fn record(request_id: &str, prompt: &[i32], output: &[i32]) -> Record {
    Record {
        status: Status::Ok,
        prompt_token_ids: Some(prompt.to_vec()),
        output_token_ids: Some(output.to_vec()),
        ..Record::new(request_id, "/v1/chat/completions", now_micros())
    }
}

#[test]
fn what_has_no_states_is_filled_in_and_failures_are_counted_by_reason() {
    let held_out = Record { split: Split::HeldOut, source: Source::Replay, ..record("b", &[4, 5], &[6, 7]) };
    let second = Record { output_token_ids: Some(vec![8, 9]), ..held_out.for_choice(1) };
    let without_ids = Record { output_token_ids: None, ..record("c", &[1], &[2]) };
    let site = Site::new(vec![
        record("a", &[1, 2, 3], &[4, 5, 6]),
        held_out,
        Record { prompt_token_ids: Some(vec![4, 5]), ..second },
        without_ids,
        record("short", &[1], &[2]),
        record("refused", &[REFUSED as i32, 1], &[2, 3]),
        record("no file", &[WITHOUT_FILE as i32, 1], &[2, 3]),
        record("other ids", &[OTHER_IDS as i32, 1], &[2, 3]),
        record("odd", &[1, 2], &[VOCABULARY as i32, 3]),
    ]);
    let server = serve_stock(site.transfer());
    let (code, first) = report(&site.backfill(&server, &[]));
    assert_eq!((code, &first["stored"], &first["without_ids"]), (3, &json!(3), &json!(2)), "{first}");
    assert_eq!(first["failed"], json!({"missing": 1, "refused": 1, "shape": 1, "vocabulary": 1}));
    assert_eq!((&first["tokens"], &first["ended_early"]), (&json!(5 + 3 + 3), &Value::Null));
    assert_eq!(entries(&site.transfer()), 0);

    let reader = Reader::open(&site.data().states()).unwrap();
    let mut found = HashMap::new();
    for index in 0..reader.index().len() {
        let sample = reader.load(index).unwrap();
        let key = (sample.header.request_id.clone(), sample.header.choice_index);
        found.insert(key, sample);
    }
    assert_eq!(found.len(), 3);
    let one = &found[&("a".to_owned(), 0)];
    assert_eq!((&one.token_ids, one.header.prompt_length), (&vec![1, 2, 3, 4, 5, 6], 3));
    // The layers of a day-0 head of eight layers, and the last one.
    assert_eq!(one.header.layer_ids, LAYERS);
    let two = &found[&("b".to_owned(), 1)];
    assert_eq!((two.header.held_out, two.header.source.as_str()), (true, "replay"));
    assert_eq!(two.token_ids, [4, 5, 8, 9]);

    let (code, again) = report(&site.backfill(&server, &[]));
    assert_eq!((code, &again["stored"], &again["already_stored"]), (3, &json!(0), &json!(3)), "{again}");
}

#[test]
fn an_all_done_run_ends_with_0_and_a_limit_holds() {
    let site = Site::new((0..5).map(|number| record(&number.to_string(), &[1, number], &[3, 4])).collect());
    let server = serve_stock(site.transfer());
    let (code, first) = report(&site.backfill(&server, &["--limit", "2"]));
    assert_eq!((code, &first["stored"]), (0, &json!(2)), "{first}");
    let (code, rest) = report(&site.backfill(&server, &[]));
    assert_eq!((code, &rest["stored"], &rest["already_stored"]), (0, &json!(3), &json!(2)), "{rest}");
    let other = site.backfill(&server, &["--layers", "1,4,5,8"]);
    let message = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(other.status.code() == Some(1) && message.contains("[2, 4, 5, 8]"), "{message}");
    let cut = site.backfill(&server, &["--layers", "2,4,5"]);
    assert!(String::from_utf8_lossy(&cut.stderr).contains("then 8"), "{cut:?}");
}

#[test]
fn a_server_that_cannot_do_it_ends_the_run() {
    let prompt = [WITHOUT_FILE as i32, 1];
    let site = Site::new((0..60).map(|number| record(&number.to_string(), &prompt, &[3, 4])).collect());
    let server = serve_stock(site.transfer());
    let (code, report) = report(&site.backfill(&server, &[]));
    let failed = report["failed"]["missing"].as_u64().unwrap();
    assert!(code == 1 && (20..60).contains(&failed), "{report}");
    assert!(report["ended_early"].as_str().unwrap().contains("20 records in a row"), "{report}");

    let away = site.backfill("http://127.0.0.1:1", &[]);
    assert_eq!(away.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&away.stderr).contains("is it running?"), "{away:?}");
}

#[test]
fn a_store_that_another_process_writes_is_refused() {
    let site = Site::new(vec![record("a", &[1, 2], &[3, 4])]);
    let _serving = StateStore::open(&site.data().states(), StoreOptions::default()).unwrap();
    let output = site.backfill(&serve_stock(site.transfer()), &[]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(message.contains("states.transfer_directory") && message.contains("locked"), "{message}");
}

#[test]
fn what_the_quota_cannot_hold_is_not_computed() {
    let site = Site::new((0..40).map(|number| record(&number.to_string(), &[1, number], &[3, 4])).collect());
    let mut config = File::options().append(true).open(site.path("draftsmith.toml")).unwrap();
    write!(config, "[states]\nsegment_bytes = 1000\nquota_bytes = 8000\n").unwrap();
    let (code, report) = report(&site.backfill(&serve_stock(site.transfer()), &[]));
    // Three quarters for training, less a quarter; 3 rows of 4 layers of 4 values of 4 bytes each.
    assert_eq!((code, &report["stored"], &report["beyond_quota"]), (0, &json!(23), &json!(17)), "{report}");
}

// ---- the command, with a real vLLM ----

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "real vLLM: four minutes, once installed"]
async fn a_real_vllm_fills_in_the_states_that_transformers_computes() {
    const RECORDS: usize = 20;
    let site = Site::new(Vec::new());
    let vllm = Vllm::extracting(site.directory.path(), &[2, 15, 27, 30]).await;
    let model = &vllm.model_directory;

    // Records with ids, as a sidecar without the plugin makes them. This vLLM writes files for these requests too.
    let settings = format!("[record]\ntoken_ids = \"request\"\n[verifier]\ndirectory = {model:?}\n");
    let sidecar = Sidecar::start(site.directory.path(), &vllm.address, &settings);
    let mut prompts = String::new();
    for number in 0..RECORDS {
        let text = format!(
            "Story number {number}: tell me of {}",
            "a river and its harbour, ".repeat(3 * number + 1)
        );
        prompts.push_str(&json!({"messages": [{"role": "user", "content": text}]}).to_string());
        prompts.push('\n');
    }
    fs::write(site.path("prompts.jsonl"), prompts).unwrap();
    let replayed = Command::new(env!("CARGO_BIN_EXE_draftsmith"))
        .arg("replay")
        .arg(site.path("prompts.jsonl"))
        .args(["--to", &format!("http://{}", sidecar.address), "--max-tokens", "24", "--temperature", "0.8"])
        .arg("--errors")
        .arg(site.path("errors.jsonl"))
        .output()
        .unwrap();
    assert!(replayed.status.success(), "{replayed:?}");
    assert!(sidecar.stop().success());
    fs::remove_dir_all(site.transfer()).unwrap();
    fs::create_dir(site.transfer()).unwrap();

    let (code, filled) = report(&site.backfill(&format!("http://{}", vllm.address), &[]));
    println!("{filled}");
    assert_eq!((code, &filled["stored"], &filled["failed"]), (0, &json!(RECORDS), &json!({})), "{filled}");
    assert_eq!(entries(&site.transfer()), 0);

    let reader = Reader::open(&site.data().states()).unwrap();
    assert_eq!(reader.index().len(), RECORDS);
    let mut command = Command::new(vllm.environment.join("venv/bin/python"));
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stock_vllm/reference.py")).arg(model);
    for index in 0..RECORDS {
        let sample = reader.load(index).unwrap();
        let header = &sample.header;
        assert!(header.prompt_length > 1 && header.rows > header.prompt_length);
        let path = site.path(&format!("{index}.safetensors"));
        let states: Vec<u8> = sample.states.iter().flat_map(|value| value.to_le_bytes()).collect();
        let ids: Vec<u8> = sample.token_ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
        let layers: Vec<u8> = header.layer_ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
        let shape = vec![header.rows, header.layers, header.hidden];
        let tensors = [
            ("hidden_states", TensorView::new(Dtype::F32, shape, &states).unwrap()),
            ("token_ids", TensorView::new(Dtype::I64, vec![ids.len() / 8], &ids).unwrap()),
            ("layer_ids", TensorView::new(Dtype::I64, vec![layers.len() / 8], &layers).unwrap()),
        ];
        fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
        command.arg(path);
    }
    let compared = command.stderr(Stdio::inherit()).output().unwrap();
    assert!(compared.status.success());
    let largest: f64 = String::from_utf8(compared.stdout).unwrap().trim().parse().unwrap();
    println!("largest relative error of a row: {largest:.1e}");
    assert!(largest <= 2e-5, "{largest}");
}
