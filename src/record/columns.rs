//! The Parquet schema and the rows as columns: one list, so that a name, its type and its values cannot drift apart.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{
    ArrayRef, BinaryArray, BooleanArray, Int32Array, Int64Array, ListArray, RecordBatch, StringArray,
    StructArray, TimestampMicrosecondArray,
};
use arrow_buffer::{NullBuffer, OffsetBuffer};
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema, SchemaRef};

use super::row::{Message, Record};

/// Raised when columns are added; a column's name and type never change.
pub const SCHEMA_VERSION: &str = "2";
/// The key of the version in each file's metadata.
pub const SCHEMA_VERSION_KEY: &str = "draftsmith.schema_version";

/// The schema of every file under `records/`.
pub fn schema() -> SchemaRef {
    with_version(columns(&[]).into_iter().map(|(field, _)| field).collect())
}

/// Some readers show the file's own metadata, others only the Arrow schema's: the version is in both.
fn with_version(fields: Vec<Field>) -> SchemaRef {
    let metadata = HashMap::from([(SCHEMA_VERSION_KEY.to_owned(), SCHEMA_VERSION.to_owned())]);
    Arc::new(Schema::new_with_metadata(fields, metadata))
}

pub(super) fn to_batch(rows: &[Record]) -> Result<RecordBatch, ArrowError> {
    let (fields, arrays): (Vec<Field>, Vec<ArrayRef>) = columns(rows).into_iter().unzip();
    RecordBatch::try_new(with_version(fields), arrays)
}

fn columns(rows: &[Record]) -> Vec<(Field, ArrayRef)> {
    vec![
        required(text("record_id", rows, |row| Some(row.record_id.as_str()))),
        required(text("request_id", rows, |row| Some(row.request_id.as_str()))),
        required(small("choice_index", rows, |row| i32::try_from(row.choice_index).ok().or(Some(i32::MAX)))),
        text("conversation_id", rows, |row| row.conversation_id.as_deref()),
        required(time("started_at", rows, |row| Some(row.started_at))),
        time("first_byte_at", rows, |row| row.first_byte_at),
        time("finished_at", rows, |row| row.finished_at),
        required(text("endpoint", rows, |row| Some(row.endpoint.as_str()))),
        text("model", rows, |row| row.model.as_deref()),
        required(flag("stream", rows, |row| Some(row.stream))),
        required(text("status", rows, |row| Some(row.status.as_str()))),
        small("http_status", rows, |row| row.http_status.map(i32::from)),
        text("finish_reason", rows, |row| row.finish_reason.as_deref()),
        messages("messages", rows),
        text("prompt", rows, |row| row.prompt.as_deref()),
        text("tools_json", rows, |row| row.tools_json.as_deref()),
        text("params_json", rows, |row| row.params_json.as_deref()),
        text("reasoning", rows, |row| row.reasoning.as_deref()),
        text("content", rows, |row| row.content.as_deref()),
        text("tool_calls_json", rows, |row| row.tool_calls_json.as_deref()),
        ids("prompt_token_ids", rows, |row| row.prompt_token_ids.as_deref()),
        ids("output_token_ids", rows, |row| row.output_token_ids.as_deref()),
        count("prompt_tokens", rows, |row| row.prompt_tokens),
        count("completion_tokens", rows, |row| row.completion_tokens),
        count("cached_tokens", rows, |row| row.cached_tokens),
        count("reasoning_tokens", rows, |row| row.reasoning_tokens),
        text("draft_head", rows, |row| row.draft_head.as_deref()),
        count("drafts", rows, |row| row.drafts),
        count("drafted_tokens", rows, |row| row.drafted_tokens),
        count("accepted_tokens", rows, |row| row.accepted_tokens),
        required(text("source", rows, |row| Some(row.source.as_str()))),
        required(text("split", rows, |row| Some(row.split.as_str()))),
        text("tenant_hash", rows, |row| row.tenant_hash.as_deref()),
        text("refusal", rows, |row| row.refusal.as_deref()),
        text("logprobs_json", rows, |row| row.logprobs_json.as_deref()),
        text("redaction", rows, |row| row.redaction.as_deref()),
        text("states_status", rows, |row| row.states_status.as_deref()),
        raw("raw_request", rows, |row| row.raw_request.as_deref()),
        raw("raw_response", rows, |row| row.raw_response.as_deref()),
    ]
}

type Column = (Field, ArrayRef);

fn required((field, array): Column) -> Column {
    (field.with_nullable(false), array)
}

fn text<'a>(name: &str, rows: &'a [Record], get: impl Fn(&'a Record) -> Option<&'a str>) -> Column {
    let array: StringArray = rows.iter().map(get).collect();
    (Field::new(name, DataType::Utf8, true), Arc::new(array))
}

fn raw<'a>(name: &str, rows: &'a [Record], get: impl Fn(&'a Record) -> Option<&'a [u8]>) -> Column {
    let array: BinaryArray = rows.iter().map(get).collect();
    (Field::new(name, DataType::Binary, true), Arc::new(array))
}

fn flag(name: &str, rows: &[Record], get: impl Fn(&Record) -> Option<bool>) -> Column {
    let array: BooleanArray = rows.iter().map(get).collect();
    (Field::new(name, DataType::Boolean, true), Arc::new(array))
}

fn small(name: &str, rows: &[Record], get: impl Fn(&Record) -> Option<i32>) -> Column {
    let array: Int32Array = rows.iter().map(get).collect();
    (Field::new(name, DataType::Int32, true), Arc::new(array))
}

fn count(name: &str, rows: &[Record], get: impl Fn(&Record) -> Option<i64>) -> Column {
    let array: Int64Array = rows.iter().map(get).collect();
    (Field::new(name, DataType::Int64, true), Arc::new(array))
}

fn time(name: &str, rows: &[Record], get: impl Fn(&Record) -> Option<i64>) -> Column {
    let values: TimestampMicrosecondArray = rows.iter().map(get).collect();
    let array = values.with_timezone("UTC");
    (Field::new(name, arrow_array::Array::data_type(&array).clone(), true), Arc::new(array))
}

fn ids<'a>(name: &str, rows: &'a [Record], get: impl Fn(&'a Record) -> Option<&'a [i32]>) -> Column {
    let lists: Vec<Option<&[i32]>> = rows.iter().map(get).collect();
    let flat: Vec<i32> = lists.iter().flatten().flat_map(|list| list.iter().copied()).collect();
    list(name, &lists, DataType::Int32, Arc::new(Int32Array::from(flat)))
}

fn messages(name: &str, rows: &[Record]) -> Column {
    let lists: Vec<Option<&[Message]>> = rows.iter().map(|row| row.messages.as_deref()).collect();
    let flat: Vec<&Message> = lists.iter().flatten().flat_map(|list| list.iter()).collect();
    let parts: [(&str, StringArray); 6] = [
        ("role", flat.iter().map(|message| Some(message.role.as_str())).collect()),
        ("content", flat.iter().map(|message| message.content.as_deref()).collect()),
        ("name", flat.iter().map(|message| message.name.as_deref()).collect()),
        ("tool_call_id", flat.iter().map(|message| message.tool_call_id.as_deref()).collect()),
        ("tool_calls_json", flat.iter().map(|message| message.tool_calls_json.as_deref()).collect()),
        ("content_json", flat.iter().map(|message| message.content_json.as_deref()).collect()),
    ];
    let mut fields = Vec::new();
    let mut arrays: Vec<ArrayRef> = Vec::new();
    for (part, array) in parts {
        fields.push(Field::new(part, DataType::Utf8, true));
        arrays.push(Arc::new(array));
    }
    let fields = Fields::from(fields);
    let structs = StructArray::new(fields.clone(), arrays, None);
    list(name, &lists, DataType::Struct(fields), Arc::new(structs))
}

/// `element` is the name that Parquet's own specification gives to what is in a list.
fn list<T>(name: &str, lists: &[Option<&[T]>], element: DataType, flat: ArrayRef) -> Column {
    let field = Arc::new(Field::new("element", element, true));
    let offsets = OffsetBuffer::from_lengths(lists.iter().map(|list| list.map_or(0, |list| list.len())));
    let nulls: NullBuffer = lists.iter().map(|list| list.is_some()).collect::<Vec<bool>>().into();
    let array = ListArray::new(Arc::clone(&field), offsets, flat, Some(nulls));
    (Field::new(name, DataType::List(field), true), Arc::new(array))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::row::tests::full_record;

    #[test]
    fn every_field_is_a_column_and_no_row_changes_the_schema() {
        let record = full_record("a");
        let json = serde_json::to_value(&record).unwrap();
        let names: Vec<String> = json.as_object().unwrap().keys().cloned().collect();
        let columns: Vec<String> = schema().fields().iter().map(|field| field.name().clone()).collect();
        assert_eq!(columns, names);

        let batch = to_batch(&[record, Record::new("b", "/v1/completions", 1)]).unwrap();
        assert_eq!(batch.schema(), schema());
        for (index, field) in schema().fields().iter().enumerate() {
            assert!(batch.column(index).is_valid(0), "{} is empty in the full row", field.name());
            assert_eq!(batch.column(index).is_valid(1), !field.is_nullable(), "{}", field.name());
        }
    }
}
