//! The whole sidecar killed amid traffic, again and again on the same data directory: what it had promised is there.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::http::{Act, CHAT, SSE_HEAD, Seen, chunk, json, post, read_chunk, read_message, upstream};
use common::sidecar::Sidecar;
use common::stalls::StallWatch;
use draftsmith::record::{Row, Status, rows, verify};
use draftsmith::store::DataDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore};

mod common {
    pub mod http;
    pub mod sidecar;
    pub mod stalls;
}

/// Unless RESTART_KILLS says how many.
const KILLS: usize = 24;
const CLIENTS: u64 = 4;
const FLUSH: Duration = Duration::from_millis(50);
/// Beyond the flush interval a row may take this long to the disk, and some of the stalls that were seen meanwhile: it goes
/// through several threads.
const WAY: Duration = Duration::from_millis(200);
const STALLS: u32 = 4;
/// Answers before most kills, also where the machine is slow.
const LEAST_ANSWERS: u32 = 40;
/// Nothing takes so long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// Small segments: the kill meets rotation and sealing too.
const SETTINGS: &str = "[record]\nflush_interval_ms = 50\nsegment_bytes = 20000\nseal_after_seconds = 1\n";

/// What a client asks for, and so what it gets.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Whole,
    TwoChoices,
    Stream,
    /// A stream that goes on until somebody dies.
    Endless,
}

impl Kind {
    fn of(number: u64) -> Kind {
        match number % 8 {
            0 => Kind::Endless,
            1 | 2 => Kind::TwoChoices,
            3..=5 => Kind::Stream,
            _ => Kind::Whole,
        }
    }

    fn request(self) -> &'static [u8] {
        match self {
            Kind::Whole => br#"{"model":"m","messages":[{"role":"user","content":"whole"}]}"#,
            Kind::TwoChoices => br#"{"model":"m","messages":[{"role":"user","content":"two"}],"n":2}"#,
            Kind::Stream => br#"{"model":"m","messages":[{"role":"user","content":"stream"}],"stream":true}"#,
            Kind::Endless => {
                br#"{"model":"m","messages":[{"role":"user","content":"endless"}],"stream":true}"#
            }
        }
    }

    fn choices(self) -> usize {
        if self == Kind::TwoChoices { 2 } else { 1 }
    }
}

fn answer(seen: &Seen) -> Vec<Act> {
    let event = |delta: &str, finish: &str| {
        chunk(
            format!(
                "data: {{\"choices\":[{{\"index\":0,\"delta\":{{{delta}}},\"finish_reason\":{finish}}}]}}\n\n"
            )
            .as_bytes(),
        )
    };
    let choice = |index: usize| {
        format!(
            "{{\"index\":{index},\"message\":{{\"role\":\"assistant\",\"content\":\"{}\"}},\"finish_reason\":\"stop\"}}",
            "word ".repeat(40)
        )
    };
    if seen.body == Kind::Whole.request() {
        return vec![Act::Write(json(&format!("{{\"choices\":[{}]}}", choice(0))))];
    }
    if seen.body == Kind::TwoChoices.request() {
        return vec![Act::Write(json(&format!("{{\"choices\":[{},{}]}}", choice(0), choice(1))))];
    }
    let mut acts = vec![Act::Write([SSE_HEAD, &event("\"content\":\"word\"", "null")].concat())];
    if seen.body == Kind::Endless.request() {
        acts.push(Act::UntilClosed(Arc::new(Notify::new())));
        return acts;
    }
    assert_eq!(seen.body, Kind::Stream.request());
    for _ in 0..5 {
        acts.push(Act::Pause(Duration::from_millis(2)));
        acts.push(Act::Write(event("\"content\":\" word\"", "null")));
    }
    let end = [event("", "\"stop\""), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n".to_vec()].concat();
    acts.push(Act::Write(end));
    acts
}

/// What a client saw of one request.
struct Asked {
    kind: Kind,
    /// A byte of the answer came, so the sidecar knew of the request.
    known_at: Option<Instant>,
    complete_at: Option<Instant>,
    killed: Option<Kill>,
}

#[derive(Clone, Copy)]
struct Kill {
    at: Instant,
    /// How long the machine kept a thread waiting before it.
    stall: Duration,
}

type Ledger = Arc<Mutex<HashMap<String, Asked>>>;

/// Asks one request after the other until the sidecar is gone.
async fn ask_until_the_end(
    address: String,
    numbers: Arc<AtomicU64>,
    ledger: Ledger,
    answered: Arc<Semaphore>,
) {
    let mut open = Vec::new();
    loop {
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let kind = Kind::of(number);
        let id = format!("r{number}");
        let Ok(mut stream) = TcpStream::connect(&address).await else { return };
        let asked = Asked { kind, known_at: None, complete_at: None, killed: None };
        ledger.lock().unwrap().insert(id.clone(), asked);
        let headers = format!("x-request-id: {id}\r\nx-draftsmith-conversation: {id}\r\n");
        if stream.write_all(&post(CHAT, &headers, kind.request())).await.is_err() {
            return;
        }
        let mut buffer = Vec::new();
        if kind == Kind::Endless {
            let head_and_more = read_head_and_chunk(&mut stream, &mut buffer).await;
            if head_and_more.is_none() {
                return;
            }
            ledger.lock().unwrap().get_mut(&id).unwrap().known_at = Some(Instant::now());
            // Held open: closed, it would end as cancelled.
            open.push(stream);
            continue;
        }
        let Some(whole) = read_message(&mut stream, &mut buffer).await else { return };
        assert_eq!(whole.status(), 200, "{whole:?}");
        ledger.lock().unwrap().get_mut(&id).unwrap().complete_at = Some(Instant::now());
        answered.add_permits(1);
    }
}

async fn read_head_and_chunk(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<()> {
    use tokio::io::AsyncReadExt;
    let end = loop {
        if let Some(position) = common::http::find(buffer, b"\r\n\r\n") {
            break position + 4;
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    buffer.drain(..end);
    read_chunk(stream, buffer).await?.map(|_| ())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sidecar_killed_amid_traffic_keeps_what_it_promised() {
    let directory = tempfile::tempdir().unwrap();
    let data = DataDir::new(directory.path().join("data"));
    let up = upstream(|_, seen| answer(seen)).await;
    let ledger = Ledger::default();
    let numbers = Arc::new(AtomicU64::new(0));
    let mut random = u64::from(std::process::id());
    let kills = std::env::var("RESTART_KILLS").map_or(KILLS, |text| text.parse().unwrap());
    for round in 0..kills {
        let sidecar = Sidecar::start(directory.path(), &up.address, SETTINGS);
        let stalls = StallWatch::start(directory.path());
        let answered = Arc::new(Semaphore::new(0));
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let address = sidecar.address.clone();
            let answers = answered.clone();
            clients.push(tokio::spawn(ask_until_the_end(address, numbers.clone(), ledger.clone(), answers)));
        }
        // A linear congruence is random enough for moments to kill at. Every fourth kill comes at once, while what the
        // one before left is being sealed; every other fourth leaves time for many segments.
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let longest = [40, 500, 500, 2500][round % 4];
        // The moment of the kill is what is random here: nothing is waited for.
        tokio::time::sleep(Duration::from_millis((random >> 33) % longest)).await;
        if round % 4 > 0 {
            let enough = tokio::time::timeout(PATIENCE, answered.acquire_many(LEAST_ANSWERS)).await;
            enough.expect("answers come").unwrap().forget();
        }
        let at = Instant::now();
        sidecar.kill();
        let kill = Kill { at, stall: stalls.stop() };
        for client in clients {
            client.await.unwrap();
        }
        for asked in ledger.lock().unwrap().values_mut() {
            asked.killed.get_or_insert(kill);
        }
        check_files(&data, round);
    }
    let sidecar = Sidecar::start(directory.path(), &up.address, SETTINGS);
    assert!(sidecar.stop().success());
    check_files(&data, kills);
    let left: Vec<_> =
        std::fs::read_dir(data.wal()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [".lock"], "nothing is left over, and no segment was found damaged");
    let asked = ledger.lock().unwrap();
    check_rows(kills, &asked, rows(&data).unwrap().map(|row| row.unwrap()).collect());
}

/// Whatever the moment of the kill, all that readers can see is whole.
fn check_files(data: &DataDir, round: usize) {
    for file in verify(data).unwrap() {
        assert_eq!(file.error, None, "round {round}: {}", file.path.display());
    }
    check_tree(&data.records(), round);
}

fn check_tree(directory: &Path, round: usize) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            check_tree(&path, round);
        } else {
            let is_parquet = path.extension().is_some_and(|extension| extension == "parquet");
            assert!(is_parquet, "round {round}: {} is litter in the tree", path.display());
        }
    }
}

fn check_rows(kills: usize, asked: &HashMap<String, Asked>, found: Vec<Row>) {
    let mut record_ids = HashSet::new();
    let mut of_request: HashMap<String, BTreeMap<u32, Status>> = HashMap::new();
    let total = found.len();
    for row in found {
        assert!(record_ids.insert(row.record_id.clone()), "{} is there twice", row.record_id);
        assert!(asked.contains_key(&row.request_id), "{} was never asked", row.request_id);
        let choices = of_request.entry(row.request_id.clone()).or_default();
        let second = choices.insert(row.choice_index, row.status);
        assert_eq!(second, None, "{} has two rows for choice {}", row.request_id, row.choice_index);
    }
    let (mut complete, mut promised, mut late, mut in_flight, mut restarted) = (0, 0, 0, 0, 0);
    let (mut longest_loss, mut longest_stall) = (Duration::ZERO, Duration::ZERO);
    let mut late_rounds = HashSet::new();
    for (id, request) in asked {
        let Kill { at: killed_at, stall } = request.killed.unwrap();
        let statuses: Vec<Status> =
            of_request.get(id).map(|choices| choices.values().copied().collect()).unwrap_or_default();
        let is_whole = statuses == vec![Status::Ok; request.kind.choices()];
        let is_restart = statuses == [Status::ProxyRestart];
        if let Some(complete_at) = request.complete_at {
            complete += 1;
            assert!(is_whole || is_restart || statuses.is_empty(), "{id} {:?}: {statuses:?}", request.kind);
            let age = killed_at.saturating_duration_since(complete_at);
            promised += usize::from(age > FLUSH + stall);
            if !is_whole {
                longest_loss = longest_loss.max(age);
            }
            longest_stall = longest_stall.max(stall);
            if !is_whole && age > FLUSH + stall {
                late += 1;
                late_rounds.insert(killed_at);
            }
            assert!(
                is_whole || age <= FLUSH + WAY + STALLS * stall,
                "{id} was whole {age:?} before the kill, the longest stall was {stall:?}: {statuses:?}"
            );
            continue;
        }
        in_flight += 1;
        restarted += usize::from(is_restart);
        // The sidecar may have seen the end of a request that its client did not.
        let may_be_whole = request.kind != Kind::Endless && is_whole;
        assert!(may_be_whole || is_restart || statuses.is_empty(), "{id} {:?}: {statuses:?}", request.kind);
        if let Some(known_at) = request.known_at {
            let age = killed_at.saturating_duration_since(known_at);
            assert!(
                is_restart || age <= FLUSH + WAY + STALLS * stall,
                "{id} was known {age:?} before the kill, the longest stall was {stall:?}: {statuses:?}"
            );
        }
    }
    println!(
        "{kills} kills, {} requests: {complete} complete at the client, {in_flight} in flight; {total} rows, of these \
         {restarted} proxy_restart. {promised} answers were complete longer than {FLUSH:?} and a stall before the kill; {late} \
         of them have no row; the longest loss was {longest_loss:?}, the longest stall {longest_stall:?}",
        asked.len()
    );
    assert!(promised > 500 && restarted > 20, "too little traffic to show anything");
    // One late row now and then is the machine's; one late kill after the other would be the recorder's.
    assert!(late_rounds.len() * 6 <= kills, "{} of {kills} kills lost older answers", late_rounds.len());
}
