//! The sidecar before a real vLLM 0.32 (CPU). A relay between the two keeps what left vLLM's socket, so that the bytes
//! that the client read are compared with those of the very same answer.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::http::{CHAT, Seen, build_request, find, read_message};
use common::samples::{Sample, dialect_samples, other_samples, samples, without_ids};
use common::sidecar::Sidecar;
use common::vllm::Vllm;
use draftsmith::record::{Row, rows};
use draftsmith::store::DataDir;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

mod common {
    pub mod environment;
    pub mod http;
    pub mod ports;
    pub mod samples;
    pub mod sidecar;
    pub mod vllm;
}

/// Opens the routes and the ways to call tools that some samples are for.
const FLAGS: [&str; 4] = ["--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"];
/// No answer takes so long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// One sample asks for a long story, to be left in the middle; here all are heard to the end.
const MOST_TOKENS: u64 = 64;
/// As both kinds of vLLM are started.
const MODEL_LENGTH: u64 = 2048;

/// For each connection that carried something, what vLLM sent on it, in the order of the last bytes.
type Sent = Vec<(usize, Vec<u8>)>;

/// Passes bytes on between the sidecar and vLLM, and keeps those that vLLM sent.
struct Relay {
    address: String,
    /// Since `clear`.
    sent: Arc<Mutex<Sent>>,
}

impl Relay {
    async fn start(vllm: String) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let sent = Arc::default();
        let kept = Arc::clone(&sent);
        tokio::spawn(async move {
            for connection in 0.. {
                let (sidecar, _) = listener.accept().await.unwrap();
                let server = TcpStream::connect(&vllm).await.unwrap();
                sidecar.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                let (from_sidecar, to_sidecar) = sidecar.into_split();
                let (from_vllm, to_vllm) = server.into_split();
                tokio::spawn(pass_on(from_sidecar, to_vllm, |_| {}));
                let kept = Arc::clone(&kept);
                tokio::spawn(pass_on(from_vllm, to_sidecar, move |bytes| keep(&kept, connection, bytes)));
            }
        });
        Relay { address, sent }
    }

    fn clear(&self) {
        self.sent.lock().unwrap().clear();
    }

    /// The last answer that vLLM gave since `clear`.
    async fn last_answer(&self) -> Seen {
        let bytes = self.sent.lock().unwrap().last().expect("vLLM sent something").1.clone();
        let mut rest = bytes.as_slice();
        let mut buffer = Vec::new();
        let mut last = None;
        while let Some(answer) = read_message(&mut rest, &mut buffer).await {
            last = Some(answer);
        }
        assert!(buffer.is_empty(), "vLLM's answer is not whole");
        last.expect("a whole answer")
    }
}

async fn pass_on(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut note: impl FnMut(&[u8])) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count) = from.read(&mut buffer).await {
        // Noted before it goes on: whoever has read an answer finds it here.
        note(&buffer[..count]);
        if count == 0 || to.write_all(&buffer[..count]).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown().await;
}

fn keep(sent: &Mutex<Sent>, connection: usize, bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    let mut kept = sent.lock().unwrap();
    let place = kept.iter().position(|(known, _)| *known == connection);
    let mut of_connection = place.map_or((connection, Vec::new()), |index| kept.remove(index));
    of_connection.1.extend_from_slice(bytes);
    kept.push(of_connection);
}

async fn ask(address: &str, sample: &Sample, body: &[u8], id: &str) -> Seen {
    // Without its content type vLLM refuses each request, and refusals alone would be compared.
    let headers = format!("content-type: application/json\r\nx-request-id: {id}\r\n");
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&build_request(sample.method, sample.path, &headers, body)).await.unwrap();
    let mut buffer = Vec::new();
    let answer = read_message(&mut stream, &mut buffer);
    tokio::time::timeout(PATIENCE, answer).await.expect("it comes soon").expect("a whole answer")
}

/// The sample's request, changed; as it is if it is no JSON object.
fn edited(sample: &Sample, change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Vec<u8> {
    let mut request: Value = serde_json::from_slice(&sample.request).unwrap_or_default();
    let Some(fields) = request.as_object_mut() else { return sample.request.clone() };
    let asked = fields.get("max_tokens").and_then(Value::as_u64).unwrap_or_default();
    // More than the model holds is a sample of its own, to be refused.
    if (MOST_TOKENS..MODEL_LENGTH).contains(&asked) {
        fields.insert("max_tokens".to_owned(), MOST_TOKENS.into());
    }
    change(fields);
    request.to_string().into_bytes()
}

/// Messages name a stop string under a key of its own; elsewhere `stop_reason` is null, or the number of a token, or the string.
fn is_ended_by_stop_string(sample: &Sample, body: &[u8]) -> bool {
    let told: &[u8] =
        if sample.path == "/v1/messages" { b"\"stop_sequence\":\"" } else { b"\"stop_reason\":\"" };
    find(body, told).is_some()
}

/// The rows of each request.
async fn rows_of(sidecar: &Sidecar, directory: &Path) -> HashMap<String, Vec<Row>> {
    sidecar.flush().await;
    let mut found: HashMap<String, Vec<Row>> = HashMap::new();
    for row in rows(&DataDir::new(directory.join("data"))).unwrap() {
        let read = row.unwrap();
        found.entry(read.request_id.clone()).or_default().push(read);
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "real vLLM: five minutes, once installed"]
async fn what_left_vllms_socket_is_what_the_client_reads() {
    let directory = tempfile::tempdir().unwrap();
    let vllm = Vllm::with_plugin(directory.path(), &FLAGS).await;
    let relay = Relay::start(vllm.address.clone()).await;
    let settings = format!(
        "[verifier]\ndirectory = {:?}\n[states]\ntransfer_directory = {:?}\n",
        vllm.model_directory, vllm.transfer_directory
    );
    let sidecar = Sidecar::start(directory.path(), &relay.address, &settings);
    let mut expected_rows = Vec::new();
    let mut answered = 0;
    let recorded = samples().into_iter().chain(dialect_samples()).map(|sample| (sample, true));
    for (sample, is_recorded) in recorded.chain(other_samples().into_iter().map(|sample| (sample, false))) {
        let id = format!("bytes-{}", sample.name);
        relay.clear();
        let answer = ask(&sidecar.address, &sample, &edited(&sample, |_| {}), &id).await;
        let sent = relay.last_answer().await;
        assert_eq!(answer.end_to_end(), sent.end_to_end(), "{}", sample.name);
        assert_eq!(answer.body, sent.body, "{}", sample.name);
        println!("{:<28} {} {:>6} bytes", sample.name, answer.status(), answer.body.len());
        if is_recorded {
            // A stream that the draft head's limits end at once has an error in it, and status 200.
            let is_answered = answer.status() == 200 && find(&answer.body, b"{\"error\"").is_none();
            answered += usize::from(is_answered);
            // vLLM's front end finds stop strings, and then aborts the request in the engine, which may have ended it by itself.
            let may_be_aborted = is_answered && is_ended_by_stop_string(&sample, &answer.body);
            // vLLM gives the requests of Responses ids of its own.
            let has_ids = is_answered && sample.path != "/v1/responses";
            expected_rows.push((id, (!may_be_aborted).then_some(has_ids)));
        }
    }
    assert!(answered > 20, "only {answered} answers were compared; the rest were refused");

    let found = rows_of(&sidecar, directory.path()).await;
    for (id, has_ids) in &expected_rows {
        let of_request = found.get(id).unwrap_or_else(|| panic!("{id} has no row"));
        let Some(expected) = has_ids else { continue };
        for row in of_request {
            assert_eq!(row.output_token_ids.is_some(), *expected, "{id}: token ids from the plugin");
        }
    }
    println!("{} requests have rows; {answered} were answered", expected_rows.len());
}

/// An answer without what differs between any two: its id and time, and how a stream's text is cut into events.
#[derive(Debug, Default, PartialEq)]
struct Outline {
    /// A whole body, or nothing.
    body: Option<Value>,
    /// Of a stream's events: keys in their order, with nulls and the kinds of all other values.
    shapes: BTreeSet<String>,
    /// Of each choice: its texts joined, by the key that they came under.
    texts: BTreeMap<(u64, String), String>,
    finish_reasons: BTreeMap<u64, String>,
    usage: Option<Value>,
}

fn outline(body: &[u8]) -> Outline {
    let mut outline = Outline::default();
    if let Ok(mut whole) = serde_json::from_slice::<Value>(body) {
        blank(&mut whole);
        outline.body = Some(whole);
        return outline;
    }
    let text = std::str::from_utf8(body).unwrap();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let data = line.strip_prefix("data: ").expect("vLLM sends nothing but data lines");
        let Ok(mut event) = serde_json::from_str::<Value>(data) else {
            outline.shapes.insert(data.to_owned());
            continue;
        };
        blank(&mut event);
        outline.shapes.insert(shape(&event));
        if event["usage"].is_object() {
            outline.usage = Some(event["usage"].clone());
        }
        for choice in event["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().unwrap();
            join_texts(&mut outline.texts, index, "", choice);
            if let Some(reason) = choice["finish_reason"].as_str() {
                outline.finish_reasons.insert(index, reason.to_owned());
            }
        }
    }
    outline
}

fn join_texts(texts: &mut BTreeMap<(u64, String), String>, index: u64, key: &str, value: &Value) {
    match value {
        Value::String(text) => texts.entry((index, key.to_owned())).or_default().push_str(text),
        Value::Object(fields) => {
            for (name, part) in fields {
                join_texts(texts, index, name, part);
            }
        }
        Value::Array(parts) => {
            for part in parts {
                join_texts(texts, index, key, part);
            }
        }
        _ => {}
    }
}

/// Takes out ids, times, and how much of a prompt was cached.
fn blank(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, part) in fields {
                match name.as_str() {
                    "id" | "created" | "cached_tokens" => *part = Value::from("any"),
                    _ => blank(part),
                }
            }
        }
        Value::Array(parts) => parts.iter_mut().for_each(blank),
        _ => {}
    }
}

fn shape(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(_) => "number".to_owned(),
        Value::String(_) => "string".to_owned(),
        Value::Array(parts) => format!("[{}]", parts.first().map(shape).unwrap_or_default()),
        Value::Object(fields) => {
            let members: Vec<String> =
                fields.iter().map(|(name, part)| format!("{name}:{}", shape(part))).collect();
            format!("{{{}}}", members.join(","))
        }
    }
}

/// Beside the samples: what else vLLM does when asked for ids.
fn more_samples() -> Vec<Sample> {
    let model = samples().into_iter().find(|sample| sample.name == "chat").unwrap();
    let of = |name: &str, path: &'static str, request: &str| Sample {
        name: name.to_owned(),
        path,
        request: request.as_bytes().to_vec(),
        head: model.head.clone(),
        body: Vec::new(),
        ..model
    };
    vec![
        of(
            "usage_in_each_event",
            CHAT,
            r#"{"model":"smollm2","messages":[{"role":"user","content":"Count."}],"max_tokens":8,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#,
        ),
        of(
            "completion_n2",
            "/v1/completions",
            r#"{"model":"smollm2","prompt":"The capital of France is","max_tokens":6,"n":2}"#,
        ),
        of(
            "completion_n2_stream",
            "/v1/completions",
            r#"{"model":"smollm2","prompt":"The capital of France is","max_tokens":6,"n":2,"stream":true}"#,
        ),
        of(
            "two_prompts",
            "/v1/completions",
            r#"{"model":"smollm2","prompt":["One two three","The sky is"],"max_tokens":6}"#,
        ),
        of(
            "tools_auto_stream",
            CHAT,
            r#"{"model":"smollm2","messages":[{"role":"user","content":"weather in Paris?"}],"max_tokens":24,"stream":true,"tools":[{"type":"function","function":{"name":"get_weather","description":"d","parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}}]}"#,
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "real vLLM: five minutes, once installed"]
async fn ids_asked_of_a_stock_vllm_are_recorded_and_the_client_does_not_see_them() {
    let directory = tempfile::tempdir().unwrap();
    let vllm = Vllm::stock(directory.path(), &FLAGS).await;
    let relay = Relay::start(vllm.address.clone()).await;
    let sidecar = Sidecar::start(directory.path(), &relay.address, "[record]\ntoken_ids = \"request\"\n");
    let mut expected_ids = Vec::new();
    for sample in samples().into_iter().chain(more_samples()) {
        let name = &sample.name;
        let body = edited(&sample, |fields| {
            fields.remove("return_token_ids");
            if !name.starts_with("err_") {
                // The same words each time; vLLM gives several choices only where it samples.
                let several = fields.contains_key("n");
                fields.insert("temperature".to_owned(), u64::from(several).into());
                fields.insert("seed".to_owned(), 7.into());
            }
        });
        relay.clear();
        let answer = ask(&sidecar.address, &sample, &body, &format!("ids-{name}")).await;
        let sent = relay.last_answer().await;
        let direct = ask(&vllm.address, &sample, &body, &format!("direct-{name}")).await;
        println!("{name:<28} {} {:>6} bytes", answer.status(), answer.body.len());
        assert_eq!(answer.status(), direct.status(), "{name}");
        // The very bytes but for the ids, and nothing that vLLM would not have sent without the question.
        let expected = without_ids(&sent.body);
        assert_eq!(String::from_utf8_lossy(&answer.body), String::from_utf8_lossy(&expected), "{name}");
        assert_eq!(outline(&answer.body), outline(&direct.body), "{name}");
        if answer.status() == 200 {
            assert_ne!(sent.body, expected, "{name}: vLLM was asked for ids");
            expected_ids.push((format!("ids-{name}"), sent));
        }
    }
    assert!(expected_ids.len() > 20, "only {} answers were compared", expected_ids.len());

    let found = rows_of(&sidecar, directory.path()).await;
    let mut choices = 0;
    for (id, sent) in &expected_ids {
        let of_request = found.get(id).unwrap_or_else(|| panic!("{id} has no row"));
        let told = ids_told(&sent.body);
        assert_eq!(of_request.len(), told.len(), "{id}");
        for row in of_request {
            assert_eq!(row.output_token_ids.as_ref(), Some(&told[&row.choice_index]), "{id}");
            assert!(row.prompt_token_ids.as_ref().is_some_and(|ids| !ids.is_empty()), "{id}");
            choices += 1;
        }
    }
    println!("{} answers, {choices} choices, each with its ids in the records", expected_ids.len());
}

/// The output ids of each choice in an answer, joined over its events.
fn ids_told(body: &[u8]) -> BTreeMap<u32, Vec<i32>> {
    let text = std::str::from_utf8(body).unwrap();
    let mut told: BTreeMap<u32, Vec<i32>> = BTreeMap::new();
    for line in text.lines() {
        let Ok(event) = serde_json::from_str::<Value>(line.trim_start_matches("data: ")) else { continue };
        for choice in event["choices"].as_array().into_iter().flatten() {
            let index = u32::try_from(choice["index"].as_u64().unwrap()).unwrap();
            let ids = choice["token_ids"].as_array().into_iter().flatten();
            let known = told.entry(index).or_default();
            known.extend(ids.map(|id| i32::try_from(id.as_i64().unwrap()).unwrap()));
        }
    }
    told
}
