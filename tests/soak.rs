//! The sidecar under traffic of all kinds for as long as one likes, on a disk that may stall and fill up meanwhile.
//!
//! ```text
//! SOAK_SECONDS=600 cargo test --release --test soak -- --include-ignored --nocapture
//! ```
//! With `SOAK_DISK` naming a mount point of a small file system of its own (and as root), that is where the data
//! are: it is frozen for the second tenth of the time, a minute at most, and full in the fourth.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::http::{Act, CHAT, SSE_HEAD, Seen, chunk, json, post, read_message, upstream};
use common::sidecar::Sidecar;
use draftsmith::record::{rows, verify};
use draftsmith::store::DataDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

mod common {
    pub mod http;
    pub mod sidecar;
}

const CLIENTS: usize = 6;
/// Without more being said.
const SECONDS: u64 = 15;
const LONGEST_FREEZE: Duration = Duration::from_secs(60);
/// Little memory, so that a stalled disk fills it; small segments, so that sealing never rests.
const SETTINGS: &str = "[record]\nqueue_bytes = 4000000\nsegment_bytes = 1000000\nseal_after_seconds = 2\n";
/// Memory that the process may grow by once it has warmed up, whatever happens.
const MOST_GROWTH: u64 = 96 << 20;

#[derive(Default)]
struct Counts {
    /// Answers that clients read whole.
    whole: AtomicU64,
    /// Streams that clients left.
    left: AtomicU64,
}

fn answer(seen: &Seen) -> Vec<Act> {
    let word = "{\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}";
    let event = chunk(format!("data: {word}\n\n").as_bytes());
    let end = [chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n".to_vec()].concat();
    let text = String::from_utf8_lossy(&seen.body);
    if text.contains("\"stream\":true") {
        let mut acts = vec![Act::Write([SSE_HEAD, &event].concat())];
        for _ in 0..8 {
            acts.push(Act::Pause(Duration::from_millis(3)));
            acts.push(Act::Write(event.clone()));
        }
        acts.push(Act::Write(end));
        return acts;
    }
    let content = "word ".repeat(text.len() / 5);
    vec![Act::Write(json(&format!(
        "{{\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"{content}\"}},\"finish_reason\":\"stop\"}}]}}"
    )))]
}

/// Asks in one way after the other, over one connection while it can. Any answer but the right one ends the test.
async fn ask_until(end: Instant, client: usize, address: String, counts: Arc<Counts>) {
    let mut kept: Option<TcpStream> = None;
    for number in 0u64.. {
        if Instant::now() >= end {
            return;
        }
        let mut stream = match kept.take() {
            Some(stream) => stream,
            None => TcpStream::connect(&address).await.unwrap(),
        };
        let stream_flag = matches!(number % 8, 1 | 3 | 5);
        let prompt = "many words ".repeat(if number % 64 == 7 { 20_000 } else { 20 });
        let body = format!(
            "{{\"model\":\"m\",\"stream\":{stream_flag},\"messages\":[{{\"role\":\"user\",\"content\":\"{prompt}\"}}]}}"
        );
        let id = format!("x-request-id: c{client}-{number}\r\n");
        stream.write_all(&post(CHAT, &id, body.as_bytes())).await.unwrap();
        if number % 8 == 3 {
            // Leaves once the stream has begun.
            let mut first = [0];
            stream.read_exact(&mut first).await.unwrap();
            counts.left.fetch_add(1, Relaxed);
            continue;
        }
        let seen = read_message(&mut stream, &mut Vec::new()).await.expect("a whole answer");
        assert_eq!(seen.status(), 200);
        let text = String::from_utf8_lossy(&seen.body);
        let right = if stream_flag { text.ends_with("data: [DONE]\n\n") } else { text.contains("\"stop\"") };
        assert!(right, "{text}");
        counts.whole.fetch_add(1, Relaxed);
        kept = Some(stream);
    }
}

/// Resident bytes and open descriptors of the process.
fn usage(process: u32) -> (u64, usize) {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kibibytes: u64 = resident.split_whitespace().next().unwrap().parse().unwrap();
    (kibibytes * 1024, fs::read_dir(format!("/proc/{process}/fd")).unwrap().count())
}

async fn get(url: String) -> String {
    draftsmith::http::client().unwrap().get(url).send().await.unwrap().text().await.unwrap()
}

/// Requests that have no row because it was dropped, and why.
fn dropped(metrics: &str) -> (u64, Vec<&str>) {
    let mut sum = 0;
    let mut lines = Vec::new();
    for line in metrics.lines() {
        let of_requests = line.contains("what=\"rows\"") || line.contains("what=\"exchange\"");
        if line.starts_with("draftsmith_record_dropped_total") && of_requests {
            sum += line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
            lines.push(line);
        }
    }
    (sum, lines)
}

/// Thaws even if the test fails.
struct Frozen(PathBuf);

impl Frozen {
    fn freeze(mount: &Path) -> Self {
        assert!(Command::new("fsfreeze").arg("-f").arg(mount).status().unwrap().success());
        Self(mount.to_owned())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // Nothing is left to do about a failure here.
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.0).status();
    }
}

/// Writes until there is no room; gives the file.
fn fill(mount: &Path) -> PathBuf {
    let path = mount.join("filler");
    let mut file = fs::File::create(&path).unwrap();
    let block = vec![0u8; 1 << 16];
    while file.write_all(&block).is_ok() {}
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes as long as it is told"]
async fn traffic_of_all_kinds_for_a_while() {
    let seconds = std::env::var("SOAK_SECONDS").map_or(SECONDS, |text| text.parse().unwrap());
    let disk = std::env::var_os("SOAK_DISK").map(PathBuf::from);
    let time = Duration::from_secs(seconds);
    let directory = tempfile::tempdir().unwrap();
    let on_disk = disk.as_ref().map(|mount| tempfile::tempdir_in(mount).unwrap());
    let place = directory.path().join("data");
    if let Some(on_disk) = &on_disk {
        // The log stays off that disk.
        std::os::unix::fs::symlink(on_disk.path(), &place).unwrap();
    }
    let up = upstream(|_, seen| answer(seen)).await;
    let mut sidecar = Sidecar::start(directory.path(), &up.address, SETTINGS);
    let (_, descriptors_before) = usage(sidecar.id());
    let counts = Arc::new(Counts::default());
    let started = Instant::now();
    let mut clients = Vec::new();
    for client in 0..CLIENTS {
        clients.push(tokio::spawn(ask_until(
            started + time,
            client,
            sidecar.address.clone(),
            counts.clone(),
        )));
    }
    let passed = |tenths: u32| tokio::time::sleep_until((started + time * tenths / 10).into());
    passed(1).await;
    let (resident_warm, _) = usage(sidecar.id());
    if let Some(mount) = &disk {
        let frozen = Frozen::freeze(mount);
        tokio::time::sleep((time / 10).min(LONGEST_FREEZE)).await;
        let ready = get(format!("{}/readyz", sidecar.control)).await;
        drop(frozen);
        println!("frozen: {ready}");
        assert!(ready.contains("stalled for"), "{ready}");
        passed(3).await;
        let filler = fill(mount);
        passed(4).await;
        let ready = get(format!("{}/readyz", sidecar.control)).await;
        println!("full: {ready}");
        assert!(ready.contains("failing for") && ready.contains("No space left"), "{ready}");
        fs::remove_file(filler).unwrap();
    }
    for client in clients {
        client.await.unwrap();
    }
    sidecar.check_alive();
    let answered = counts.whole.load(Relaxed) + counts.left.load(Relaxed);
    sidecar.flush().await;
    let (resident, descriptors) = usage(sidecar.id());
    let metrics = get(format!("{}/metrics", sidecar.control)).await;
    let (dropped, reasons) = dropped(&metrics);
    let ready = get(format!("{}/readyz", sidecar.control)).await;
    assert!(ready.contains("WAL good; sealing good"), "{ready}");
    assert!(sidecar.stop().success());

    let data = DataDir::new(&place);
    let mut known = HashSet::new();
    for row in rows(&data).unwrap() {
        assert!(known.insert(row.unwrap().request_id), "a request has two rows");
    }
    for file in verify(&data).unwrap() {
        assert!(file.is_sound(), "{file:?}");
    }
    println!(
        "{seconds} s: {answered} requests, {} of them left by their clients; {} rows, {dropped} dropped {reasons:?}; {} MiB \
         after a tenth of the time, {} MiB at the end",
        counts.left.load(Relaxed),
        known.len(),
        resident_warm >> 20,
        resident >> 20,
    );
    assert_eq!(known.len() as u64 + dropped, answered, "each has a row, or was counted");
    assert_eq!(dropped > 0, disk.is_some(), "{reasons:?}");
    assert!(resident < resident_warm + MOST_GROWTH, "memory grows");
    // The last clients' connections may still be closing.
    assert!(
        descriptors <= descriptors_before + 3 * CLIENTS,
        "{descriptors_before} descriptors became {descriptors}"
    );
}
