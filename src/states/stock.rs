//! The files of vLLM's own hidden-states connector (`ExampleHiddenStatesConnector`), by its lock protocol.
//!
//! vLLM makes `<file>.lock` and takes flock(LOCK_EX) on it before a client can learn the path, and lets go when the
//! file is whole; a reader that gets LOCK_SH has a whole file, and deletes both. The kernel ends the wait, a killed vLLM
//! included.
//!
//! The file has one row of states for each id of the prompt. It does not say which layers it holds, and has no checksum;
//! so the layers are what the server was started with, and the ids must be those that were sent.

use std::fs::File;
use std::path::Path;

use bytes::Bytes;
use safetensors::SafeTensors;

use super::accept::{self, Expected, OutcomeStatus, SampleKey};
use super::transfer::{self, Tensors, TransferError, TransferFile, TransferName};
use super::{StateStore, remove};

/// A larger file is refused unread.
const MAX_FILE_BYTES: u64 = 4 << 30;

/// The ids of a sample whose states vLLM computes again.
#[derive(Clone, Debug, PartialEq)]
pub struct StockSample {
    /// [T + 1], prompt and output. vLLM is sent [`StockSample::prefill`].
    pub token_ids: Vec<u32>,
    /// How many of them are the prompt.
    pub prompt_length: usize,
    /// What the server was started with, ascending, as vLLM sorts them.
    pub layer_ids: Vec<u32>,
}

impl StockSample {
    /// The T ids that have a row of states: nothing is computed after the last one.
    pub fn prefill(&self) -> &[u32] {
        &self.token_ids[..self.token_ids.len().saturating_sub(1)]
    }

    /// Waits until vLLM has written the file, reads and verifies it, and deletes it with its lock, whatever came of it.
    ///
    /// Blocks for as long as vLLM writes. `reported` is the path as vLLM gave it; only its name counts, and it must be
    /// that of `request_id`: nothing outside `directory` is touched.
    pub fn take(
        &self,
        directory: &Path,
        reported: &Path,
        request_id: &str,
    ) -> Result<TransferFile, OutcomeStatus> {
        let name = reported.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(parsed) = TransferName::parse(name).filter(|parsed| parsed.request_id == request_id) else {
            tracing::warn!(request_id, reported = %reported.display(), "vLLM names a file of another request");
            return Err(OutcomeStatus::BadName);
        };
        let path = directory.join(name);
        let lock_path = directory.join(format!("{name}.lock"));
        let read = wait(&lock_path)
            .and_then(|_lock| transfer::read_plain_file(&path, MAX_FILE_BYTES))
            .and_then(|bytes| self.parse(&bytes, parsed.internal_id));
        for file in [&path, &lock_path] {
            remove(file);
        }
        read.map_err(|error| {
            tracing::warn!(file = %path.display(), "states file {error}");
            OutcomeStatus::from(&error)
        })
    }

    fn parse(&self, bytes: &[u8], internal_id: String) -> Result<TransferFile, TransferError> {
        let file =
            SafeTensors::deserialize(bytes).map_err(|error| TransferError::Format(error.to_string()))?;
        let (states, ids) = transfer::views(&file)?;
        let tensors = Tensors::read(&states, &ids, self.layer_ids.len())?;
        if tensors.rows != tensors.token_ids.len() {
            return Err(TransferError::Shape(format!(
                "{} rows for {} token ids; vLLM's own connector gives one for each",
                tensors.rows,
                tensors.token_ids.len()
            )));
        }
        if tensors.token_ids != self.prefill() {
            return Err(TransferError::Shape(format!(
                "its {} token ids are not the {} that were sent",
                tensors.token_ids.len(),
                self.prefill().len()
            )));
        }
        Ok(TransferFile {
            internal_id,
            layer_ids: self.layer_ids.clone(),
            prompt_length: self.prompt_length,
            head_digest: None,
            head_swapped: false,
            drafting: None,
            token_ids: self.token_ids.clone(),
            prefix_salt: String::new(),
            first_row: 0,
            rows: tensors.rows,
            layers: tensors.layers,
            hidden: tensors.hidden,
            dtype: tensors.dtype,
            states: Bytes::copy_from_slice(states.data()),
        })
    }
}

/// Checks what [`StockSample::take`] gave as the collector checks the plugin's files, and stores it.
pub fn store_stock(
    store: &mut StateStore,
    expected: &mut Expected,
    key: SampleKey<'_>,
    file: &TransferFile,
) -> OutcomeStatus {
    match expected.check_ids(&file.token_ids) {
        Ok(()) => accept::check_and_store(store, expected, key, file).status,
        Err(status) => status,
    }
}

/// Sleeps until the writer lets go of its lock. The lock is held while the result lives.
fn wait(lock_path: &Path) -> Result<File, TransferError> {
    let failed = |error: std::io::Error| {
        TransferError::Unreadable(format!(
            "its lock {}: {error}; is this the server's shared_storage_path, and use_synchronization_lock on?",
            lock_path.display()
        ))
    };
    let lock = File::open(lock_path).map_err(failed)?;
    lock.lock_shared().map_err(failed)?;
    Ok(lock)
}
