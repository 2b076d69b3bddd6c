//! The thread that owns the WAL: takes what was handed over, appends, syncs in groups, and passes full segments on to be
//! sealed.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::error::RecordError;
use super::health::DropReason;
use super::recorder::{Counters, Item, RecorderOptions, Reply, Shared};
use super::row::Record;
use super::seal::SealJob;
use super::wal::{Begun, Frame, Join, SegmentFile};
use crate::store::Disk;

/// After a disk error the next try comes no sooner.
const SHORTEST_RETRY: Duration = Duration::from_millis(100);

/// A request id and a choice.
type Key = (String, u32);

struct Segment {
    /// Counts up; orders segments and names them in the maps.
    sequence: u64,
    file: SegmentFile,
    created: Instant,
    rows: u64,
    /// Bytes that requests carried over take; they alone are no reason to close a segment.
    carried_bytes: u64,
    /// Rows whose ids have not come.
    waiting: HashSet<Key>,
    /// When closing: until when to wait for them.
    deadline: Option<Instant>,
    /// Bytes to release from the memory bound when the pending frames are on disk.
    held: usize,
    pending_since: Option<Instant>,
    /// Not to be tried before, after an error.
    retry_at: Option<Instant>,
}

impl Segment {
    fn append(&mut self, frame: &Frame, held: usize, now: Instant) -> std::io::Result<()> {
        self.file.append(frame)?;
        self.held += held;
        self.pending_since.get_or_insert(now);
        Ok(())
    }

    fn flush_at(&self, options: &RecorderOptions) -> Option<Instant> {
        let since = self.pending_since?;
        let full = self.file.pending_bytes() >= options.flush_bytes;
        let due = if full { since } else { since + options.flush_interval };
        Some(self.retry_at.map_or(due, |retry| retry.max(due)))
    }
}

struct Writer {
    disk: Disk,
    directory: PathBuf,
    options: RecorderOptions,
    shared: Arc<Shared>,
    jobs: Sender<SealJob>,
    active: Option<Segment>,
    /// Begun while rotating, when the disk failed: with the requests that it carries. Used by the next try.
    carrying: Option<(Segment, HashSet<String>)>,
    /// Left by new rows; waiting for ids.
    closing: Vec<Segment>,
    next_sequence: u64,
    /// Requests begun and not ended.
    running: HashMap<String, Begun>,
    /// Which segment has the row that waits for these ids.
    waiting: HashMap<Key, u64>,
    /// Ids that came before their row: until when they are kept, and their bytes.
    early: HashMap<Key, (Join, Instant, usize)>,
    flush_replies: Vec<Reply>,
    /// Answered when the segments up to this one are sealed.
    seal_replies: Vec<(u64, Reply)>,
    rotation_retry_at: Option<Instant>,
    seal_asked: bool,
    stopping: bool,
}

pub(super) fn spawn(
    disk: Disk,
    directory: PathBuf,
    options: RecorderOptions,
    shared: Arc<Shared>,
    jobs: Sender<SealJob>,
) -> Result<JoinHandle<()>, RecordError> {
    let mut writer = Writer {
        disk,
        directory,
        options,
        shared,
        jobs,
        active: None,
        carrying: None,
        closing: Vec::new(),
        next_sequence: 0,
        running: HashMap::new(),
        waiting: HashMap::new(),
        early: HashMap::new(),
        flush_replies: Vec::new(),
        seal_replies: Vec::new(),
        rotation_retry_at: None,
        seal_asked: false,
        stopping: false,
    };
    std::thread::Builder::new()
        .name("record-wal".into())
        .spawn(move || writer.run())
        .map_err(|source| RecordError::Thread { name: "record-wal", source })
}

impl Writer {
    fn run(&mut self) {
        loop {
            let items = self.shared.take(self.next_deadline());
            let mut left = false;
            for handed in items {
                left |= !self.accept(handed.item, handed.held, handed.at);
            }
            let failed = self.tick(Instant::now(), left);
            if left || (self.stopping && (failed || self.closing.is_empty())) {
                return;
            }
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let mut deadlines: Vec<Option<Instant>> = Vec::new();
        for segment in self.active.iter().chain(&self.closing) {
            deadlines.push(segment.flush_at(&self.options));
            deadlines.push(
                segment.deadline.map(|deadline| segment.retry_at.map_or(deadline, |at| at.max(deadline))),
            );
        }
        if let Some(segment) = self.active.as_ref().filter(|segment| segment.rows > 0) {
            let due = segment.created + self.options.segment_age;
            deadlines.push(Some(self.rotation_retry_at.map_or(due, |retry| retry.max(due))));
        }
        deadlines.extend(self.early.values().map(|(_, until, _)| Some(*until)));
        deadlines.into_iter().flatten().min()
    }

    /// False when the recorder is to leave at once, without sealing.
    fn accept(&mut self, item: Item, held: usize, at: Instant) -> bool {
        match item {
            Item::Records(records) => self.accept_records(records, held, at),
            Item::Begin(begun) => {
                let request_id = begun.request_id.clone();
                let frame = Frame::Begin(begun);
                self.append(&frame, held, at);
                if let Frame::Begin(begun) = frame {
                    self.running.insert(request_id, begun);
                }
            }
            Item::Abandon(request_id) => {
                if self.running.remove(&request_id).is_some() {
                    self.append(&Frame::Abandon(request_id), held, at);
                }
            }
            Item::Join(join) => self.accept_join(join, held, at),
            Item::Flush(reply) => self.flush_replies.push(reply),
            Item::Seal(reply) => self.accept_seal(reply),
            Item::PassOn(job) => {
                // The sealing thread outlives this one; if it died, whoever waits sees that its answer cannot come.
                let _ = self.jobs.send(job);
            }
            Item::Stop(Some(reply)) => {
                self.stopping = true;
                self.accept_seal(reply);
            }
            Item::Stop(None) => return false,
        }
        true
    }

    fn accept_records(&mut self, mut records: Vec<Record>, held: usize, at: Instant) {
        let mut awaited = Vec::new();
        for record in &mut records {
            self.running.remove(&record.request_id);
            let key = (record.request_id.clone(), record.choice_index);
            // A row that says what became of its states wants no ids: they would give away what was taken out of it.
            if record.states_status.is_some() {
                continue;
            }
            if let Some((join, _, early_held)) = self.early.remove(&key) {
                join.apply(record);
                self.shared.release(early_held);
                self.shared.counters.joined.fetch_add(1, Relaxed);
                continue;
            }
            if self.options.expect_join && record.status.engine_ran() {
                awaited.push(key);
            }
        }
        let rows = records.len() as u64;
        let statuses: Vec<&'static str> = records.iter().map(|record| record.status.as_str()).collect();
        if !self.append(&Frame::Records(records), held, at) {
            self.shared.counters.dropped(rows, DropReason::Unencodable);
            return;
        }
        self.shared.counters.rows.fetch_add(rows, Relaxed);
        for status in statuses {
            metrics::counter!("draftsmith_record_rows_total", "status" => status).increment(1);
        }
        let Some(segment) = self.active.as_mut() else { return };
        segment.rows += rows;
        for key in awaited {
            segment.waiting.insert(key.clone());
            self.waiting.insert(key, segment.sequence);
        }
    }

    fn accept_join(&mut self, join: Join, held: usize, at: Instant) {
        let key = (join.request_id.clone(), join.choice_index);
        let Some(sequence) = self.waiting.remove(&key) else {
            let until = at + self.options.join_timeout;
            if let Some((_, _, replaced)) = self.early.insert(key, (join, until, held)) {
                self.shared.release(replaced);
            }
            return;
        };
        // Beside its row, so that a segment can be sealed from its own bytes.
        let mut segments = self.active.iter_mut().chain(&mut self.closing);
        let Some(segment) = segments.find(|segment| segment.sequence == sequence) else {
            self.shared.release(held);
            return;
        };
        segment.waiting.remove(&key);
        if let Err(error) = segment.append(&Frame::Join(join), held, at) {
            tracing::warn!(%error, "token ids cannot be written");
            self.shared.release(held);
            return;
        }
        self.shared.counters.joined.fetch_add(1, Relaxed);
    }

    fn accept_seal(&mut self, reply: Reply) {
        self.seal_asked = true;
        self.seal_replies.push((self.next_sequence, reply));
    }

    /// Appends to the active segment. False, with the bytes released, when the frame cannot be encoded.
    fn append(&mut self, frame: &Frame, held: usize, now: Instant) -> bool {
        if self.active.is_none() {
            self.active = Some(self.new_segment(now));
        }
        let Some(segment) = self.active.as_mut() else { return false };
        if let Err(error) = segment.append(frame, held, now) {
            tracing::warn!(%error, "a request cannot be recorded");
            self.shared.release(held);
            return false;
        }
        true
    }

    fn new_segment(&mut self, now: Instant) -> Segment {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        Segment {
            sequence,
            file: SegmentFile::new(&self.disk, &self.directory, &self.options.writer),
            created: now,
            rows: 0,
            carried_bytes: 0,
            waiting: HashSet::new(),
            deadline: None,
            held: 0,
            pending_since: None,
            retry_at: None,
        }
    }

    /// Does what is due. `leaving`: make all durable now. Tells whether the disk failed.
    fn tick(&mut self, now: Instant, leaving: bool) -> bool {
        let mut failed = false;
        let asked = leaving || self.stopping || !self.flush_replies.is_empty();
        for segment in self.active.iter_mut().chain(&mut self.closing) {
            if asked || segment.flush_at(&self.options).is_some_and(|due| due <= now) {
                failed |= !flush(segment, &self.shared, &self.options, now);
            }
        }
        for reply in self.flush_replies.drain(..) {
            let _ = reply.send(outcome(failed));
        }
        if leaving {
            return failed;
        }
        if self.rotation_due(now) {
            failed |= !self.rotate(now);
        }
        failed |= !self.pass_on(now);
        self.answer_seals(failed);
        self.forget_early(now);
        metrics::gauge!("draftsmith_record_held_bytes").set(self.shared.counters.held.load(Relaxed) as f64);
        failed
    }

    fn rotation_due(&mut self, now: Instant) -> bool {
        let asked = std::mem::take(&mut self.seal_asked);
        let Some(segment) = &self.active else { return false };
        if self.stopping || (asked && segment.rows > 0) {
            return true;
        }
        if self.rotation_retry_at.is_some_and(|retry| now < retry) {
            return false;
        }
        let full = segment.file.bytes() - segment.carried_bytes >= self.options.segment_bytes;
        full || (segment.rows > 0 && now >= segment.created + self.options.segment_age)
    }

    /// Closes the active segment. Requests still running are begun again in the next one, on disk, before this one is
    /// marked as left: at no moment does a crash lose or double them. False when the disk failed; then nothing changed.
    fn rotate(&mut self, now: Instant) -> bool {
        let mut next = None;
        if self.stopping && !self.drop_carrying(now) {
            return false;
        }
        if (!self.running.is_empty() || self.carrying.is_some()) && !self.stopping {
            let (mut segment, mut carried) = match self.carrying.take() {
                Some(before) => before,
                None => (self.new_segment(now), HashSet::new()),
            };
            self.carry_into(&mut segment, &mut carried, now);
            segment.carried_bytes = segment.file.bytes();
            if !flush(&mut segment, &self.shared, &self.options, now) {
                // Kept, and not begun anew: part of it may be on the disk, and a disk that fails need not let go of it.
                self.carrying = Some((segment, carried));
                self.rotation_retry_at = Some(now + self.options.flush_interval.max(SHORTEST_RETRY));
                return false;
            }
            next = Some(segment);
        }
        self.rotation_retry_at = None;
        let Some(mut left) = self.active.take() else { return true };
        if next.is_some()
            && let Err(error) = left.append(&Frame::Carried, 0, now)
        {
            tracing::warn!(%error, "a WAL segment cannot be marked as left");
        }
        left.deadline = Some(now + self.options.join_timeout);
        self.closing.push(left);
        self.active = next;
        true
    }

    /// Nothing is carried any more: the requests that still run are the active segment's. False when the disk failed.
    fn drop_carrying(&mut self, now: Instant) -> bool {
        let Some((mut segment, mut carried)) = self.carrying.take() else { return true };
        for request_id in carried.drain() {
            if let Err(error) = segment.append(&Frame::Abandon(request_id), 0, now) {
                tracing::warn!(%error, "a running request cannot be recorded");
            }
        }
        let flushed = flush(&mut segment, &self.shared, &self.options, now);
        segment.deadline = Some(now);
        self.closing.push(segment);
        flushed
    }

    /// Makes the segment carry exactly the requests that run now.
    fn carry_into(&self, segment: &mut Segment, carried: &mut HashSet<String>, now: Instant) {
        let mut frames = Vec::new();
        for ended in carried.extract_if(|request_id| !self.running.contains_key(request_id)) {
            frames.push(Frame::Abandon(ended));
        }
        for (request_id, begun) in &self.running {
            if carried.insert(request_id.clone()) {
                frames.push(Frame::Begin(begun.clone()));
            }
        }
        for frame in frames {
            if let Err(error) = segment.append(&frame, 0, now) {
                tracing::warn!(%error, "a running request cannot be recorded");
            }
        }
    }

    /// Hands segments that wait for nothing more to the sealing thread. False when the disk failed.
    fn pass_on(&mut self, now: Instant) -> bool {
        let mut good = true;
        let mut kept = Vec::new();
        for mut segment in std::mem::take(&mut self.closing) {
            // Nothing is taken any more when stopping, ids neither.
            let in_time = !self.stopping && segment.deadline.is_some_and(|deadline| now < deadline);
            let waits = in_time && !segment.waiting.is_empty();
            let retry_later = segment.retry_at.is_some_and(|retry| now < retry) && !self.stopping;
            if waits || retry_later || !flush(&mut segment, &self.shared, &self.options, now) {
                good &= waits || retry_later;
                kept.push(segment);
                continue;
            }
            let late = segment.waiting.len() as u64;
            for key in &segment.waiting {
                self.waiting.remove(key);
            }
            self.shared.counters.join_timeouts.fetch_add(late, Relaxed);
            metrics::counter!("draftsmith_record_join_timeouts_total").increment(late);
            // The sealing thread ends after this one; if it died, the next start seals the segment.
            self.shared.counters.waiting_segments.fetch_add(1, Relaxed);
            let asked = self.stopping || !self.seal_replies.is_empty();
            let _ = self.jobs.send(SealJob::Segment { path: segment.file.path().to_path_buf(), asked });
        }
        self.closing = kept;
        good
    }

    fn answer_seals(&mut self, failed: bool) {
        let active = self.active.as_ref().filter(|segment| segment.rows > 0);
        let oldest = self.closing.iter().chain(active).map(|segment| segment.sequence).min();
        let mut kept = Vec::new();
        for (before, reply) in std::mem::take(&mut self.seal_replies) {
            if failed {
                let _ = reply.send(outcome(true));
            } else if oldest.is_some_and(|sequence| sequence < before) {
                kept.push((before, reply));
            } else {
                let _ = self.jobs.send(SealJob::Barrier(reply));
            }
        }
        self.seal_replies = kept;
    }

    fn forget_early(&mut self, now: Instant) {
        let Writer { early, shared, stopping, .. } = self;
        early.retain(|_, (_, until, held)| {
            if *until > now && !*stopping {
                return true;
            }
            shared.release(*held);
            shared.counters.unmatched_joins.fetch_add(1, Relaxed);
            metrics::counter!("draftsmith_record_unmatched_joins_total").increment(1);
            false
        });
    }
}

fn outcome(failed: bool) -> Result<(), RecordError> {
    if failed { Err(RecordError::Unwritten("the last write failed, see the log".into())) } else { Ok(()) }
}

/// False when the disk failed; the frames stay pending.
fn flush(segment: &mut Segment, shared: &Shared, options: &RecorderOptions, now: Instant) -> bool {
    if segment.pending_since.is_none() {
        return true;
    }
    let started = Instant::now();
    shared.counters.wal.begins();
    let flushed = segment.file.flush();
    shared.counters.wal.ended(flushed.as_ref().map(|_| ()).map_err(ToString::to_string));
    if let Err(error) = flushed {
        shared.counters.disk_error("wal", &error);
        segment.retry_at = Some(now + options.flush_interval.max(SHORTEST_RETRY));
        return false;
    }
    note_flush(&shared.counters, started.elapsed());
    segment.retry_at = None;
    segment.pending_since = None;
    shared.release(std::mem::take(&mut segment.held));
    true
}

fn note_flush(counters: &Counters, took: Duration) {
    counters.flushes.fetch_add(1, Relaxed);
    counters.longest_flush_micros.fetch_max(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
    metrics::histogram!("draftsmith_record_flush_seconds").record(took.as_secs_f64());
}
