//! Reading `records/` back: the columns that training and the commands need.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use arrow_array::cast::AsArray;
use arrow_array::types::{Int32Type, Int64Type, TimestampMicrosecondType};
use arrow_array::{Array, ListArray, RecordBatch};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};

use super::error::RecordError;
use super::row::{Source, Split, Status};
use crate::store::DataDir;

const COLUMNS: [&str; 18] = [
    "record_id",
    "request_id",
    "choice_index",
    "conversation_id",
    "started_at",
    "model",
    "status",
    "prompt_token_ids",
    "output_token_ids",
    "prompt_tokens",
    "completion_tokens",
    "draft_head",
    "drafts",
    "drafted_tokens",
    "accepted_tokens",
    "source",
    "split",
    "tenant_hash",
];

const BATCH_ROWS: usize = 1024;

/// What is read of a [`Record`](super::Record); the texts stay on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub record_id: String,
    pub request_id: String,
    pub choice_index: u32,
    pub conversation_id: Option<String>,
    /// Microseconds since the Unix epoch, UTC.
    pub started_at: i64,
    pub model: Option<String>,
    pub status: Status,
    pub prompt_token_ids: Option<Vec<i32>>,
    pub output_token_ids: Option<Vec<i32>>,
    pub prompt_tokens: Option<i64>,
    pub completion_tokens: Option<i64>,
    pub draft_head: Option<String>,
    pub drafts: Option<i64>,
    pub drafted_tokens: Option<i64>,
    pub accepted_tokens: Option<i64>,
    pub source: Source,
    pub split: Split,
    pub tenant_hash: Option<String>,
}

/// The Parquet files under `records/`, oldest hour first, in each hour in the order of their making. Empty when there is
/// no such directory yet.
pub fn files(data: &DataDir) -> Result<Vec<PathBuf>, RecordError> {
    let mut found = Vec::new();
    for day in entries(&data.records(), "dt=")? {
        for hour in entries(&day, "hour=")? {
            let in_hour = entries(&hour, "")?;
            found.extend(
                in_hour.into_iter().filter(|path| path.extension().is_some_and(|ext| ext == "parquet")),
            );
        }
    }
    Ok(found)
}

/// What starts with the prefix in a directory, sorted; hidden names are not data.
fn entries(directory: &Path, prefix: &str) -> Result<Vec<PathBuf>, RecordError> {
    let listing = match fs::read_dir(directory) {
        Ok(listing) => listing,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(RecordError::disk("list", directory)(error)),
    };
    let mut found = Vec::new();
    for entry in listing {
        let entry = entry.map_err(RecordError::disk("list", directory))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(prefix) && !name.starts_with('.') {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// All rows, file by file in the order of [`files`]. A file that cannot be read gives one error that names it; the next
/// call goes on with the next file.
pub fn rows(data: &DataDir) -> Result<Rows, RecordError> {
    Ok(Rows::over(files(data)?))
}

/// As [`rows`], the newest file first.
pub fn newest_rows(data: &DataDir) -> Result<Rows, RecordError> {
    Ok(Rows::over(files(data)?.into_iter().rev().collect()))
}

/// Rows as they are read. Small files may be merged meanwhile: each row still comes once.
#[derive(Debug)]
pub struct Rows {
    files: VecDeque<PathBuf>,
    open: Option<(PathBuf, ParquetRecordBatchReader)>,
    ready: VecDeque<Row>,
    /// The hour that is being read, and the ids of its rows so far.
    hour: Option<PathBuf>,
    given: HashSet<u128>,
    /// The hour's files were merged while it was read: what was given before comes again in the new ones.
    merged: bool,
}

impl Rows {
    fn over(files: Vec<PathBuf>) -> Self {
        Rows {
            files: files.into(),
            open: None,
            ready: VecDeque::new(),
            hour: None,
            given: HashSet::new(),
            merged: false,
        }
    }

    /// Opens the file, or finds what its hour's files have become.
    fn open_next(&mut self, path: PathBuf) -> Result<(), RecordError> {
        let hour = path.parent().map(Path::to_path_buf);
        if hour != self.hour {
            self.hour = hour;
            self.given.clear();
            self.merged = false;
        }
        let is_gone = |error: &RecordError| matches!(error, RecordError::Disk { source, .. } if source.kind() == std::io::ErrorKind::NotFound);
        match open(&path, &COLUMNS) {
            Ok(reader) => self.open = Some((path, reader)),
            Err(error) if is_gone(&error) => {
                let Some(hour) = self.hour.clone() else { return Err(error) };
                self.merged = true;
                self.files.retain(|other| other.parent() != Some(hour.as_path()));
                for found in entries(&hour, "")?.into_iter().rev() {
                    if found.extension().is_some_and(|extension| extension == "parquet") {
                        self.files.push_front(found);
                    }
                }
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Keeps what was not given before.
    fn take(&mut self, rows: Vec<Row>) {
        for row in rows {
            // An id that is no UUID was not written by this program; it is given whenever it comes.
            let id = uuid::Uuid::parse_str(&row.record_id).ok().map(|id| id.as_u128());
            let again = id.is_some_and(|id| !self.given.insert(id));
            if !(again && self.merged) {
                self.ready.push_back(row);
            }
        }
    }

    /// The file that the last row came from.
    pub fn path(&self) -> Option<&Path> {
        self.open.as_ref().map(|(path, _)| path.as_path())
    }

    /// Reads on; false at the end.
    fn advance(&mut self) -> Result<bool, RecordError> {
        let Some((path, reader)) = &mut self.open else {
            let Some(path) = self.files.pop_front() else { return Ok(false) };
            self.open_next(path)?;
            return Ok(true);
        };
        match reader.next() {
            None => self.open = None,
            Some(Ok(batch)) => {
                let parsed = parse(path, &batch)?;
                self.take(parsed);
            }
            Some(Err(error)) => return Err(RecordError::parquet("read", path)(error.into())),
        }
        Ok(true)
    }
}

impl Iterator for Rows {
    type Item = Result<Row, RecordError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(row) = self.ready.pop_front() {
                return Some(Ok(row));
            }
            match self.advance() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => {
                    self.open = None;
                    return Some(Err(error));
                }
            }
        }
    }
}

/// Reads these columns alone.
pub(super) fn open(path: &Path, wanted: &[&str]) -> Result<ParquetRecordBatchReader, RecordError> {
    let file = File::open(path).map_err(RecordError::disk("open", path))?;
    let builder =
        ParquetRecordBatchReaderBuilder::try_new(file).map_err(RecordError::parquet("read", path))?;
    let mut roots = Vec::new();
    for (index, field) in builder.parquet_schema().root_schema().get_fields().iter().enumerate() {
        if wanted.contains(&field.name()) {
            roots.push(index);
        }
    }
    let mask = ProjectionMask::roots(builder.parquet_schema(), roots);
    builder
        .with_projection(mask)
        .with_batch_size(BATCH_ROWS)
        .build()
        .map_err(RecordError::parquet("read", path))
}

fn parse(path: &Path, batch: &RecordBatch) -> Result<Vec<Row>, RecordError> {
    let columns = Columns { path, batch };
    let record_ids = columns.texts("record_id")?;
    let request_ids = columns.texts("request_id")?;
    let conversation_ids = columns.texts("conversation_id")?;
    let models = columns.texts("model")?;
    let draft_heads = columns.texts("draft_head")?;
    let statuses = columns.texts("status")?;
    let sources = columns.texts("source")?;
    let splits = columns.texts("split")?;
    let tenants = columns.texts("tenant_hash")?;
    let choices = columns.column("choice_index", "int32", |array| array.as_primitive_opt::<Int32Type>())?;
    let started = columns.column("started_at", "timestamp[us]", |array| {
        array.as_primitive_opt::<TimestampMicrosecondType>()
    })?;
    let prompt_ids = columns.ids("prompt_token_ids")?;
    let output_ids = columns.ids("output_token_ids")?;
    let count = |name| columns.column(name, "int64", |array| array.as_primitive_opt::<Int64Type>());
    let prompt_tokens = count("prompt_tokens")?;
    let completion_tokens = count("completion_tokens")?;
    // Files of schema version 1 have no such column.
    let drafts = batch.column_by_name("drafts").map(|_| count("drafts")).transpose()?;
    let drafted_tokens = count("drafted_tokens")?;
    let accepted_tokens = count("accepted_tokens")?;

    let text =
        |array: &arrow_array::StringArray, row| array.is_valid(row).then(|| array.value(row).to_owned());
    let number = |array: &arrow_array::Int64Array, row| array.is_valid(row).then(|| array.value(row));
    let mut parsed = Vec::with_capacity(batch.num_rows());
    for row in 0..batch.num_rows() {
        parsed.push(Row {
            record_id: record_ids.value(row).to_owned(),
            request_id: request_ids.value(row).to_owned(),
            choice_index: u32::try_from(choices.value(row)).unwrap_or_default(),
            conversation_id: text(conversation_ids, row),
            started_at: started.value(row),
            model: text(models, row),
            status: columns.known("status", statuses.value(row), |word| word.parse().ok())?,
            prompt_token_ids: prompt_ids.value(row),
            output_token_ids: output_ids.value(row),
            prompt_tokens: number(prompt_tokens, row),
            completion_tokens: number(completion_tokens, row),
            draft_head: text(draft_heads, row),
            drafts: drafts.and_then(|array| number(array, row)),
            drafted_tokens: number(drafted_tokens, row),
            accepted_tokens: number(accepted_tokens, row),
            source: columns.known("source", sources.value(row), Source::parse)?,
            split: columns.known("split", splits.value(row), Split::parse)?,
            tenant_hash: text(tenants, row),
        });
    }
    Ok(parsed)
}

struct Columns<'a> {
    path: &'a Path,
    batch: &'a RecordBatch,
}

impl<'a> Columns<'a> {
    fn column<T>(
        &self,
        column: &'static str,
        expected: &'static str,
        cast: impl FnOnce(&'a dyn Array) -> Option<&'a T>,
    ) -> Result<&'a T, RecordError> {
        let array = self.batch.column_by_name(column).and_then(|array| cast(array.as_ref()));
        array.ok_or_else(|| RecordError::Column { path: self.path.to_path_buf(), column, expected })
    }

    fn texts(&self, column: &'static str) -> Result<&'a arrow_array::StringArray, RecordError> {
        self.column(column, "utf8", |array| array.as_string_opt::<i32>())
    }

    fn ids(&self, column: &'static str) -> Result<Ids<'a>, RecordError> {
        let lists = self.column(column, "list<int32>", |array| array.as_list_opt::<i32>())?;
        let missing =
            || RecordError::Column { path: self.path.to_path_buf(), column, expected: "list<int32>" };
        let flat = lists.values().as_primitive_opt::<Int32Type>().ok_or_else(missing)?;
        Ok(Ids { lists, flat })
    }

    fn known<T>(
        &self,
        column: &'static str,
        value: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, RecordError> {
        let unknown =
            || RecordError::Value { path: self.path.to_path_buf(), column, value: value.to_owned() };
        parse(value).ok_or_else(unknown)
    }
}

struct Ids<'a> {
    lists: &'a ListArray,
    flat: &'a arrow_array::Int32Array,
}

impl Ids<'_> {
    fn value(&self, row: usize) -> Option<Vec<i32>> {
        if self.lists.is_null(row) {
            return None;
        }
        let offsets = self.lists.value_offsets();
        let (start, end) = (offsets[row] as usize, offsets[row + 1] as usize);
        Some(self.flat.values()[start..end].to_vec())
    }
}

/// How often each token id was produced, over the training split. Length `vocab_size`. What a draft vocabulary is
/// chosen by.
pub fn token_frequencies(data: &DataDir, vocab_size: usize) -> Result<Vec<u64>, RecordError> {
    let mut counts = vec![0u64; vocab_size];
    let mut all = rows(data)?;
    while let Some(row) = all.next() {
        let row = row?;
        if row.split != Split::Train {
            continue;
        }
        for id in row.output_token_ids.iter().flatten() {
            let slot = usize::try_from(*id).ok().and_then(|index| counts.get_mut(index));
            let Some(slot) = slot else {
                let path = all.path().unwrap_or(Path::new("records")).to_path_buf();
                return Err(RecordError::TokenId { path, id: *id, vocab_size });
            };
            *slot += 1;
        }
    }
    Ok(counts)
}

/// The rows of one day with one status.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct DayStats {
    /// `2026-11-29`, UTC.
    pub day: String,
    pub status: Status,
    pub rows: u64,
    /// Rows that have their output's token ids: what can be trained on.
    pub rows_with_ids: u64,
    /// Sums over the rows where they are known.
    pub prompt_tokens: i64,
    pub completion_tokens: i64,
}

/// What was drafted on one day by one head, over the rows that know it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct DayAcceptance {
    /// `2026-11-29`, UTC.
    pub day: String,
    /// sha256 of the head's model file; None: not known, or swapped while the answer was written.
    pub draft_head: Option<String>,
    pub rows: u64,
    pub drafts: i64,
    pub drafted_tokens: i64,
    pub accepted_tokens: i64,
}

impl DayAcceptance {
    /// Mean tokens for each step of the verifier that had a draft; None where there was none.
    pub fn acceptance_length(&self) -> Option<f64> {
        (self.drafts > 0).then(|| 1.0 + self.accepted_tokens as f64 / self.drafts as f64)
    }
}

/// What [`stats`] found.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Stats {
    /// By day, then status.
    pub days: Vec<DayStats>,
    /// By day, then head.
    pub acceptance: Vec<DayAcceptance>,
}

/// Counts and sums over all rows.
pub fn stats(data: &DataDir) -> Result<Stats, RecordError> {
    let mut groups: BTreeMap<(String, Status), DayStats> = BTreeMap::new();
    let mut acceptance: BTreeMap<(String, Option<String>), DayAcceptance> = BTreeMap::new();
    for row in rows(data)? {
        let row = row?;
        let timestamp =
            jiff::Timestamp::from_microsecond(row.started_at).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
        let day = jiff::tz::Offset::UTC.to_datetime(timestamp).date().to_string();
        if let (Some(drafts), Some(drafted), Some(accepted)) =
            (row.drafts, row.drafted_tokens, row.accepted_tokens)
        {
            let key = (day.clone(), row.draft_head.clone());
            let of_head = acceptance.entry(key).or_insert_with(|| DayAcceptance {
                day: day.clone(),
                draft_head: row.draft_head,
                rows: 0,
                drafts: 0,
                drafted_tokens: 0,
                accepted_tokens: 0,
            });
            of_head.rows += 1;
            of_head.drafts += drafts;
            of_head.drafted_tokens += drafted;
            of_head.accepted_tokens += accepted;
        }
        let group = groups.entry((day.clone(), row.status)).or_insert_with(|| DayStats {
            day,
            status: row.status,
            rows: 0,
            rows_with_ids: 0,
            prompt_tokens: 0,
            completion_tokens: 0,
        });
        group.rows += 1;
        group.rows_with_ids += u64::from(row.output_token_ids.is_some());
        group.prompt_tokens += row.prompt_tokens.unwrap_or(0);
        group.completion_tokens += row.completion_tokens.unwrap_or(0);
    }
    Ok(Stats { days: groups.into_values().collect(), acceptance: acceptance.into_values().collect() })
}

/// What [`verify`] found of one file.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct FileCheck {
    pub path: PathBuf,
    /// Rows read before the error, if there is one.
    pub rows: u64,
    /// Rows that this file, or one before it, has already.
    pub duplicates: u64,
    pub error: Option<String>,
}

impl FileCheck {
    pub fn is_sound(&self) -> bool {
        self.error.is_none() && self.duplicates == 0
    }
}

/// Reads every column of every file, and checks the schema, the version, that each row is in its hour, and that none is
/// there twice.
pub fn verify(data: &DataDir) -> Result<Vec<FileCheck>, RecordError> {
    let mut checks = Vec::new();
    let mut seen = HashSet::new();
    for path in files(data)? {
        let mut check = FileCheck { path, rows: 0, duplicates: 0, error: None };
        check.error = verify_file(data, &mut check, &mut seen).err().map(|error| error.to_string());
        checks.push(check);
    }
    Ok(checks)
}

fn verify_file(data: &DataDir, check: &mut FileCheck, seen: &mut HashSet<String>) -> Result<(), RecordError> {
    let path = check.path.as_path();
    let file = File::open(path).map_err(RecordError::disk("open", path))?;
    let builder =
        ParquetRecordBatchReaderBuilder::try_new(file).map_err(RecordError::parquet("read", path))?;
    let foreign = |what: String| RecordError::Foreign { path: path.to_path_buf(), what };
    if **builder.schema() != *super::columns::schema() {
        return Err(foreign("its columns or its schema version are others than this version's".into()));
    }
    let reader = builder.with_batch_size(BATCH_ROWS).build().map_err(RecordError::parquet("read", path))?;
    for batch in reader {
        let batch = batch.map_err(|error| RecordError::parquet("read", path)(error.into()))?;
        for row in parse(path, &batch)? {
            let hour = data.records().join(super::seal::partition(row.started_at));
            if path.parent() != Some(hour.as_path()) {
                return Err(foreign(format!("row {} belongs in {}", row.record_id, hour.display())));
            }
            check.rows += 1;
            check.duplicates += u64::from(!seen.insert(row.record_id));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::columns::to_batch;
    use crate::record::row::tests::full_record;

    #[test]
    fn rows_of_schema_version_1_have_no_drafts() {
        let batch = to_batch(&[full_record("a")]).unwrap();
        let path = Path::new("a.parquet");
        assert_eq!(parse(path, &batch).unwrap()[0].drafts, Some(2));
        let names = batch.schema();
        let kept: Vec<usize> =
            (0..names.fields().len()).filter(|index| names.field(*index).name() != "drafts").collect();
        let older = parse(path, &batch.project(&kept).unwrap()).unwrap();
        assert_eq!((older[0].drafts, older[0].accepted_tokens), (None, Some(4)));
    }
}
