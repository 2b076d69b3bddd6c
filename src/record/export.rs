//! Recorded conversations as JSON lines, as training libraries read them.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch, StringArray, StructArray};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Value, json};

use super::error::RecordError;
use super::read::files;
use super::row::Split;
use crate::store::DataDir;

/// Writes one line for each row with a whole answer: `{"messages": [...], "record_id", "request_id", "model"}`, the answer
/// as the last message. Rows without text (their content was dropped) and requests of `/v1/completions` have none. `split`:
/// of this side alone. Gives how many lines were written.
pub fn export(data: &DataDir, split: Option<Split>, output: &mut impl Write) -> Result<u64, RecordError> {
    let mut lines = 0;
    for path in files(data)? {
        let file = File::open(&path).map_err(RecordError::disk("open", &path))?;
        let builder =
            ParquetRecordBatchReaderBuilder::try_new(file).map_err(RecordError::parquet("read", &path))?;
        let reader = builder.build().map_err(RecordError::parquet("read", &path))?;
        for batch in reader {
            let batch = batch.map_err(|error| RecordError::parquet("read", &path)(error.into()))?;
            lines += export_batch(&path, &batch, split, output)?;
        }
    }
    Ok(lines)
}

fn export_batch(
    path: &Path,
    batch: &RecordBatch,
    split: Option<Split>,
    output: &mut impl Write,
) -> Result<u64, RecordError> {
    let column = |column: &'static str| {
        let found = batch.column_by_name(column).and_then(|array| array.as_string_opt::<i32>());
        found.ok_or_else(|| RecordError::Column { path: path.to_path_buf(), column, expected: "utf8" })
    };
    let (splits, statuses) = (column("split")?, column("status")?);
    let identity = [column("record_id")?, column("request_id")?, column("model")?];
    let (reasoning, content, calls) = (column("reasoning")?, column("content")?, column("tool_calls_json")?);
    let wrong =
        || RecordError::Column { path: path.to_path_buf(), column: "messages", expected: "list<struct>" };
    let lists =
        batch.column_by_name("messages").and_then(|array| array.as_list_opt::<i32>()).ok_or_else(wrong)?;
    let mut lines = 0;
    for row in 0..batch.num_rows() {
        let is_wanted = split.is_none_or(|split| splits.value(row) == split.as_str());
        let is_whole = matches!(statuses.value(row), "ok" | "length");
        if !is_wanted || !is_whole || lists.is_null(row) {
            continue;
        }
        let said = lists.value(row);
        let mut messages = messages_of(said.as_struct_opt().ok_or_else(wrong)?);
        let mut answer = Map::from_iter([("role".to_owned(), json!("assistant"))]);
        set(&mut answer, "content", text(content, row).map(Value::String).or(Some(Value::Null)));
        set(&mut answer, "reasoning_content", text(reasoning, row).map(Value::String));
        set(&mut answer, "tool_calls", text(calls, row).and_then(|calls| serde_json::from_str(&calls).ok()));
        messages.push(Value::Object(answer));
        let mut line = Map::from_iter([("messages".to_owned(), Value::Array(messages))]);
        for (name, array) in ["record_id", "request_id", "model"].into_iter().zip(identity) {
            set(&mut line, name, text(array, row).map(Value::String));
        }
        let failed = |source: io::Error| RecordError::Disk {
            action: "write the export of",
            path: path.to_path_buf(),
            source,
        };
        writeln!(output, "{}", Value::Object(line)).map_err(failed)?;
        lines += 1;
    }
    Ok(lines)
}

fn messages_of(said: &StructArray) -> Vec<Value> {
    let field = |name: &str, row: usize| {
        said.column_by_name(name)
            .and_then(|array| array.as_string_opt::<i32>())
            .and_then(|array| text(array, row))
    };
    let parsed =
        |name: &str, row: usize| field(name, row).and_then(|text| serde_json::from_str::<Value>(&text).ok());
    let mut messages = Vec::with_capacity(said.len());
    for row in 0..said.len() {
        let mut message = Map::new();
        set(&mut message, "role", field("role", row).map(Value::String));
        // As it was sent: content in parts keeps its parts.
        let content = parsed("content_json", row).or_else(|| field("content", row).map(Value::String));
        set(&mut message, "content", content.or(Some(Value::Null)));
        set(&mut message, "name", field("name", row).map(Value::String));
        set(&mut message, "tool_call_id", field("tool_call_id", row).map(Value::String));
        set(&mut message, "tool_calls", parsed("tool_calls_json", row));
        messages.push(Value::Object(message));
    }
    messages
}

fn text(array: &StringArray, row: usize) -> Option<String> {
    array.is_valid(row).then(|| array.value(row).to_owned())
}

fn set(object: &mut Map<String, Value>, name: &str, value: Option<Value>) {
    if let Some(value) = value {
        object.insert(name.to_owned(), value);
    }
}
