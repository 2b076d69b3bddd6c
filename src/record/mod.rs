//! Records: the bounded recorder, the WAL, sealing to Parquet, and reading back.
//!
//! What crosses the door: the proxy hands over [`Record`]s (one per choice) and never waits; the state collector adds the
//! token ids that it saw, and what was drafted for them; the trainer and the commands read rows back from `records/`.
//!
//! Promises:
//! - `begin`, `record`, `abandon` and `join` never wait for a disk. What does not fit the memory bound is dropped
//!   and counted.
//! - A row is in the WAL, synced, at most one flush interval after it was handed over, plus what the disk takes for that
//!   flush and for one that is running then. A crash loses nothing older.
//! - A request that had begun and was not finished when the process died becomes one row with status `proxy_restart`.
//! - `records/` holds whole Parquet files and nothing else, and no row twice, wherever the process was killed.
//! - A disk that fails, fills up or stalls costs rows at worst, never a request: what does not fit is counted by reason,
//!   the work is tried again, and recording goes on by itself once the disk does.
//! - An object store that gets copies of `records/` can be away for as long as it likes: it is brought up to date later.

mod aside;
mod columns;
mod edit;
mod error;
mod export;
mod health;
mod mirror;
mod privacy;
mod read;
mod recorder;
mod row;
mod seal;
mod wal;
mod writer;

pub use columns::{SCHEMA_VERSION, SCHEMA_VERSION_KEY, schema};
pub use edit::{Compacted, Forgotten, Selection, selected_requests};
pub use error::RecordError;
pub use export::export;
pub use health::{DropReason, Health};
pub use mirror::has_copies;
pub use privacy::{Privacy, PrivacyError, tenant_hash};
pub use read::{
    DayAcceptance, DayStats, FileCheck, Row, Rows, Stats, files, newest_rows, rows, stats, token_frequencies,
    verify,
};
pub use recorder::{Recorder, RecorderHandle, RecorderOptions, RecorderStats};
pub use row::{Message, Record, Source, Split, Status, messages_from_json, now_micros};
pub use wal::Join;
