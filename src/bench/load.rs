//! The clients: as many requests as are taken, requests at a fixed pace, or many slow streams.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::upstream::Kind;

/// What a load saw.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lap {
    pub answers: u64,
    pub errors: usize,
    pub elapsed: Duration,
}

/// Requests that come whether or not the last one was answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub requests_per_second: f64,
    pub connections: usize,
}

/// Where the head ends, and the length that it tells. None while it is not whole.
pub(super) fn framing(bytes: &[u8]) -> Option<(usize, Option<usize>)> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&bytes[..end]).ok()?;
    let mut length = None;
    for line in head.lines() {
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().ok();
        }
    }
    Some((end, length))
}

/// Follows one answer as its bytes come.
#[derive(Default)]
struct Answer {
    bytes: Vec<u8>,
    framing: Option<(usize, Option<usize>)>,
}

impl Answer {
    /// True once it is whole. Clients of a stream look at its end alone.
    fn is_whole(&mut self) -> bool {
        if self.framing.is_none() {
            self.framing = framing(&self.bytes);
        }
        match self.framing {
            None => false,
            Some((end, Some(length))) => self.bytes.len() >= end + length,
            Some((end, None)) => self.bytes.len() > end && self.bytes.ends_with(b"0\r\n\r\n"),
        }
    }

    fn check(&self) -> io::Result<()> {
        if self.bytes.starts_with(b"HTTP/1.1 200") {
            return Ok(());
        }
        let start = String::from_utf8_lossy(&self.bytes[..self.bytes.len().min(200)]).into_owned();
        Err(io::Error::other(format!("answered {start:?}")))
    }

    fn body(&self) -> Option<String> {
        let (end, length) = self.framing?;
        let text = std::str::from_utf8(&self.bytes[end..]).ok()?;
        if length.is_some() {
            return Some(text.to_owned());
        }
        let mut body = String::new();
        let mut rest = text;
        loop {
            let (digits, after) = rest.split_once("\r\n")?;
            let size = usize::from_str_radix(digits, 16).ok()?;
            if size == 0 {
                return Some(body);
            }
            body.push_str(after.get(..size)?);
            rest = after.get(size + 2..)?;
        }
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.framing = None;
    }
}

fn wire(address: SocketAddr, kind: Kind) -> Vec<u8> {
    let body = kind.request();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\nuser-agent: bench\r\naccept: */*\r\n\
         authorization: Bearer sk-bench\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

async fn ask(stream: &mut TcpStream, request: &[u8], answer: &mut Answer) -> io::Result<()> {
    answer.clear();
    stream.write_all(request).await?;
    while !answer.is_whole() {
        if stream.read_buf(&mut answer.bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    answer.check()
}

async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// One answer's body.
pub(super) fn answer(address: SocketAddr, kind: Kind) -> anyhow::Result<String> {
    runtime()?.block_on(async {
        let mut found = Answer::default();
        ask(&mut connect(address).await?, &wire(address, kind), &mut found).await?;
        found.body().context("the answer's body cannot be read")
    })
}

/// Each connection sends its next request as soon as its last one was answered.
pub(super) fn closed_loop(
    address: SocketAddr,
    kind: Kind,
    connections: usize,
    time: Duration,
) -> anyhow::Result<Lap> {
    let request: Arc<[u8]> = wire(address, kind).into();
    let started = Instant::now();
    runtime()?.block_on(async {
        let mut clients = Vec::new();
        for _ in 0..connections {
            let request = request.clone();
            clients.push(tokio::spawn(async move {
                let mut found = Answer::default();
                let mut answers = 0u64;
                let mut stream = connect(address).await?;
                while started.elapsed() < time {
                    ask(&mut stream, &request, &mut found).await?;
                    answers += 1;
                }
                io::Result::Ok(answers)
            }));
        }
        let mut lap = Lap { answers: 0, errors: 0, elapsed: Duration::ZERO };
        for client in clients {
            match client.await? {
                Ok(answers) => lap.answers += answers,
                Err(error) => {
                    tracing::warn!(%error, "a client failed");
                    lap.errors += 1;
                }
            }
        }
        lap.elapsed = started.elapsed();
        Ok(lap)
    })
}

/// The seconds that each answer took from the moment its request was due.
pub(super) fn paced(address: SocketAddr, pace: Pace, time: Duration) -> anyhow::Result<Vec<f64>> {
    let period = Duration::from_secs_f64(pace.connections as f64 / pace.requests_per_second);
    let mut threads = Vec::new();
    let started = Instant::now();
    for number in 0..pace.connections {
        let first = started + period.mul_f64(number as f64 / pace.connections as f64);
        threads.push(std::thread::spawn(move || paced_client(address, first, period, started + time)));
    }
    let mut samples = Vec::new();
    for thread in threads {
        let found = thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))?;
        samples.extend(found?);
    }
    Ok(samples)
}

/// Blocking, on a thread of its own: an event loop's timers are too coarse here.
#[expect(clippy::disallowed_methods, reason = "the pace itself is what is waited for")]
fn paced_client(address: SocketAddr, first: Instant, period: Duration, end: Instant) -> io::Result<Vec<f64>> {
    let request = wire(address, Kind::Json);
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut found = Answer::default();
    let mut samples = Vec::new();
    let mut due = first;
    let mut piece = [0; 16 << 10];
    while due < end {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        found.clear();
        stream.write_all(&request)?;
        while !found.is_whole() {
            let count = stream.read(&mut piece)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            found.bytes.extend_from_slice(&piece[..count]);
        }
        found.check()?;
        samples.push(due.elapsed().as_secs_f64());
        due += period;
    }
    Ok(samples)
}

/// Opens the streams over one second, so that their events are spread, and reads each to its end.
pub(super) fn slow_streams(address: SocketAddr, streams: usize, time: Duration) -> anyhow::Result<Lap> {
    let kind = Kind::Slow(time.as_secs());
    let request: Arc<[u8]> = wire(address, kind).into();
    let expected: Arc<str> = kind.body().into();
    let started = Instant::now();
    runtime()?.block_on(async {
        let mut clients = Vec::new();
        for number in 0..streams {
            let (request, expected) = (request.clone(), expected.clone());
            clients.push(tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs_f64(number as f64 / streams as f64)).await;
                let mut found = Answer::default();
                ask(&mut connect(address).await?, &request, &mut found).await?;
                if found.body().as_deref() == Some(&expected) {
                    return Ok(());
                }
                Err(io::Error::other("the answer is not what the upstream sent"))
            }));
        }
        let mut lap = Lap { answers: 0, errors: 0, elapsed: Duration::ZERO };
        for client in clients {
            match client.await? {
                Ok(()) => lap.answers += 1,
                Err(error) => {
                    tracing::warn!(%error, "a stream failed");
                    lap.errors += 1;
                }
            }
        }
        lap.elapsed = started.elapsed();
        Ok(lap)
    })
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}
