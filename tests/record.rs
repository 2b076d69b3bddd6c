//! The recorder as its users meet it: what is handed over is read back, through full memory, failing disks, late token
//! ids, and a process killed at any moment.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

mod common {
    pub mod environment;
    pub mod python;
}

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use draftsmith::record::{
    DropReason, Health, Join, Message, Record, RecordError, Recorder, RecorderHandle, RecorderOptions, Row,
    SCHEMA_VERSION, SCHEMA_VERSION_KEY, Selection, Source, Split, Status, export, files, newest_rows,
    now_micros, rows, selected_requests, stats, token_frequencies, verify,
};
use draftsmith::store::{DataDir, Disk, Operation};
use proptest::prelude::*;

const CHILD: &str = "DRAFTSMITH_TEST_RECORD_CHILD";
const CHILD_MODE: &str = "DRAFTSMITH_TEST_RECORD_CHILD_MODE";
/// Full speed and small segments: the kill meets rotation and sealing. With calls to flush, or without.
const FLUSHING: &str = "flushing";
const FAST: &str = "fast";
/// A pace at which nothing but the flush interval makes rows durable.
const PACED: &str = "paced";

fn temporary() -> (tempfile::TempDir, DataDir) {
    let directory = tempfile::tempdir().unwrap();
    let data = DataDir::new(directory.path().join("data"));
    (directory, data)
}

fn options() -> RecorderOptions {
    RecorderOptions { flush_interval: Duration::from_millis(10), ..RecorderOptions::default() }
}

/// Starts on a directory that another recorder has just left. A child that another test spawns holds that one's lock too,
/// between its fork and its exec.
fn start_again(data: &DataDir) -> RecorderHandle {
    start_again_on(Disk::default(), data)
}

fn start_again_on(disk: Disk, data: &DataDir) -> RecorderHandle {
    let started = Instant::now();
    loop {
        match Recorder::start_on(disk.clone(), data, options()) {
            Err(RecordError::Locked { .. }) if started.elapsed() < Duration::from_secs(60) => {
                std::thread::yield_now();
            }
            outcome => return outcome.unwrap(),
        }
    }
}

fn ended(request_id: &str) -> Record {
    Record { status: Status::Ok, ..Record::new(request_id, "/v1/chat/completions", now_micros()) }
}

fn join(request_id: &str, prompt_token_ids: Vec<i32>, output_token_ids: Vec<i32>) -> Join {
    Join {
        request_id: request_id.into(),
        prompt_token_ids,
        output_token_ids,
        states_status: "stored".into(),
        ..Join::default()
    }
}

fn all_rows(data: &DataDir) -> Vec<Row> {
    rows(data).unwrap().map(|row| row.unwrap()).collect()
}

fn statuses(data: &DataDir) -> BTreeMap<String, Status> {
    all_rows(data).into_iter().map(|row| (row.request_id, row.status)).collect()
}

fn wal_segments(data: &DataDir) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(data.wal()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "wal") {
            found.push(path);
        }
    }
    found
}

#[test]
fn rows_are_read_back_and_nothing_but_parquet_is_in_the_tree() {
    let (_directory, data) = temporary();
    let recorder = Recorder::start(&data, options()).unwrap();
    let first = Record {
        output_token_ids: Some(vec![3, 3, 1]),
        completion_tokens: Some(3),
        draft_head: Some("digest".into()),
        drafts: Some(4),
        drafted_tokens: Some(8),
        accepted_tokens: Some(2),
        source: Source::Replay,
        ..ended("a")
    };
    let second = Record { split: Split::HeldOut, output_token_ids: Some(vec![2]), ..first.for_choice(1) };
    recorder.begin("a", "/v1/chat/completions", first.started_at);
    recorder.record(vec![first.clone(), second]);
    recorder.record(vec![]);
    recorder.record(vec![ended("without counts")]);
    recorder.shutdown().unwrap();

    let read = all_rows(&data);
    assert_eq!(read.len(), 3);
    assert_eq!(read[0].record_id, first.record_id);
    assert_eq!(read[0].output_token_ids, Some(vec![3, 3, 1]));
    assert_eq!(read[0].source, Source::Replay);
    assert_eq!((read[1].choice_index, read[1].split), (1, Split::HeldOut));

    assert_eq!(token_frequencies(&data, 5).unwrap(), [0, 1, 0, 2, 0]);
    let error = token_frequencies(&data, 3).unwrap_err().to_string();
    assert!(error.contains("token id 3") && error.contains("vocabulary of 3"), "{error}");

    let sums = stats(&data).unwrap();
    assert_eq!(sums.days.len(), 1);
    assert_eq!((sums.days[0].rows, sums.days[0].rows_with_ids), (3, 2));
    assert_eq!(sums.acceptance.len(), 1, "a row without counts is in no group");
    let drafted = &sums.acceptance[0];
    assert_eq!((drafted.draft_head.as_deref(), drafted.rows), (Some("digest"), 2));
    assert_eq!((drafted.drafts, drafted.drafted_tokens, drafted.accepted_tokens), (8, 16, 4));
    assert_eq!(drafted.acceptance_length(), Some(1.5));

    let found = files(&data).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(count_files(&data.records()), 1);
    assert!(found[0].to_str().unwrap().ends_with("-draftsmith.parquet"));
    assert!(wal_segments(&data).is_empty());
    let reader =
        parquet::file::reader::SerializedFileReader::new(fs::File::open(&found[0]).unwrap()).unwrap();
    let metadata = parquet::file::reader::FileReader::metadata(&reader).file_metadata();
    let keys = metadata.key_value_metadata().unwrap();
    let version = keys.iter().find(|pair| pair.key == SCHEMA_VERSION_KEY).unwrap();
    assert_eq!(version.value.as_deref(), Some(SCHEMA_VERSION));
    assert!(metadata.created_by().unwrap().starts_with("draftsmith version "));
}

fn count_files(directory: &Path) -> usize {
    let mut count = 0;
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        count += if path.is_dir() { count_files(&path) } else { 1 };
    }
    count
}

#[test]
fn full_memory_drops_and_counts_and_leaves_no_false_restart() {
    let (_directory, data) = temporary();
    let limit = 100_000;
    let slow =
        RecorderOptions { memory_bytes: limit, flush_interval: Duration::from_secs(3600), ..options() };
    let recorder = Recorder::start(&data, slow).unwrap();
    for index in 0..100 {
        let request_id = format!("r{index}");
        recorder.begin(&request_id, "/", now_micros());
        recorder.record(vec![Record { content: Some("x".repeat(10_000)), ..ended(&request_id) }]);
    }
    let before = recorder.stats();
    assert!(before.held_bytes <= limit as u64);
    recorder.shutdown().unwrap();
    let after = recorder.stats();
    assert!((5..10).contains(&after.rows), "{after:?}");
    assert_eq!(after.rows + after.dropped_rows, 100);
    assert_eq!(after.held_bytes, 0);
    let read = statuses(&data);
    assert_eq!(read.len() as u64, after.rows);
    assert!(read.values().all(|status| *status == Status::Ok));

    recorder.record(vec![ended("late")]);
    assert_eq!(recorder.stats().dropped_rows, after.dropped_rows + 1);
    assert!(matches!(recorder.flush(), Err(RecordError::Stopped)));
}

#[test]
fn ids_meet_their_rows_before_and_after_the_segment_is_closed() {
    let (_directory, data) = temporary();
    let waiting = RecorderOptions { expect_join: true, join_timeout: Duration::from_secs(3600), ..options() };
    let recorder = Recorder::start(&data, waiting).unwrap();
    recorder.join(join("early", vec![1], vec![2]));
    for request_id in ["early", "in time", "closed", "unknown"] {
        recorder.record(vec![ended(request_id)]);
    }
    // None of these has ids to wait for.
    recorder.record(vec![Record { status: Status::ClientError, ..ended("refused") }]);
    recorder.record(vec![Record { states_status: Some("off".into()), ..ended("no states") }]);
    recorder.join(Join { drafts: Some(2), ..join("in time", vec![3], vec![4, 5]) });
    recorder.join(join("unknown", vec![], vec![]));
    recorder.flush().unwrap();

    let sealing = recorder.clone();
    let (done, sealed) = mpsc::channel();
    std::thread::spawn(move || done.send(sealing.seal()));
    // The segment is closed as soon as a row handed over later is durable in another one.
    let started = Instant::now();
    while wal_segments(&data).len() < 2 {
        assert!(started.elapsed() < Duration::from_secs(60));
        recorder.record(vec![Record { states_status: Some("off".into()), ..ended("later") }]);
        recorder.flush().unwrap();
    }
    assert!(sealed.try_recv().is_err());
    recorder.join(join("closed", vec![6], vec![7]));
    sealed.recv().unwrap().unwrap();

    let mut ids: HashMap<String, Option<Vec<i32>>> = HashMap::new();
    for row in all_rows(&data) {
        assert_eq!(row.drafts, (row.request_id == "in time").then_some(2));
        ids.insert(row.request_id, row.output_token_ids);
    }
    assert_eq!(ids["early"], Some(vec![2]));
    assert_eq!(ids["in time"], Some(vec![4, 5]));
    assert_eq!(ids["closed"], Some(vec![7]));
    assert_eq!((&ids["refused"], &ids["unknown"]), (&None, &None));
    let counts = recorder.stats();
    assert_eq!((counts.joined, counts.join_timeouts), (4, 0));
    recorder.shutdown().unwrap();
}

#[test]
fn row_whose_ids_never_come_is_sealed_after_the_timeout() {
    let (_directory, data) = temporary();
    let impatient =
        RecorderOptions { expect_join: true, join_timeout: Duration::from_millis(100), ..options() };
    let recorder = Recorder::start(&data, impatient).unwrap();
    recorder.join(join("nobody", vec![1], vec![1]));
    recorder.record(vec![ended("a")]);
    let started = Instant::now();
    recorder.seal().unwrap();
    assert!(started.elapsed() >= Duration::from_millis(100));
    recorder.shutdown().unwrap();
    let counts = recorder.stats();
    assert_eq!((counts.join_timeouts, counts.unmatched_joins, counts.sealed_rows), (1, 1, 1));
    assert_eq!(counts.held_bytes, 0);
    assert_eq!(all_rows(&data)[0].output_token_ids, None);
}

#[test]
fn segments_are_sealed_by_size_and_by_age_without_being_asked() {
    for sealing in [
        RecorderOptions { segment_bytes: 1, ..options() },
        RecorderOptions { segment_age: Duration::from_millis(50), ..options() },
    ] {
        let (_directory, data) = temporary();
        let recorder = Recorder::start(&data, sealing).unwrap();
        recorder.begin("running", "/", now_micros());
        recorder.record(vec![ended("a")]);
        let started = Instant::now();
        while recorder.stats().sealed_rows == 0 {
            assert!(started.elapsed() < Duration::from_secs(60), "{:?}", recorder.stats());
            std::thread::yield_now();
        }
        // The running request was carried over, and ends after all.
        recorder.record(vec![ended("running")]);
        recorder.shutdown().unwrap();
        let expected = BTreeMap::from([("a".to_owned(), Status::Ok), ("running".to_owned(), Status::Ok)]);
        assert_eq!(statuses(&data), expected);
        assert_eq!(all_rows(&data).len(), 2);
        assert_eq!(recorder.stats().restarted_rows, 0);
    }
}

#[test]
fn dropped_recorder_leaves_durable_rows_that_the_next_start_seals() {
    let (_directory, data) = temporary();
    let recorder = Recorder::start(&data, options()).unwrap();
    assert!(matches!(Recorder::start(&data, options()), Err(RecordError::Locked { .. })));
    for request_id in ["done", "sampled out", "cut short"] {
        recorder.begin(request_id, "/", now_micros());
    }
    recorder.record(vec![ended("done")]);
    recorder.abandon("sampled out");
    drop(recorder);
    assert!(files(&data).unwrap().is_empty());
    assert_eq!(wal_segments(&data).len(), 1);

    let recorder = start_again(&data);
    recorder.shutdown().unwrap();
    let expected =
        BTreeMap::from([("done".to_owned(), Status::Ok), ("cut short".to_owned(), Status::ProxyRestart)]);
    assert_eq!(statuses(&data), expected);
    assert_eq!(recorder.stats().restarted_rows, 1);
}

#[test]
fn failing_disk_costs_nothing_once_it_is_back() {
    let (_directory, data) = temporary();
    let recorder = Recorder::start(&data, options()).unwrap();
    recorder.seal().unwrap();
    let aside = data.root().join("aside");
    fs::rename(data.wal(), &aside).unwrap();
    recorder.record(vec![ended("a")]);
    assert!(matches!(recorder.flush(), Err(RecordError::Unwritten(_))));
    assert!(recorder.stats().held_bytes > 0);
    recorder.record(vec![ended("b")]);
    assert!(recorder.seal().is_err());
    assert!(recorder.stats().disk_errors >= 2);
    fs::rename(&aside, data.wal()).unwrap();
    recorder.flush().unwrap();
    recorder.record(vec![ended("c")]);
    recorder.shutdown().unwrap();
    assert_eq!(statuses(&data).len(), 3);
    assert_eq!(all_rows(&data).len(), 3);
    assert_eq!(recorder.stats().held_bytes, 0);
}

#[test]
fn unreadable_file_is_named_and_the_others_are_read() {
    let (_directory, data) = temporary();
    let recorder = Recorder::start(&data, options()).unwrap();
    recorder.record(vec![ended("a")]);
    recorder.shutdown().unwrap();
    let bad = data.records().join("dt=2000-01-01/hour=00/bad.parquet");
    fs::create_dir_all(bad.parent().unwrap()).unwrap();
    fs::write(&bad, "not Parquet").unwrap();
    let good = files(&data).unwrap().pop().unwrap();
    // Whole, but not where its rows belong.
    let misplaced = data.records().join("dt=2000-01-01/hour=01/misplaced.parquet");
    fs::create_dir_all(misplaced.parent().unwrap()).unwrap();
    fs::copy(&good, &misplaced).unwrap();
    let checks = verify(&data).unwrap();
    let errors: Vec<Option<&str>> = checks.iter().map(|check| check.error.as_deref()).collect();
    assert!(errors[0].unwrap().contains("bad.parquet"), "{errors:?}");
    assert!(errors[1].unwrap().contains("misplaced.parquet"), "{errors:?}");
    assert_eq!(errors[2], None);
    assert_eq!((checks.len(), checks[2].rows, &checks[2].path), (3, 1, &good));
    assert!(checks[2].is_sound() && !checks[1].is_sound());
    fs::remove_file(&misplaced).unwrap();
    let copy = good.with_file_name("zz.parquet");
    fs::copy(&good, &copy).unwrap();
    let checks = verify(&data).unwrap();
    assert_eq!((checks[1].duplicates, checks[2].duplicates, checks[2].is_sound()), (0, 1, false));
    fs::remove_file(&copy).unwrap();

    let read: Vec<Result<Row, RecordError>> = rows(&data).unwrap().collect();
    assert_eq!(read.len(), 2);
    assert!(read[0].as_ref().unwrap_err().to_string().contains("bad.parquet"));
    assert_eq!(read[1].as_ref().unwrap().request_id, "a");
}

const FLUSH: Duration = Duration::from_millis(50);
/// How long one write and sync may take on a machine whose disk is busy with other things.
const STALL: Duration = Duration::from_secs(2);

fn child_options(mode: &str) -> RecorderOptions {
    let segment_bytes = if mode == PACED { 64 << 20 } else { 200_000 };
    RecorderOptions { flush_interval: FLUSH, segment_bytes, ..RecorderOptions::default() }
}

/// The process that is killed: the test binary again. Appends to its notes what it handed over, and when. On its own it
/// is no test and does nothing.
#[test]
fn child_records_until_killed() {
    let Ok(root) = std::env::var(CHILD) else { return };
    let mode = std::env::var(CHILD_MODE).unwrap();
    let data = DataDir::new(&root);
    let recorder = Recorder::start(&data, child_options(&mode)).unwrap();
    let (_never_sent, silence) = mpsc::channel::<()>();
    let mut notes = OpenOptions::new().create(true).append(true).open(notes_path(&root)).unwrap();
    writeln!(notes, "start").unwrap();
    for index in 0u64.. {
        let request_id = format!("{}-{index}", std::process::id());
        let begun = Record::new(&request_id, "/v1/chat/completions", now_micros());
        recorder.begin(&begun.request_id, &begun.endpoint, begun.started_at);
        // Every seventh request never ends.
        if index % 7 != 0 {
            let message =
                Message { role: "user".into(), content: Some("hello ".repeat(50)), ..Message::default() };
            let first = Record { messages: Some(vec![message]), status: Status::Ok, ..begun.for_choice(0) };
            let second = first.for_choice(1);
            let line = format!("row {} {} {}\n", now_micros(), first.record_id, second.record_id);
            recorder.record(vec![first, second]);
            notes.write_all(line.as_bytes()).unwrap();
        }
        if mode == FLUSHING && index % 50 == 49 {
            recorder.flush().unwrap();
            notes.write_all(b"flushed\n").unwrap();
        }
        if mode == PACED {
            silence.recv_timeout(Duration::from_millis(1)).unwrap_err();
        }
        // Faster than the disk would only fill the memory bound: then rows are dropped, which is not what is tested.
        while recorder.stats().held_bytes > 1_000_000 {
            std::thread::yield_now();
        }
    }
}

fn notes_path(root: &str) -> PathBuf {
    Path::new(root).with_extension("notes")
}

struct Handed {
    record_ids: [String; 2],
    /// A flush returned after it was handed over.
    flushed: bool,
    at: i64,
}

fn read_notes(root: &str) -> Vec<Handed> {
    let mut handed: Vec<Handed> = Vec::new();
    let notes = fs::read_to_string(notes_path(root)).unwrap();
    for line in notes.lines() {
        if line == "flushed" {
            for row in &mut handed {
                row.flushed = true;
            }
        }
        let words: Vec<&str> = line.split(' ').collect();
        if let ["row", at, first, second] = words[..] {
            // The kill may have cut the last line.
            if second.len() == 36 {
                let record_ids = [first.to_owned(), second.to_owned()];
                handed.push(Handed { record_ids, flushed: false, at: at.parse().unwrap() });
            }
        }
    }
    handed
}

#[test]
fn killed_process_loses_only_what_it_had_not_flushed() {
    let (_directory, data) = temporary();
    fs::create_dir_all(data.root()).unwrap();
    let root = data.root().to_str().unwrap().to_owned();
    // Each with why it must.
    let mut must_exist: HashMap<String, String> = HashMap::new();
    let mut prompt_rounds: Vec<HashSet<String>> = Vec::new();
    let mut found = HashSet::new();
    let mut random = std::process::id().wrapping_mul(2_654_435_761);
    for round in 0..20 {
        // A linear congruence is random enough for moments to kill at.
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let delay = Duration::from_millis(u64::from(200 + (random >> 16) % 500));
        let mode = [FLUSHING, FAST, PACED][round % 3];
        let longer = if mode == PACED { STALL } else { Duration::ZERO };
        let killed_at = run_child_and_kill(&root, delay + longer, mode);
        let mut prompt = HashSet::new();
        for row in read_notes(&root) {
            let age = Duration::from_micros(u64::try_from(killed_at - row.at).unwrap_or(0));
            if mode == PACED && age > FLUSH + Duration::from_millis(250) {
                prompt.extend(row.record_ids.clone());
            }
            if row.flushed || age > FLUSH + STALL {
                let why = format!("round {round}, {mode}, flushed {}, {age:?} before the kill", row.flushed);
                must_exist.extend(row.record_ids.map(|record_id| (record_id, why.clone())));
            }
        }
        if mode == PACED {
            prompt_rounds.push(prompt);
        }
        fs::remove_file(notes_path(&root)).unwrap();
        // Every other time the next child finds the left-overs and may be killed while it seals them.
        if round % 2 == 1 {
            let recorder = Recorder::start(&data, options()).unwrap();
            recorder.shutdown().unwrap();
            assert!(wal_segments(&data).is_empty());
            found = check(&data, &must_exist, round);
        }
    }
    // A disk that stalls now and then is not the recorder's fault; one late round after the other would be.
    let kept = prompt_rounds.iter().filter(|record_ids| record_ids.is_subset(&found)).count();
    assert!(
        kept * 2 > prompt_rounds.len(),
        "only {kept} of {} rounds kept the flush interval",
        prompt_rounds.len()
    );
    assert!(must_exist.len() > 1000, "the children recorded only {} rows", must_exist.len());
}

/// Gives the time just before the kill.
fn run_child_and_kill(root: &str, delay: Duration, mode: &str) -> i64 {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_records_until_killed"]).env(CHILD, root).env(CHILD_MODE, mode);
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let waited = Instant::now();
    while fs::metadata(notes_path(root)).is_err() {
        assert!(waited.elapsed() < Duration::from_secs(60), "the child does not start");
        assert!(child.try_wait().unwrap().is_none(), "the child failed");
        std::thread::yield_now();
    }
    // The moment of the kill is what is random here: nothing is waited for.
    let (_never_sent, silence) = mpsc::channel::<()>();
    silence.recv_timeout(delay).unwrap_err();
    assert!(child.try_wait().unwrap().is_none(), "the child failed");
    let killed_at = now_micros();
    child.kill().unwrap();
    child.wait().unwrap();
    killed_at
}

/// Gives the ids of all rows.
fn check(data: &DataDir, must_exist: &HashMap<String, String>, round: usize) -> HashSet<String> {
    let mut record_ids = HashSet::new();
    let mut choices = HashSet::new();
    let mut restarted = 0;
    let mut statuses_of: HashMap<String, HashSet<Status>> = HashMap::new();
    for row in rows(data).unwrap() {
        let row = row.unwrap();
        assert!(record_ids.insert(row.record_id.clone()), "round {round}: {} is there twice", row.record_id);
        let choice = (row.request_id.clone(), row.choice_index);
        assert!(choices.insert(choice), "round {round}: {} has two rows for a choice", row.request_id);
        restarted += usize::from(row.status == Status::ProxyRestart);
        statuses_of.entry(row.request_id).or_default().insert(row.status);
    }
    let lost: Vec<_> = must_exist.iter().filter(|(record_id, _)| !record_ids.contains(*record_id)).collect();
    assert!(
        lost.is_empty(),
        "round {round}: lost {} of {} rows: {:?}",
        lost.len(),
        must_exist.len(),
        lost[0]
    );
    assert!(restarted > 0, "round {round}: no unended request was found");
    assert!(
        statuses_of.values().all(|of_request| of_request.len() == 1),
        "round {round}: a request ended twice"
    );
    assert_eq!(count_files(&data.records()), files(data).unwrap().len(), "round {round}: litter in the tree");
    record_ids
}

#[test]
#[ignore = "real Python readers: seconds, once installed"]
fn python_readers_open_the_tree_as_one_table() {
    let (_directory, data) = temporary();
    let recorder = Recorder::start(&data, options()).unwrap();
    let day = 86_400_000_000;
    let start = 1_764_437_000_000_000;
    for index in 0..100i64 {
        let message = Message { role: "user".into(), content: Some("hello".into()), ..Message::default() };
        let row = Record {
            messages: Some(vec![message]),
            started_at: start + (index % 2) * day,
            status: if index % 10 == 0 { Status::Length } else { Status::Ok },
            draft_head: Some(if index % 2 == 0 { "first" } else { "second" }.into()),
            drafts: (index % 4 != 0).then_some(4),
            drafted_tokens: (index % 4 != 0).then_some(10),
            accepted_tokens: (index % 4 != 0).then_some(3 + index % 2),
            prompt_token_ids: Some(vec![1, 2]),
            output_token_ids: Some(vec![3]),
            raw_request: Some(vec![0xff]),
            ..ended(&format!("r{index}"))
        };
        recorder.record(vec![row]);
    }
    // A second file in each hour, with every optional column empty: the types must stay.
    recorder.seal().unwrap();
    for index in 0..2 {
        recorder.record(vec![Record { started_at: start + index * day, ..ended(&format!("empty{index}")) }]);
    }
    recorder.shutdown().unwrap();
    assert_eq!(files(&data).unwrap().len(), 4);

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/read_records.py");
    let output = common::python::python_with("readers").arg(script).arg(data.records()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let result: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
    // Odd rows are on the second day, all known, accepting 4 in 4 drafts; the even ones that are known accept 3.
    let expected = serde_json::json!([["2025-11-29", "first", 1.75, 25], ["2025-11-30", "second", 2.0, 50]]);
    assert_eq!(result["acceptance"], expected);
    assert_eq!(result["rates"], serde_json::json!([["2025-11-29", 0.3], ["2025-11-30", 0.4]]));
    assert_eq!(result["rows_by_status"], serde_json::json!([["length", 10], ["ok", 92]]));
}

/// The handle goes to every connection's task.
#[test]
fn handle_can_be_shared_by_threads() {
    fn shared<T: Clone + Send + Sync + 'static>() {}
    shared::<RecorderHandle>();
    let (_directory, data) = temporary();
    let recorder = Recorder::start(&data, options()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let recorder = recorder.clone();
            scope.spawn(move || {
                for index in 0..250 {
                    recorder.record(vec![ended(&format!("{thread}-{index}"))]);
                }
            });
        }
    });
    recorder.shutdown().unwrap();
    assert_eq!(statuses(&data).len(), 1000);
    assert_eq!(all_rows(&data).len(), 1000);
}

// ---- Faults of the disk ----

/// A disk with a switch: what the closure says is done to each operation while it is on.
struct Switch {
    on: AtomicBool,
    /// A stalled operation waits here.
    turned_off: Condvar,
    lock: Mutex<()>,
}

impl Switch {
    fn new() -> Arc<Switch> {
        Arc::new(Switch { on: AtomicBool::new(false), turned_off: Condvar::new(), lock: Mutex::new(()) })
    }

    fn is_on(&self) -> bool {
        self.on.load(Ordering::SeqCst)
    }

    fn turn(&self, on: bool) {
        let _held = self.lock.lock().unwrap();
        self.on.store(on, Ordering::SeqCst);
        self.turned_off.notify_all();
    }

    fn wait_until_off(&self) {
        let mut held = self.lock.lock().unwrap();
        while self.is_on() {
            held = self.turned_off.wait(held).unwrap();
        }
    }
}

/// A test that fails must not leave the recorder's thread stalled, which the end of the test waits for.
struct TurnOff<'a>(&'a Switch);

impl Drop for TurnOff<'_> {
    fn drop(&mut self) {
        self.0.turn(false);
    }
}

/// Comes back when it is so.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let (_never_sent, silence) = mpsc::channel::<()>();
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "not in a minute: {what}");
        silence.recv_timeout(Duration::from_millis(5)).unwrap_err();
    }
}

fn small_memory() -> RecorderOptions {
    RecorderOptions { memory_bytes: 100_000, ..options() }
}

fn large(request_id: &str) -> Record {
    Record { content: Some("x".repeat(10_000)), ..ended(request_id) }
}

/// Records until rows are dropped, heals the disk, and sees that what was taken is there and recording goes on.
fn drops_and_recovers(
    disk: Disk,
    switch: &Switch,
    reason: DropReason,
    is_seen: impl Fn(&Health, &Health) -> bool,
) {
    let (_directory, data) = temporary();
    let recorder = Recorder::start_on(disk, &data, small_memory()).unwrap();
    recorder.record(vec![ended("before")]);
    recorder.seal().unwrap();
    let _turned_off_first = TurnOff(switch);
    switch.turn(true);
    recorder.begin("running", "/", now_micros());
    recorder.record(vec![large("first")]);
    wait_until("the state is told", || {
        let (wal, sealing) = recorder.health();
        is_seen(&wal, &sealing)
    });
    // Nobody waits: as long as the switch is on, whoever waited for this disk would wait for ever.
    for index in 0..1000 {
        let request_id = format!("r{index}");
        recorder.begin(&request_id, "/", now_micros());
        recorder.record(vec![large(&request_id)]);
    }
    let dropped = recorder.stats();
    assert!(dropped.dropped_rows_by_reason[reason.as_str()] > 900, "{dropped:?}");
    assert_eq!(dropped.dropped_rows_by_reason.len(), 1, "{dropped:?}");
    assert!(dropped.held_bytes <= 100_000, "{dropped:?}");

    switch.turn(false);
    wait_until("memory is free again", || recorder.stats().held_bytes == 0);
    wait_until("the state is good again", || recorder.health() == (Health::Good, Health::Good));
    recorder.record(vec![ended("after")]);
    recorder.record(vec![ended("running")]);
    recorder.shutdown().unwrap();
    let counts = recorder.stats();
    let read = statuses(&data);
    assert_eq!(read.len() as u64, counts.rows);
    assert_eq!(all_rows(&data).len() as u64, counts.rows, "none is there twice");
    assert_eq!(counts.rows + counts.dropped_rows, 1004);
    for request_id in ["before", "running", "first", "after"] {
        assert_eq!(read[request_id], Status::Ok, "{request_id}");
    }
    assert!(read.values().all(|status| *status == Status::Ok), "no false restart");
    assert!(verify(&data).unwrap().iter().all(|file| file.is_sound()));
}

fn fails(switch: &Arc<Switch>, operations: &'static [Operation], kind: io::ErrorKind) -> Disk {
    let watched = Arc::clone(switch);
    Disk::with_faults(move |operation, _| {
        if watched.is_on() && operations.contains(&operation) { Err(kind.into()) } else { Ok(()) }
    })
}

#[test]
fn full_disk_drops_counts_and_recovers_by_itself() {
    let switch = Switch::new();
    let disk = fails(&switch, &[Operation::Write, Operation::Sync], io::ErrorKind::StorageFull);
    drops_and_recovers(
        disk,
        &switch,
        DropReason::DiskFailing,
        |wal, _| matches!(wal, Health::Failing { error, .. } if error.contains("write")),
    );
}

#[test]
fn lost_permission_drops_counts_and_recovers_by_itself() {
    let switch = Switch::new();
    let disk = fails(
        &switch,
        &[Operation::Create, Operation::Rename, Operation::Delete, Operation::MakeDirectory],
        io::ErrorKind::PermissionDenied,
    );
    drops_and_recovers(
        disk,
        &switch,
        DropReason::DiskFailing,
        |wal, _| matches!(wal, Health::Failing { error, .. } if error.contains("create")),
    );
}

#[test]
fn stalled_disk_drops_counts_and_recovers_by_itself() {
    let switch = Switch::new();
    let watched = Arc::clone(&switch);
    let disk = Disk::with_faults(move |operation, _| {
        if operation == Operation::Sync {
            watched.wait_until_off();
        }
        Ok(())
    });
    drops_and_recovers(disk, &switch, DropReason::DiskStalled, |wal, _| matches!(wal, Health::Stalled(_)));
}

#[test]
fn parquet_half_written_is_tried_again_and_never_seen() {
    let (_directory, data) = temporary();
    let switch = Switch::new();
    let watched = Arc::clone(&switch);
    let disk = Disk::with_faults(move |operation, path| {
        let of_parquet = path.extension().is_some_and(|extension| extension == "tmp");
        let fails = watched.is_on() && of_parquet && operation == Operation::Write;
        if fails { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    });
    let recorder = Recorder::start_on(disk, &data, options()).unwrap();
    switch.turn(true);
    recorder.record(vec![ended("a")]);
    assert!(matches!(recorder.seal(), Err(RecordError::Unsealed(1))));
    let (wal, sealing) = recorder.health();
    assert_eq!(wal, Health::Good);
    assert!(matches!(sealing, Health::Failing { .. }), "{sealing:?}");
    assert_eq!(files(&data).unwrap(), Vec::<PathBuf>::new());
    recorder.record(vec![ended("b")]);
    switch.turn(false);
    recorder.seal().unwrap();
    assert_eq!(recorder.health(), (Health::Good, Health::Good));
    recorder.shutdown().unwrap();
    assert_eq!(statuses(&data).len(), 2);
    assert_eq!(all_rows(&data).len(), 2);
}

/// What a script handed over and was promised.
#[derive(Default)]
struct Script {
    /// A flush or seal that came after them returned well.
    promised: HashSet<String>,
    handed: Vec<String>,
    next: usize,
}

impl Script {
    fn run(&mut self, recorder: &RecorderHandle, rounds: usize) {
        for _ in 0..rounds {
            let index = self.next;
            self.next += 1;
            let request_id = format!("r{index}");
            recorder.begin(&request_id, "/", now_micros());
            if !index.is_multiple_of(3) {
                let first = ended(&request_id);
                self.handed.push(request_id);
                recorder.record(vec![first.for_choice(0), first.for_choice(1)]);
            }
            // The one before it is still running while a segment is left.
            if index >= 4 && index.is_multiple_of(4) && (index - 1).is_multiple_of(3) {
                self.handed.push(format!("r{}", index - 1));
                recorder.record(vec![ended(&format!("r{}", index - 1))]);
            }
            let outcome = if index % 5 == 4 { recorder.seal() } else { recorder.flush() };
            if outcome.is_ok() {
                self.promised.extend(self.handed.iter().cloned());
            }
        }
    }

    /// Gives how many rows there are.
    fn check(&self, data: &DataDir, what: &str) -> usize {
        for file in verify(data).unwrap() {
            assert!(file.is_sound(), "{what}: {file:?}");
        }
        let mut choices = HashSet::new();
        let mut of_request: HashMap<String, Vec<Status>> = HashMap::new();
        for row in all_rows(data) {
            assert!(choices.insert((row.request_id.clone(), row.choice_index)), "{what}: {row:?} twice");
            of_request.entry(row.request_id).or_default().push(row.status);
        }
        for (request_id, found) in &of_request {
            let whole = found.iter().all(|status| *status == Status::Ok);
            let restarted = found.len() == 1 && found[0] == Status::ProxyRestart;
            assert!(whole || restarted, "{what}: {request_id} {found:?}");
        }
        for request_id in &self.promised {
            let found = of_request.get(request_id).unwrap_or_else(|| panic!("{what}: {request_id} is lost"));
            assert!(found.iter().all(|status| *status == Status::Ok), "{what}: {request_id} {found:?}");
        }
        choices.len()
    }
}

fn quick() -> RecorderOptions {
    RecorderOptions { flush_interval: Duration::ZERO, segment_bytes: 4_000, ..RecorderOptions::default() }
}

/// The process dies at each operation on the disk in turn: nothing that it did before is undone, nothing comes after.
#[test]
fn death_at_any_operation_loses_nothing_promised_and_doubles_nothing() {
    let mut deaths = 0;
    for alive_for in 0.. {
        let (_directory, data) = temporary();
        let left = AtomicUsize::new(alive_for);
        let died = Arc::new(AtomicBool::new(false));
        let noted = Arc::clone(&died);
        let disk = Disk::with_faults(move |_, _| {
            if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1)).is_ok() {
                return Ok(());
            }
            noted.store(true, Ordering::SeqCst);
            Err(io::Error::other("the process is dead"))
        });
        let mut script = Script::default();
        let recorder = Recorder::start_on(disk, &data, quick()).unwrap();
        script.run(&recorder, 12);
        drop(recorder);
        let recorder = start_again(&data);
        recorder.shutdown().unwrap();
        assert!(wal_segments(&data).is_empty());
        script.check(&data, &format!("dead after {alive_for} operations"));
        if !died.load(Ordering::SeqCst) {
            break;
        }
        deaths += 1;
    }
    assert!(deaths > 50, "only {deaths} operations");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 32,
        // Threads are at work: a smaller case says no more, and a seed need not fail twice.
        max_shrink_iters: 0,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// A disk on which operations fail at random, then heals: everything that was taken is there, once.
    #[test]
    fn failures_at_random_lose_and_double_nothing(seed in any::<u64>(), of_ten in 1u64..9) {
        let (_directory, data) = temporary();
        let switch = Switch::new();
        switch.turn(true);
        let watched = Arc::clone(&switch);
        let state = AtomicU64::new(seed);
        let disk = Disk::with_faults(move |_, _| {
            let next = |value: u64| Some(value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
            let drawn = state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).unwrap();
            let fails = watched.is_on() && (drawn >> 33) % 10 < of_ten;
            if fails { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        });
        let mut script = Script::default();
        let recorder = Recorder::start_on(disk, &data, quick()).unwrap();
        script.run(&recorder, 20);
        switch.turn(false);
        wait_until("all is sealed", || recorder.seal().is_ok());
        script.promised.extend(script.handed.iter().cloned());
        recorder.shutdown().unwrap();
        let counts = recorder.stats();
        prop_assert_eq!(counts.dropped_rows, 0);
        // The last handle holds the lock.
        drop(recorder);
        // Those that were running at the end are found begun by the next start, or were sealed with the stop.
        let next = start_again(&data);
        next.shutdown().unwrap();
        let found = script.check(&data, &format!("seed {seed}, {of_ten} of ten"));
        let running = (0..20).filter(|index| !script.handed.contains(&format!("r{index}"))).count();
        prop_assert_eq!(found as u64, counts.rows + running as u64);
    }
}

// ---- Merging, forgetting, exporting ----

/// Rows of a past hour, one file each, and one of the present hour.
fn past_rows(data: &DataDir, count: usize) -> Vec<String> {
    let recorder = Recorder::start(data, options()).unwrap();
    let mut record_ids = Vec::new();
    for index in 0..count {
        let message =
            Message { role: "user".into(), content: Some(format!("q{index}")), ..Message::default() };
        let row = Record {
            started_at: 1_764_437_000_000_000,
            tenant_hash: Some(if index % 2 == 0 { "even" } else { "odd" }.into()),
            messages: Some(vec![message]),
            content: Some(format!("a{index}")),
            ..ended(&format!("r{index}"))
        };
        record_ids.push(row.record_id.clone());
        recorder.record(vec![row]);
        recorder.seal().unwrap();
    }
    recorder.record(vec![ended("now")]);
    recorder.shutdown().unwrap();
    record_ids.sort();
    record_ids
}

fn past_ids(rows: impl Iterator<Item = Row>) -> Vec<String> {
    let mut found: Vec<String> =
        rows.filter(|row| row.request_id != "now").map(|row| row.record_id).collect();
    found.sort();
    found
}

#[test]
fn small_files_of_past_hours_become_one_and_readers_lose_nothing() {
    let (_directory, data) = temporary();
    let record_ids = past_rows(&data, 7);
    assert_eq!(files(&data).unwrap().len(), 8);
    // These began to read before; one has read a row of the first file, one only has the list.
    let mut amid = rows(&data).unwrap();
    let first = amid.next().unwrap().unwrap();
    let listed = rows(&data).unwrap();
    let backwards = newest_rows(&data).unwrap();

    let recorder = start_again(&data);
    let done = recorder.compact().unwrap();
    assert_eq!((done.hours, done.files_before, done.files_after), (1, 7, 1));
    assert_eq!(recorder.compact().unwrap().hours, 0, "there is nothing left to merge");
    assert_eq!(files(&data).unwrap().len(), 2);
    assert_eq!(past_ids(all_rows(&data).into_iter()), record_ids);
    assert_eq!(past_ids([first].into_iter().chain(amid.map(|row| row.unwrap()))), record_ids);
    assert_eq!(past_ids(listed.map(|row| row.unwrap())), record_ids);
    assert_eq!(past_ids(backwards.map(|row| row.unwrap())), record_ids);
    assert!(verify(&data).unwrap().iter().all(|file| file.is_sound()));
    assert_eq!(count_files(&data.records()), 2);
    recorder.shutdown().unwrap();
    let left: Vec<_> = fs::read_dir(data.wal()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [".lock"]);
}

/// The process dies at each operation of merging or forgetting in turn.
fn dies_while_editing(edit: impl Fn(&RecorderHandle) -> bool, check: impl Fn(&[String], Vec<String>, usize)) {
    for alive_for in 0.. {
        let (_directory, data) = temporary();
        let record_ids = past_rows(&data, 5);
        let left = AtomicUsize::new(alive_for);
        let disk = Disk::with_faults(move |_, _| {
            let alive = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
            alive.map(|_| ()).map_err(|_| io::Error::other("the process is dead"))
        });
        let recorder = start_again_on(disk, &data);
        let whole = edit(&recorder);
        drop(recorder);
        // What readers see at once, and after the next start.
        for restarted in [false, true] {
            if restarted {
                start_again(&data).shutdown().unwrap();
            }
            assert!(verify(&data).unwrap().iter().all(|file| file.is_sound()), "dead after {alive_for}");
            check(&record_ids, past_ids(all_rows(&data).into_iter()), alive_for);
        }
        if whole {
            assert!(alive_for > 3, "only {alive_for} operations");
            break;
        }
    }
}

#[test]
fn death_while_merging_leaves_each_row_once() {
    dies_while_editing(
        |recorder| recorder.compact().is_ok_and(|done| done.hours == 1),
        |before, after, alive_for| assert_eq!(after, before, "dead after {alive_for}"),
    );
}

#[test]
fn death_while_forgetting_leaves_the_others() {
    let odd = || Selection { tenant_hash: Some("odd".into()), before: now_micros() };
    dies_while_editing(
        |recorder| recorder.forget(odd()).is_ok(),
        |before, after, alive_for| {
            assert!(after.iter().all(|record_id| before.contains(record_id)), "dead after {alive_for}");
            assert!((3..=5).contains(&after.len()), "dead after {alive_for}: {after:?}");
        },
    );
}

#[test]
fn forgotten_rows_are_gone_from_every_file() {
    let (_directory, data) = temporary();
    past_rows(&data, 6);
    fs::write(data.wal().join("x.damaged"), "secret").unwrap();
    let recorder = start_again(&data);
    recorder.compact().unwrap();
    let odd = Selection { tenant_hash: Some("odd".into()), before: now_micros() };
    let requests = selected_requests(&data, &odd).unwrap();
    assert_eq!(requests.iter().collect::<Vec<_>>(), ["r1", "r3", "r5"]);
    // One that is only in the WAL yet.
    recorder.record(vec![Record { tenant_hash: Some("odd".into()), started_at: 5, ..ended("late") }]);
    let done = recorder.forget(odd.clone()).unwrap();
    assert_eq!((done.rows, done.files_rewritten, done.files_deleted), (4, 1, 1));
    assert_eq!(done.damaged_segments_deleted, 1);
    assert_eq!(selected_requests(&data, &odd).unwrap().len(), 0);
    let names: BTreeMap<String, Status> = statuses(&data);
    assert_eq!(names.keys().collect::<Vec<_>>(), ["now", "r0", "r2", "r4"]);
    assert!(verify(&data).unwrap().iter().all(|file| file.is_sound()));

    let done = recorder.forget(Selection { tenant_hash: None, before: 1_764_437_000_000_001 }).unwrap();
    assert_eq!(done.rows, 3);
    assert_eq!(statuses(&data).keys().collect::<Vec<_>>(), ["now"]);
    recorder.shutdown().unwrap();
}

#[test]
fn conversations_are_exported_with_the_answer_last() {
    let (_directory, data) = temporary();
    past_rows(&data, 2);
    let mut output = Vec::new();
    assert_eq!(
        export(&data, Some(Split::Train), &mut output).unwrap(),
        2,
        "the row without messages has none"
    );
    let lines: Vec<serde_json::Value> =
        String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let expected =
        serde_json::json!([{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]);
    assert_eq!(lines[0]["messages"], expected);
    assert_eq!(lines[0]["request_id"], "r0");
    assert_eq!(export(&data, Some(Split::HeldOut), &mut Vec::new()).unwrap(), 0);
}
