//! An upstream that answers as vLLM does, without thinking.

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::Context;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Events of one streamed answer.
const EVENTS: usize = 200;

/// The answers that can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole answer.
    Json,
    /// A stream of 200 events, each written by itself.
    Events,
    /// A stream of one event a second, for so many seconds.
    Slow(u64),
}

static JSON_BODY: LazyLock<String> = LazyLock::new(|| {
    let text = "The capital of France is Paris, and it has been so for most of its history. ".repeat(3);
    format!(
        "{{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1764403200,\"model\":\"bench\",\
         \"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"{text}\"}},\
         \"finish_reason\":\"stop\"}}],\"usage\":{{\"prompt_tokens\":24,\"total_tokens\":72,\"completion_tokens\":48}}}}"
    )
});

static EVENTS_BODY: LazyLock<Vec<String>> = LazyLock::new(|| {
    let mut events: Vec<String> = (0..EVENTS - 2).map(|_| event("{\"content\":\" word\"}", "null")).collect();
    events.push(event("{}", "\"stop\""));
    events.push("data: [DONE]\n\n".to_owned());
    events
});

fn event(delta: &str, finish_reason: &str) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1764403200,\
         \"model\":\"bench\",\"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\
         \"finish_reason\":{finish_reason}}}]}}\n\n"
    )
}

const EVENTS_HEAD: &str = "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 16:12:20 GMT\r\nserver: uvicorn\r\n\
    content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
const EVENTS_END: &[u8] = b"0\r\n\r\n";

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Json => "whole answers",
            Kind::Events => "streams of 200 events",
            Kind::Slow(_) => "slow streams",
        }
    }

    /// The request's body; the upstream knows the kind by its user.
    pub(super) fn request(self) -> String {
        let user = match self {
            Kind::Json => "bench-json".to_owned(),
            Kind::Events => "bench-events".to_owned(),
            Kind::Slow(seconds) => format!("bench-slow-{seconds}-"),
        };
        format!(
            "{{\"model\":\"bench\",\"stream\":{},\"user\":\"{user}\",\"max_tokens\":256,\"temperature\":0.7,\
             \"messages\":[{{\"role\":\"system\",\"content\":\"You are a helpful assistant. Answer in one paragraph, \
             and say so where you do not know.\"}},{{\"role\":\"user\",\"content\":\"What is the capital of France, and \
             since when has it been so? Name the other towns that were.\"}}]}}",
            self != Kind::Json
        )
    }

    /// The whole body of the answer.
    pub(super) fn body(self) -> String {
        match self {
            Kind::Json => JSON_BODY.clone(),
            Kind::Events => EVENTS_BODY.concat(),
            Kind::Slow(seconds) => {
                let events = usize::try_from(seconds).unwrap_or(usize::MAX);
                event("{\"content\":\" word\"}", "null").repeat(events) + "data: [DONE]\n\n"
            }
        }
    }

    fn asked_for(body: &[u8]) -> Self {
        let text = String::from_utf8_lossy(body);
        if text.contains("bench-events") {
            return Kind::Events;
        }
        let seconds = text.split_once("bench-slow-").and_then(|(_, rest)| rest.split_once('-'));
        match seconds.and_then(|(digits, _)| digits.parse().ok()) {
            Some(seconds) => Kind::Slow(seconds),
            None => Kind::Json,
        }
    }
}

/// Starts it on a thread of its own; it lives as long as the process.
pub(super) fn start() -> anyhow::Result<SocketAddr> {
    let listener =
        std::net::TcpListener::bind("127.0.0.1:0").context("cannot bind a port for the upstream")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("upstream".to_owned()).spawn(move || {
        runtime.block_on(async {
            match TcpListener::from_std(listener) {
                Ok(listener) => accept(listener).await,
                Err(error) => tracing::error!(%error, "the upstream cannot accept"),
            }
        });
    })?;
    Ok(address)
}

async fn accept(listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(async move {
                    if let Err(error) = serve(stream).await {
                        tracing::debug!(%error, "upstream: a connection ended");
                    }
                });
            }
            Err(error) => tracing::warn!(%error, "upstream: accept failed"),
        }
    }
}

async fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let head = "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 16:12:20 GMT\r\nserver: uvicorn\r\n\
                content-type: application/json\r\ncontent-length: ";
    let json = format!("{head}{}\r\n\r\n{}", JSON_BODY.len(), *JSON_BODY);
    let mut buffer = Vec::with_capacity(4096);
    while let Some(body) = read_request(&mut stream, &mut buffer).await? {
        match Kind::asked_for(&body) {
            Kind::Json => stream.write_all(json.as_bytes()).await?,
            Kind::Events => {
                stream.write_all(EVENTS_HEAD.as_bytes()).await?;
                for event in EVENTS_BODY.iter() {
                    stream.write_all(chunk(event).as_bytes()).await?;
                }
                stream.write_all(EVENTS_END).await?;
            }
            Kind::Slow(seconds) => {
                stream.write_all(EVENTS_HEAD.as_bytes()).await?;
                let mut ticks = tokio::time::interval(Duration::from_secs(1));
                let word = chunk(&event("{\"content\":\" word\"}", "null"));
                for _ in 0..seconds {
                    ticks.tick().await;
                    stream.write_all(word.as_bytes()).await?;
                }
                stream.write_all(chunk("data: [DONE]\n\n").as_bytes()).await?;
                stream.write_all(EVENTS_END).await?;
            }
        }
    }
    Ok(())
}

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

/// The next request's body. None at the connection's end.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> std::io::Result<Option<Vec<u8>>> {
    loop {
        if let Some((head_end, length)) = super::load::framing(buffer)
            && buffer.len() >= head_end + length.unwrap_or(0)
        {
            let body = buffer[head_end..head_end + length.unwrap_or(0)].to_vec();
            buffer.drain(..head_end + length.unwrap_or(0));
            return Ok(Some(body));
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}
