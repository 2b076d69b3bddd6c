//! The door for the proxy: hand over and go on.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::edit::{Compacted, Forgotten, Selection};
use super::error::RecordError;
use super::health::{DropReason, Health, Watch};
use super::mirror::Mirror;
use super::row::Record;
use super::seal::{self, SealJob, SealReport};
use super::wal::{self, Begun, Join, Stop};
use super::writer;
use crate::handoff::Handoff;
use crate::store::{DataDir, Disk};

/// The writer lets so much time pass for more rows to come, and no more than a quarter of the flush interval.
const MOST_LINGER: Duration = Duration::from_millis(10);

#[derive(Clone, Debug, PartialEq)]
pub struct RecorderOptions {
    /// Bytes of rows held in memory until they are on disk; more is dropped and counted.
    pub memory_bytes: usize,
    /// How long a row may wait in memory before the next sync; zero syncs whatever is there at once.
    pub flush_interval: Duration,
    /// A sync happens earlier when this many bytes wait.
    pub flush_bytes: usize,
    /// A WAL segment is sealed at this size
    pub segment_bytes: u64,
    /// or at this age.
    pub segment_age: Duration,
    /// Whether the token ids of rows come through [`RecorderHandle::join`].
    pub expect_join: bool,
    /// How long sealing waits for them after the segment is closed, and how long ids wait for their row.
    pub join_timeout: Duration,
    /// In the file names, to tell the writers of one bucket apart. Letters, digits, `.`, `_`; the rest becomes `_`.
    pub writer: String,
    /// Small Parquet files of an hour are merged so long after its end; None: never.
    pub merge_after: Option<Duration>,
    /// The URL of an object store that gets copies of the sealed files.
    pub object_store: Option<String>,
}

impl Default for RecorderOptions {
    fn default() -> Self {
        Self {
            memory_bytes: 64 << 20,
            flush_interval: Duration::from_millis(200),
            flush_bytes: 1 << 20,
            segment_bytes: 16 << 20,
            segment_age: Duration::from_secs(60),
            expect_join: false,
            join_timeout: Duration::from_secs(10),
            writer: "draftsmith".into(),
            merge_after: Some(Duration::from_secs(3600)),
            object_store: None,
        }
    }
}

/// What has happened since the start.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct RecorderStats {
    /// Rows taken.
    pub rows: u64,
    /// Rows dropped, all reasons together.
    pub dropped_rows: u64,
    /// The same by [`DropReason`]; only those that occurred.
    pub dropped_rows_by_reason: BTreeMap<&'static str, u64>,
    /// Starts and joins dropped for the same reasons.
    pub dropped_other: u64,
    pub flushes: u64,
    pub longest_flush_micros: u64,
    /// Failed writes, syncs and seals; each is tried again.
    pub disk_errors: u64,
    pub sealed_rows: u64,
    pub sealed_files: u64,
    /// Files copied to the object store.
    pub copied_files: u64,
    /// Requests found begun and not ended: `proxy_restart`.
    pub restarted_rows: u64,
    pub torn_segments: u64,
    pub damaged_segments: u64,
    pub joined: u64,
    /// Rows sealed without the ids that they waited for.
    pub join_timeouts: u64,
    /// Ids for which no row came.
    pub unmatched_joins: u64,
    /// Bytes in memory now.
    pub held_bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub rows: AtomicU64,
    /// In the order of [`DropReason::ALL`].
    dropped_rows: [AtomicU64; DropReason::ALL.len()],
    pub dropped_other: AtomicU64,
    pub flushes: AtomicU64,
    pub longest_flush_micros: AtomicU64,
    pub disk_errors: AtomicU64,
    pub sealed_rows: AtomicU64,
    pub sealed_files: AtomicU64,
    copied_files: AtomicU64,
    pub restarted_rows: AtomicU64,
    pub torn_segments: AtomicU64,
    pub damaged_segments: AtomicU64,
    pub joined: AtomicU64,
    pub join_timeouts: AtomicU64,
    pub unmatched_joins: AtomicU64,
    /// Bytes of what was handed over and is not on disk yet.
    pub held: AtomicUsize,
    /// Segments on their way to the sealing thread.
    pub waiting_segments: AtomicUsize,
    /// How appending to the WAL goes.
    pub wal: Watch,
    /// How sealing goes.
    pub sealing: Watch,
    /// How copying to the object store goes.
    pub object_store: Watch,
}

impl Counters {
    pub fn dropped(&self, rows: u64, reason: DropReason) {
        self.dropped_rows[reason as usize].fetch_add(rows, Relaxed);
        metrics::counter!("draftsmith_record_dropped_total", "what" => "rows", "reason" => reason.as_str())
            .increment(rows);
    }

    pub fn dropped_other(&self, what: &'static str, reason: DropReason) {
        self.dropped_other.fetch_add(1, Relaxed);
        metrics::counter!("draftsmith_record_dropped_total", "what" => what, "reason" => reason.as_str())
            .increment(1);
    }

    pub fn disk_error(&self, action: &'static str, error: &RecordError) {
        tracing::warn!(%error, "recording: will try again");
        self.disk_errors.fetch_add(1, Relaxed);
        metrics::counter!("draftsmith_record_disk_errors_total", "action" => action).increment(1);
    }

    pub fn sealed(&self, report: &SealReport, path: &Path) {
        self.sealed_rows.fetch_add(report.rows, Relaxed);
        self.sealed_files.fetch_add(report.files, Relaxed);
        self.restarted_rows.fetch_add(report.restarted, Relaxed);
        metrics::counter!("draftsmith_record_sealed_rows_total").increment(report.rows);
        metrics::counter!("draftsmith_record_sealed_files_total").increment(report.files);
        metrics::counter!("draftsmith_record_restarted_rows_total").increment(report.restarted);
        match report.stop {
            None => {}
            Some(Stop::Torn { at }) => {
                tracing::warn!(path = %path.display(), at, "a WAL segment was cut by a crash; kept what was whole");
                self.torn_segments.fetch_add(1, Relaxed);
                metrics::counter!("draftsmith_record_torn_segments_total").increment(1);
            }
            Some(Stop::Damaged { at }) => {
                tracing::error!(path = %path.display(), at, "a WAL segment is damaged; kept beside the others as .damaged");
                self.damaged_segments.fetch_add(1, Relaxed);
                metrics::counter!("draftsmith_record_damaged_segments_total").increment(1);
            }
        }
    }

    pub fn copied(&self) {
        self.copied_files.fetch_add(1, Relaxed);
    }

    pub fn snapshot(&self) -> RecorderStats {
        let mut dropped_rows_by_reason = BTreeMap::new();
        for (reason, count) in DropReason::ALL.iter().zip(&self.dropped_rows) {
            let rows = count.load(Relaxed);
            if rows > 0 {
                dropped_rows_by_reason.insert(reason.as_str(), rows);
            }
        }
        RecorderStats {
            rows: self.rows.load(Relaxed),
            dropped_rows: dropped_rows_by_reason.values().sum(),
            dropped_rows_by_reason,
            dropped_other: self.dropped_other.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            longest_flush_micros: self.longest_flush_micros.load(Relaxed),
            disk_errors: self.disk_errors.load(Relaxed),
            sealed_rows: self.sealed_rows.load(Relaxed),
            sealed_files: self.sealed_files.load(Relaxed),
            copied_files: self.copied_files.load(Relaxed),
            restarted_rows: self.restarted_rows.load(Relaxed),
            torn_segments: self.torn_segments.load(Relaxed),
            damaged_segments: self.damaged_segments.load(Relaxed),
            joined: self.joined.load(Relaxed),
            join_timeouts: self.join_timeouts.load(Relaxed),
            unmatched_joins: self.unmatched_joins.load(Relaxed),
            held_bytes: self.held.load(Relaxed) as u64,
        }
    }
}

pub(super) type Reply = Sender<Result<(), RecordError>>;

pub(super) enum Item {
    Records(Vec<Record>),
    Begin(Begun),
    Abandon(String),
    Join(Join),
    Flush(Reply),
    Seal(Reply),
    /// For the sealing thread, in turn with the segments.
    PassOn(SealJob),
    /// With a reply: seal everything first. Without: make durable and leave the rest to the next start.
    Stop(Option<Reply>),
}

/// What was handed over.
pub(super) struct Handed {
    pub item: Item,
    /// The bytes that it counts for.
    pub held: usize,
    /// The flush interval runs from here, even if the writer is busy with an earlier flush.
    pub at: Instant,
}

pub(super) struct Shared {
    queue: Handoff<Handed>,
    /// Requests whose start was taken and whose end was not. Only these have anything to abandon, so that a stalled
    /// disk cannot pile up the ends of requests that were never taken.
    begun: Mutex<HashSet<String>>,
    memory_bytes: usize,
    pub counters: Arc<Counters>,
    /// Held until the last thread is done.
    _lock: File,
}

impl Shared {
    fn begun(&self) -> MutexGuard<'_, HashSet<String>> {
        // A poisoned set is still a set: nothing is done under the lock but insert and remove.
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for items until the deadline.
    pub fn take(&self, deadline: Option<Instant>) -> VecDeque<Handed> {
        self.queue.take(deadline)
    }

    /// Takes the item, or says why not. Its bytes count until `release`.
    fn offer(&self, item: Item, bytes: usize) -> Result<(), DropReason> {
        let fits = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= self.memory_bytes);
        if self.counters.held.fetch_update(Relaxed, Relaxed, fits).is_err() {
            return Err(self.counters.wal.reason_for_full());
        }
        match &item {
            Item::Begin(begun) => {
                self.begun().insert(begun.request_id.clone());
            }
            Item::Records(records) => {
                let mut begun = self.begun();
                for record in records {
                    begun.remove(&record.request_id);
                }
            }
            _ => {}
        }
        if self.queue.push(Handed { item, held: bytes, at: Instant::now() }).is_err() {
            self.release(bytes);
            return Err(DropReason::Stopped);
        }
        Ok(())
    }

    fn abandon(&self, request_id: String) {
        if !self.begun().remove(&request_id) {
            return;
        }
        // An error means that all has stopped: then nothing is to be told any more.
        let _ = self.queue.push(Handed { item: Item::Abandon(request_id), held: 0, at: Instant::now() });
    }

    /// For what is not counted: questions. Whoever asks waits.
    fn push(&self, item: Item) -> bool {
        let last = matches!(item, Item::Stop(_));
        let handed = Handed { item, held: 0, at: Instant::now() };
        if last { self.queue.close(handed).is_ok() } else { self.queue.push_urgent(handed).is_ok() }
    }

    pub fn release(&self, bytes: usize) {
        self.counters.held.fetch_sub(bytes, Relaxed);
    }
}

/// Starts recorders.
pub struct Recorder;

impl Recorder {
    /// Starts the recorder's threads and seals what an earlier process left, without waiting for it.
    ///
    /// Fails when the directory cannot be made or another process records into it.
    pub fn start(data: &DataDir, options: RecorderOptions) -> Result<RecorderHandle, RecordError> {
        Self::start_on(Disk::default(), data, options)
    }

    /// As [`start`](Self::start), on a disk that may have faults.
    pub fn start_on(
        disk: Disk,
        data: &DataDir,
        mut options: RecorderOptions,
    ) -> Result<RecorderHandle, RecordError> {
        let plain =
            |letter: char| if letter.is_ascii_alphanumeric() || "._".contains(letter) { letter } else { '_' };
        options.writer = options.writer.chars().take(100).map(plain).collect();
        data.create().map_err(RecordError::disk("create", data.root()))?;
        let lock = lock(&data.wal().join(".lock"))?;
        seal::remove_temporaries(&data.wal())?;
        let left_over = wal::segments(&data.wal())?;

        let counters = Arc::new(Counters::default());
        let shared = Arc::new(Shared {
            queue: Handoff::new(options.flush_interval.min(MOST_LINGER * 4) / 4),
            begun: Mutex::default(),
            memory_bytes: options.memory_bytes,
            counters: Arc::clone(&counters),
            _lock: lock,
        });
        let (jobs, received) = channel();
        // The receiver is right here.
        let _ = jobs.send(SealJob::Recover(left_over));
        let compaction = seal::Compaction { age: options.merge_after, writer: options.writer.clone() };
        let (mirror, copier) = match &options.object_store {
            Some(url) => {
                let (mirror, copier) = Mirror::start(url, data.clone(), Arc::clone(&counters))?;
                (Some(mirror), Some(copier))
            }
            None => (None, None),
        };
        let mirrored = mirror.is_some();
        let sealer = seal::spawn(disk.clone(), data.clone(), received, counters, compaction, mirror)?;
        let writer = writer::spawn(disk, data.wal(), options, Arc::clone(&shared), jobs)?;
        let mut threads = vec![writer, sealer];
        threads.extend(copier);
        Ok(RecorderHandle { inner: Arc::new(Inner { shared, threads: Mutex::new(threads), mirrored }) })
    }
}

fn lock(path: &Path) -> Result<File, RecordError> {
    let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = opened.map_err(RecordError::disk("create", path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(RecordError::Locked { path: path.to_path_buf() }),
        Err(TryLockError::Error(source)) => Err(RecordError::disk("lock", path)(source)),
    }
}

struct Inner {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// There is an object store.
    mirrored: bool,
}

impl Inner {
    fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a recorder thread panicked; what it had synced is sealed at the next start");
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.push(Item::Stop(None));
        self.join();
    }
}

/// Hands rows to the recorder; clone it freely. When the last one is dropped without [`shutdown`](Self::shutdown), rows
/// are made durable and sealed at the next start.
#[derive(Clone)]
pub struct RecorderHandle {
    inner: Arc<Inner>,
}

impl RecorderHandle {
    /// A request starts. If the process dies before it ends, this becomes its row, with status `proxy_restart`.
    /// `started_at` is in microseconds since the Unix epoch. Never waits.
    pub fn begin(&self, request_id: &str, endpoint: &str, started_at: i64) {
        let begun = Begun::new(request_id, endpoint, started_at);
        let bytes = begun.approximate_bytes();
        if let Err(reason) = self.inner.shared.offer(Item::Begin(begun), bytes) {
            self.inner.shared.counters.dropped_other("begin", reason);
        }
    }

    /// A request has ended: its rows, one per choice. They are kept together or lost together. Never waits.
    pub fn record(&self, records: Vec<Record>) {
        if records.is_empty() {
            return;
        }
        let rows = records.len() as u64;
        let bytes = records.iter().map(Record::approximate_bytes).sum();
        let mut request_ids: Vec<String> = records.iter().map(|record| record.request_id.clone()).collect();
        let Err(reason) = self.inner.shared.offer(Item::Records(records), bytes) else { return };
        self.inner.shared.counters.dropped(rows, reason);
        // Or each would come back as `proxy_restart`, which it was not.
        request_ids.dedup();
        for request_id in request_ids {
            self.abandon(request_id);
        }
    }

    /// A request that had begun will not be recorded (sampled out, opted out). Never waits.
    pub fn abandon(&self, request_id: impl Into<String>) {
        self.inner.shared.abandon(request_id.into());
    }

    /// The token ids that the engine saw for one choice, what it drafted, and what became of its states. May come a
    /// little before its row. Never waits.
    pub fn join(&self, join: Join) {
        let bytes = join.approximate_bytes();
        if let Err(reason) = self.inner.shared.offer(Item::Join(join), bytes) {
            self.inner.shared.counters.dropped_other("join", reason);
        }
    }

    /// Waits until all that was handed over is on disk. Blocks the thread: not for async code.
    pub fn flush(&self) -> Result<(), RecordError> {
        self.ask(Item::Flush)
    }

    /// Waits until all rows handed over are in `records/`, with the ids that come in time. Blocks the thread.
    pub fn seal(&self) -> Result<(), RecordError> {
        self.ask(Item::Seal)
    }

    /// Seals what there is, then removes the selected rows. Blocks the thread.
    pub fn forget(&self, selection: Selection) -> Result<Forgotten, RecordError> {
        self.seal()?;
        self.ask(|reply| Item::PassOn(SealJob::Forget(selection, reply)))
    }

    /// Merges the small files of all hours that are over. Blocks the thread.
    pub fn compact(&self) -> Result<Compacted, RecordError> {
        self.ask(|reply| Item::PassOn(SealJob::Compact(reply)))
    }

    /// Waits until the object store, if there is one, has what is sealed, and nothing that was removed here, or until that
    /// failed. Gives the number of objects that stay though an operator has removed their files. Blocks the thread.
    pub fn settle_object_store(&self) -> Result<usize, RecordError> {
        self.ask(|reply| Item::PassOn(SealJob::SettleObjectStore(reply)))
    }

    /// Seals everything and stops; requests still running become `proxy_restart` rows. Blocks the thread, for up to the
    /// join timeout and the sealing itself. What other handles record afterwards is dropped and counted.
    pub fn shutdown(&self) -> Result<(), RecordError> {
        // Sealed first while ids can still come; what is recorded meanwhile is sealed by the stop.
        if let Err(error) = self.seal() {
            tracing::warn!(%error, "not all rows were sealed; trying once more before the stop");
        }
        let outcome = self.ask(|reply| Item::Stop(Some(reply)));
        self.inner.join();
        outcome
    }

    /// How appending to the WAL goes, and how sealing does; both also become gauges.
    pub fn health(&self) -> (Health, Health) {
        let counters = &self.inner.shared.counters;
        let (wal, sealing) = (counters.wal.health(), counters.sealing.health());
        metrics::gauge!("draftsmith_record_disk_state", "part" => "wal").set(f64::from(wal.code()));
        metrics::gauge!("draftsmith_record_disk_state", "part" => "sealing").set(f64::from(sealing.code()));
        (wal, sealing)
    }

    /// How copying to the object store goes, as [`health`](Self::health) tells the rest; None where there is none.
    pub fn object_store_health(&self) -> Option<Health> {
        if !self.inner.mirrored {
            return None;
        }
        let health = self.inner.shared.counters.object_store.health();
        metrics::gauge!("draftsmith_record_disk_state", "part" => "object_store")
            .set(f64::from(health.code()));
        Some(health)
    }

    pub fn stats(&self) -> RecorderStats {
        self.inner.shared.counters.snapshot()
    }

    fn ask<T>(&self, item: impl FnOnce(Sender<Result<T, RecordError>>) -> Item) -> Result<T, RecordError> {
        let (reply, answer) = channel();
        if !self.inner.shared.push(item(reply)) {
            return Err(RecordError::Stopped);
        }
        answer.recv().unwrap_or(Err(RecordError::Stopped))
    }
}
