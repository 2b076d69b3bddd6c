//! Clients and upstreams that behave badly. None may harm another request, reach vLLM by a trick, or fill the memory.

// The helpers are test code too, though they stand outside of the test functions.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::http::{Act, CHAT, SSE_HEAD, Seen, chunk, json, post, read_message, upstream};
use common::proxy::{event, one_thread, proxy, read_head, soon};
use draftsmith::proxy::Status;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

mod common {
    pub mod http;
    pub mod proxy;
}

/// Whatever comes until the end of the connection.
async fn read_all(stream: &mut TcpStream) -> Vec<u8> {
    let mut heard = Vec::new();
    // A reset ends it too.
    let _ = soon(stream.read_to_end(&mut heard)).await;
    heard
}

// ---- Clients ----

#[tokio::test]
async fn requests_that_can_be_read_in_two_ways_never_reach_vllm() {
    let mut up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let running = proxy(&up.address, |_| {}).await;
    for head in [
        "content-length: 2\r\ncontent-length: 3\r\n",
        "content-length: 2, 3\r\n",
        "content-length: -1\r\n",
        "content-length: +2\r\n",
        "content-length: 2x\r\n",
        "content-length: 99999999999999999999999\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "transfer-encoding: gzip\r\n",
        "content-length : 2\r\n",
        "x-a: 1\r\n folded: 2\r\ncontent-length: 2\r\n",
        "x-a\0b: 1\r\ncontent-length: 2\r\n",
        "x-a: b\rc\r\ncontent-length: 2\r\n",
    ] {
        for path in [CHAT, "/v1/embeddings"] {
            let request = format!("POST {path} HTTP/1.1\r\nhost: c\r\n{head}\r\n{{}}");
            let mut stream = running.send(request.as_bytes()).await;
            let heard = read_all(&mut stream).await;
            assert!(heard.starts_with(b"HTTP/1.1 400"), "{head:?}: {}", String::from_utf8_lossy(&heard));
        }
    }
    assert!(up.seen.try_recv().is_err(), "nothing reached vLLM");
}

#[tokio::test]
async fn a_body_has_one_length_on_its_way_to_vllm() {
    let mut up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let running = proxy(&up.address, |_| {}).await;
    for path in [CHAT, "/v1/embeddings"] {
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: c\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"
        );
        let mut stream = running.send(request.as_bytes()).await;
        let answer = soon(read_message(&mut stream, &mut Vec::new())).await.unwrap();
        if answer.status() == 400 {
            continue;
        }
        let seen = soon(up.seen.recv()).await.unwrap();
        assert_eq!(seen.body, b"{}");
        let framings = (seen.header("content-length"), seen.header("transfer-encoding"));
        assert!(matches!(framings, (Some("2"), None) | (None, Some("chunked"))), "{framings:?}");
    }
}

#[tokio::test]
async fn floods_of_headers_are_refused() {
    let mut up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let running = proxy(&up.address, |_| {}).await;
    let many: String = (0..5000).map(|number| format!("x-{number}: y\r\n")).collect();
    let long = format!("x-long: {}\r\n", "y".repeat(2 << 20));
    for headers in [many, long] {
        let mut stream = TcpStream::connect(&running.address).await.unwrap();
        // The refusal may come before all is sent.
        let _ = stream.write_all(&post(CHAT, &headers, b"{}")).await;
        let heard = read_all(&mut stream).await;
        assert!(
            heard.is_empty() || heard.starts_with(b"HTTP/1.1 431"),
            "{}",
            String::from_utf8_lossy(&heard)
        );
    }
    assert_eq!(running.ask(&post(CHAT, "", b"{}")).await.status(), 200);
    assert!(soon(up.seen.recv()).await.unwrap().header("x-long").is_none());
    assert!(up.seen.try_recv().is_err());
}

#[tokio::test]
async fn chunks_that_lie_about_their_size_end_the_request() {
    let lies: [&[u8]; 5] = [
        b"ffffffffffffffffff\r\n{}\r\n",
        b"zz\r\n{}\r\n",
        b"-2\r\n{}\r\n",
        b"1\r\n{}\r\n0\r\n\r\n",
        b"2\r\n{}0\r\n\r\n",
    ];
    for lie in lies {
        let up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
        let mut running = proxy(&up.address, |_| {}).await;
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: c\r\ntransfer-encoding: chunked\r\n\r\n");
        let mut stream = running.send(&[head.as_bytes(), lie].concat()).await;
        let heard = read_all(&mut stream).await;
        assert!(!heard.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(lie));
        assert_eq!(running.exchange().await.transfer, Status::Cancelled);
        assert_eq!(up.connections.load(Ordering::SeqCst), 0, "vLLM was not asked");
    }
}

#[tokio::test]
async fn a_request_in_single_bytes_is_a_request() {
    let up = upstream(|_, seen| vec![Act::Write(json(std::str::from_utf8(&seen.body).unwrap()))]).await;
    let running = proxy(&up.address, |_| {}).await;
    let mut stream = TcpStream::connect(&running.address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for byte in post(CHAT, "", b"{\"a\":1}") {
        stream.write_all(&[byte]).await.unwrap();
    }
    assert_eq!(soon(read_message(&mut stream, &mut Vec::new())).await.unwrap().body, b"{\"a\":1}");
}

#[tokio::test]
async fn requests_sent_ahead_are_answered_in_order() {
    let up = upstream(|_, seen| vec![Act::Write(json(std::str::from_utf8(&seen.body).unwrap()))]).await;
    let running = proxy(&up.address, |_| {}).await;
    let bodies = ["1", "22", "333"];
    let requests: Vec<u8> = bodies.iter().flat_map(|body| post(CHAT, "", body.as_bytes())).collect();
    let mut stream = running.send(&requests).await;
    let mut buffer = Vec::new();
    for body in bodies {
        assert_eq!(soon(read_message(&mut stream, &mut buffer)).await.unwrap().body, body.as_bytes());
    }
}

#[tokio::test]
async fn a_client_that_closes_its_sending_side_has_left() {
    let closed = Arc::new(Notify::new());
    let told = closed.clone();
    let mut up = upstream(move |_, _| vec![Act::UntilClosed(told.clone())]).await;
    let mut running = proxy(&up.address, |_| {}).await;
    let mut stream = running.send(&post(CHAT, "", b"{}")).await;
    soon(up.seen.recv()).await.unwrap();
    stream.shutdown().await.unwrap();
    soon(closed.notified()).await;
    assert_eq!(running.exchange().await.transfer, Status::Cancelled);
}

#[tokio::test]
async fn a_client_that_leaves_within_its_body_never_reaches_vllm() {
    let up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let mut running = proxy(&up.address, |_| {}).await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: c\r\ncontent-length: 9\r\n\r\n{{");
    let stream = running.send(head.as_bytes()).await;
    soon(running.begun.recv()).await.unwrap();
    drop(stream);
    let exchange = running.exchange().await;
    assert_eq!(exchange.transfer, Status::Cancelled);
    assert!(exchange.request_body.is_empty());
    assert_eq!(up.connections.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_slow_reader_slows_vllm_down_and_gets_all() {
    const PIECE: usize = 64 << 10;
    const PIECES: usize = 1500;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let running = proxy(&listener.local_addr().unwrap().to_string(), |options| {
        options.max_capture_bytes = 1000;
    })
    .await;
    let mut client = running.send(&post(CHAT, "", b"{}")).await;
    let (mut vllm, _) = soon(listener.accept()).await.unwrap();
    let sent = Arc::new(AtomicUsize::new(0));
    let counted = sent.clone();
    tokio::spawn(async move {
        read_message(&mut vllm, &mut Vec::new()).await.unwrap();
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", PIECE * PIECES);
        vllm.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..PIECES {
            vllm.write_all(&[7; PIECE]).await.unwrap();
            counted.fetch_add(1, Ordering::SeqCst);
        }
        // Held open: the client must know the end by the length.
        std::future::pending::<()>().await;
    });
    let mut buffer = Vec::new();
    read_head(&mut client, &mut buffer).await;
    // Nothing tells that vLLM stands still but that nothing happens for a while.
    let mut before = usize::MAX;
    while before != sent.load(Ordering::SeqCst) {
        before = sent.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert!(before < PIECES / 2, "{before} of {PIECES} pieces were taken though none was read");
    let mut length = buffer.len();
    while length < PIECE * PIECES {
        buffer.clear();
        length += soon(client.read_buf(&mut buffer)).await.unwrap();
    }
    assert_eq!(length, PIECE * PIECES);
}

// ---- Upstreams ----

/// What a client sees of an answer that is these bytes, after which vLLM closes.
async fn seen_through(wire: Vec<u8>, inject: bool) -> (Option<Seen>, Status) {
    let up = upstream(move |_, _| vec![Act::Write(wire.clone()), Act::Close]).await;
    let mut running = proxy(&up.address, |options| options.inject_token_ids = inject).await;
    let mut stream = running.send(&post(CHAT, "", b"{\"stream\":true}")).await;
    let answer = soon(read_message(&mut stream, &mut Vec::new())).await;
    (answer, running.exchange().await.transfer)
}

#[tokio::test]
async fn what_is_no_answer_is_a_502() {
    let many: String = (0..5000).map(|number| format!("x-{number}: y\r\n")).collect();
    for wire in [
        "SSH-2.0-OpenSSH_9.6\r\n".to_owned(),
        "HTTP/1.1 abc OK\r\n\r\n".to_owned(),
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab".to_owned(),
        "HTTP/1.1 200 OK\r\nbroken header\r\n\r\n".to_owned(),
        format!("HTTP/1.1 200 OK\r\n{many}\r\n"),
    ] {
        let (answer, status) = seen_through(wire.clone().into_bytes(), false).await;
        assert_eq!(answer.unwrap().status(), 502, "{}", &wire[..30.min(wire.len())]);
        assert_eq!(status, Status::UpstreamError);
    }
}

#[tokio::test]
async fn an_answer_that_is_shorter_than_it_says_is_seen_to_be_broken() {
    let streamed = |tail: &[u8]| [SSE_HEAD, &chunk(&event("a")), tail].concat();
    for wire in [
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"choices\""
            .to_vec(),
        streamed(b"64\r\ndata: {\"choices"),
        streamed(b"6"),
        streamed(b"zz\r\n"),
        streamed(b"ffffffffffffffffff\r\nx"),
        streamed(b"0\r\n"),
    ] {
        let text = String::from_utf8_lossy(&wire[wire.len() - 12..]).into_owned();
        let (answer, status) = seen_through(wire, false).await;
        assert!(answer.is_none(), "{text:?}: the client must not take it for whole");
        assert_eq!(status, Status::Truncated, "{text:?}");
    }
}

#[tokio::test]
async fn bytes_after_an_answer_are_nobodys_answer() {
    let more = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil";
    let up = upstream(move |_, _| vec![Act::Write([json("{}").as_slice(), more].concat())]).await;
    let running = proxy(&up.address, one_thread).await;
    for _ in 0..20 {
        assert_eq!(running.ask(&post(CHAT, "", b"{}")).await.body, b"{}");
    }
}

#[tokio::test]
async fn early_answers_arrive_and_spoil_no_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let running = proxy(&listener.local_addr().unwrap().to_string(), one_thread).await;
    let head = "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: c\r\ncontent-length: 1000000\r\n\r\nstart";
    let mut client = running.send(head.as_bytes()).await;
    let (mut vllm, _) = soon(listener.accept()).await.unwrap();
    read_head(&mut vllm, &mut Vec::new()).await;
    let refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 5\r\n\r\nlarge";
    vllm.write_all(refusal).await.unwrap();
    let answer = soon(read_message(&mut client, &mut Vec::new())).await.unwrap();
    assert_eq!((answer.status(), answer.body.as_slice()), (413, b"large".as_slice()));
    // The rest of that body must not meet the next request.
    let mut next = running.send(&post(CHAT, "", b"{}")).await;
    let (mut second, _) = soon(listener.accept()).await.unwrap();
    let mut buffer = Vec::new();
    assert_eq!(soon(read_message(&mut second, &mut buffer)).await.unwrap().body, b"{}");
    second.write_all(&json("[]")).await.unwrap();
    assert_eq!(soon(read_message(&mut next, &mut Vec::new())).await.unwrap().body, b"[]");
}

#[tokio::test]
async fn interim_answers_are_no_answer() {
    let wire = [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n".as_slice(), &json("{}")].concat();
    let (answer, status) = seen_through(wire, false).await;
    assert_eq!((answer.unwrap().body, status), (b"{}".to_vec(), Status::Ok));
}

#[tokio::test]
async fn strange_events_pass_as_they_are() {
    let giant =
        format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", "y".repeat(9 << 20));
    for events in [
        b"data: \xff\xfe\x80\n\n".to_vec(),
        b"data: {\"choices\":[{\"delta\":{\"content\":\"\xc3\"}}]}\n\ndata: [DONE]\n\n".to_vec(),
        b"\xef\xbb\xbfdata: {}\r\r\n\n: comment\nid\nretry: x\ndata\n\n".to_vec(),
        b"data: {\"choices\":".to_vec(),
        b"\0\0\0\n\n".to_vec(),
        vec![b'\n'; 100_000],
        giant.into_bytes(),
    ] {
        for inject in [false, true] {
            let wire = [SSE_HEAD, &chunk(&events), b"0\r\n\r\n"].concat();
            let (answer, status) = seen_through(wire, inject).await;
            assert!(
                answer.unwrap().body == events,
                "{:?}",
                String::from_utf8_lossy(&events[..30.min(events.len())])
            );
            assert_eq!(status, Status::Ok);
        }
    }
}

#[tokio::test]
async fn a_bad_request_beside_good_ones_harms_none() {
    let up = upstream(|number, _| match number % 3 {
        0 => vec![Act::Write([SSE_HEAD, b"zz\r\n"].concat()), Act::Close],
        1 => vec![Act::Close],
        _ => vec![Act::Write([SSE_HEAD, &chunk(&event("a")), b"0\r\n\r\n"].concat())],
    })
    .await;
    let running = proxy(&up.address, |_| {}).await;
    let mut good = 0;
    for _ in 0..30 {
        let mut stream = running.send(&post(CHAT, "", b"{}")).await;
        // A broken answer may end before its head has left.
        let Some(answer) = soon(read_message(&mut stream, &mut Vec::new())).await else { continue };
        if answer.head.starts_with("HTTP/1.1 200") {
            assert_eq!(answer.body, event("a"));
            good += 1;
        }
    }
    assert!(good >= 10, "{good}");
}
