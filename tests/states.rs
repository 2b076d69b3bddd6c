//! The state store and the collector, from outside: damage, concurrency, quotas, and files as vLLM's plugin makes them.

// Clippy takes helpers outside #[test] functions for library code.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use draftsmith::states::transfer::{self, FORMAT};
use draftsmith::states::{
    Appended, ChoiceText, Collector, CollectorOptions, Drafting, NewSample, Outcome, OutcomeStatus, Reader,
    RequestSummary, SampleHeader, StateDtype, StateStore, StatesError, StoreOptions,
};
use proptest::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const LAYERS: usize = 2;
const HIDDEN: usize = 4;

fn header(request_id: &str, rows: usize, held_out: bool) -> SampleHeader {
    SampleHeader {
        request_id: request_id.to_string(),
        choice_index: 0,
        conversation_id: format!("conversation of {request_id}"),
        source: "live".to_string(),
        held_out,
        prompt_length: 2,
        rows,
        missing_rows: 0,
        layers: LAYERS,
        hidden: HIDDEN,
        dtype: StateDtype::F32,
        layer_ids: vec![2, 30],
        prefix_salt: String::new(),
        head_digest: None,
        drafting: None,
        captured_at: 1,
    }
}

fn ids(rows: usize) -> Vec<u32> {
    (0..=rows as u32).map(|id| id + 7).collect()
}

fn floats(rows: usize) -> Vec<f32> {
    (0..rows * LAYERS * HIDDEN).map(|i| i as f32 * 0.5 - 3.0).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn bounds(segment_bytes: u64, quota_bytes: u64, held_out_quota_bytes: u64) -> StoreOptions {
    StoreOptions { segment_bytes, quota_bytes, held_out_quota_bytes, ..StoreOptions::default() }
}

/// A sample that shares nothing with those of other requests.
fn append(store: &mut StateStore, request_id: &str, rows: usize, held_out: bool) -> Result<(), StatesError> {
    let header = SampleHeader { prefix_salt: request_id.to_owned(), ..header(request_id, rows, held_out) };
    let sample =
        NewSample { header: &header, token_ids: &ids(rows), first_row: 0, states: &bytes(&floats(rows)) };
    store.append(sample).map(drop)
}

fn segments(directory: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "states"))
        .collect();
    paths.sort();
    paths
}

/// All that the store wrote.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut paths = segments(directory);
    paths.push(index(directory));
    paths
}

fn index(directory: &Path) -> PathBuf {
    directory.join("samples.index")
}

fn names(reader: &Reader) -> Vec<String> {
    reader.index().iter().map(|entry| entry.header.request_id.clone()).collect()
}

#[test]
fn samples_come_back_as_they_went_in() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    append(&mut store, "a", 5, false).unwrap();
    let half: Vec<half::bf16> = floats(3).iter().map(|value| half::bf16::from_f32(*value)).collect();
    let raw: Vec<u8> = half.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut narrow = header("b", 3, true);
    narrow.dtype = StateDtype::Bf16;
    narrow.head_digest = Some("head".to_string());
    let sample = NewSample { header: &narrow, token_ids: &ids(3), first_row: 0, states: &raw };
    store.append(sample).unwrap();

    let reader = Reader::open(directory.path()).unwrap();
    let by_name: HashMap<String, usize> = names(&reader).into_iter().zip(0..).collect();
    let first = reader.load(by_name["a"]).unwrap();
    let put = SampleHeader { prefix_salt: "a".to_owned(), ..header("a", 5, false) };
    assert_eq!((first.header, first.token_ids, first.states), (put, ids(5), floats(5)));
    let second = reader.load(by_name["b"]).unwrap();
    assert_eq!(second.header, narrow);
    assert_eq!(second.states, half.iter().map(|value| value.to_f32()).collect::<Vec<_>>());
    assert_eq!(reader.verify().unwrap().samples, 2);
    assert!(reader.verify().unwrap().damaged.is_empty());
    assert!(matches!(reader.load(2), Err(StatesError::NoSuchSample { index: 2, len: 2 })));
    for file in files(directory.path()) {
        assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    }
}

#[test]
fn one_writer_no_duplicates_no_wrong_shapes() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    assert!(matches!(
        StateStore::open(directory.path(), StoreOptions::default()),
        Err(StatesError::Locked { .. })
    ));
    append(&mut store, "a", 5, false).unwrap();
    assert!(matches!(append(&mut store, "a", 5, false), Err(StatesError::Duplicate { .. })));
    let header = header("b", 5, false);
    let mut wrong = |ids: usize, first_row: usize, rows: usize| {
        let (token_ids, states) = (self::ids(ids), bytes(&floats(rows)));
        let sample = NewSample { header: &header, token_ids: &token_ids, first_row, states: &states };
        assert!(matches!(store.append(sample), Err(StatesError::Shape { .. })), "{ids} {first_row} {rows}");
    };
    for (ids, first_row, rows) in [(4, 0, 5), (5, 0, 4), (5, 1, 5), (5, 5, 0), (0, 0, 0)] {
        wrong(ids, first_row, rows);
    }
    drop(store);
    // The next run knows what is stored.
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    assert!(matches!(append(&mut store, "a", 5, false), Err(StatesError::Duplicate { .. })));
    append(&mut store, "b", 5, false).unwrap();
    assert_eq!(names(&Reader::open(directory.path()).unwrap()), ["a", "b"]);
}

/// Two samples, one after the other; the lengths of segment and index between them.
fn two_samples(directory: &Path) -> (u64, u64) {
    let mut store = StateStore::open(directory, StoreOptions::default()).unwrap();
    append(&mut store, "a", 3, false).unwrap();
    let length = |path: &Path| fs::metadata(path).unwrap().len();
    let ends = (length(&segments(directory)[0]), length(&index(directory)));
    append(&mut store, "b", 3, false).unwrap();
    ends
}

/// What a reader, and then a writer, make of the directory as it is.
fn check_damaged(directory: &Path, wanted: &[&str], what: &str) {
    let reader = Reader::open(directory).unwrap();
    let readable: Vec<String> = (0..reader.index().len())
        .filter_map(|index| reader.load(index).ok())
        .map(|sample| {
            assert_eq!(sample.states, floats(3), "{what}");
            sample.header.request_id
        })
        .collect();
    assert_eq!(readable, wanted, "{what}: read");
    let mut store = StateStore::open(directory, StoreOptions::default()).unwrap();
    for name in ["a", "b"] {
        assert_eq!(store.contains(name, 0), wanted.contains(&name), "{what}: {name} after recovery");
    }
    append(&mut store, "c", 3, false).unwrap();
    drop(store);
    let reader = Reader::open(directory).unwrap();
    assert!(reader.verify().unwrap().damaged.is_empty(), "{what}: {:?}", reader.verify().unwrap());
    assert_eq!(reader.index().len(), wanted.len() + 1, "{what}");
    assert_eq!(reader.load(wanted.len()).unwrap().states, floats(3), "{what}");
}

#[test]
fn an_end_cut_at_any_byte_costs_the_last_sample_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (segment_end, index_end) = two_samples(directory.path());
    let (segment, index) = (segments(directory.path()).remove(0), index(directory.path()));
    let (blocks, samples) = (fs::read(&segment).unwrap(), fs::read(&index).unwrap());
    for length in segment_end as usize..=blocks.len() {
        // The next writer deletes what is empty, so all is put back each time.
        for file in files(directory.path()) {
            fs::remove_file(file).unwrap();
        }
        fs::write(&segment, &blocks[..length]).unwrap();
        fs::write(&index, &samples).unwrap();
        let wanted: &[&str] = if length == blocks.len() { &["a", "b"] } else { &["a"] };
        check_damaged(directory.path(), wanted, &format!("segment cut at {length}"));
    }
    for length in 0..=samples.len() {
        for file in files(directory.path()) {
            fs::remove_file(file).unwrap();
        }
        fs::write(&segment, &blocks).unwrap();
        fs::write(&index, &samples[..length]).unwrap();
        let wanted: &[&str] = if length == samples.len() {
            &["a", "b"]
        } else if length >= index_end as usize {
            &["a"]
        } else {
            &[]
        };
        check_damaged(directory.path(), wanted, &format!("index cut at {length}"));
    }
}

#[test]
fn any_flipped_bit_is_seen_and_costs_no_other_sample() {
    let directory = tempfile::tempdir().unwrap();
    let (segment_end, index_end) = two_samples(directory.path());
    let whole: Vec<(PathBuf, Vec<u8>)> =
        files(directory.path()).into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    let put_back = || {
        for file in segments(directory.path()) {
            fs::remove_file(file).unwrap();
        }
        for (path, bytes) in &whole {
            fs::write(path, bytes).unwrap();
        }
    };
    for ((path, bytes), end) in whole.iter().zip([segment_end, index_end]) {
        // The header of the file itself is left out: without it the file is not known to be ours.
        for position in 16..bytes.len() {
            let bit = [0, 7][position % 2];
            let mut damaged = bytes.clone();
            damaged[position] ^= 1 << bit;
            fs::write(path, &damaged).unwrap();
            let what = format!("{}: byte {position} bit {bit}", path.display());
            let good = if position < end as usize { "b" } else { "a" };
            let reader = Reader::open(directory.path()).unwrap();
            let readable: Vec<String> = (0..reader.index().len())
                .filter_map(|index| reader.load(index).ok())
                .map(|sample| {
                    assert_eq!(sample.states, floats(3), "{what}");
                    sample.header.request_id
                })
                .collect();
            assert_eq!(readable, [good], "{what}");
            assert!(!reader.verify().unwrap().damaged.is_empty(), "{what}");
            if position % 16 == 0 {
                let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
                assert!(store.contains(good, 0), "{what}: a writer that starts keeps it");
                store.compact().unwrap();
                drop(store);
                let reader = Reader::open(directory.path()).unwrap();
                let kept = names(&reader).iter().position(|name| name == good).unwrap();
                assert_eq!(reader.load(kept).unwrap().states, floats(3), "{what}");
                put_back();
            }
        }
        put_back();
    }
}

#[test]
fn forgetting_that_failed_is_done_by_the_next_one() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    append(&mut store, "a", 4, false).unwrap();
    append(&mut store, "b", 4, false).unwrap();
    // A directory stands where the new index would be written.
    let in_the_way = directory.path().join(format!(".samples.index.{}.tmp", std::process::id()));
    fs::create_dir(&in_the_way).unwrap();
    assert!(matches!(store.forget(|request_id| request_id == "a"), Err(StatesError::Io { .. })));
    fs::remove_dir(&in_the_way).unwrap();
    assert_eq!(
        store.forget(|request_id| request_id == "a").unwrap(),
        0,
        "it is gone from the tables already"
    );
    let raw: Vec<u8> = files(directory.path()).iter().flat_map(|path| fs::read(path).unwrap()).collect();
    assert!(!raw.windows(17).any(|window| window == b"conversation of a"));
    append(&mut store, "c", 4, false).unwrap();
    drop(store);
    let store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    assert!(store.contains("b", 0) && store.contains("c", 0) && !store.contains("a", 0));
}

/// Turn after turn of one conversation: the tokens of each begin with those of the one before.
fn turn(
    store: &mut StateStore,
    request_id: &str,
    rows: usize,
    first_row: usize,
) -> Result<Appended, StatesError> {
    let states = bytes(&floats(rows)[first_row * LAYERS * HIDDEN..]);
    store.append(NewSample {
        header: &header(request_id, rows, false),
        token_ids: &ids(rows),
        first_row,
        states: &states,
    })
}

#[test]
fn what_requests_have_in_common_is_stored_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    let appended = |new_rows, shared_rows, missing_rows| Appended { new_rows, shared_rows, missing_rows };
    assert_eq!(turn(&mut store, "1", 40, 0).unwrap(), appended(40, 0, 0));
    // Its last 8 rows were no full block.
    assert_eq!(turn(&mut store, "2", 100, 0).unwrap(), appended(68, 32, 0));
    assert_eq!(turn(&mut store, "3", 150, 96).unwrap(), appended(54, 96, 0));
    assert_eq!(turn(&mut store, "the same once more", 150, 0).unwrap(), appended(0, 150, 0));
    let reader = Reader::open(directory.path()).unwrap();
    for (index, rows) in [40, 100, 150, 150].into_iter().enumerate() {
        let sample = reader.load(index).unwrap();
        assert_eq!((sample.token_ids, sample.states), (ids(rows), floats(rows)));
    }
    let stats = reader.stats().unwrap();
    let row_bytes = (LAYERS * HIDDEN * 4) as u64;
    assert_eq!((stats.tokens, stats.whole_bytes), (440, 440 * row_bytes));
    assert!(stats.bytes < 2 * 162 * row_bytes + 4 * 1500, "{stats:?}");
    // Nothing of this is lost with the first ones.
    store.forget(|request_id| request_id == "1" || request_id == "2").unwrap();
    let reader = Reader::open(directory.path()).unwrap();
    assert_eq!(reader.load(0).unwrap().states, floats(150));
    store.forget(|_| true).unwrap();
    assert_eq!(segments(directory.path()).len(), 0, "no row outlives its last sample");
}

#[test]
fn a_missing_prefix_makes_a_sample_partial() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    // vLLM's blocks need not be ours: the rows of ours that begins at 32 are not all there.
    let appended = turn(&mut store, "1", 100, 40).unwrap();
    assert_eq!(appended, Appended { new_rows: 52, shared_rows: 0, missing_rows: 48 });
    let sample = Reader::open(directory.path()).unwrap().load(0).unwrap();
    assert_eq!((sample.header.rows, sample.header.missing_rows, sample.header.prompt_length), (52, 48, 1));
    assert_eq!(sample.token_ids, ids(100)[48..]);
    assert_eq!(sample.states, floats(100)[48 * LAYERS * HIDDEN..]);
    assert!(matches!(turn(&mut store, "2", 40, 39), Err(StatesError::NoCompleteRows { missing: 40, .. })));
    // Once somebody gives the whole, later ones are whole again.
    assert_eq!(turn(&mut store, "3", 100, 0).unwrap().missing_rows, 0);
    assert_eq!(
        turn(&mut store, "4", 120, 96).unwrap(),
        Appended { new_rows: 24, shared_rows: 96, missing_rows: 0 }
    );
    assert_eq!(Reader::open(directory.path()).unwrap().load(2).unwrap().states, floats(120));
}

#[test]
fn badly_accepted_samples_stay_longer() {
    let directory = tempfile::tempdir().unwrap();
    let options = bounds(4_000, 64_000, 8_000);
    let mut store = StateStore::open(directory.path(), options).unwrap();
    for number in 0..200 {
        let mut header = header(&number.to_string(), 16, false);
        let accepted_tokens = if number % 2 == 0 { 0 } else { 30 };
        header.prefix_salt = number.to_string();
        header.drafting = Some(Drafting { drafts: 10, drafted_tokens: 30, accepted_tokens });
        let (token_ids, states) = (ids(16), bytes(&floats(16)));
        let sample = NewSample { header: &header, token_ids: &token_ids, first_row: 0, states: &states };
        store.append(sample).unwrap();
    }
    let kept: Vec<usize> =
        names(&Reader::open(directory.path()).unwrap()).iter().map(|name| name.parse().unwrap()).collect();
    let refused = kept.iter().filter(|number| *number % 2 == 0).count();
    assert!(kept.contains(&199) && kept.contains(&198), "{kept:?}");
    assert!(refused > kept.len() * 11 / 20, "{refused} of {}", kept.len());
    let oldest = |odd: usize| kept.iter().filter(|number| *number % 2 == odd).min().unwrap();
    assert!(oldest(0) < oldest(1), "{kept:?}");
}

#[test]
fn a_crash_while_a_segment_is_emptied_leaves_each_block_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    append(&mut store, "a", 20, false).unwrap();
    append(&mut store, "b", 20, false).unwrap();
    let old = segments(directory.path()).remove(0);
    let old_bytes = fs::read(&old).unwrap();
    store.forget(|request_id| request_id == "a").unwrap();
    drop(store);
    // The copy was made, and the old segment not yet deleted.
    assert!(!old.exists());
    fs::write(&old, old_bytes).unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    assert!(store.contains("b", 0) && !store.contains("a", 0));
    assert!(store.compact().unwrap() > 0);
    drop(store);
    let reader = Reader::open(directory.path()).unwrap();
    assert_eq!(reader.load(0).unwrap().states, floats(20));
    assert!(reader.verify().unwrap().damaged.is_empty());
}

#[test]
fn a_reader_follows_the_writer_and_meets_eviction() {
    let directory = tempfile::tempdir().unwrap();
    let options = bounds(2_000, 16_000, 4_000);
    let mut store = StateStore::open(directory.path(), options.clone()).unwrap();
    let mut reader = Reader::open(directory.path()).unwrap();
    assert!(reader.index().is_empty());
    append(&mut store, "held out", 5, true).unwrap();
    append(&mut store, "0", 5, false).unwrap();
    assert_eq!(reader.refresh().unwrap().added, 2);
    assert_eq!(reader.refresh().unwrap().added, 0);
    let oldest = names(&reader).iter().position(|name| name == "0").unwrap();

    for i in 1..100 {
        append(&mut store, &i.to_string(), 5, false).unwrap();
        assert!(store.stats().bytes <= options.quota_bytes);
        let on_disk: u64 = files(directory.path()).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert_eq!(on_disk, store.stats().bytes);
    }
    // Whether its bytes are still there or not, what it gives is right.
    match reader.load(oldest) {
        Ok(sample) => assert_eq!(sample.states, floats(5)),
        Err(error) => assert!(matches!(error, StatesError::Evicted { .. }), "{error}"),
    }
    let refreshed = reader.refresh().unwrap();
    assert!(refreshed.removed >= 1 && refreshed.added >= 10, "{refreshed:?}");
    assert!(names(&reader).contains(&"99".to_string()));
    assert!(names(&reader).contains(&"held out".to_string()));
    assert!(!names(&reader).contains(&"0".to_string()));
    for index in 0..reader.index().len() {
        reader.load(index).unwrap();
    }
    assert_eq!(reader.index().len(), store.stats().train_samples + 1);
    // What was evicted may come again.
    append(&mut store, "0", 5, false).unwrap();
}

#[test]
fn held_out_samples_have_a_quota_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let options = bounds(1 << 20, 40_000, 8_000);
    let mut store = StateStore::open(directory.path(), options.clone()).unwrap();
    append(&mut store, "train", 5, false).unwrap();
    for i in 0..60 {
        append(&mut store, &format!("held out {i}"), 5, true).unwrap();
        assert!(store.stats().held_out_bytes <= 8_000);
    }
    assert_eq!(store.stats().train_samples, 1, "held-out samples must not push out training samples here");
    assert!(store.contains("held out 59", 0) && !store.contains("held out 0", 0));
    assert!(matches!(append(&mut store, "big", 500, true), Err(StatesError::TooLarge { .. })));
    append(&mut store, "big", 500, false).unwrap();
}

#[test]
fn a_concurrent_reader_never_sees_a_broken_sample() {
    let directory = tempfile::tempdir().unwrap();
    let options = bounds(20_000, 200_000, 20_000);
    let mut store = StateStore::open(directory.path(), options).unwrap();
    let path = directory.path().to_path_buf();
    let writer = std::thread::spawn(move || {
        for i in 0..800 {
            append(&mut store, &i.to_string(), 1 + i % 30, i % 10 == 0).unwrap();
        }
    });
    let mut reader = Reader::open(&path).unwrap();
    let (mut loaded, mut last_round) = (0, false);
    loop {
        reader.refresh().unwrap();
        for index in 0..reader.index().len() {
            let rows = reader.index()[index].header.rows;
            match reader.load(index) {
                Ok(sample) => {
                    assert_eq!(sample.states, floats(rows));
                    loaded += 1;
                }
                Err(StatesError::Evicted { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        if last_round {
            break;
        }
        last_round = writer.is_finished();
    }
    writer.join().unwrap();
    assert!(loaded > 100);
}

#[test]
fn forgetting_leaves_nothing_on_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    for name in ["a", "b", "c"] {
        append(&mut store, name, 4, false).unwrap();
    }
    let mut reader = Reader::open(directory.path()).unwrap();
    assert_eq!(store.forget(|request_id| request_id == "b").unwrap(), 1);
    assert!(!store.contains("b", 0));
    reader.refresh().unwrap();
    assert_eq!(names(&reader), ["a", "c"]);
    assert_eq!(reader.load(1).unwrap().states, floats(4));
    append(&mut store, "d", 4, false).unwrap();
    reader.refresh().unwrap();
    assert_eq!(names(&reader), ["a", "c", "d"]);
    let raw: Vec<u8> = files(directory.path()).iter().flat_map(|path| fs::read(path).unwrap()).collect();
    assert!(!raw.windows(17).any(|window| window == b"conversation of b"));
}

#[test]
fn a_foreign_file_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let foreign = directory.path().join("blocks-0000000000000001.states");
    fs::write(&foreign, b"something else entirely").unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    append(&mut store, "a", 2, false).unwrap();
    assert_eq!(names(&Reader::open(directory.path()).unwrap()), ["a"]);
    assert_eq!(fs::read(&foreign).unwrap(), b"something else entirely");
}

// ---- collector ----

struct Lab {
    transfer: tempfile::TempDir,
    store: tempfile::TempDir,
    outcomes: Receiver<Outcome>,
    collector: Collector,
}

fn lab(change: impl FnOnce(&mut CollectorOptions), tokenizer: bool) -> Lab {
    let transfer = tempfile::tempdir().unwrap();
    lab_in(transfer, change, tokenizer)
}

fn lab_in(transfer: tempfile::TempDir, change: impl FnOnce(&mut CollectorOptions), tokenizer: bool) -> Lab {
    let store = tempfile::tempdir().unwrap();
    let mut options = CollectorOptions::new(transfer.path());
    options.expected.layer_ids = Some(vec![2, 30]);
    options.expected.hidden_size = Some(HIDDEN);
    options.expected.vocab_size = Some(1000);
    change(&mut options);
    let (sender, outcomes) = channel();
    let writer = StateStore::open(store.path(), StoreOptions::default()).unwrap();
    let tokenizer = tokenizer.then(|| tokenizers::Tokenizer::from_bytes(TOKENIZER).unwrap());
    let collector =
        Collector::start(options, writer, tokenizer, move |outcome| sender.send(outcome).unwrap()).unwrap();
    Lab { transfer, store, outcomes, collector }
}

impl Lab {
    fn next(&self) -> Outcome {
        self.outcomes.recv_timeout(Duration::from_secs(20)).expect("no outcome came")
    }

    /// All but the collector's own.
    fn files(&self) -> usize {
        let names = fs::read_dir(self.transfer.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name != transfer::RESEND).count()
    }

    fn resend(&self) -> std::time::SystemTime {
        fs::metadata(self.transfer.path().join(transfer::RESEND)).unwrap().modified().unwrap()
    }
}

const TOKENIZER: &[u8] = br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[
 {"id":0,"content":"<eos>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
 "normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
 "model":{"type":"WordLevel","vocab":{"<eos>":0,"my":1,"router":2,"is":3,"slow":4,"restart":5,"it":6},"unk_token":"<eos>"}}"#;

struct Fake {
    internal_id: String,
    layer_ids: String,
    token_ids: Vec<i64>,
    prompt: usize,
    first_row: usize,
    rows: usize,
    states: Vec<f32>,
    sha256: Option<String>,
    /// Names and values that not every vLLM gives.
    drafting: Vec<(&'static str, &'static str)>,
}

fn fake(internal_id: &str) -> Fake {
    Fake {
        internal_id: internal_id.to_string(),
        layer_ids: "[2, 30]".to_string(),
        token_ids: vec![1, 2, 3, 4, 5, 6, 0],
        prompt: 4,
        first_row: 0,
        rows: 6,
        states: floats(6),
        sha256: None,
        drafting: vec![("drafts", "2"), ("drafted_tokens", "6"), ("accepted_tokens", "1")],
    }
}

impl Fake {
    fn bytes(&self) -> Vec<u8> {
        let states = bytes(&self.states);
        let ids: Vec<u8> = self.token_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let sha256 = self.sha256.clone().unwrap_or_else(|| transfer::checksum(&states, &ids));
        let mut metadata = HashMap::from([
            ("format".to_string(), FORMAT.to_string()),
            ("request_id".to_string(), self.internal_id.clone()),
            ("layer_ids".to_string(), self.layer_ids.clone()),
            ("prompt_tokens".to_string(), self.prompt.to_string()),
            ("first_row".to_string(), self.first_row.to_string()),
            ("prefix_salt".to_string(), String::new()),
            ("sha256".to_string(), sha256),
            ("head_digest".to_string(), "abc".to_string()),
        ]);
        for (name, value) in &self.drafting {
            metadata.insert(name.to_string(), value.to_string());
        }
        let layers = self.states.len() / self.rows / HIDDEN;
        let tensors = [
            ("hidden_states", TensorView::new(Dtype::F32, vec![self.rows, layers, HIDDEN], &states).unwrap()),
            ("token_ids", TensorView::new(Dtype::I64, vec![self.token_ids.len()], &ids).unwrap()),
        ];
        safetensors::serialize(tensors, Some(metadata)).unwrap()
    }

    fn publish(&self, directory: &Path) {
        publish(directory, &self.internal_id, &self.bytes());
    }
}

fn publish(directory: &Path, internal_id: &str, bytes: &[u8]) {
    let path = directory.join(format!("{internal_id}.safetensors"));
    draftsmith::store::publish(&path, bytes).unwrap();
}

fn request(request_id: &str, choices: usize) -> RequestSummary {
    RequestSummary {
        request_id: request_id.to_string(),
        conversation_id: "c".to_string(),
        source: "replay".to_string(),
        held_out: false,
        status: "ok".to_string(),
        n: choices,
        choices: vec![ChoiceText { content: "restart it".to_string(), ..Default::default() }; choices],
    }
}

#[test]
fn a_file_meets_its_request_in_either_order() {
    let lab = lab(|_| {}, true);
    assert!(lab.collector.expect(request("first", 1)));
    fake("chatcmpl-first-0123abcd").publish(lab.transfer.path());
    let outcome = lab.next();
    assert_eq!(outcome.status, OutcomeStatus::Stored);
    assert_eq!((outcome.prompt_ids, outcome.output_ids), (vec![1, 2, 3, 4], vec![5, 6, 0]));

    fake("cmpl-second-0-0123abcd").publish(lab.transfer.path());
    lab.collector.expect(request("second", 1));
    assert_eq!(lab.next().status, OutcomeStatus::Stored);
    assert_eq!(lab.files(), 0);

    let reader = Reader::open(lab.store.path()).unwrap();
    assert_eq!(names(&reader), ["first", "second"]);
    let sample = reader.load(0).unwrap();
    assert_eq!(sample.states, floats(6));
    assert_eq!(sample.header.head_digest.as_deref(), Some("abc"));
    assert_eq!((sample.header.prompt_length, sample.header.source.as_str()), (4, "replay"));
    lab.collector.stop();
}

#[test]
fn what_was_drafted_comes_with_the_ids_and_only_one_head_is_named() {
    let lab = lab(|_| {}, true);
    let publish = |name: &str, change: fn(&mut Fake)| {
        let mut file = fake(&format!("chatcmpl-{name}-0123abcd"));
        change(&mut file);
        file.publish(lab.transfer.path());
        lab.collector.expect(request(name, 1));
        lab.next()
    };
    let counted = Some(Drafting { drafts: 2, drafted_tokens: 6, accepted_tokens: 1 });
    let plain = publish("plain", |_| {});
    assert_eq!((plain.drafting, plain.head_digest.as_deref()), (counted, Some("abc")));
    let swapped = publish("swapped", |file| file.drafting.push(("head_swapped", "true")));
    assert_eq!((swapped.drafting, swapped.head_digest), (counted, None));
    let uncounted = publish("uncounted", |file| file.drafting.clear());
    assert_eq!((uncounted.status, uncounted.drafting), (OutcomeStatus::Stored, None));
    let refused = publish("refused", |file| file.states[0] = f32::NAN);
    assert_eq!((refused.status, refused.drafting), (OutcomeStatus::NotFinite, counted));
    let other = publish("other", |file| file.token_ids[5] = 1);
    assert_eq!((other.status, other.drafting), (OutcomeStatus::Text, None));
    let odd = publish("odd", |file| file.drafting[2].1 = "-1");
    assert_eq!((odd.status, odd.drafting), (OutcomeStatus::Format, None));
    lab.collector.stop();
}

#[test]
fn choices_are_told_apart() {
    let lab = lab(|_| {}, true);
    // Two prompts, two answers each.
    let mut summary = request("many", 4);
    summary.n = 2;
    lab.collector.expect(summary);
    for name in [
        "1_cmpl-many-1-0123abcd",
        "0_cmpl-many-0-0123abcd",
        "0_cmpl-many-1-0123abcd",
        "1_cmpl-many-0-0123abcd",
    ] {
        fake(name).publish(lab.transfer.path());
    }
    let mut seen: Vec<usize> = (0..4).map(|_| lab.next().choice_index).collect();
    assert_eq!(seen[0], 3);
    seen.sort();
    assert_eq!(seen, [0, 1, 2, 3]);
    assert_eq!(lab.files(), 0);
}

#[test]
fn files_from_before_the_start_are_taken_in() {
    let transfer = tempfile::tempdir().unwrap();
    fake("chatcmpl-early-0123abcd").publish(transfer.path());
    let lab = lab_in(transfer, |_| {}, true);
    lab.collector.expect(request("early", 1));
    assert_eq!(lab.next().status, OutcomeStatus::Stored);
}

#[test]
fn the_transfer_directory_may_be_relative() {
    let lab = lab(
        |options| {
            let depth = std::env::current_dir().unwrap().components().count() - 1;
            let from_root = options.transfer_directory.strip_prefix("/").unwrap().to_path_buf();
            options.transfer_directory = PathBuf::from("../".repeat(depth)).join(from_root);
        },
        true,
    );
    lab.collector.expect(request("relative", 1));
    fake("chatcmpl-relative-0123abcd").publish(lab.transfer.path());
    assert_eq!(lab.next().status, OutcomeStatus::Stored);
}

#[test]
fn each_fault_has_its_reason_and_the_file_goes() {
    let lab = lab(|_| {}, true);
    let mut count = 0;
    let mut check = |wanted: OutcomeStatus, ids_trusted: bool, change: &dyn Fn(&mut Fake)| {
        count += 1;
        let request_id = format!("fault-{count}");
        let mut file = fake(&format!("chatcmpl-{request_id}-0123abcd"));
        let published_as = file.internal_id.clone();
        change(&mut file);
        lab.collector.expect(request(&request_id, 1));
        publish(lab.transfer.path(), &published_as, &file.bytes());
        let outcome = lab.next();
        assert_eq!(outcome.status, wanted);
        assert_eq!(!outcome.output_ids.is_empty(), ids_trusted, "{wanted:?}");
        assert_eq!(lab.files(), 0, "{wanted:?}");
    };
    check(OutcomeStatus::Stored, true, &|_| {});
    check(OutcomeStatus::Checksum, false, &|file| file.sha256 = Some("00".to_string()));
    check(OutcomeStatus::Shape, false, &|file| {
        file.token_ids.pop();
    });
    check(OutcomeStatus::Shape, false, &|file| file.prompt = 100);
    check(OutcomeStatus::Shape, false, &|file| file.layer_ids = "[2]".to_string());
    check(OutcomeStatus::Shape, false, &|file| file.internal_id = "chatcmpl-other-0123abcd".to_string());
    check(OutcomeStatus::Shape, false, &|file| file.token_ids[0] = -1);
    check(OutcomeStatus::Format, false, &|file| file.layer_ids = "two".to_string());
    check(OutcomeStatus::Layers, true, &|file| file.layer_ids = "[3, 30]".to_string());
    check(OutcomeStatus::Vocabulary, false, &|file| file.token_ids[0] = 1000);
    check(OutcomeStatus::Text, false, &|file| file.token_ids[4] = 3);
    check(OutcomeStatus::NotFinite, true, &|file| file.states[5] = f32::NAN);
    let reader = Reader::open(lab.store.path()).unwrap();
    assert_eq!(reader.index().len(), 1);
    assert_eq!(lab.collector.stats().by_status[&OutcomeStatus::Shape], 5);

    let garbage = |name: &str, wanted: OutcomeStatus| {
        lab.collector.expect(request(name, 1));
        publish(lab.transfer.path(), &format!("chatcmpl-{name}-0123abcd"), b"no safetensors");
        assert_eq!(lab.next().status, wanted);
        assert_eq!(lab.files(), 0);
    };
    garbage("garbage", OutcomeStatus::Format);
}

#[test]
fn a_prefix_that_is_not_here_is_asked_for_again() {
    let lab = lab(|_| {}, false);
    let first_asked = lab.resend();
    let conversation = |request_id: &str, rows: usize, first_row: usize| {
        let mut file = fake(&format!("chatcmpl-{request_id}-0123abcd"));
        file.token_ids = (0..=rows as i64).map(|id| id % 7).collect();
        file.prompt = rows - 1;
        file.first_row = first_row;
        file.rows = rows - first_row;
        file.states = floats(rows)[first_row * LAYERS * HIDDEN..].to_vec();
        lab.collector.expect(request(request_id, 1));
        file.publish(lab.transfer.path());
        let outcome = lab.next();
        assert_eq!(
            outcome.prompt_ids.len() + outcome.output_ids.len(),
            rows + 1,
            "all ids, whatever the rows"
        );
        outcome.status
    };
    assert_eq!(conversation("first", 40, 0), OutcomeStatus::Stored);
    assert_eq!(conversation("second", 60, 32), OutcomeStatus::Stored);
    assert_eq!(lab.resend(), first_asked, "all was here");
    assert_eq!(conversation("after-a-lost-one", 100, 80), OutcomeStatus::Stored);
    assert_ne!(lab.resend(), first_asked);
    let reader = Reader::open(lab.store.path()).unwrap();
    let missing: Vec<usize> = reader.index().iter().map(|entry| entry.header.missing_rows).collect();
    assert_eq!(missing, [0, 0, 80]);
    assert_eq!(reader.load(1).unwrap().states, floats(60));
    let files: Vec<_> =
        fs::read_dir(lab.transfer.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(files, [transfer::RESEND], "no temporary file stays");
}

#[test]
fn links_are_not_followed() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret.safetensors");
    fs::write(&secret, fake("chatcmpl-link-0123abcd").bytes()).unwrap();
    let transfer = tempfile::tempdir().unwrap();
    symlink(&secret, transfer.path().join("chatcmpl-link-0123abcd.safetensors")).unwrap();
    let lab = lab_in(transfer, |_| {}, true);
    lab.collector.expect(request("link", 1));
    assert_eq!(lab.next().status, OutcomeStatus::Unreadable);
    assert_eq!(lab.files(), 0);
    assert!(secret.exists());
}

#[test]
fn what_waits_too_long_is_given_up() {
    let lab = lab(|options| options.time_out = Duration::from_secs(1), false);
    lab.collector.expect(request("lonely", 2));
    fake("0_chatcmpl-lonely-0123abcd").publish(lab.transfer.path());
    assert_eq!((lab.next().status, lab.next().status), (OutcomeStatus::Stored, OutcomeStatus::Missing));
    fake("chatcmpl-unknown-0123abcd").publish(lab.transfer.path());
    // Its outcome comes after the unknown file's time is over, as it began to wait later.
    lab.collector.expect(request("later", 1));
    assert_eq!(lab.next().status, OutcomeStatus::Missing);
    let directory = lab.transfer.path().to_path_buf();
    let mut events = 0;
    while fs::read_dir(&directory).unwrap().count() > 0 && events < 50 {
        lab.collector.expect(request(&format!("tick {events}"), 1));
        lab.next();
        events += 1;
    }
    assert_eq!(lab.files(), 0);
    assert_eq!(lab.collector.stats().by_status[&OutcomeStatus::Unmatched], 1);
}

#[test]
fn unwanted_files_go_at_once_and_a_duplicate_is_refused() {
    let lab = lab(|_| {}, false);
    lab.collector.expect(request("private", 0));
    fake("chatcmpl-private-0123abcd").publish(lab.transfer.path());
    for wanted in [OutcomeStatus::Stored, OutcomeStatus::Duplicate] {
        fake("chatcmpl-twice-0123abcd").publish(lab.transfer.path());
        lab.collector.expect(request("twice", 1));
        assert_eq!(lab.next().status, wanted);
    }
    assert_eq!(lab.files(), 0);
    let stats = lab.collector.stats();
    assert_eq!(stats.by_status[&OutcomeStatus::NotWanted], 1);
    assert_eq!(stats.store.train_samples, 1);
}

#[test]
fn tool_calls_skip_the_text_check_and_reasoning_is_checked() {
    let lab = lab(|_| {}, true);
    let mut tools = request("tools", 1);
    tools.choices[0] =
        ChoiceText { content: "not in the ids".to_string(), has_tool_calls: true, ..Default::default() };
    lab.collector.expect(tools);
    fake("chatcmpl-tools-0123abcd").publish(lab.transfer.path());
    assert_eq!(lab.next().status, OutcomeStatus::Stored);
    let mut reasoning = request("reasoning", 1);
    reasoning.choices[0].reasoning = "slow".to_string();
    lab.collector.expect(reasoning);
    fake("chatcmpl-reasoning-0123abcd").publish(lab.transfer.path());
    assert_eq!(lab.next().status, OutcomeStatus::Text);
}

#[test]
fn damage_under_a_reader_is_a_typed_error() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = StateStore::open(directory.path(), StoreOptions::default()).unwrap();
    append(&mut store, "a", 2, false).unwrap();
    let reader = Reader::open(directory.path()).unwrap();
    reader.load(0).unwrap();
    let segment = segments(directory.path()).remove(0);
    let file = fs::OpenOptions::new().write(true).open(&segment).unwrap();
    file.write_all_at(b"xx", 60).unwrap();
    assert!(matches!(reader.load(0), Err(StatesError::Damaged { .. })));
    file.set_len(30).unwrap();
    assert!(matches!(reader.load(0), Err(StatesError::Evicted { .. })));
}

#[test]
fn a_source_that_gives_nothing_but_wrong_files_is_switched_off() {
    let lab = lab(|_| {}, false);
    let give = |number: usize, broken: bool| {
        let request_id = format!("request-{number}");
        let mut file = fake(&format!("chatcmpl-{request_id}-0123abcd"));
        if broken {
            file.states[7] = f32::NAN;
        }
        lab.collector.expect(request(&request_id, 1));
        file.publish(lab.transfer.path());
        let outcome = lab.next();
        assert_eq!(lab.files(), 0);
        outcome.status
    };
    for number in 0..15 {
        assert_eq!(give(number, true), OutcomeStatus::NotFinite);
    }
    assert_eq!(give(15, false), OutcomeStatus::Stored, "a good one ends the row");
    for number in 16..32 {
        assert_eq!(give(number, true), OutcomeStatus::NotFinite);
    }
    for number in 32..40 {
        assert_eq!(give(number, number % 2 == 0), OutcomeStatus::SwitchedOff);
    }
    assert_eq!(lab.collector.stats().by_status[&OutcomeStatus::SwitchedOff], 8);
    assert_eq!(Reader::open(lab.store.path()).unwrap().index().len(), 1);
}

/// What a sample in the model of [`the_store_behaves_like_a_map`] holds: rows of a number that its prefix decides.
fn model_states(tokens: &[u32]) -> Vec<f32> {
    let mut prefix = 0_u32;
    let mut states = Vec::new();
    for token in tokens {
        prefix = prefix.wrapping_mul(31).wrapping_add(*token + 1);
        states.extend(
            (0..LAYERS * HIDDEN).map(|value| ((prefix >> 3) % 100_003) as f32 + value as f32 * 0.125),
        );
    }
    states
}

#[derive(Clone, Debug)]
enum Step {
    /// A sample of `rows` rows that has the first `shared` tokens of conversation `conversation` in common with others,
    /// its first `left_out` blocks of vLLM's not given.
    Append {
        conversation: u32,
        shared: usize,
        rows: usize,
        left_out: usize,
        held_out: bool,
    },
    /// Every sample whose number has this remainder by three.
    Forget(usize),
    Compact,
    /// The writer starts again; None: as it ended, else so many bytes short at the end of the youngest segment.
    Reopen(Option<u64>),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0..4_u32, 0..120_usize, 1..150_usize, 0..5_usize, any::<bool>()).prop_map(
            |(conversation, shared, rows, left_out, held_out)| {
                Step::Append { conversation, shared, rows, left_out, held_out }
            }
        ),
        1 => (0..3_usize).prop_map(Step::Forget),
        1 => Just(Step::Compact),
        1 => prop_oneof![Just(None), (1..400_u64).prop_map(Some)].prop_map(Step::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever is appended, evicted, forgotten, moved and lost: what a reader gets is what was put in.
    #[test]
    fn the_store_behaves_like_a_map(steps in prop::collection::vec(step(), 1..60)) {
        let directory = tempfile::tempdir().unwrap();
        let options = bounds(3_000, 40_000, 10_000);
        let mut store = StateStore::open(directory.path(), options.clone()).unwrap();
        let mut reader = Reader::open(directory.path()).unwrap();
        let mut put: HashMap<String, Vec<u32>> = HashMap::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Append { conversation, shared, rows, left_out, held_out } => {
                    let tokens: Vec<u32> = (0..=rows)
                        .map(|at| if at < shared { conversation * 1000 + at as u32 } else { 50_000 + number as u32 })
                        .collect();
                    let first_row = (16 * left_out).min((rows - 1) / 16 * 16);
                    let states = bytes(&model_states(&tokens[..rows])[first_row * LAYERS * HIDDEN..]);
                    let name = number.to_string();
                    let header = SampleHeader { prefix_salt: String::new(), ..header(&name, rows, held_out) };
                    let sample = NewSample { header: &header, token_ids: &tokens, first_row, states: &states };
                    match store.append(sample) {
                        Ok(appended) => {
                            prop_assert_eq!(appended.new_rows + appended.shared_rows + appended.missing_rows, rows);
                            prop_assert!(appended.missing_rows <= first_row);
                            put.insert(name, tokens);
                        }
                        Err(error) => prop_assert!(matches!(error, StatesError::TooLarge { .. }), "{}", error),
                    }
                }
                Step::Forget(remainder) => {
                    let forgotten = |name: &str| name.parse::<usize>().unwrap() % 3 == remainder;
                    store.forget(forgotten).unwrap();
                    put.retain(|name, _| !forgotten(name));
                }
                Step::Compact => {
                    store.compact().unwrap();
                    prop_assert_eq!(store.stats().bytes, store.stats().live_bytes + store.stats().segments as u64 * 16);
                }
                Step::Reopen(cut) => {
                    drop(store);
                    if let (Some(cut), Some(youngest)) = (cut, segments(directory.path()).pop()) {
                        let file = fs::OpenOptions::new().write(true).open(youngest).unwrap();
                        let length = file.metadata().unwrap().len();
                        file.set_len(length.saturating_sub(cut)).unwrap();
                    }
                    store = StateStore::open(directory.path(), options.clone()).unwrap();
                }
            }
            reader.refresh().unwrap();
            let stats = store.stats();
            prop_assert!(stats.bytes <= options.quota_bytes && stats.held_out_bytes <= options.held_out_quota_bytes);
            let on_disk: u64 =
                files(directory.path()).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
            prop_assert_eq!(on_disk, stats.bytes);
            prop_assert_eq!(reader.index().len(), stats.train_samples + stats.held_out_samples);
            for entry in reader.index() {
                let tokens = &put[&entry.header.request_id];
                let sample = entry.load().unwrap();
                let missing = entry.header.missing_rows;
                prop_assert_eq!(&sample.token_ids, &tokens[missing..]);
                prop_assert_eq!(sample.states, model_states(&tokens[..tokens.len() - 1])[missing * LAYERS * HIDDEN..].to_vec());
            }
        }
        let report = reader.verify().unwrap();
        prop_assert!(report.damaged.is_empty(), "{:?}", report);
    }
}
