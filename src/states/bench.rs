//! Measures the way of states onto the disk and back, each on one core: a file as vLLM's plugin publishes it is read,
//! verified and stored, and samples are read into a batch from the page cache.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::Serialize;

use super::accept::{Expected, OutcomeStatus, SampleKey, check_and_store};
use super::transfer::{self, EXTENSION, FORMAT, TransferFile};
use super::{Reader, StateStore, StatesError, StoreOptions};
use crate::config::StateEncoding;

/// What is stored and read back.
#[derive(Clone, Copy, Debug)]
pub struct BenchOptions {
    /// H
    pub hidden: usize,
    /// T of each sample.
    pub rows: usize,
    pub samples: usize,
    /// Each is read so often.
    pub rounds: usize,
    pub encoding: StateEncoding,
}

/// One encoding's figures.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    pub encoding: StateEncoding,
    /// Of a token in vLLM's file, and in the store.
    pub received_row_bytes: u64,
    pub stored_row_bytes: f64,
    /// Reading a file, verifying and storing it, one after the other.
    pub write_tokens_per_second: f64,
    pub write_received_bytes_per_second: f64,
    /// Shares of the time that this took.
    pub read_file: f64,
    pub checksum: f64,
    pub check_and_store: f64,
    /// Out of the page cache into a batch of f32.
    pub read_tokens_per_second: f64,
    pub read_stored_bytes_per_second: f64,
}

/// Stores samples in `directory`, which is made and deleted, and reads them back.
pub fn measure(directory: &Path, options: &BenchOptions) -> Result<BenchReport, StatesError> {
    let failed = |error| StatesError::io("cannot make", directory, error);
    fs::create_dir(directory).map_err(failed)?;
    let report = measure_in(directory, options);
    fs::remove_dir_all(directory).map_err(|error| StatesError::io("cannot delete", directory, error))?;
    report
}

const LAYERS: usize = 4;

fn measure_in(directory: &Path, options: &BenchOptions) -> Result<BenchReport, StatesError> {
    let row_bytes = LAYERS * options.hidden * 2;
    let sample_bytes = (row_bytes * options.rows) as u64;
    let quota_bytes = 4 * sample_bytes * options.samples as u64 + (1 << 20);
    let store_options = StoreOptions {
        quota_bytes,
        held_out_quota_bytes: quota_bytes / 4,
        encoding: options.encoding,
        ..StoreOptions::default()
    };
    let store_directory = directory.join("states");
    let mut store = StateStore::open(&store_directory, store_options)?;
    let mut expected = Expected::default();
    let path = directory.join(format!("chatcmpl-bench-00000000{EXTENSION}"));
    let mut times = WriteTimes::default();
    for number in 0..options.samples {
        fs::write(&path, published(options, number))
            .map_err(|error| StatesError::io("cannot write", &path, error))?;
        times.add(&mut store, &mut expected, &path, number)?;
    }
    let written = times.read_file + times.checksum + times.store;
    let tokens = (options.rows * options.samples) as f64;

    let reader = Reader::open(&store_directory)?;
    let stored_bytes = reader.stats()?.bytes as f64;
    let mut batch = vec![0.0; options.rows * LAYERS * options.hidden];
    // The first look maps the segments and brings the batch into memory.
    for entry in reader.index() {
        entry.load_states(&mut batch)?;
    }
    let began = Instant::now();
    for _ in 0..options.rounds {
        for entry in reader.index() {
            entry.load_states(&mut batch)?;
            std::hint::black_box(&batch);
        }
    }
    let read = began.elapsed().as_secs_f64() / options.rounds as f64;
    let share = |part: Duration| part.as_secs_f64() / written.as_secs_f64();
    Ok(BenchReport {
        encoding: options.encoding,
        received_row_bytes: row_bytes as u64,
        stored_row_bytes: stored_bytes / tokens,
        write_tokens_per_second: tokens / written.as_secs_f64(),
        write_received_bytes_per_second: tokens * row_bytes as f64 / written.as_secs_f64(),
        read_file: share(times.read_file),
        checksum: share(times.checksum),
        check_and_store: share(times.store),
        read_tokens_per_second: tokens / read,
        read_stored_bytes_per_second: stored_bytes / read,
    })
}

#[derive(Default)]
struct WriteTimes {
    read_file: Duration,
    checksum: Duration,
    store: Duration,
}

impl WriteTimes {
    fn add(
        &mut self,
        store: &mut StateStore,
        expected: &mut Expected,
        path: &Path,
        number: usize,
    ) -> Result<(), StatesError> {
        let unusable = |reason: String| StatesError::Shape { request_id: number.to_string(), reason };
        let began = Instant::now();
        let bytes = transfer::read_plain_file(path, u64::MAX).map_err(|error| unusable(error.to_string()))?;
        let read = Instant::now();
        let file: TransferFile = transfer::parse(bytes).map_err(|error| unusable(error.to_string()))?;
        let parsed = Instant::now();
        let request_id = number.to_string();
        let key = SampleKey {
            request_id: &request_id,
            choice_index: 0,
            conversation_id: &request_id,
            source: "replay",
            held_out: false,
        };
        let status = check_and_store(store, expected, key, &file).status;
        drop(file);
        self.read_file += read - began;
        self.checksum += parsed - read;
        self.store += parsed.elapsed();
        if status == OutcomeStatus::Stored { Ok(()) } else { Err(unusable(status.as_str().to_owned())) }
    }
}

/// A file as the plugin writes it, other tokens in each.
fn published(options: &BenchOptions, number: usize) -> Vec<u8> {
    let count = options.rows * LAYERS * options.hidden;
    let mut state = number as u64 + 1;
    let mut states = Vec::with_capacity(2 * count);
    for _ in 0..count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let value = bf16::from_f32((state >> 40) as f32 / f32::from(1_u16 << 15) / 256.0 - 1.0);
        states.extend_from_slice(&value.to_le_bytes());
    }
    let ids: Vec<u8> =
        (0..=options.rows).flat_map(|token| ((token * (number + 3)) as i64 % 30_000).to_le_bytes()).collect();
    let metadata = HashMap::from(
        [
            ("format", FORMAT.to_owned()),
            ("request_id", "chatcmpl-bench-00000000".to_owned()),
            ("layer_ids", "[2,15,28,32]".to_owned()),
            ("prompt_tokens", (options.rows / 2).to_string()),
            ("first_row", "0".to_owned()),
            ("prefix_salt", String::new()),
            ("sha256", transfer::checksum(&states, &ids)),
        ]
        .map(|(name, value)| (name.to_owned(), value)),
    );
    let shape = vec![options.rows, LAYERS, options.hidden];
    let tensors = [
        ("hidden_states", TensorView::new(Dtype::BF16, shape, &states)),
        ("token_ids", TensorView::new(Dtype::I64, vec![options.rows + 1], &ids)),
    ];
    let views = tensors.into_iter().filter_map(|(name, view)| Some((name, view.ok()?)));
    safetensors::serialize(views, Some(metadata)).unwrap_or_default()
}
