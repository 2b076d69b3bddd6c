//! Replay against a server in this process.

// Clippy takes helpers outside #[test] functions for library code.
#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use draftsmith::replay::{ReplayError, Report, RunOptions, Shard, Split, journal_path, run, support};
use draftsmith::store::is_held_out;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::Notify;

#[derive(Clone, Debug)]
struct Seen {
    conversation: String,
    source: String,
    request_id: String,
    body: Value,
}

type Answer = dyn Fn(usize, &Seen) -> Response<Full<Bytes>> + Send + Sync;

struct Server {
    address: String,
    seen: Arc<Mutex<Vec<Seen>>>,
    most_in_flight: Arc<AtomicUsize>,
    /// Chat requests wait for it where it is set.
    gate: Arc<Mutex<Option<Arc<Notify>>>>,
    arrived: Arc<Notify>,
}

fn json_response(status: u16, body: &Value) -> Response<Full<Bytes>> {
    Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap()
}

fn answer(text: &str) -> Response<Full<Bytes>> {
    json_response(
        200,
        &json!({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 10, "completion_tokens": 3}}),
    )
}

fn header(request: &Request<Incoming>, name: &str) -> String {
    request.headers().get(name).map(|value| value.to_str().unwrap().to_string()).unwrap_or_default()
}

async fn serve(reply: impl Fn(usize, &Seen) -> Response<Full<Bytes>> + Send + Sync + 'static) -> Server {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = Server {
        address: format!("http://{}", listener.local_addr().unwrap()),
        seen: Arc::default(),
        most_in_flight: Arc::default(),
        gate: Arc::default(),
        arrived: Arc::new(Notify::new()),
    };
    let reply: Arc<Answer> = Arc::new(reply);
    let in_flight = Arc::new(AtomicUsize::new(0));
    let (seen, most, gate, arrived) = (
        Arc::clone(&server.seen),
        Arc::clone(&server.most_in_flight),
        Arc::clone(&server.gate),
        Arc::clone(&server.arrived),
    );
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (reply, in_flight) = (Arc::clone(&reply), Arc::clone(&in_flight));
            let (seen, most, gate, arrived) =
                (Arc::clone(&seen), Arc::clone(&most), Arc::clone(&gate), Arc::clone(&arrived));
            let service = service_fn(move |request: Request<Incoming>| {
                let (reply, in_flight) = (Arc::clone(&reply), Arc::clone(&in_flight));
                let (seen, most, gate, arrived) =
                    (Arc::clone(&seen), Arc::clone(&most), Arc::clone(&gate), Arc::clone(&arrived));
                async move {
                    if request.uri().path() == "/v1/models" {
                        return Ok::<_, Infallible>(json_response(
                            200,
                            &json!({"data": [{"id": "the-model"}]}),
                        ));
                    }
                    assert_eq!(request.uri().path(), "/v1/chat/completions");
                    let now = in_flight.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(now, Ordering::SeqCst);
                    let mut record = Seen {
                        conversation: header(&request, "x-draftsmith-conversation"),
                        source: header(&request, "x-draftsmith-source"),
                        request_id: header(&request, "x-request-id"),
                        body: Value::Null,
                    };
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    record.body = serde_json::from_slice(&body).unwrap();
                    let number = {
                        let mut seen = seen.lock().unwrap();
                        seen.push(record.clone());
                        seen.len() - 1
                    };
                    arrived.notify_one();
                    let waiting = gate.lock().unwrap().clone();
                    match waiting {
                        Some(gate) => gate.notified().await,
                        // Lets other requests in, so that concurrency can be seen.
                        None => tokio::task::yield_now().await,
                    }
                    let response = reply(number, &record);
                    in_flight.fetch_sub(1, Ordering::SeqCst);
                    Ok(response)
                }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    server
}

impl Server {
    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

fn options(directory: &Path, dataset: &str, server: &Server) -> RunOptions {
    let path = directory.join("dataset");
    std::fs::write(&path, dataset).unwrap();
    let mut options = RunOptions::new(path, server.address.clone(), directory.join("errors.jsonl"));
    options.first_delay = Duration::from_millis(1);
    options
}

async fn to_the_end(options: RunOptions) -> Report {
    run(options, std::future::pending()).await.unwrap()
}

fn support_rows(count: usize) -> String {
    let mut text = Vec::new();
    support::write(count, 3, &mut text).unwrap();
    String::from_utf8(text).unwrap()
}

fn errors(options: &RunOptions) -> Vec<Value> {
    let text = std::fs::read_to_string(&options.error_file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn journal_lines(error_file: &Path) -> usize {
    std::fs::read_to_string(journal_path(error_file)).unwrap().lines().count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_is_sent_once_and_marked() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(|_, _| answer("fine")).await;
    let mut options = options(directory.path(), &support_rows(40), &server);
    options.concurrency = 4;
    options.max_tokens = Some(17);
    options.temperature = Some(0.0);
    let report = to_the_end(options.clone()).await;
    assert_eq!((report.sent, report.ok, report.failed, report.exit_code()), (40, 40, 0, 0));
    assert_eq!((report.prompt_tokens, report.completion_tokens), (400, 120));
    assert!(report.tokens_per_second > 0.0);
    let seen = server.seen();
    assert_eq!(seen.len(), 40);
    assert!(seen.iter().all(|request| request.source == "replay" && request.conversation.contains('/')));
    assert_eq!(seen.iter().map(|request| &request.request_id).collect::<HashSet<_>>().len(), 40);
    assert_eq!(seen[0].body["model"], "the-model");
    assert_eq!((&seen[0].body["max_tokens"], &seen[0].body["temperature"]), (&json!(17), &json!(0.0)));
    assert_eq!(seen[0].body["stream"], json!(false));
    let most = server.most_in_flight.load(Ordering::SeqCst);
    assert!(most <= 4, "{most} at once");
    assert_eq!(journal_lines(&options.error_file), 40);

    // A second run has nothing to do; a fresh one sends all.
    let again = to_the_end(options.clone()).await;
    assert_eq!((again.sent, again.skipped, again.exit_code()), (0, 40, 0));
    options.fresh = true;
    assert_eq!(to_the_end(options).await.sent, 40);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_servers_are_asked_again_and_refusals_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let tries: Mutex<HashMap<String, usize>> = Mutex::default();
    let server = serve(move |_, request| {
        let text = request.body["messages"][0]["content"].as_str().unwrap().to_string();
        let mut tries = tries.lock().unwrap();
        let count = tries.entry(text.clone()).or_default();
        *count += 1;
        match (text.as_str(), *count) {
            ("busy", 1) => json_response(429, &json!({"error": {"message": "slow down"}})),
            ("busy", 2) => json_response(503, &json!({})),
            ("long", _) => json_response(400, &json!({"error": {"message": "too long", "code": 400}})),
            ("never", _) => json_response(503, &json!({"error": {"message": "down"}})),
            ("aborted", 1) => json_response(
                200,
                &json!({"choices": [{"message": {"content": "x"}, "finish_reason": "abort"}], "usage": {}}),
            ),
            _ => answer("fine"),
        }
    })
    .await;
    let mut dataset = String::new();
    for text in ["busy", "long", "never", "aborted"] {
        dataset.push_str(&json!({"id": text, "messages": [{"role": "user", "content": text}]}).to_string());
        dataset.push('\n');
    }
    dataset.push_str("{\"id\": \"bad\"}\n");
    let mut options = options(directory.path(), &dataset, &server);
    options.attempts = 3;
    let report = to_the_end(options.clone()).await;
    assert_eq!((report.ok, report.failed, report.bad_rows, report.exit_code()), (2, 2, 1, 3));
    assert_eq!(report.retries, 2 + 2 + 1);
    let by_id: HashMap<String, Value> = errors(&options)
        .into_iter()
        .map(|entry| (entry["id"].as_str().unwrap().to_string(), entry))
        .collect();
    assert_eq!(by_id["long"], json!({"line": 2, "id": "long", "status": 400, "error": "too long"}));
    assert_eq!(by_id["never"]["error"], "down (tried 3 times)");
    assert_eq!(by_id["bad"]["line"], 5);
    let sent = |text: &str| {
        server.seen().iter().filter(|request| request.body["messages"][0]["content"] == text).count()
    };
    assert_eq!((sent("long"), sent("busy"), sent("never")), (1, 3, 3));

    // The next run sends what failed, alone.
    let again = to_the_end(options).await;
    assert_eq!((again.sent, again.skipped), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_pause_is_honoured() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(|number, _| {
        if number > 0 {
            return answer("fine");
        }
        let mut response = json_response(429, &json!({}));
        response.headers_mut().insert("retry-after", "1".parse().unwrap());
        response
    })
    .await;
    let options = options(directory.path(), &support_rows(1), &server);
    let report = to_the_end(options).await;
    assert_eq!((report.ok, report.retries), (1, 1));
    assert!(report.seconds >= 1.0, "{}", report.seconds);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn splits_and_shards_cover_everything_once() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(|_, _| answer("fine")).await;
    let mut options = options(directory.path(), &support_rows(132), &server);
    options.fresh = true;
    options.held_out_fraction = 0.25;
    options.split = Split::HeldOut;
    let held_out = to_the_end(options.clone()).await.ok;
    assert!(held_out > 10);
    assert!(server.seen().iter().all(|request| is_held_out(&request.conversation, 0.25)));
    options.split = Split::Train;
    let train = to_the_end(options.clone()).await.ok;
    assert_eq!(held_out + train, 132);

    server.seen.lock().unwrap().clear();
    options.split = Split::All;
    for index in 0..3 {
        options.shard = Some(Shard { index, of: 3 });
        assert_eq!(to_the_end(options.clone()).await.ok, 44);
    }
    let conversations: HashSet<String> =
        server.seen().into_iter().map(|request| request.conversation).collect();
    assert_eq!((conversations.len(), server.seen().len()), (132, 132));

    // The same limit again completes the same rows instead of taking more.
    options.shard = None;
    options.limit = Some(7);
    assert_eq!(to_the_end(options.clone()).await.ok, 7);
    options.fresh = false;
    assert_eq!(to_the_end(options.clone()).await.skipped, 7);
    options.limit = Some(9);
    let more = to_the_end(options).await;
    assert_eq!((more.skipped, more.ok), (7, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn later_turns_carry_the_servers_own_answers() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(|number, _| answer(&format!("answer {number}"))).await;
    let dataset = json!([{"id": "a_0", "conversations": [
        {"from": "human", "value": "one"}, {"from": "gpt", "value": "theirs"},
        {"from": "human", "value": "two"}, {"from": "gpt", "value": "theirs"},
        {"from": "human", "value": "three"}]}]);
    let mut options = options(directory.path(), &dataset.to_string(), &server);
    options.turns = 2;
    let report = to_the_end(options).await;
    assert_eq!((report.sent, report.ok, report.completion_tokens), (1, 1, 6));
    let seen = server.seen();
    assert_eq!(seen.len(), 2);
    let roles = json!([
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "answer 0"},
        {"role": "user", "content": "two"}]);
    assert_eq!(seen[1].body["messages"], roles);
    assert!(seen.iter().all(|request| request.conversation == "a"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_are_read_to_done() {
    let directory = tempfile::tempdir().unwrap();
    let frame = |value: Value| format!("data: {value}\n\n");
    let text = frame(json!({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        + &frame(json!({"choices": [{"index": 0, "delta": {"content": "Hé"}}]}))
        + &frame(json!({"choices": [{"index": 0, "delta": {"content": "llo"}, "finish_reason": "stop"}]}))
        + &frame(json!({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}));
    let server = serve(move |number, _| {
        // The first one breaks off, the second one reports an error, as vLLM does when its engine dies.
        let body = match number {
            0 => text.clone(),
            1 => {
                text.clone()
                    + "data: {\"error\":{\"message\":\"EngineCore died\",\"code\":500}}\n\ndata: [DONE]\n\n"
            }
            _ => text.clone() + "data: [DONE]\n\n",
        };
        Response::builder()
            .header("content-type", "text/event-stream")
            .body(Full::new(Bytes::from(body)))
            .unwrap()
    })
    .await;
    let dataset = json!([{"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "human", "value": "two"}]}]);
    let mut options = options(directory.path(), &dataset.to_string(), &server);
    options.stream = true;
    options.turns = 2;
    let report = to_the_end(options).await;
    assert_eq!((report.ok, report.retries, report.prompt_tokens, report.completion_tokens), (1, 2, 8, 4));
    let last = server.seen().pop().unwrap();
    assert_eq!(last.body["messages"][1]["content"], "Héllo");
    assert_eq!(last.body["stream_options"]["include_usage"], json!(true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_finishes_what_is_in_flight() {
    let directory = tempfile::tempdir().unwrap();
    let server = serve(|_, _| answer("fine")).await;
    let gate = Arc::new(Notify::new());
    *server.gate.lock().unwrap() = Some(Arc::clone(&gate));
    let mut options = options(directory.path(), &support_rows(30), &server);
    options.concurrency = 1;
    let stop = Arc::new(Notify::new());
    let stopped = Arc::clone(&stop);
    let running = tokio::spawn(run(options.clone(), async move { stopped.notified().await }));
    server.arrived.notified().await;
    stop.notify_one();
    // Released for good: later requests, if there were any, would pass as well.
    *server.gate.lock().unwrap() = None;
    // Notified once the run has surely seen the stop: it is polled first, before any answer.
    gate.notify_one();
    let report = running.await.unwrap().unwrap();
    assert!(report.interrupted);
    assert_eq!(report.exit_code(), 3);
    assert_eq!(report.ok, 1, "{report:?}");
    assert_eq!(report.ok, report.sent);
    assert_eq!(journal_lines(&options.error_file) as u64, report.ok);
    let rest = to_the_end(options).await;
    assert_eq!(rest.skipped + rest.ok, 30);
    assert_eq!(rest.skipped, report.ok);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_there_is_said() {
    let directory = tempfile::tempdir().unwrap();
    // Bound and not listening: nobody else gets the port.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = format!("http://{}", socket.local_addr().unwrap());
    let path = directory.path().join("dataset");
    std::fs::write(&path, support_rows(2)).unwrap();
    let mut options = RunOptions::new(path, address, directory.path().join("errors.jsonl"));
    options.first_delay = Duration::from_millis(1);
    options.attempts = 2;
    assert!(matches!(run(options.clone(), std::future::pending()).await, Err(ReplayError::Model { .. })));
    options.model = Some("m".to_string());
    let report = to_the_end(options.clone()).await;
    assert_eq!((report.failed, report.retries, report.exit_code()), (2, 2, 1));
    assert_eq!(errors(&options).len(), 2);
    options.to = "ftp://x".to_string();
    assert!(matches!(run(options, std::future::pending()).await, Err(ReplayError::Option { .. })));
}
