//! The proxy between real sockets: a scripted upstream behind it, a client before it.

// The helpers are test code too, though they stand outside of the test functions.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use common::http::{
    Act, CHAT, SSE_HEAD, Seen, build_request, chunk, find, header, json, post, read_chunk, read_message,
    upstream,
};
use common::proxy::{event, proxy, read_head, soon};
use common::samples::{Sample, dialect_samples, other_samples, samples, without_ids};
use draftsmith::proxy::{Drained, Exchange, Routes, Source, Status};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;

mod common {
    pub mod http;
    pub mod proxy;
    pub mod samples;
}

// ---- The samples ----

/// Places to cut at, as good as random; the same in every run.
struct Cuts(u64);

impl Cuts {
    /// At most 12 places in `length` bytes, in order.
    fn of(&mut self, length: usize) -> Vec<usize> {
        let mut places = Vec::new();
        for _ in 0..self.below(13) {
            places.push(self.below(length.max(1)));
        }
        places.sort_unstable();
        places
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % end
    }
}

/// One write for each piece.
fn writes(wire: &[u8], places: &[usize]) -> Vec<Act> {
    let mut acts = Vec::new();
    let mut start = 0;
    for end in places.iter().copied().chain([wire.len()]) {
        acts.push(Act::Write(wire[start..end].to_vec()));
        start = end;
    }
    acts
}

#[tokio::test]
async fn clients_get_vllms_bytes() {
    const RANDOM_CUTS: usize = 6;
    let mut cuts = Cuts(1);
    let recorded = samples().into_iter().chain(dialect_samples()).map(|sample| (sample, true));
    for (sample, is_recorded) in recorded.chain(other_samples().into_iter().map(|sample| (sample, false))) {
        let mut scripts = vec![writes(&sample.wire(), &[])];
        for _ in 0..RANDOM_CUTS {
            let wire = sample.wire_cut_at(&cuts.of(sample.body.len()));
            scripts.push(writes(&wire, &cuts.of(wire.len())));
        }
        let rounds = scripts.len();
        let mut up = upstream(move |number, _| scripts[number].clone()).await;
        let mut running = proxy(&up.address, |_| {}).await;
        let sent = Seen {
            head: String::from_utf8(sample.head.clone()).unwrap().trim_end().to_owned(),
            body: sample.body.clone(),
        };
        for _ in 0..rounds {
            let asked = build_request(sample.method, sample.path, "", &sample.request);
            let answer = running.ask(&asked).await;
            assert_eq!(answer.end_to_end(), sent.end_to_end(), "{}", sample.name);
            assert_eq!(answer.body, sent.body, "{}", sample.name);
            assert_eq!(soon(up.seen.recv()).await.unwrap().body, sample.request, "{}", sample.name);
            if is_recorded {
                check_exchange(&running.exchange().await, &sample);
            }
        }
    }
}

fn check_exchange(exchange: &Exchange, sample: &Sample) {
    let name = &sample.name;
    assert_eq!(exchange.response_body, sample.body, "{name}");
    assert_eq!(exchange.request_body, sample.request, "{name}");
    let parsed = exchange.parse();
    let expected = if sample.status == 200 { Status::Ok } else { Status::ClientError };
    assert_eq!(exchange.transfer, expected, "{name}");
    assert_eq!(parsed.answer.choices.is_empty(), sample.status != 200, "{name}");
    let failed = sample.status != 200 || name == "engine_death_stream";
    assert_eq!(parsed.answer.error_json.is_some(), failed, "{name}");
}

#[tokio::test]
async fn ids_asked_for_by_the_proxy_are_taken_out_again() {
    for sample in samples() {
        let mut request: serde_json::Value = serde_json::from_slice(&sample.request).unwrap_or_default();
        if let Some(fields) = request.as_object_mut() {
            fields.remove("return_token_ids");
        }
        let body =
            if request.is_object() { request.to_string().into_bytes() } else { sample.request.clone() };
        let wire = sample.wire();
        let mut up = upstream(move |_, _| vec![Act::Write(wire.clone())]).await;
        let mut running = proxy(&up.address, |options| options.inject_token_ids = true).await;
        let answer = running.ask(&post(sample.path, "", &body)).await;
        let expected = without_ids(&sample.body);
        assert_eq!(
            String::from_utf8_lossy(&answer.body),
            String::from_utf8_lossy(&expected),
            "{}",
            sample.name
        );
        if !sample.streamed {
            assert_eq!(
                answer.header("content-length").unwrap(),
                expected.len().to_string(),
                "{}",
                sample.name
            );
        }
        let seen = soon(up.seen.recv()).await.unwrap();
        if request.is_object() {
            let sent: serde_json::Value = serde_json::from_slice(&seen.body).unwrap();
            assert_eq!(sent["return_token_ids"], true, "{}", sample.name);
        } else {
            assert_eq!(seen.body, body, "{}", sample.name);
        }
        if sample.status == 400 && request.is_object() {
            assert_eq!(soon(up.seen.recv()).await.unwrap().body, body, "vLLM judges the client's own body");
        }
        let exchange = running.exchange().await;
        assert_eq!(exchange.request_body, body, "{}", sample.name);
        assert_eq!(exchange.response_body, sample.body, "{}: the ids are recorded", sample.name);
    }
}

#[tokio::test]
async fn a_client_that_asks_for_ids_gets_them() {
    for sample in samples().into_iter().filter(|sample| find(&sample.request, b"return_token_ids").is_some())
    {
        let wire = sample.wire();
        let mut up = upstream(move |_, _| vec![Act::Write(wire.clone())]).await;
        let running = proxy(&up.address, |options| options.inject_token_ids = true).await;
        assert_eq!(
            running.ask(&post(sample.path, "", &sample.request)).await.body,
            sample.body,
            "{}",
            sample.name
        );
        assert_eq!(soon(up.seen.recv()).await.unwrap().body, sample.request);
    }
}

// ---- Streaming, leaving, breaking off ----

#[tokio::test]
async fn each_chunk_arrives_before_the_next_is_sent() {
    for inject in [false, true] {
        let go_on = Arc::new(Notify::new());
        let gate = go_on.clone();
        let up = upstream(move |_, _| {
            let mut acts = vec![Act::Write(SSE_HEAD.to_vec())];
            for number in 0..5 {
                acts.push(Act::Write(chunk(&event(&number.to_string()))));
                acts.push(Act::Wait(gate.clone()));
            }
            acts.push(Act::Write(b"0\r\n\r\n".to_vec()));
            acts
        })
        .await;
        let running = proxy(&up.address, |options| options.inject_token_ids = inject).await;
        let mut stream = running.send(&post(CHAT, "", b"{\"stream\":true}")).await;
        let mut buffer = Vec::new();
        read_head(&mut stream, &mut buffer).await;
        for number in 0..5 {
            let piece = soon(read_chunk(&mut stream, &mut buffer)).await.unwrap().unwrap();
            let sent = event(&number.to_string());
            assert_eq!(piece, if inject { without_ids(&sent) } else { sent });
            go_on.notify_one();
        }
        assert_eq!(soon(read_chunk(&mut stream, &mut buffer)).await, Some(None));
    }
}

#[tokio::test]
async fn a_request_body_of_another_route_streams_through() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let running = proxy(&listener.local_addr().unwrap().to_string(), |_| {}).await;
    let head =
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: client\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut client = running.send(&[head.as_slice(), &chunk(b"first")].concat()).await;
    let (mut stream, _) = soon(listener.accept()).await.unwrap();
    let mut buffer = Vec::new();
    read_head(&mut stream, &mut buffer).await;
    assert_eq!(soon(read_chunk(&mut stream, &mut buffer)).await, Some(Some(b"first".to_vec())));
    client.write_all(&chunk(b"second")).await.unwrap();
    assert_eq!(soon(read_chunk(&mut stream, &mut buffer)).await, Some(Some(b"second".to_vec())));
    client.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(soon(read_chunk(&mut stream, &mut buffer)).await, Some(None));
    stream.write_all(&json("{}")).await.unwrap();
    assert_eq!(soon(read_message(&mut client, &mut Vec::new())).await.unwrap().body, b"{}");
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    for (inject, first) in [(false, true), (true, true), (false, false), (true, false)] {
        let closed = Arc::new(Notify::new());
        let told = closed.clone();
        let mut up = upstream(move |_, _| {
            let mut acts = Vec::new();
            if first {
                acts.push(Act::Write([SSE_HEAD, &chunk(&event("a"))].concat()));
            }
            acts.push(Act::UntilClosed(told.clone()));
            acts
        })
        .await;
        let mut running = proxy(&up.address, |options| options.inject_token_ids = inject).await;
        let mut stream = running.send(&post(CHAT, "", b"{\"stream\":true}")).await;
        soon(up.seen.recv()).await.unwrap();
        if first {
            let mut buffer = Vec::new();
            read_head(&mut stream, &mut buffer).await;
            soon(read_chunk(&mut stream, &mut buffer)).await.unwrap();
        }
        drop(stream);
        soon(closed.notified()).await;
        let exchange = running.exchange().await;
        assert_eq!(exchange.transfer, Status::Cancelled);
        assert_eq!(exchange.http_status, first.then_some(200));
        let parsed = exchange.parse();
        assert_eq!(parsed.answer.choices.len(), usize::from(first));
        assert_eq!(parsed.status_of(parsed.answer.choices.first()), Status::Cancelled);
        assert_eq!(soon(running.begun.recv()).await.unwrap(), exchange.request_id);
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_truncated() {
    for inject in [false, true] {
        let up =
            upstream(|_, _| vec![Act::Write([SSE_HEAD, &chunk(&event("a"))].concat()), Act::Close]).await;
        let mut running = proxy(&up.address, |options| options.inject_token_ids = inject).await;
        let mut stream = running.send(&post(CHAT, "", b"{\"stream\":true}")).await;
        let mut buffer = Vec::new();
        read_head(&mut stream, &mut buffer).await;
        assert!(soon(read_chunk(&mut stream, &mut buffer)).await.unwrap().is_some());
        assert_eq!(
            soon(read_chunk(&mut stream, &mut buffer)).await,
            None,
            "the client sees that it broke off"
        );
        let exchange = running.exchange().await;
        assert_eq!(exchange.transfer, Status::Truncated);
        let parsed = exchange.parse();
        assert_eq!(parsed.answer.choices[0].content.as_deref(), Some("a"));
        assert_eq!(parsed.status_of(parsed.answer.choices.first()), Status::Truncated);
    }
}

#[tokio::test]
async fn an_answer_beyond_the_capture_limit_still_goes_to_the_client() {
    let body = format!("{{\"choices\":[],\"x\":\"{}\"}}", "y".repeat(5000));
    let sent = json(&body);
    let up = upstream(move |_, _| vec![Act::Write(sent.clone())]).await;
    let mut running = proxy(&up.address, |options| options.max_capture_bytes = 100).await;
    assert_eq!(running.ask(&post(CHAT, "", b"{}")).await.body, body.as_bytes());
    let exchange = running.exchange().await;
    assert_eq!(
        (exchange.response_body.len(), exchange.response_cut, exchange.transfer),
        (100, true, Status::Truncated)
    );
}

// ---- Connections to vLLM ----

#[tokio::test]
async fn connections_are_kept_and_reused() {
    let up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let running = proxy(&up.address, |_| {}).await;
    let mut stream = TcpStream::connect(&running.address).await.unwrap();
    let mut buffer = Vec::new();
    for _ in 0..5 {
        stream.write_all(&post(CHAT, "", b"{}")).await.unwrap();
        assert_eq!(soon(read_message(&mut stream, &mut buffer)).await.unwrap().status(), 200);
    }
    assert_eq!(up.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_request_is_sent_again_only_when_a_kept_connection_gave_no_byte() {
    for (second, expected_status, expected_requests) in
        [(vec![Act::Close], 200, 3), (vec![Act::Write(b"HTTP/1.1 2".to_vec()), Act::Close], 502, 2)]
    {
        let mut up = upstream(
            move |number, _| if number == 1 { second.clone() } else { vec![Act::Write(json("{}"))] },
        )
        .await;
        let running = proxy(&up.address, |_| {}).await;
        let mut stream = TcpStream::connect(&running.address).await.unwrap();
        let mut buffer = Vec::new();
        for expected in [200, expected_status] {
            stream.write_all(&post(CHAT, "", b"{\"n\":1}")).await.unwrap();
            assert_eq!(soon(read_message(&mut stream, &mut buffer)).await.unwrap().status(), expected);
        }
        let mut ids = Vec::new();
        while let Ok(seen) = up.seen.try_recv() {
            assert_eq!(seen.body, b"{\"n\":1}");
            ids.push(seen.header("x-request-id").unwrap().to_owned());
        }
        assert_eq!(ids.len(), expected_requests);
        assert_eq!(ids[1], ids[expected_requests - 1], "the same request, under the same id");
    }
}

#[tokio::test]
async fn a_new_connection_that_is_closed_is_an_error_at_once() {
    let mut up = upstream(|_, _| vec![Act::Close]).await;
    let mut running = proxy(&up.address, |_| {}).await;
    let answer = running.ask(&post(CHAT, "", b"{}")).await;
    assert_eq!(answer.status(), 502);
    assert!(up.seen.recv().await.is_some() && up.seen.try_recv().is_err());
    assert_eq!(running.exchange().await.transfer, Status::UpstreamError);
}

#[tokio::test]
async fn no_upstream_is_502() {
    // Bound and not listening: nobody else gets the port.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let mut running = proxy(&address, |_| {}).await;
    let answer = running.ask(&post("/v1/completions", "", b"{}")).await;
    assert_eq!(answer.status(), 502);
    let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("cannot be reached") && !message.contains(&address), "{body}");
    assert_eq!(body["error"]["code"], 502);
    let exchange = running.exchange().await;
    assert_eq!((exchange.transfer, exchange.http_status), (Status::UpstreamError, Some(502)));
    assert!(exchange.parse().answer.error_json.is_some());
}

// ---- Requests that are refused ----

#[tokio::test]
async fn what_is_no_inference_route_is_refused_in_any_spelling() {
    let mut up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let running = proxy(&up.address, |_| {}).await;
    for path in [
        "/pause",
        "/resume?x=1",
        "//collective_rpc",
        "/update_weights/",
        "/SLEEP",
        "/%73leep",
        "/%2573leep",
        "/v1/../wake_up",
        "/v1/%2e%2e/wake_up",
        "/v1/./load_lora_adapter",
        "/inference/v1/abort_requests",
        "/start_draft_weight_update",
        "http://elsewhere/pause",
        "/is_paused",
        "/metrics",
        "/adapters",
        "/not_of_this_version",
        "*",
    ] {
        for method in ["GET", "POST", "OPTIONS"] {
            let answer = running.ask(&build_request(method, path, "", b"")).await;
            assert_eq!(answer.status(), 403, "{method} {path}");
            let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
            assert_eq!(body["error"]["code"], 403);
            assert_eq!(body["error"]["type"], "PermissionDeniedError");
            let message = body["error"]["message"].as_str().unwrap();
            let named = path.trim_start_matches("http://elsewhere").split('?').next().unwrap();
            assert!(message.starts_with(named) && message.contains("proxy.allow_routes"), "{message}");
        }
    }
    assert!(up.seen.try_recv().is_err(), "nothing reached vLLM");
    let open = proxy(&up.address, |options| options.routes = Routes::All).await;
    assert_eq!(open.ask(&post("/pause?mode=wait", "", b"")).await.status(), 200);
    assert!(soon(up.seen.recv()).await.unwrap().head.starts_with("POST /pause?mode=wait HTTP/1.1"));
    let naming = proxy(&up.address, |options| options.allow_routes = vec!["/metrics".to_owned()]).await;
    assert_eq!(naming.ask(&build_request("GET", "/metrics", "", b"")).await.status(), 200);
    assert_eq!(naming.ask(&post("/pause", "", b"")).await.status(), 403);
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_413() {
    let mut up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let mut running = proxy(&up.address, |options| options.max_request_bytes = 1000).await;
    let large = vec![b' '; 1001];
    for request in [
        post(CHAT, "", &large),
        [
            format!("POST {CHAT} HTTP/1.1\r\nhost: c\r\ntransfer-encoding: chunked\r\n\r\n").as_bytes(),
            &chunk(&large),
            b"0\r\n\r\n",
        ]
        .concat(),
        post(CHAT, "", &vec![b' '; 100_000]),
    ] {
        let answer = running.ask(&request).await;
        assert_eq!(answer.status(), 413);
        let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert!(body["error"]["message"].as_str().unwrap().contains("1000 bytes"));
        assert_eq!(running.exchange().await.transfer, Status::ClientError);
    }
    assert_eq!(running.ask(&post(CHAT, "", &large[..1000])).await.status(), 200);
    assert_eq!(soon(up.seen.recv()).await.unwrap().body.len(), 1000);
}

// ---- Headers and ids ----

#[tokio::test]
async fn ids_and_headers_follow_the_rules() {
    let mut up = upstream(|_, _| {
        let mut sent = b"HTTP/1.1 200 OK\r\nset-cookie: a\r\nset-cookie: b\r\nconnection: x-hop\r\nx-hop: 1\r\ncontent-length: 2\r\n\r\n{}".to_vec();
        sent.shrink_to_fit();
        vec![Act::Write(sent)]
    })
    .await;
    let mut running = proxy(&up.address, |_| {}).await;
    let headers = "x-request-id: job-1\r\nx-draftsmith-conversation: talk 7\r\nx-draftsmith-source: replay\r\n\
                   x-draftsmith-other: z\r\nconnection: x-mine\r\nx-mine: 1\r\nauthorization: Bearer t\r\naccept-encoding: gzip\r\n";
    let answer = running.ask(&post(CHAT, headers, b"{}")).await;
    let cookies: Vec<_> = answer.head.lines().filter(|line| line.starts_with("set-cookie")).collect();
    assert_eq!(cookies, ["set-cookie: a", "set-cookie: b"]);
    assert_eq!(answer.header("x-hop"), None);
    let seen = soon(up.seen.recv()).await.unwrap();
    assert!(seen.head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"));
    assert_eq!(seen.header("host"), Some(up.address.as_str()));
    assert_eq!(seen.header("x-request-id"), Some("job-1"));
    assert_eq!(seen.header("authorization"), Some("Bearer t"));
    for gone in ["x-mine", "connection", "accept-encoding"] {
        assert_eq!(seen.header(gone), None, "{gone}");
    }
    assert!(!seen.head.contains("x-draftsmith"));
    let exchange = running.exchange().await;
    assert_eq!(exchange.request_id, "job-1");
    assert_eq!(exchange.conversation_id.as_deref(), Some("talk 7"));
    assert_eq!(exchange.source, Source::Replay);
    assert!(exchange.first_byte_at.unwrap() >= exchange.received_at);

    running.ask(&post(CHAT, "x-request-id: job-1\r\n", b"{}")).await;
    let second = soon(up.seen.recv()).await.unwrap();
    let fresh = second.header("x-request-id").unwrap().to_owned();
    assert_eq!(fresh.len(), 32, "an id that was used gives way to a new one");
    let next = running.exchange().await;
    assert_eq!((next.request_id, next.source, next.conversation_id), (fresh, Source::Live, None));
}

#[tokio::test]
async fn other_routes_pass_unrecorded() {
    let mut up = upstream(|_, _| vec![Act::Write(json("{\"data\":[]}"))]).await;
    let mut running = proxy(&up.address, |options| {
        options.inject_token_ids = true;
        options.routes = Routes::AllButControl;
    })
    .await;
    for request in
        ["GET /v1/models?a=%20b HTTP/1.1", "DELETE /anything//twice HTTP/1.1", "POST /v1/embeddings HTTP/1.1"]
    {
        let answer =
            running.ask(format!("{request}\r\nhost: c\r\ncontent-length: 0\r\n\r\n").as_bytes()).await;
        assert_eq!(answer.body, b"{\"data\":[]}");
        let seen = soon(up.seen.recv()).await.unwrap();
        assert!(seen.head.starts_with(request), "{}", seen.head);
        assert!(seen.body.is_empty());
    }
    assert!(running.finished.try_recv().is_err() && running.begun.try_recv().is_err());
}

#[tokio::test]
async fn http2_clients_are_served() {
    use http_body_util::{BodyExt, Full};
    use hyper_util::rt::{TokioExecutor, TokioIo};
    let up = upstream(|_, _| vec![Act::Write([SSE_HEAD, &chunk(&event("a")), b"0\r\n\r\n"].concat())]).await;
    let running = proxy(&up.address, |_| {}).await;
    let stream = TcpStream::connect(&running.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = hyper::Request::post(format!("http://client{CHAT}"))
        .body(Full::new(Bytes::from_static(b"{}")))
        .unwrap();
    let answer = soon(sender.send_request(request)).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(soon(answer.into_body().collect()).await.unwrap().to_bytes(), event("a"));
}

// ---- The end ----

#[tokio::test]
async fn shutdown_lets_open_requests_finish() {
    let go_on = Arc::new(Notify::new());
    let gate = go_on.clone();
    let mut up = upstream(move |_, _| vec![Act::Wait(gate.clone()), Act::Write(json("{}"))]).await;
    let running = proxy(&up.address, |_| {}).await;
    let mut stream = running.send(&post(CHAT, "", b"{}")).await;
    soon(up.seen.recv()).await.unwrap();
    running.stop.send(()).unwrap();
    go_on.notify_one();
    assert_eq!(soon(read_message(&mut stream, &mut Vec::new())).await.unwrap().status(), 200);
    assert_eq!(soon(running.ended).await.unwrap(), Drained::Completely);
    assert!(TcpStream::connect(&running.address).await.is_err(), "no new connections");
}

#[tokio::test]
async fn shutdown_cuts_what_does_not_end() {
    let mut up =
        upstream(|_, _| vec![Act::Write(SSE_HEAD.to_vec()), Act::UntilClosed(Arc::new(Notify::new()))]).await;
    let mut running = proxy(&up.address, |options| options.drain_timeout = Duration::from_millis(50)).await;
    let mut stream = running.send(&post(CHAT, "", b"{}")).await;
    read_head(&mut stream, &mut Vec::new()).await;
    soon(up.seen.recv()).await.unwrap();
    running.stop.send(()).unwrap();
    assert_eq!(soon(&mut running.ended).await.unwrap(), Drained::Cut(1));
    assert_eq!(soon(running.finished.recv()).await.unwrap().transfer, Status::Cancelled);
}

#[tokio::test]
async fn an_http2_client_that_leaves_cancels_its_request() {
    use http_body_util::Full;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    let closed = Arc::new(Notify::new());
    let told = closed.clone();
    let mut up = upstream(move |_, _| {
        vec![Act::Write([SSE_HEAD, &chunk(&event("a"))].concat()), Act::UntilClosed(told.clone())]
    })
    .await;
    let mut running = proxy(&up.address, |_| {}).await;
    let stream = TcpStream::connect(&running.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = hyper::Request::post(format!("http://client{CHAT}"))
        .body(Full::new(Bytes::from_static(b"{}")))
        .unwrap();
    let answer = soon(sender.send_request(request)).await.unwrap();
    soon(up.seen.recv()).await.unwrap();
    // One stream is reset; the connection lives on.
    drop(answer);
    soon(closed.notified()).await;
    assert_eq!(running.exchange().await.transfer, Status::Cancelled);
}

#[tokio::test]
async fn a_head_answer_keeps_its_length() {
    let up =
        upstream(|_, _| vec![Act::Write(b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n".to_vec())]).await;
    let running = proxy(&up.address, |_| {}).await;
    let mut stream = running.send(b"HEAD /health HTTP/1.1\r\nhost: c\r\n\r\n").await;
    let head = read_head(&mut stream, &mut Vec::new()).await;
    assert_eq!(header(&head, "content-length"), Some("1234"));
}
