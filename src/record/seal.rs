//! Sealing: a WAL segment becomes Parquet files, one per hour that its rows started in, and is deleted.
//!
//! The files are named after the segment and hold a function of its bytes alone, so a process that was killed anywhere
//! in between does the same again over the same names: no row is lost and none is there twice.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;

use super::aside::{aside, be_nice, give_way};
use super::columns::{SCHEMA_VERSION, SCHEMA_VERSION_KEY, schema, to_batch};
use super::edit::{self, Compacted, Compactor, Forgotten, Removes, Selection};
use super::error::RecordError;
use super::mirror::{self, Mirror, Settled};
use super::recorder::Counters;
use super::row::Record;
use super::wal::{self, Begun, Frame, Join, Stop};
use crate::store::{DataDir, Disk};

/// A row group ends at the first of these.
const ROW_GROUP_ROWS: usize = 8192;
const ROW_GROUP_BYTES: usize = 16 << 20;
const RETRY: Duration = Duration::from_secs(5);
const TEMPORARY: &str = "tmp";
/// With more segments than this waiting, sealing takes its share of the processor's time like any other thread.
const MOST_WAITING: usize = 4;

/// Long texts: their smallest and largest value help no reader.
const TEXT_COLUMNS: [&str; 11] = [
    "prompt",
    "tools_json",
    "params_json",
    "reasoning",
    "content",
    "tool_calls_json",
    "refusal",
    "logprobs_json",
    "redaction",
    "raw_request",
    "raw_response",
];

pub(super) enum SealJob {
    /// What an earlier process left, oldest first.
    Recover(Vec<PathBuf>),
    Segment {
        path: PathBuf,
        /// Someone waits for it.
        asked: bool,
    },
    /// Answered when everything before it was tried.
    Barrier(Sender<Result<(), RecordError>>),
    Forget(Selection, Sender<Result<Forgotten, RecordError>>),
    Compact(Sender<Result<Compacted, RecordError>>),
    /// Answered when the object store has what was done before it.
    SettleObjectStore(Sender<Settled>),
}

/// How often the sealing thread looks for small files when it has nothing else to do.
const LOOK_FOR_SMALL_FILES: Duration = Duration::from_secs(300);

/// When small files of an hour are merged.
#[derive(Clone, Debug)]
pub(super) struct Compaction {
    /// After the hour's end; None: only when asked.
    pub age: Option<Duration>,
    /// The end of the merged files' names.
    pub writer: String,
}

/// What sealing one segment did.
#[derive(Debug, Default, PartialEq)]
pub(super) struct SealReport {
    pub rows: u64,
    pub files: u64,
    /// Rows of requests that had begun and never ended.
    pub restarted: u64,
    pub stop: Option<Stop>,
}

struct Pending {
    path: PathBuf,
    recovered: bool,
    /// Requests that another segment answers for.
    elsewhere: HashSet<String>,
}

/// The sealing thread. Ends when the last sender is gone; what it could not seal is there at the next start.
pub(super) fn run(
    disk: &Disk,
    data: &DataDir,
    jobs: &Receiver<SealJob>,
    counters: &Counters,
    compaction: &Compaction,
    mirror: Option<&Mirror>,
) {
    let mut pending: Vec<Pending> = Vec::new();
    let mut compactor = Compactor::default();
    loop {
        let idle = pending.is_empty();
        let job = jobs.recv_timeout(if idle { LOOK_FOR_SMALL_FILES } else { RETRY });
        let mut hurry = false;
        let mut barrier = None;
        let mut edit = None;
        match job {
            Ok(SealJob::Recover(paths)) => pending.extend(plan_recovery(paths)),
            Ok(SealJob::Segment { path, asked }) => {
                let waiting = counters.waiting_segments.fetch_sub(1, Relaxed);
                hurry = asked || waiting > MOST_WAITING;
                pending.push(Pending { path, recovered: false, elsewhere: HashSet::new() });
            }
            Ok(SealJob::Barrier(reply)) => barrier = Some(reply),
            Ok(SealJob::SettleObjectStore(reply)) => settle(mirror, reply),
            Ok(other @ (SealJob::Forget(..) | SealJob::Compact(_))) => edit = Some(other),
            Err(RecvTimeoutError::Timeout) if idle => {
                let Some(age) = compaction.age else { continue };
                let merged = edited(data, mirror, |removes| {
                    aside(be_nice, || compactor.run(disk, data, &compaction.writer, age, removes))
                });
                if let Err(error) = merged {
                    counters.disk_error("merge", &error);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        hurry |= pending.len() > MOST_WAITING;
        if !pending.is_empty() {
            pending = if hurry || barrier.is_some() || edit.is_some() {
                seal_all(disk, data, pending, counters)
            } else {
                aside(give_way, || seal_all(disk, data, pending, counters))
            };
            if let Some(mirror) = mirror {
                mirror.changed();
            }
        }
        if let Some(reply) = barrier {
            let outcome = if pending.is_empty() { Ok(()) } else { Err(RecordError::Unsealed(pending.len())) };
            // Nobody waits for the answer any more: nothing to tell.
            let _ = reply.send(outcome);
        }
        match edit {
            // A segment that is still to be sealed would bring back what is taken away.
            Some(SealJob::Forget(_, reply)) if !pending.is_empty() => {
                let _ = reply.send(Err(RecordError::Unsealed(pending.len())));
            }
            Some(SealJob::Forget(selection, reply)) => {
                let _ =
                    reply.send(edited(data, mirror, |removes| edit::forget(disk, data, &selection, removes)));
            }
            Some(SealJob::Compact(reply)) => {
                let merged = edited(data, mirror, |removes| {
                    compactor.run(disk, data, &compaction.writer, Duration::ZERO, removes)
                });
                let _ = reply.send(merged);
            }
            _ => {}
        }
    }
}

/// Changes files that were sealed, while no copier looks. The edit tells of each file before it removes it.
fn edited<T>(data: &DataDir, mirror: Option<&Mirror>, edit: impl FnOnce(Removes<'_>) -> T) -> T {
    let editing = mirror.map(Mirror::edit);
    let outcome = edit(&|path| mirror::removes(data, path));
    drop(editing);
    if let Some(mirror) = mirror {
        mirror.changed();
    }
    outcome
}

fn settle(mirror: Option<&Mirror>, reply: Sender<Settled>) {
    match mirror {
        Some(mirror) => mirror.settle(reply),
        None => {
            // Nobody waits for the answer any more: nothing to tell.
            let _ = reply.send(Ok(0));
        }
    }
}

/// Seals what it can and gives back the rest. Left-over segments go strictly in order: a request may be begun in an older
/// one and ended in a newer one, and the newer one must not go first.
fn seal_all(disk: &Disk, data: &DataDir, pending: Vec<Pending>, counters: &Counters) -> Vec<Pending> {
    let mut left = Vec::new();
    let mut recovery_blocked = false;
    for segment in pending {
        if segment.recovered && recovery_blocked {
            left.push(segment);
            continue;
        }
        counters.sealing.begins();
        let sealed = seal_segment(disk, data, &segment.path, &segment.elsewhere);
        counters.sealing.ended(sealed.as_ref().map(|_| ()).map_err(ToString::to_string));
        match sealed {
            Ok(report) => counters.sealed(&report, &segment.path),
            Err(error) => {
                counters.disk_error("seal", &error);
                recovery_blocked |= segment.recovered;
                left.push(segment);
            }
        }
    }
    left
}

/// A begun request belongs to the newest segment that knows it: a crash while the running requests were being carried
/// over leaves it in two.
fn plan_recovery(paths: Vec<PathBuf>) -> Vec<Pending> {
    let mut later: HashSet<String> = HashSet::new();
    // While a disk fails, an older segment may take the end of what a newer one was to carry.
    let mut ended: HashSet<String> = HashSet::new();
    let mut plan = Vec::new();
    for path in paths.into_iter().rev() {
        let elsewhere = later.clone();
        match wal::read(&path) {
            Ok(content) => {
                for frame in &content.frames {
                    match frame {
                        Frame::Records(records) => {
                            ended.extend(records.iter().map(|row| row.request_id.clone()))
                        }
                        Frame::Begin(begun) => {
                            later.insert(begun.request_id.clone());
                        }
                        Frame::Abandon(request_id) => {
                            ended.insert(request_id.clone());
                        }
                        Frame::Join(_) | Frame::Carried => {}
                    }
                }
            }
            // Sealing it will meet the same error, count it and try again.
            Err(error) => tracing::warn!(%error, "a left-over WAL segment cannot be read"),
        }
        plan.push(Pending { path, recovered: true, elsewhere });
    }
    plan.reverse();
    for segment in &mut plan {
        segment.elsewhere.extend(ended.iter().cloned());
    }
    plan
}

/// Writes the segment's rows under `records/`, then deletes it. `elsewhere`: begun requests to leave to other segments.
pub(super) fn seal_segment(
    disk: &Disk,
    data: &DataDir,
    path: &Path,
    elsewhere: &HashSet<String>,
) -> Result<SealReport, RecordError> {
    let content = wal::read(path)?;
    let (rows, restarted) = fold(content.frames, elsewhere);
    let mut report = SealReport { rows: rows.len() as u64, files: 0, restarted, stop: content.stop };

    let mut partitions: BTreeMap<String, Vec<Record>> = BTreeMap::new();
    for row in rows {
        partitions.entry(partition(row.started_at)).or_default().push(row);
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    for (directory, partition_rows) in &partitions {
        let target = data.records().join(directory).join(format!("{stem}-{}.parquet", content.writer));
        // Not beside the target: nothing but whole Parquet files is ever in the tree.
        let temporary = data.wal().join(format!(".{stem}.{TEMPORARY}"));
        write_parquet(disk, &temporary, partition_rows)?;
        create_partition(disk, &data.records(), directory)?;
        disk.rename_durably(&temporary, &target).map_err(RecordError::disk("publish", &target))?;
        report.files += 1;
    }

    match content.stop {
        Some(Stop::Damaged { .. }) => {
            let kept = path.with_extension("damaged");
            disk.rename_durably(path, &kept).map_err(RecordError::disk("keep the damaged", path))?;
        }
        Some(Stop::Torn { .. }) | None => disk.delete(path).map_err(RecordError::disk("delete", path))?,
    }
    // The segment is gone: an error here must not have it sealed again. What a crash brings back is sealed over itself.
    if let Err(error) = disk.sync_directory(&data.wal()) {
        tracing::warn!(%error, "the deletion of a WAL segment is not durable yet");
    }
    Ok(report)
}

/// The rows that a segment's frames come to, in the order in which they were written, and how many are `proxy_restart`.
fn fold(frames: Vec<Frame>, elsewhere: &HashSet<String>) -> (Vec<Record>, u64) {
    let mut rows: Vec<Record> = Vec::new();
    let mut seen: HashSet<String> = HashSet::new();
    let mut joins: HashMap<(String, u32), Join> = HashMap::new();
    let mut running: BTreeMap<String, Begun> = BTreeMap::new();
    for frame in frames {
        match frame {
            Frame::Records(records) => {
                for record in records {
                    running.remove(&record.request_id);
                    if seen.insert(record.record_id.clone()) {
                        rows.push(record);
                    }
                }
            }
            Frame::Join(join) => {
                joins.insert((join.request_id.clone(), join.choice_index), join);
            }
            Frame::Begin(begun) => {
                running.insert(begun.request_id.clone(), begun);
            }
            Frame::Abandon(request_id) => {
                running.remove(&request_id);
            }
            Frame::Carried => running.clear(),
        }
    }
    for row in &mut rows {
        if let Some(join) = joins.get(&(row.request_id.clone(), row.choice_index)) {
            join.apply(row);
        }
    }
    let mut restarted = 0;
    for (request_id, begun) in running {
        if elsewhere.contains(&request_id) || !seen.insert(begun.record_id.clone()) {
            continue;
        }
        // Its status is that of a row whose end nobody told.
        rows.push(begun.into_row());
        restarted += 1;
    }
    (rows, restarted)
}

/// `dt=2026-11-29/hour=17`, in UTC. A time that no calendar holds goes to the epoch.
pub(super) fn partition(started_at: i64) -> String {
    let timestamp = jiff::Timestamp::from_microsecond(started_at).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    let moment = jiff::tz::Offset::UTC.to_datetime(timestamp);
    format!("dt={}/hour={:02}", moment.date(), moment.hour())
}

fn create_partition(disk: &Disk, records: &Path, directory: &str) -> Result<(), RecordError> {
    let target = records.join(directory);
    if target.is_dir() {
        return Ok(());
    }
    disk.create_directory(&target).map_err(RecordError::disk("create", &target))?;
    // The names of new directories must survive a crash as well as the file in them.
    for level in [target.as_path(), target.parent().unwrap_or(records), records] {
        disk.sync_directory(level).map_err(RecordError::disk("sync", level))?;
    }
    Ok(())
}

fn write_parquet(disk: &Disk, path: &Path, rows: &[Record]) -> Result<(), RecordError> {
    let mut file = disk.create(path, false).map_err(RecordError::disk("create", path))?;
    let mut writer = ArrowWriter::try_new(&mut file, schema(), Some(properties()))
        .map_err(RecordError::parquet("write", path))?;
    let mut rest = rows;
    while !rest.is_empty() {
        let (group, after) = rest.split_at(row_group_length(rest));
        let batch =
            to_batch(group).map_err(|source| RecordError::Rows { path: path.to_path_buf(), source })?;
        writer.write(&batch).map_err(RecordError::parquet("write", path))?;
        writer.flush().map_err(RecordError::parquet("write", path))?;
        rest = after;
    }
    writer.close().map_err(RecordError::parquet("write", path))?;
    file.sync_all().map_err(RecordError::disk("sync", path))
}

fn row_group_length(rows: &[Record]) -> usize {
    let mut bytes = 0;
    for (index, row) in rows.iter().take(ROW_GROUP_ROWS).enumerate() {
        bytes += row.approximate_bytes();
        if bytes > ROW_GROUP_BYTES {
            return index.max(1);
        }
    }
    rows.len().min(ROW_GROUP_ROWS)
}

pub(super) fn properties() -> WriterProperties {
    let version = KeyValue::new(SCHEMA_VERSION_KEY.to_owned(), SCHEMA_VERSION.to_owned());
    let mut builder = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3).unwrap_or_default()))
        .set_created_by(format!("draftsmith version {}", env!("CARGO_PKG_VERSION")))
        .set_key_value_metadata(Some(vec![version]));
    for column in TEXT_COLUMNS {
        builder = builder.set_column_statistics_enabled(ColumnPath::from(column), EnabledStatistics::None);
    }
    builder.build()
}

/// What an earlier process was writing when it died; nothing points at it.
pub(super) fn remove_temporaries(wal: &Path) -> Result<(), RecordError> {
    edit::remove_staging(wal)?;
    for entry in fs::read_dir(wal).map_err(RecordError::disk("list", wal))? {
        let path = entry.map_err(RecordError::disk("list", wal))?.path();
        if path.extension().is_some_and(|extension| extension == TEMPORARY) {
            fs::remove_file(&path).map_err(RecordError::disk("delete", &path))?;
        }
    }
    Ok(())
}

pub(super) fn spawn(
    disk: Disk,
    data: DataDir,
    jobs: Receiver<SealJob>,
    counters: Arc<Counters>,
    compaction: Compaction,
    mirror: Option<Mirror>,
) -> Result<std::thread::JoinHandle<()>, RecordError> {
    std::thread::Builder::new()
        .name("record-seal".into())
        .spawn(move || run(&disk, &data, &jobs, &counters, &compaction, mirror.as_ref()))
        .map_err(|source| RecordError::Thread { name: "record-seal", source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::record::row::Status;
    use crate::record::row::tests::full_record;
    use crate::record::wal::SegmentFile;
    use crate::record::{files, rows};

    const HOUR: i64 = 3_600_000_000;

    fn segment(data: &DataDir, frames: &[Frame]) -> PathBuf {
        data.create().unwrap();
        let mut file = SegmentFile::new(&Disk::default(), &data.wal(), "w");
        for frame in frames {
            file.append(frame).unwrap();
        }
        file.flush().unwrap();
        file.path().to_path_buf()
    }

    fn begin(request_id: &str) -> Frame {
        Frame::Begin(Begun::new(request_id, "/v1/completions", 1))
    }

    fn sealed(data: &DataDir) -> Vec<(String, Status)> {
        let mut found: Vec<(String, Status)> =
            rows(data).unwrap().map(|row| row.unwrap()).map(|row| (row.request_id, row.status)).collect();
        found.sort();
        found
    }

    #[test]
    fn partition_is_the_hour_of_the_start_in_utc() {
        assert_eq!(partition(1_764_437_000_000_000), "dt=2025-11-29/hour=17");
        assert_eq!(partition(0), "dt=1970-01-01/hour=00");
        assert_eq!(partition(i64::MAX), "dt=1970-01-01/hour=00");
    }

    #[test]
    fn rows_go_to_their_hours_with_ids_joined_and_the_segment_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let data = DataDir::new(directory.path());
        let first = full_record("a");
        let second = Record { started_at: first.started_at + HOUR, ..Record::new("b", "/v1/completions", 0) };
        let join = Join {
            request_id: "b".into(),
            choice_index: 0,
            prompt_token_ids: vec![9, 8],
            output_token_ids: vec![7],
            draft_head: Some("digest".into()),
            drafts: Some(3),
            drafted_tokens: Some(9),
            accepted_tokens: Some(4),
            states_status: "stored".into(),
        };
        let again = Frame::Records(vec![first.clone()]);
        let path = segment(&data, &[again.clone(), Frame::Records(vec![second]), again, Frame::Join(join)]);
        let report = seal_segment(&Disk::default(), &data, &path, &HashSet::new()).unwrap();
        assert_eq!(report, SealReport { rows: 2, files: 2, restarted: 0, stop: None });

        let found = files(&data).unwrap();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        for (file, hour) in found.iter().zip(["17", "18"]) {
            let expected = data.records().join(format!("dt=2025-11-29/hour={hour}/{stem}-w.parquet"));
            assert_eq!(*file, expected);
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(fs::read_dir(data.wal()).unwrap().count(), 0);
        let read: Vec<_> = rows(&data).unwrap().map(|row| row.unwrap()).collect();
        assert_eq!(read[0].output_token_ids, first.output_token_ids);
        assert_eq!(read[1].prompt_token_ids, Some(vec![9, 8]));
        assert_eq!(read[1].output_token_ids, Some(vec![7]));
        assert_eq!(read[1].draft_head.as_deref(), Some("digest"));
        let counts = (read[1].drafts, read[1].drafted_tokens, read[1].accepted_tokens);
        assert_eq!(counts, (Some(3), Some(9), Some(4)));
    }

    #[test]
    fn sealing_again_after_a_kill_before_the_delete_gives_the_same_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let data = DataDir::new(directory.path());
        let path = segment(
            &data,
            &[begin("x"), Frame::Records(vec![full_record("a"), full_record("b")]), begin("y")],
        );
        let bytes = fs::read(&path).unwrap();
        seal_segment(&Disk::default(), &data, &path, &HashSet::new()).unwrap();
        let before: Vec<Vec<u8>> = files(&data).unwrap().iter().map(|file| fs::read(file).unwrap()).collect();
        fs::write(&path, &bytes).unwrap();
        seal_segment(&Disk::default(), &data, &path, &HashSet::new()).unwrap();
        let after: Vec<Vec<u8>> = files(&data).unwrap().iter().map(|file| fs::read(file).unwrap()).collect();
        assert_eq!(before.len(), 2);
        assert_eq!(before, after);
    }

    #[test]
    fn unended_requests_become_one_row_each() {
        let directory = tempfile::tempdir().unwrap();
        let data = DataDir::new(directory.path());
        let ended = Frame::Records(vec![full_record("ended")]);
        let path = segment(
            &data,
            &[begin("ended"), begin("open"), begin("gone"), ended, Frame::Abandon("gone".into())],
        );
        let report = seal_segment(&Disk::default(), &data, &path, &HashSet::new()).unwrap();
        assert_eq!((report.rows, report.restarted), (2, 1));
        assert_eq!(sealed(&data), [("ended".into(), Status::Ok), ("open".into(), Status::ProxyRestart)]);
    }

    #[test]
    fn request_carried_over_by_a_dying_process_is_the_newest_segments_row() {
        let directory = tempfile::tempdir().unwrap();
        let data = DataDir::new(directory.path());
        // Killed after the next segment was synced and before the first was marked.
        let first = segment(&data, &[begin("x"), begin("y"), begin("z")]);
        let ended = Frame::Records(vec![full_record("y")]);
        let second = segment(&data, &[begin("x"), begin("y"), ended]);
        let counters = Counters::default();
        let left = seal_all(&Disk::default(), &data, plan_recovery(vec![first, second]), &counters);
        assert!(left.is_empty());
        let expected = [
            ("x".into(), Status::ProxyRestart),
            ("y".into(), Status::Ok),
            ("z".into(), Status::ProxyRestart),
        ];
        assert_eq!(sealed(&data), expected);
    }

    #[test]
    fn carried_requests_are_not_rows_of_the_segment_they_left() {
        let directory = tempfile::tempdir().unwrap();
        let data = DataDir::new(directory.path());
        let path = segment(&data, &[begin("x"), Frame::Carried]);
        assert_eq!(seal_segment(&Disk::default(), &data, &path, &HashSet::new()).unwrap().rows, 0);
        assert!(files(&data).unwrap().is_empty());
        assert!(!path.exists());
    }

    #[test]
    fn torn_segment_is_sealed_to_its_last_whole_frame_and_a_damaged_one_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let data = DataDir::new(directory.path());
        let path =
            segment(&data, &[Frame::Records(vec![full_record("a")]), Frame::Records(vec![full_record("b")])]);
        let mut bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let report = seal_segment(&Disk::default(), &data, &path, &HashSet::new()).unwrap();
        assert!(matches!(report.stop, Some(Stop::Torn { .. })));
        assert_eq!(sealed(&data), [("a".into(), Status::Ok)]);
        assert!(!path.exists());

        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let report = seal_segment(&Disk::default(), &data, &path, &HashSet::new()).unwrap();
        assert!(matches!(report.stop, Some(Stop::Damaged { .. })));
        assert_eq!(sealed(&data), [("a".into(), Status::Ok)]);
        assert_eq!(fs::read(path.with_extension("damaged")).unwrap(), bytes);
    }

    #[test]
    fn segment_that_cannot_be_sealed_stays_and_holds_back_the_newer_left_overs() {
        let directory = tempfile::tempdir().unwrap();
        let data = DataDir::new(directory.path());
        let first = segment(&data, &[Frame::Records(vec![full_record("a")])]);
        let second = segment(&data, &[Frame::Records(vec![full_record("b")])]);
        fs::remove_dir(data.records()).unwrap();
        fs::write(data.records(), "in the way").unwrap();
        let counters = Counters::default();
        let left =
            seal_all(&Disk::default(), &data, plan_recovery(vec![first.clone(), second.clone()]), &counters);
        assert_eq!(left.len(), 2);
        assert_eq!(counters.snapshot().disk_errors, 1);
        assert!(first.exists() && second.exists());
        fs::remove_file(data.records()).unwrap();
        fs::create_dir(data.records()).unwrap();
        assert!(seal_all(&Disk::default(), &data, left, &counters).is_empty());
        assert_eq!(sealed(&data).len(), 2);
    }

    #[test]
    fn large_rows_make_small_row_groups() {
        let large = Record { content: Some("x".repeat(ROW_GROUP_BYTES)), ..full_record("a") };
        assert_eq!(row_group_length(&[large.clone(), large]), 1);
        assert_eq!(row_group_length(&vec![Record::new("a", "/", 0); 2 * ROW_GROUP_ROWS]), ROW_GROUP_ROWS);
    }
}
