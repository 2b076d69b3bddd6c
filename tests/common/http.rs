//! HTTP by hand, on raw sockets, and an upstream that does as it is told. What a library would tidy up is seen here.

// Each test file takes what it needs.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};

/// What the upstream does with a request, in order.
#[derive(Clone)]
pub enum Act {
    Write(Vec<u8>),
    /// The model's pace.
    Pause(Duration),
    /// Until the test lets it go on.
    Wait(Arc<Notify>),
    /// Until the proxy closes the connection; then tells the test.
    UntilClosed(Arc<Notify>),
    Close,
}

/// A request or an answer; its body is decoded.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Without the blank line.
    pub head: String,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }

    pub fn status(&self) -> u16 {
        self.head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// The status line, and the headers that a proxy must pass on, by their names: the order of different ones means
    /// nothing, that of equal ones is kept.
    pub fn end_to_end(&self) -> Vec<&str> {
        const HOP_BY_HOP: [&str; 4] = ["connection", "keep-alive", "trailer", "transfer-encoding"];
        let name_of = |line: &str| line.split(':').next().unwrap_or_default().to_ascii_lowercase();
        let mut lines: Vec<&str> = self.head.lines().collect();
        lines.retain(|line| !HOP_BY_HOP.contains(&name_of(line).as_str()));
        lines[1..].sort_by_key(|line| name_of(line));
        lines
    }
}

pub fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let lines = head.lines().filter_map(|line| line.split_once(':'));
    lines.filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()).next()
}

pub struct Upstream {
    pub address: String,
    pub seen: mpsc::UnboundedReceiver<Seen>,
    pub connections: Arc<AtomicUsize>,
}

/// `script` is given the request and its number, from 0.
pub async fn upstream(script: impl Fn(usize, &Seen) -> Vec<Act> + Send + Sync + 'static) -> Upstream {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (streams, accepted) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            if streams.send(stream).is_err() {
                return;
            }
        }
    });
    upstream_on(address, accepted, script)
}

/// An upstream on connections that were accepted elsewhere: through TLS, or on a Unix-domain socket.
pub fn upstream_on<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    address: String,
    mut accepted: mpsc::UnboundedReceiver<S>,
    script: impl Fn(usize, &Seen) -> Vec<Act> + Send + Sync + 'static,
) -> Upstream {
    let (sender, seen) = mpsc::unbounded_channel();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    let script = Arc::new(script);
    let number = Arc::new(AtomicUsize::new(0));
    tokio::spawn(async move {
        while let Some(stream) = accepted.recv().await {
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(play(stream, script.clone(), number.clone(), sender.clone()));
        }
    });
    Upstream { address, seen, connections }
}

async fn play(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    script: Arc<impl Fn(usize, &Seen) -> Vec<Act>>,
    number: Arc<AtomicUsize>,
    sender: mpsc::UnboundedSender<Seen>,
) {
    let mut buffer = Vec::new();
    while let Some(seen) = read_message(&mut stream, &mut buffer).await {
        let acts = script(number.fetch_add(1, Ordering::SeqCst), &seen);
        let _ = sender.send(seen);
        for act in acts {
            match act {
                Act::Write(bytes) => {
                    if stream.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
                Act::Pause(duration) => tokio::time::sleep(duration).await,
                Act::Wait(notify) => notify.notified().await,
                Act::UntilClosed(notify) => {
                    let mut byte = [0];
                    while matches!(stream.read(&mut byte).await, Ok(count) if count > 0) {}
                    notify.notify_one();
                    return;
                }
                Act::Close => return,
            }
        }
    }
}

/// Reads one message. None at the connection's end.
pub async fn read_message(stream: &mut (impl AsyncRead + Unpin), buffer: &mut Vec<u8>) -> Option<Seen> {
    let head_end = loop {
        if let Some(position) = find(buffer, b"\r\n\r\n") {
            break position;
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(buffer[..head_end].to_vec()).unwrap();
    buffer.drain(..head_end + 4);
    if header(&head, "transfer-encoding") == Some("chunked") {
        let mut body = Vec::new();
        while let Some(piece) = read_chunk(stream, buffer).await? {
            body.extend(piece);
        }
        return Some(Seen { head, body });
    }
    let length: usize = header(&head, "content-length").map_or(0, |value| value.parse().unwrap());
    while buffer.len() < length {
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    Some(Seen { head, body: buffer.drain(..length).collect() })
}

/// One chunk of a chunked body; `Some(None)` is the last, None a broken one.
pub async fn read_chunk(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
) -> Option<Option<Vec<u8>>> {
    loop {
        if let Some(line_end) = find(buffer, b"\r\n") {
            let size = usize::from_str_radix(std::str::from_utf8(&buffer[..line_end]).unwrap(), 16).unwrap();
            let end = line_end + 2 + size + 2;
            if buffer.len() >= end {
                let piece = buffer[line_end + 2..line_end + 2 + size].to_vec();
                buffer.drain(..end);
                return Some(Some(piece).filter(|found| !found.is_empty()));
            }
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

pub fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

pub fn chunk(bytes: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

pub fn json(body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// The head of a stream, as vLLM sends it.
pub const SSE_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 16:12:20 GMT\r\nserver: uvicorn\r\n\
      content-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\ntransfer-encoding: chunked\r\n\r\n";

pub fn build_request(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: client\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

pub fn post(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    build_request("POST", path, headers, body)
}

pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";
