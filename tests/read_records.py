"""Opens a records/ tree as pyarrow and DuckDB users would, checks the types, and prints the documents' queries as JSON.

usage: read_records.py RECORDS
"""

import json
import re
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

TIME = pa.timestamp("us", tz="UTC")
MESSAGE_FIELDS = ["role", "content", "name", "tool_call_id", "tool_calls_json", "content_json"]
TYPES = {
    "record_id": pa.string(), "request_id": pa.string(), "choice_index": pa.int32(),
    "conversation_id": pa.string(), "started_at": TIME, "first_byte_at": TIME, "finished_at": TIME,
    "endpoint": pa.string(), "model": pa.string(), "stream": pa.bool_(), "status": pa.string(),
    "http_status": pa.int32(), "finish_reason": pa.string(),
    "prompt": pa.string(), "tools_json": pa.string(), "params_json": pa.string(), "reasoning": pa.string(),
    "content": pa.string(), "tool_calls_json": pa.string(),
    "prompt_tokens": pa.int64(), "completion_tokens": pa.int64(), "cached_tokens": pa.int64(),
    "reasoning_tokens": pa.int64(), "draft_head": pa.string(), "drafts": pa.int64(), "drafted_tokens": pa.int64(),
    "accepted_tokens": pa.int64(), "source": pa.string(), "split": pa.string(), "tenant_hash": pa.string(),
    "refusal": pa.string(), "logprobs_json": pa.string(), "redaction": pa.string(), "states_status": pa.string(),
    "raw_request": pa.binary(), "raw_response": pa.binary(),
}  # fmt: skip


def check_with_pyarrow(root: Path) -> int:
    files = sorted(root.rglob("*.parquet"))
    assert files, f"no Parquet under {root}"
    first = pq.read_schema(files[0])
    for path in files:
        schema = pq.read_schema(path)
        assert schema.equals(first), f"{path}: another schema than {files[0]}"
        assert schema.metadata[b"draftsmith.schema_version"] == b"2", path
        assert "dt" not in schema.names and "hour" not in schema.names, path
        metadata = pq.read_metadata(path)
        assert metadata.metadata[b"draftsmith.schema_version"] == b"2", path
        assert metadata.row_group(0).column(0).compression == "ZSTD", path

    dataset = ds.dataset(root, format="parquet", partitioning="hive")
    names = [*TYPES, "messages", "prompt_token_ids", "output_token_ids", "dt", "hour"]
    assert set(dataset.schema.names) == set(names), set(dataset.schema.names) ^ set(names)
    for name, expected in TYPES.items():
        found = dataset.schema.field(name).type
        assert found == expected, f"{name} is {found}, not {expected}"
    for name in ("prompt_token_ids", "output_token_ids"):
        assert dataset.schema.field(name).type.value_type == pa.int32(), name
    message = dataset.schema.field("messages").type.value_type
    assert [message.field(i).name for i in range(message.num_fields)] == MESSAGE_FIELDS, message

    table = dataset.to_table()
    assert len(set(table["record_id"].to_pylist())) == table.num_rows
    days = {(moment.strftime("%Y-%m-%d"), moment.hour) for moment in table["started_at"].to_pylist()}
    partitions = {(str(day), int(hour)) for day, hour in zip(table["dt"].to_pylist(), table["hour"].to_pylist())}
    assert days == partitions, (days, partitions)
    return table.num_rows


def queries_of(document: str, root: Path) -> list[str]:
    """The SQL that users are told to run, on this tree."""
    text = (Path(__file__).parent.parent / document).read_text()
    blocks = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1, f"{document} has {len(blocks)} blocks of SQL"
    assert blocks[0].count("'data/records/") == 1, document
    queries = blocks[0].replace("'data/records/", f"'{root}/").split(";")
    return [query for query in queries if query.strip()]


def query_with_duckdb(root: Path) -> dict:
    connection = duckdb.connect()
    view, *of_schema = queries_of("schemas/records.md", root)
    connection.execute(view)
    described = {name: kind for name, kind, *_ in connection.execute("DESCRIBE records").fetchall()}
    assert described["started_at"] == "TIMESTAMP WITH TIME ZONE", described["started_at"]
    assert described["output_token_ids"] == "INTEGER[]", described["output_token_ids"]
    assert described["messages"].startswith("STRUCT(") and described["messages"].endswith("[]"), described["messages"]
    assert described["raw_request"] == "BLOB", described["raw_request"]
    assert described["accepted_tokens"] == "BIGINT", described["accepted_tokens"]
    [of_readme] = queries_of("README.md", root)
    acceptance = [(str(day), *rest) for day, *rest in connection.execute(of_readme).fetchall()]
    rates, statuses = [connection.execute(query).fetchall() for query in of_schema]
    rows = connection.execute("SELECT count(*) FROM records").fetchone()[0]
    return {
        "acceptance": acceptance,
        "rates": [(str(day), rate) for day, rate in rates],
        "rows_by_status": sorted(statuses),
        "rows": rows,
    }


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    root = Path(sys.argv[1])
    rows = check_with_pyarrow(root)
    result = query_with_duckdb(root)
    assert result["rows"] == rows, (result["rows"], rows)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
