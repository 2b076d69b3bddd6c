//! What carries requests and answers: TLS, HTTP/2, Unix-domain sockets, WebSockets, trailers, keys, timeouts, the end.

// The helpers are test code too, though they stand outside of the test functions.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use common::http::{
    Act, CHAT, SSE_HEAD, Upstream, build_request, chunk, header, json, post, read_chunk, read_message,
    upstream, upstream_on,
};
use common::proxy::{event, one_thread, proxy, proxy_at, read_head, soon};
use draftsmith::keys::NewKey;
use draftsmith::proxy::{Authorization, Drained, Status, TlsFiles};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{CertifiedKey, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{Notify, mpsc};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

mod common {
    pub mod http;
    pub mod proxy;
    pub mod sidecar;
}

const TICK: Duration = Duration::from_millis(50);

// ---- TLS ----

/// A certificate for `localhost` that is its own authority.
fn certificate() -> CertifiedKey<KeyPair> {
    rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap()
}

fn write(made: &CertifiedKey<KeyPair>, directory: &Path) -> TlsFiles {
    let files = TlsFiles { certificate: directory.join("cert.pem"), key: directory.join("key.pem") };
    std::fs::write(&files.certificate, made.cert.pem()).unwrap();
    std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    files
}

async fn connect_tls(
    address: &str,
    trusted: &CertifiedKey<KeyPair>,
    protocol: &[u8],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let stream = TcpStream::connect(address).await.unwrap();
    TlsConnector::from(Arc::new(config)).connect(ServerName::try_from("localhost").unwrap(), stream).await
}

#[tokio::test]
async fn a_new_certificate_is_taken_while_connections_are_open() {
    let up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let directory = tempfile::tempdir().unwrap();
    let (first, second) = (certificate(), certificate());
    let files = write(&first, directory.path());
    let running = proxy(&up.address, |options| options.tls = Some(files.clone())).await;
    let mut open = connect_tls(&running.address, &first, b"http/1.1").await.unwrap();
    let mut buffer = Vec::new();
    open.write_all(&post(CHAT, "", b"{}")).await.unwrap();
    assert_eq!(soon(read_message(&mut open, &mut buffer)).await.unwrap().body, b"{}");

    // A certificate without its key leaves the old one in force.
    std::fs::write(&files.certificate, second.cert.pem()).unwrap();
    running.proxy.reload();
    assert!(connect_tls(&running.address, &first, b"http/1.1").await.is_ok());
    write(&second, directory.path());
    running.proxy.reload();
    assert!(connect_tls(&running.address, &first, b"http/1.1").await.is_err());
    assert!(connect_tls(&running.address, &second, b"http/1.1").await.is_ok());
    open.write_all(&post(CHAT, "", b"{}")).await.unwrap();
    assert_eq!(soon(read_message(&mut open, &mut buffer)).await.unwrap().status(), 200, "it is still open");
    assert_eq!(running.proxy.watched_files(), [files.certificate, files.key]);
}

#[tokio::test]
async fn http2_is_agreed_on_in_tls() {
    let mut up =
        upstream(|_, _| vec![Act::Write([SSE_HEAD, &chunk(&event("a")), b"0\r\n\r\n"].concat())]).await;
    let directory = tempfile::tempdir().unwrap();
    let made = certificate();
    let files = write(&made, directory.path());
    let running = proxy(&up.address, |options| options.tls = Some(files)).await;
    let stream = connect_tls(&running.address, &made, b"h2").await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = hyper::Request::post(format!("https://localhost{CHAT}"))
        .header("cookie", "a=1")
        .header("cookie", "b=2")
        .body(Full::new(Bytes::from_static(b"{}")))
        .unwrap();
    let answer = soon(sender.send_request(request)).await.unwrap();
    assert_eq!(soon(answer.into_body().collect()).await.unwrap().to_bytes(), event("a"));
    let seen = soon(up.seen.recv()).await.unwrap();
    assert_eq!(seen.header("cookie"), Some("a=1; b=2"));
    assert_eq!(seen.header("via"), Some("2 draftsmith"));
    assert_eq!(seen.header("host"), Some(up.address.as_str()));
}

#[tokio::test]
async fn plain_http_on_a_tls_port_is_refused() {
    let up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let directory = tempfile::tempdir().unwrap();
    let files = write(&certificate(), directory.path());
    let running = proxy(&up.address, |options| options.tls = Some(files)).await;
    let mut stream = running.send(&post(CHAT, "", b"{}")).await;
    let mut heard = Vec::new();
    // The alert, then the end; or a reset.
    let _ = soon(stream.read_to_end(&mut heard)).await;
    assert!(!heard.starts_with(b"HTTP"));
}

/// An upstream behind TLS with this certificate.
async fn tls_upstream(made: &CertifiedKey<KeyPair>) -> Upstream {
    let chain = vec![made.cert.der().clone()];
    let key = PrivateKeyDer::from_pem_slice(made.signing_key.serialize_pem().as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (streams, accepted) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(secured) = acceptor.accept(stream).await {
                let _ = streams.send(secured);
            }
        }
    });
    upstream_on(format!("https://localhost:{port}"), accepted, |number, _| match number {
        1 => vec![Act::Close],
        _ => vec![Act::Write(json("{}"))],
    })
}

#[tokio::test]
async fn an_upstream_behind_tls_must_show_its_certificate() {
    let made = certificate();
    let up = tls_upstream(&made).await;
    let directory = tempfile::tempdir().unwrap();
    let ca_file = directory.path().join("ca.pem");
    std::fs::write(&ca_file, made.cert.pem()).unwrap();
    assert_eq!(CertificateDer::pem_file_iter(&ca_file).unwrap().count(), 1);
    let trusting = proxy_at(&up.address, |options| {
        one_thread(options);
        options.upstream_ca = Some(ca_file.clone());
    })
    .await;
    // The second request meets a kept connection that is closed, and goes again.
    for _ in 0..3 {
        assert_eq!(trusting.ask(&post(CHAT, "", b"{}")).await.status(), 200);
    }
    assert_eq!(up.connections.load(Ordering::SeqCst), 2);
    std::fs::write(&ca_file, certificate().cert.pem()).unwrap();
    let doubting = proxy_at(&up.address, |options| options.upstream_ca = Some(ca_file)).await;
    let refused = doubting.ask(&post(CHAT, "", b"{}")).await;
    assert_eq!(refused.status(), 502);
    assert!(String::from_utf8_lossy(&refused.body).contains("certificate"));
}

// ---- Unix-domain sockets, WebSockets ----

#[tokio::test]
async fn vllm_is_reached_on_a_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vllm.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let (streams, accepted) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let _ = streams.send(stream);
        }
    });
    let mut up =
        upstream_on(format!("unix:{}", path.display()), accepted, |_, _| vec![Act::Write(json("{\"a\":1}"))]);
    let mut running = proxy_at(&up.address, one_thread).await;
    for _ in 0..2 {
        assert_eq!(running.ask(&post(CHAT, "", b"{}")).await.body, b"{\"a\":1}");
        assert_eq!(running.exchange().await.transfer, Status::Ok);
    }
    assert_eq!(soon(up.seen.recv()).await.unwrap().header("host"), Some("localhost"));
    assert_eq!(up.connections.load(Ordering::SeqCst), 1);
    assert_eq!(running.proxy.probe().await.unwrap(), 200);
}

const ASK_FOR_WEBSOCKET: &[u8] =
    b"GET /v1/realtime?model=m HTTP/1.1\r\nhost: c\r\nconnection: keep-alive, Upgrade\r\n\
      upgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n";

#[tokio::test]
async fn a_websocket_carries_bytes_both_ways() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let running =
        proxy(&listener.local_addr().unwrap().to_string(), |options| options.drain_timeout = TICK).await;
    let mut client = running.send(ASK_FOR_WEBSOCKET).await;
    let (mut vllm, _) = soon(listener.accept()).await.unwrap();
    let head = read_head(&mut vllm, &mut Vec::new()).await;
    assert!(head.starts_with("GET /v1/realtime?model=m HTTP/1.1"));
    assert_eq!(header(&head, "connection"), Some("upgrade"));
    assert_eq!(header(&head, "upgrade"), Some("websocket"));
    assert_eq!(header(&head, "sec-websocket-key"), Some("dGhlIHNhbXBsZSBub25jZQ=="));
    // The first frame may come with the head.
    vllm.write_all(
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
          sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n\x81\x02hi",
    )
    .await
    .unwrap();
    let mut buffer = Vec::new();
    let answer = read_head(&mut client, &mut buffer).await;
    assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
    assert_eq!(header(&answer, "upgrade"), Some("websocket"));
    assert_eq!(header(&answer, "sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    while buffer.len() < 4 {
        assert_ne!(soon(client.read_buf(&mut buffer)).await.unwrap(), 0);
    }
    assert_eq!(buffer, b"\x81\x02hi");
    client.write_all(b"\x88\x00").await.unwrap();
    let mut heard = [0; 2];
    soon(vllm.read_exact(&mut heard)).await.unwrap();
    assert_eq!(&heard, b"\x88\x00");
    // A tunnel that stays open is cut at the end, on both sides.
    running.stop.send(()).unwrap();
    assert_eq!(soon(running.ended).await.unwrap(), Drained::Cut(1));
    assert_eq!(soon(client.read(&mut heard)).await.unwrap_or(0), 0);
    assert_eq!(soon(vllm.read(&mut heard)).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn a_websocket_ends_with_either_side_and_may_be_denied() {
    for vllm_leaves in [true, false] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let running = proxy(&listener.local_addr().unwrap().to_string(), |_| {}).await;
        let mut client = running.send(ASK_FOR_WEBSOCKET).await;
        let (mut vllm, _) = soon(listener.accept()).await.unwrap();
        read_head(&mut vllm, &mut Vec::new()).await;
        vllm.write_all(b"HTTP/1.1 101 S\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n").await.unwrap();
        read_head(&mut client, &mut Vec::new()).await;
        let (leaving, mut staying) = if vllm_leaves { (vllm, client) } else { (client, vllm) };
        drop(leaving);
        assert_eq!(soon(staying.read(&mut [0; 8])).await.unwrap_or(0), 0);
        drop(staying);
        running.stop.send(()).unwrap();
        assert_eq!(soon(running.ended).await.unwrap(), Drained::Completely);
    }
    let denied = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno".to_vec();
    let up = upstream(move |_, _| vec![Act::Write(denied.clone())]).await;
    let running = proxy(&up.address, |_| {}).await;
    let answer = running.ask(ASK_FOR_WEBSOCKET).await;
    assert_eq!((answer.status(), answer.body.as_slice()), (403, b"no".as_slice()));
}

// ---- RFC 9110 ----

#[tokio::test]
async fn trailers_pass_both_ways() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let running = proxy(&listener.local_addr().unwrap().to_string(), |_| {}).await;
    let mut client = running
        .send(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: c\r\nte: trailers\r\nconnection: te\r\ntrailer: x-sum\r\n\
              transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-sum: 7\r\ncontent-length: 9\r\n\r\n",
        )
        .await;
    let (mut vllm, _) = soon(listener.accept()).await.unwrap();
    let mut buffer = Vec::new();
    let head = read_head(&mut vllm, &mut buffer).await;
    assert_eq!(header(&head, "trailer"), Some("x-sum"));
    assert_eq!(header(&head, "te"), Some("trailers"));
    let end = b"1\r\na\r\n0\r\nx-sum: 7\r\n\r\n";
    while buffer.len() < end.len() {
        assert_ne!(soon(vllm.read_buf(&mut buffer)).await.unwrap(), 0);
    }
    assert_eq!(buffer, end, "the trailer that frames a message is left out");
    vllm.write_all(
        b"HTTP/1.1 200 OK\r\ntrailer: x-took\r\ntransfer-encoding: chunked\r\n\r\n1\r\nb\r\n0\r\nx-took: 3\r\n\r\n",
    )
    .await
    .unwrap();
    let mut answer = Vec::new();
    read_head(&mut client, &mut answer).await;
    let expected = b"1\r\nb\r\n0\r\nx-took: 3\r\n\r\n";
    while answer.len() < expected.len() {
        assert_ne!(soon(client.read_buf(&mut answer)).await.unwrap(), 0);
    }
    assert_eq!(answer, expected);
}

#[tokio::test]
async fn trailers_pass_over_http2() {
    let mut up = upstream(|_, _| {
        let sent = b"HTTP/1.1 200 OK\r\ntrailer: x-took\r\ntransfer-encoding: chunked\r\n\r\n1\r\nb\r\n0\r\nx-took: 3\r\n\r\n";
        vec![Act::Write(sent.to_vec())]
    })
    .await;
    let running = proxy(&up.address, |_| {}).await;
    let stream = TcpStream::connect(&running.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut trailers = HeaderMap::new();
    trailers.insert(HeaderName::from_static("x-sum"), HeaderValue::from_static("7"));
    let frames = [
        Ok::<_, std::convert::Infallible>(Frame::data(Bytes::from_static(b"a"))),
        Ok(Frame::trailers(trailers)),
    ];
    let body = StreamBody::new(futures_util::stream::iter(frames));
    let request =
        hyper::Request::post("http://client/v1/embeddings").header("te", "trailers").body(body).unwrap();
    let answer = soon(sender.send_request(request)).await.unwrap();
    let collected = soon(answer.into_body().collect()).await.unwrap();
    assert_eq!(collected.trailers().unwrap()["x-took"], "3");
    assert_eq!(collected.to_bytes(), "b");
    assert_eq!(soon(up.seen.recv()).await.unwrap().body, b"a");
}

#[tokio::test]
async fn a_body_is_asked_for_before_it_is_sent() {
    let mut up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let running = proxy(&up.address, |options| options.max_request_bytes = 10).await;
    for path in [CHAT, "/v1/embeddings"] {
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: c\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n");
        let mut stream = running.send(head.as_bytes()).await;
        let mut buffer = Vec::new();
        assert_eq!(read_head(&mut stream, &mut buffer).await, "HTTP/1.1 100 Continue", "{path}");
        stream.write_all(b"{}").await.unwrap();
        assert_eq!(soon(read_message(&mut stream, &mut buffer)).await.unwrap().status(), 200);
        let seen = soon(up.seen.recv()).await.unwrap();
        assert_eq!((seen.body.as_slice(), seen.header("expect")), (b"{}".as_slice(), None));
    }
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nhost: c\r\nexpect: 100-continue\r\ncontent-length: 11\r\n\r\n");
    let refused = running.ask(head.as_bytes()).await;
    assert_eq!(refused.status(), 413, "the body is not asked for first");
}

#[tokio::test]
async fn an_encoded_answer_stays_encoded() {
    let encoded = b"\x1f\x8b\x08\x00rest".to_vec();
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\ncontent-length: 8\r\n\r\n";
    let wire = [head.as_slice(), &encoded].concat();
    let up = upstream(move |_, _| vec![Act::Write(wire.clone())]).await;
    for inject in [false, true] {
        let running = proxy(&up.address, |options| {
            options.inject_token_ids = inject;
            options.sse_keep_alive = Some(TICK);
        })
        .await;
        let answer = running.ask(&post(CHAT, "", b"{\"stream\":true}")).await;
        assert_eq!(answer.body, encoded);
        assert_eq!(answer.header("content-encoding"), Some("gzip"));
        assert_eq!(answer.header("content-length"), Some("8"));
    }
}

#[tokio::test]
async fn a_client_of_http_1_0_gets_a_body_without_chunks() {
    let up = upstream(|_, _| vec![Act::Write([SSE_HEAD, &chunk(&event("a")), b"0\r\n\r\n"].concat())]).await;
    let running = proxy(&up.address, |_| {}).await;
    let request = format!("POST {CHAT} HTTP/1.0\r\nte: trailers\r\ncontent-length: 2\r\n\r\n{{}}");
    let mut stream = running.send(request.as_bytes()).await;
    let mut heard = Vec::new();
    soon(stream.read_to_end(&mut heard)).await.unwrap();
    let text = String::from_utf8(heard).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.0 200") && header(head, "transfer-encoding").is_none(), "{head}");
    assert_eq!(body.as_bytes(), event("a"));
}

// ---- Keys ----

#[tokio::test]
async fn clients_need_a_key_that_vllm_never_sees() {
    let mut up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keys");
    let (ours, later) = (NewKey::generate("ours").unwrap(), NewKey::generate("later").unwrap());
    std::fs::write(&path, &ours.line).unwrap();
    let mut running = proxy(&up.address, |options| options.client_keys = Some(path.clone())).await;
    let bearing = |secret: &str| post(CHAT, &format!("authorization: Bearer {secret}\r\n"), b"{}");

    for request in [post(CHAT, "", b"{}"), bearing("ds-0"), bearing(&later.secret), post("/pause", "", b"")] {
        let refused = running.ask(&request).await;
        assert_eq!(refused.status(), 401);
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
        let body: serde_json::Value = serde_json::from_slice(&refused.body).unwrap();
        assert_eq!(body["error"]["code"], 401);
        assert_eq!(body["error"]["type"], "AuthenticationError");
    }
    assert!(up.seen.try_recv().is_err() && running.begun.try_recv().is_err());

    for request in [bearing(&ours.secret), post(CHAT, &format!("x-api-key: {}\r\n", ours.secret), b"{}")] {
        assert_eq!(running.ask(&request).await.status(), 200);
        let seen = soon(up.seen.recv()).await.unwrap();
        assert!(!seen.head.contains(&ours.secret), "{}", seen.head);
        running.exchange().await;
    }
    for (method, open) in [("GET", "/health"), ("OPTIONS", CHAT)] {
        assert_eq!(running.ask(&build_request(method, open, "", b"")).await.status(), 200, "{method} {open}");
    }

    std::fs::write(&path, &later.line).unwrap();
    running.proxy.reload();
    assert_eq!(running.ask(&bearing(&ours.secret)).await.status(), 401);
    assert_eq!(running.ask(&bearing(&later.secret)).await.status(), 200);
}

#[tokio::test]
async fn what_vllm_sees_of_credentials_is_chosen() {
    let mut up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let directory = tempfile::tempdir().unwrap();
    let (keys, vllm_key) = (directory.path().join("keys"), directory.path().join("vllm"));
    let ours = NewKey::generate("ours").unwrap();
    std::fs::write(&keys, &ours.line).unwrap();
    std::fs::write(&vllm_key, "token-of-vllm\n").unwrap();
    let given = format!("Bearer {}", ours.secret);
    for (with_keys, authorization, own_key, expected) in [
        (false, Authorization::Auto, false, Some(given.as_str())),
        (false, Authorization::Drop, false, None),
        (true, Authorization::Auto, false, None),
        (true, Authorization::Pass, false, Some(given.as_str())),
        (true, Authorization::Auto, true, Some("Bearer token-of-vllm")),
        (false, Authorization::Pass, true, Some("Bearer token-of-vllm")),
    ] {
        let running = proxy(&up.address, |options| {
            options.client_keys = with_keys.then(|| keys.clone());
            options.authorization = authorization;
            options.upstream_key = own_key.then(|| vllm_key.clone());
        })
        .await;
        let answer = running.ask(&post(CHAT, &format!("authorization: {given}\r\n"), b"{}")).await;
        assert_eq!(answer.status(), 200);
        let seen = soon(up.seen.recv()).await.unwrap();
        assert_eq!(seen.header("authorization"), expected, "{with_keys} {authorization:?} {own_key}");
    }
}

// ---- Silence ----

#[tokio::test]
async fn each_phase_has_its_own_limit() {
    let up = upstream(|number, _| match number {
        0 => vec![Act::UntilClosed(Arc::default())],
        _ => vec![Act::Write([SSE_HEAD, &chunk(&event("a"))].concat()), Act::UntilClosed(Arc::default())],
    })
    .await;
    let mut running = proxy(&up.address, |options| {
        options.first_byte_timeout = Some(8 * TICK);
        options.between_chunks_timeout = Some(TICK);
        options.client_body_timeout = Some(TICK);
    })
    .await;
    let late = running.ask(&post(CHAT, "", b"{}")).await;
    assert_eq!(late.status(), 504);
    assert!(String::from_utf8_lossy(&late.body).contains("proxy.first_byte_seconds"));
    assert_eq!(running.exchange().await.transfer, Status::UpstreamError);

    let mut stream = running.send(&post(CHAT, "", b"{}")).await;
    let mut buffer = Vec::new();
    read_head(&mut stream, &mut buffer).await;
    assert_eq!(soon(read_chunk(&mut stream, &mut buffer)).await, Some(Some(event("a"))));
    assert_eq!(soon(read_chunk(&mut stream, &mut buffer)).await, None, "the answer breaks off");
    assert_eq!(running.exchange().await.transfer, Status::UpstreamError);

    for path in [CHAT, "/v1/embeddings"] {
        let head = format!("POST {path} HTTP/1.1\r\nhost: c\r\ncontent-length: 9\r\n\r\n{{");
        let answer = running.ask(head.as_bytes()).await;
        assert_eq!(answer.status(), 408, "{path}");
        assert!(String::from_utf8_lossy(&answer.body).contains("proxy.client_body_seconds"));
    }
}

/// A listener whose queue is full: further connections wait. With those that fill it.
async fn full_listener() -> (TcpListener, Vec<TcpStream>) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(Ok(stream)) = tokio::time::timeout(TICK, TcpStream::connect(address)).await {
        waiting.push(stream);
    }
    (listener, waiting)
}

#[tokio::test]
async fn a_connection_that_is_never_made_is_given_up() {
    let (listener, _waiting) = full_listener().await;
    let address = listener.local_addr().unwrap();
    let running = proxy(&address.to_string(), |options| options.connect_timeout = TICK).await;
    let answer = running.ask(&post(CHAT, "", b"{}")).await;
    assert_eq!(answer.status(), 502);
    assert!(String::from_utf8_lossy(&answer.body).contains("no connection within"));
}

#[tokio::test]
async fn a_client_that_leaves_while_vllm_is_looked_for_ends_its_request() {
    let (listener, _waiting) = full_listener().await;
    let address = listener.local_addr().unwrap();
    let mut running = proxy(&address.to_string(), |options| options.connect_timeout = 400 * TICK).await;
    let stream = running.send(&post(CHAT, "", b"{}")).await;
    soon(running.begun.recv()).await.unwrap();
    drop(stream);
    let exchange = running.exchange().await;
    assert_eq!((exchange.transfer, exchange.http_status), (Status::Cancelled, None));
}

#[tokio::test]
async fn silent_streams_get_comments_between_events() {
    let go_on = Arc::new(Notify::new());
    let gate = go_on.clone();
    let whole = event("ab");
    let (first, rest) = (whole[..9].to_vec(), whole[9..].to_vec());
    let expected_start = first.clone();
    let up = upstream(move |_, _| {
        vec![
            Act::Write(SSE_HEAD.to_vec()),
            Act::Wait(gate.clone()),
            Act::Write(chunk(&first)),
            Act::Pause(4 * TICK),
            Act::Write(chunk(&rest)),
            Act::Wait(gate.clone()),
            Act::Write(b"0\r\n\r\n".to_vec()),
        ]
    })
    .await;
    let mut running = proxy(&up.address, |options| options.sse_keep_alive = Some(TICK)).await;
    let mut stream = running.send(&post(CHAT, "", b"{\"stream\":true}")).await;
    let mut buffer = Vec::new();
    read_head(&mut stream, &mut buffer).await;
    let comment = Some(Some(b": keep-alive\n\n".to_vec()));
    assert_eq!(soon(read_chunk(&mut stream, &mut buffer)).await, comment);
    go_on.notify_one();
    let mut next = soon(read_chunk(&mut stream, &mut buffer)).await;
    while next == comment {
        next = soon(read_chunk(&mut stream, &mut buffer)).await;
    }
    assert_eq!(next, Some(Some(expected_start)));
    let after = soon(read_chunk(&mut stream, &mut buffer)).await.unwrap().unwrap();
    assert!(after.ends_with(b"\n\n") && !after.starts_with(b":"), "no comment within an event");
    assert_eq!(soon(read_chunk(&mut stream, &mut buffer)).await, comment);
    go_on.notify_one();
    let exchange = running.exchange().await;
    assert_eq!(exchange.response_body, event("ab"), "comments are not recorded");
}

// ---- The process ----

#[tokio::test]
async fn a_process_drains_and_its_second_signal_ends_at_once() {
    let mut up = upstream(|_, _| {
        vec![Act::Write([SSE_HEAD, &chunk(&event("a"))].concat()), Act::UntilClosed(Arc::default())]
    })
    .await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let key = NewKey::generate("operator").unwrap();
    std::fs::write(path.join("control.keys"), &key.line).unwrap();
    let settings = format!("[control]\nkeys_file = {:?}\n", path.join("control.keys"));
    let sidecar = common::sidecar::Sidecar::start(path, &up.address, &settings);
    let mut stream = TcpStream::connect(&sidecar.address).await.unwrap();
    stream.write_all(&post(CHAT, "", b"{\"stream\":true}")).await.unwrap();
    let mut buffer = Vec::new();
    read_head(&mut stream, &mut buffer).await;
    soon(read_chunk(&mut stream, &mut buffer)).await.unwrap();
    soon(up.seen.recv()).await.unwrap();

    let client = draftsmith::http::client().unwrap();
    let ready_url = format!("{}/readyz", sidecar.control);
    assert_eq!(client.get(&ready_url).send().await.unwrap().status(), 401);
    sidecar.terminate();
    let drains = async {
        loop {
            let answer = client.get(&ready_url).bearer_auth(&key.secret).send().await.unwrap();
            let status = answer.status();
            if answer.text().await.unwrap().contains("drains") {
                return status;
            }
        }
    };
    assert_eq!(soon(drains).await, 503);
    assert!(TcpStream::connect(&sidecar.address).await.is_err(), "no new connections");
    sidecar.terminate();
    let status = tokio::task::spawn_blocking(move || sidecar.wait()).await.unwrap();
    assert_eq!(status.code(), Some(1));
    assert_eq!(soon(read_chunk(&mut stream, &mut buffer)).await, None, "the stream was cut");
    let log = std::fs::read_to_string(path.join("serve.log")).unwrap();
    assert!(!log.contains(&key.secret));
}

#[tokio::test]
async fn a_process_reads_changed_keys_by_itself() {
    let up = upstream(|_, _| vec![Act::Write(json("{}"))]).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let keys = path.join("secrets");
    std::fs::create_dir(&keys).unwrap();
    std::fs::write(keys.join("clients"), "").unwrap();
    let settings = format!("[proxy]\nclient_keys_file = {:?}\n", keys.join("clients"));
    let sidecar = common::sidecar::Sidecar::start(path, &up.address, &settings);
    let key = NewKey::generate("client").unwrap();
    let ask = || {
        let url = format!("http://{}{CHAT}", sidecar.address);
        draftsmith::http::client().unwrap().post(url).bearer_auth(&key.secret).body("{}").send()
    };
    assert_eq!(ask().await.unwrap().status(), 401);
    std::fs::write(keys.join("new"), &key.line).unwrap();
    std::fs::rename(keys.join("new"), keys.join("clients")).unwrap();
    let admitted = async { while ask().await.unwrap().status() != 200 {} };
    soon(admitted).await;
    sidecar.flush().await;
    for entry in walk(path) {
        let bytes = std::fs::read(&entry).unwrap();
        let secret = key.secret.as_bytes();
        assert!(common::http::find(&bytes, secret).is_none(), "{}", entry.display());
    }
    assert_eq!(sidecar.stop().code(), Some(0));
}

/// All files below a directory.
fn walk(directory: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(walk(&path)) } else { found.push(path) }
    }
    found
}
