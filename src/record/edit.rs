//! Changing what was sealed: rows that are to be forgotten, and small files made one. Done by the sealing thread alone, so
//! that nothing else writes in the tree meanwhile.
//!
//! Forgetting replaces a file by its rest under the same name. Merging makes the hour's directory anew beside the tree and
//! exchanges the two in one step of the file system: at no moment, and after no crash, is a row missing or there twice.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::slice;
use std::time::{Duration, SystemTime};

use arrow_array::cast::AsArray;
use arrow_array::types::TimestampMicrosecondType;
use arrow_array::{Array, BooleanArray, RecordBatch};
use arrow_schema::SchemaRef;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use uuid::Uuid;

use super::error::RecordError;
use super::read::{files, open, rows};
use super::seal::properties;
use super::{columns, now_micros, wal};
use crate::store::{DataDir, Disk};

/// Rows read and written at a time; one row group of the new file.
const BATCH_ROWS: usize = 1024;
const ROW_GROUP_BYTES: usize = 16 << 20;
/// A file of at least this size stays as it is, and no merged one grows much larger.
const LARGE: u64 = 64 << 20;
const TEMPORARY: &str = ".edit.tmp";
/// Where an hour's new directory is made, and where its old one is deleted.
pub(super) const STAGING: &str = ".staging.tmp";
const HOUR_MICROS: i64 = 3_600_000_000;

/// Which rows are to be forgotten.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Selection {
    /// Of this tenant alone, as the column has it.
    pub tenant_hash: Option<String>,
    /// Of requests that started before this, in microseconds since the Unix epoch.
    pub before: i64,
}

impl Selection {
    fn holds(&self, tenant_hash: Option<&str>, started_at: i64) -> bool {
        started_at < self.before
            && self.tenant_hash.as_deref().is_none_or(|wanted| tenant_hash == Some(wanted))
    }
}

/// What forgetting did to the records.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Forgotten {
    pub rows: u64,
    pub files_rewritten: u64,
    pub files_deleted: u64,
    /// Damaged WAL segments: nobody can say whose rows are in them, so all go.
    pub damaged_segments_deleted: u64,
}

/// The request ids of the rows that a selection means.
pub fn selected_requests(data: &DataDir, selection: &Selection) -> Result<BTreeSet<String>, RecordError> {
    let mut found = BTreeSet::new();
    for row in rows(data)? {
        let row = row?;
        if selection.holds(row.tenant_hash.as_deref(), row.started_at) {
            found.insert(row.request_id);
        }
    }
    Ok(found)
}

/// Is told of each file before it is removed.
pub(super) type Removes<'a> = &'a (dyn Fn(&Path) -> Result<(), RecordError> + Sync);

/// Removes the selected rows.
pub(super) fn forget(
    disk: &Disk,
    data: &DataDir,
    selection: &Selection,
    removes: Removes<'_>,
) -> Result<Forgotten, RecordError> {
    let mut done = Forgotten::default();
    for path in files(data)? {
        let mut gone = 0;
        for batch in open(&path, &["tenant_hash", "started_at"])? {
            let batch = batch.map_err(|error| RecordError::parquet("read", &path)(error.into()))?;
            let keep = rows_to_keep(&path, &batch, selection)?;
            gone += keep.iter().filter(|kept| !**kept).count() as u64;
        }
        if gone == 0 {
            continue;
        }
        let temporary = data.wal().join(TEMPORARY);
        let kept =
            copy_rows(disk, slice::from_ref(&path), builder(&path)?.schema().clone(), &temporary, |batch| {
                rows_to_keep(&path, batch, selection)
            })?;
        if kept > 0 {
            disk.rename_durably(&temporary, &path).map_err(RecordError::disk("publish", &path))?;
            done.files_rewritten += 1;
        } else {
            disk.delete(&temporary).map_err(RecordError::disk("delete", &temporary))?;
            removes(&path)?;
            disk.delete(&path).map_err(RecordError::disk("delete", &path))?;
            let directory = path.parent().unwrap_or(Path::new("."));
            disk.sync_directory(directory).map_err(RecordError::disk("sync", directory))?;
            done.files_deleted += 1;
        }
        done.rows += gone;
    }
    for path in wal::with_extension(&data.wal(), "damaged")? {
        disk.delete(&path).map_err(RecordError::disk("delete", &path))?;
        done.damaged_segments_deleted += 1;
    }
    Ok(done)
}

fn rows_to_keep(path: &Path, batch: &RecordBatch, selection: &Selection) -> Result<Vec<bool>, RecordError> {
    let missing = |column| RecordError::Column {
        path: path.to_path_buf(),
        column,
        expected: "as this program writes it",
    };
    let tenants = batch.column_by_name("tenant_hash").and_then(|array| array.as_string_opt::<i32>());
    let tenants = tenants.ok_or_else(|| missing("tenant_hash"))?;
    let started = batch
        .column_by_name("started_at")
        .and_then(|array| array.as_primitive_opt::<TimestampMicrosecondType>())
        .ok_or_else(|| missing("started_at"))?;
    let mut keep = Vec::with_capacity(batch.num_rows());
    for row in 0..batch.num_rows() {
        let tenant = tenants.is_valid(row).then(|| tenants.value(row));
        keep.push(!selection.holds(tenant, started.value(row)));
    }
    Ok(keep)
}

/// Writes the kept rows of all inputs into one synced file; gives how many there are. The inputs have one schema.
fn copy_rows(
    disk: &Disk,
    inputs: &[PathBuf],
    schema: SchemaRef,
    target: &Path,
    keep: impl Fn(&RecordBatch) -> Result<Vec<bool>, RecordError>,
) -> Result<usize, RecordError> {
    let output = disk.create(target, false).map_err(RecordError::disk("create", target))?;
    let mut writer = ArrowWriter::try_new(output, schema, Some(properties()))
        .map_err(RecordError::parquet("write", target))?;
    let mut rows = 0;
    for path in inputs {
        let builder = builder(path)?;
        let reader =
            builder.with_batch_size(BATCH_ROWS).build().map_err(RecordError::parquet("read", path))?;
        for batch in reader {
            let batch = batch.map_err(|error| RecordError::parquet("read", path)(error.into()))?;
            let mask = BooleanArray::from(keep(&batch)?);
            let kept = arrow_select::filter::filter_record_batch(&batch, &mask)
                .map_err(|source| RecordError::Rows { path: path.clone(), source })?;
            rows += kept.num_rows();
            writer.write(&kept).map_err(RecordError::parquet("write", target))?;
            if writer.in_progress_rows() >= BATCH_ROWS || writer.in_progress_size() >= ROW_GROUP_BYTES {
                writer.flush().map_err(RecordError::parquet("write", target))?;
            }
        }
    }
    let output = writer.into_inner().map_err(RecordError::parquet("write", target))?;
    output.sync_all().map_err(RecordError::disk("sync", target))?;
    Ok(rows)
}

fn builder(path: &Path) -> Result<ParquetRecordBatchReaderBuilder<File>, RecordError> {
    let file = File::open(path).map_err(RecordError::disk("open", path))?;
    ParquetRecordBatchReaderBuilder::try_new(file).map_err(RecordError::parquet("read", path))
}

/// What merging did.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Compacted {
    pub hours: u64,
    pub files_before: u64,
    pub files_after: u64,
}

/// Merges small files of hours that are over.
#[derive(Debug, Default)]
pub(super) struct Compactor {
    /// Hours that were looked at, with when they last changed.
    seen: HashMap<PathBuf, SystemTime>,
    /// The file system cannot exchange directories.
    unable: bool,
}

impl Compactor {
    /// Looks at every hour that ended at least `age` ago.
    pub fn run(
        &mut self,
        disk: &Disk,
        data: &DataDir,
        writer: &str,
        age: Duration,
        removes: Removes<'_>,
    ) -> Result<Compacted, RecordError> {
        let mut done = Compacted::default();
        if self.unable {
            return Ok(done);
        }
        let mut of_hour: HashMap<PathBuf, Vec<PathBuf>> = HashMap::new();
        for path in files(data)? {
            of_hour.entry(path.parent().unwrap_or(Path::new(".")).to_path_buf()).or_default().push(path);
        }
        for (hour, found) in of_hour {
            let changed = fs::metadata(&hour).and_then(|metadata| metadata.modified());
            let changed = changed.map_err(RecordError::disk("look at", &hour))?;
            if found.len() < 2 || !is_over(&hour, age) || self.seen.get(&hour) == Some(&changed) {
                continue;
            }
            let groups = groups(data, &found)?;
            if groups.is_empty() {
                self.seen.insert(hour, changed);
                continue;
            }
            if !merge(disk, data, writer, &hour, &found, &groups, removes)? {
                tracing::warn!(
                    "this file system cannot exchange directories; small Parquet files are not merged"
                );
                self.unable = true;
                return Ok(done);
            }
            let merged: usize = groups.iter().map(Vec::len).sum();
            done.hours += 1;
            done.files_before += found.len() as u64;
            done.files_after += (found.len() - merged + groups.len()) as u64;
            metrics::counter!("draftsmith_record_merged_files_total").increment(merged as u64);
        }
        Ok(done)
    }
}

/// `records/dt=2026-11-29/hour=17` ended at least `age` ago.
fn is_over(hour: &Path, age: Duration) -> bool {
    let latest = now_micros() - i64::try_from(age.as_micros()).unwrap_or(i64::MAX) - HOUR_MICROS;
    let name = super::seal::partition(latest.max(0));
    let path = hour.to_string_lossy();
    // The names sort by time.
    path.get(path.len().saturating_sub(name.len())..).is_some_and(|of_hour| of_hour <= name.as_str())
}

/// Small files of this version's schema, two or more together up to the size of a large one.
fn groups(data: &DataDir, found: &[PathBuf]) -> Result<Vec<Vec<PathBuf>>, RecordError> {
    let mut groups = Vec::new();
    let (mut group, mut bytes) = (Vec::new(), 0);
    for path in found {
        let length = fs::metadata(path).map_err(RecordError::disk("look at", path))?.len();
        if length >= LARGE || belongs_to_a_segment(data, path) || !has_this_schema(path) {
            continue;
        }
        if bytes + length > LARGE {
            groups.push(std::mem::take(&mut group));
            bytes = 0;
        }
        group.push(path.clone());
        bytes += length;
    }
    groups.push(group);
    groups.retain(|group| group.len() > 1);
    Ok(groups)
}

/// The segment is still there: it will be sealed over this very file.
fn belongs_to_a_segment(data: &DataDir, path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.get(..36).unwrap_or_default();
    data.wal().join(format!("{stem}.{}", wal::EXTENSION)).is_file()
}

fn has_this_schema(path: &Path) -> bool {
    builder(path).is_ok_and(|found| **found.schema() == *columns::schema())
}

/// False when the file system cannot do it; then nothing has changed.
fn merge(
    disk: &Disk,
    data: &DataDir,
    writer: &str,
    hour: &Path,
    found: &[PathBuf],
    groups: &[Vec<PathBuf>],
    removes: Removes<'_>,
) -> Result<bool, RecordError> {
    let staging = data.wal().join(STAGING);
    remove_staging(&data.wal())?;
    disk.create_directory(&staging).map_err(RecordError::disk("create", &staging))?;
    for group in groups {
        let target = staging.join(format!("{}-{writer}.parquet", Uuid::now_v7()));
        copy_rows(disk, group, columns::schema(), &target, |batch| Ok(vec![true; batch.num_rows()]))?;
    }
    for path in found {
        if groups.iter().any(|group| group.contains(path)) {
            continue;
        }
        let link = staging.join(path.file_name().unwrap_or_default());
        fs::hard_link(path, &link).map_err(RecordError::disk("link", &link))?;
    }
    disk.sync_directory(&staging).map_err(RecordError::disk("sync", &staging))?;
    for path in groups.iter().flatten() {
        removes(path)?;
    }
    let exchanged = disk.exchange(&staging, hour);
    if let Err(error) = &exchanged {
        use std::io::ErrorKind::{CrossesDevices, InvalidInput, Unsupported};
        if matches!(error.kind(), CrossesDevices | InvalidInput | Unsupported) {
            remove_staging(&data.wal())?;
            return Ok(false);
        }
    }
    exchanged.map_err(RecordError::disk("exchange", hour))?;
    // What is there now is the old directory.
    remove_staging(&data.wal())?;
    Ok(true)
}

/// An hour's directory that was never put into its place, or was taken out of it.
pub(super) fn remove_staging(wal: &Path) -> Result<(), RecordError> {
    let staging = wal.join(STAGING);
    match fs::remove_dir_all(&staging) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(RecordError::disk("delete", &staging)(error)),
    }
}
