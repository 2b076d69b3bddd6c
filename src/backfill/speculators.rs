//! What Speculators leaves on disk: the data set of `prepare-data` and the states of its offline generation.
//!
//! As Speculators 0.9 writes it: the data set is a Hugging Face one, Arrow streams that `state.json` names in their order,
//! with a list of `input_ids` and of `loss_mask` in each row. The states of row i are in `hs_<i>.safetensors`, which is
//! vLLM's own connector's file: `hidden_states` [n, L, H] and `token_ids` [n]. So the files alone do not say where the
//! answer begins; the loss mask does.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, RecordBatch};
use arrow_ipc::reader::StreamReader;
use arrow_schema::ArrowError;
use bytes::Bytes;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::states::TransferFile;
use crate::states::transfer::{self, Tensors, TransferError};

/// A larger file is refused unread.
const MAX_FILE_BYTES: u64 = 4 << 30;

#[derive(Debug, thiserror::Error)]
pub(super) enum SpeculatorsError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "{}: {count} .pt files and no hs_*.safetensors; those are older Speculators' pickles, which are not read since reading \
         one runs code: generate the states with Speculators 0.9, or save each as safetensors with `hidden_states` \
         [tokens, layers, hidden] and `token_ids` under the name hs_<row>.safetensors", directory.display()
    )]
    Pickles { directory: PathBuf, count: usize },
    #[error("{}: no hs_*.safetensors; give the directory that Speculators' offline generation wrote", directory.display())]
    NoFiles { directory: PathBuf },
    #[error(
        "{}: not a data set of Speculators ({problem}); give the output of its prepare-data by --dataset, since the loss \
         mask there tells the prompt from the answer", path.display()
    )]
    DataSet { path: PathBuf, problem: String },
    #[error("{}: {source}; prepare the data again", path.display())]
    Arrow { path: PathBuf, source: ArrowError },
}

/// The files of states in a directory, by the row of the data set.
pub(super) fn state_files(directory: &Path) -> Result<BTreeMap<usize, PathBuf>, SpeculatorsError> {
    let failed = |source| SpeculatorsError::Io { path: directory.to_path_buf(), source };
    let mut files = BTreeMap::new();
    let mut pickles = 0;
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        pickles += usize::from(path.extension().is_some_and(|extension| extension == "pt"));
        if let Some(row) = row_of(&path) {
            files.insert(row, path);
        }
    }
    if !files.is_empty() {
        return Ok(files);
    }
    let directory = directory.to_path_buf();
    if pickles > 0 {
        return Err(SpeculatorsError::Pickles { directory, count: pickles });
    }
    Err(SpeculatorsError::NoFiles { directory })
}

fn row_of(path: &Path) -> Option<usize> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix("hs_")?.strip_suffix(transfer::EXTENSION)?.parse().ok()
}

/// One row of the data set.
#[derive(Debug, PartialEq)]
pub(super) struct DataRow {
    pub token_ids: Vec<u32>,
    /// The first position that counts in the loss; None where none does.
    pub prompt_length: Option<usize>,
}

/// The rows of a data set in their order; a batch of them is in memory.
pub(super) struct DataSet {
    files: VecDeque<PathBuf>,
    open: Option<(PathBuf, StreamReader<BufReader<File>>)>,
    ready: VecDeque<DataRow>,
}

impl DataSet {
    pub fn open(directory: &Path) -> Result<Self, SpeculatorsError> {
        let path = directory.join("state.json");
        let bad = |problem: String| SpeculatorsError::DataSet { path: path.clone(), problem };
        let bytes = fs::read(&path).map_err(|error| bad(error.to_string()))?;
        let state: Value = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
        let listed =
            state["_data_files"].as_array().ok_or_else(|| bad("it lists no _data_files".to_owned()))?;
        let mut files = VecDeque::new();
        for file in listed {
            match file["filename"].as_str() {
                // A plain name only: a list from elsewhere must not reach outside its directory.
                Some(name) if !name.contains('/') => files.push_back(directory.join(name)),
                _ => return Err(bad(format!("_data_files has {file}, not the name of a file beside it"))),
            }
        }
        Ok(Self { files, open: None, ready: VecDeque::new() })
    }

    /// None at the end.
    pub fn next_row(&mut self) -> Result<Option<DataRow>, SpeculatorsError> {
        loop {
            if let Some(row) = self.ready.pop_front() {
                return Ok(Some(row));
            }
            if let Some((path, reader)) = &mut self.open {
                match reader.next() {
                    Some(batch) => {
                        let arrow = |source| SpeculatorsError::Arrow { path: path.clone(), source };
                        self.ready = rows(path, &batch.map_err(arrow)?)?;
                    }
                    None => self.open = None,
                }
                continue;
            }
            let Some(path) = self.files.pop_front() else { return Ok(None) };
            let file =
                File::open(&path).map_err(|source| SpeculatorsError::Io { path: path.clone(), source })?;
            let reader = StreamReader::try_new_buffered(file, None)
                .map_err(|source| SpeculatorsError::Arrow { path: path.clone(), source })?;
            self.open = Some((path, reader));
        }
    }
}

fn rows(path: &Path, batch: &RecordBatch) -> Result<VecDeque<DataRow>, SpeculatorsError> {
    let bad = |problem: String| SpeculatorsError::DataSet { path: path.to_path_buf(), problem };
    let column =
        |name: &str| batch.column_by_name(name).ok_or_else(|| bad(format!("it has no column {name}")));
    let (ids, masks) = (column("input_ids")?, column("loss_mask")?);
    let mut rows = VecDeque::with_capacity(batch.num_rows());
    for row in 0..batch.num_rows() {
        let ids_here = numbers(ids, row).ok_or_else(|| bad("input_ids are no lists of int64".to_owned()))?;
        let mask = numbers(masks, row).ok_or_else(|| bad("loss_mask is no list of int64".to_owned()))?;
        let token_ids: Result<Vec<u32>, _> = ids_here.iter().map(|id| u32::try_from(*id)).collect();
        rows.push_back(DataRow {
            token_ids: token_ids
                .map_err(|_| bad("input_ids hold a number that is no token id".to_owned()))?,
            prompt_length: mask.iter().position(|counts| *counts == 1),
        });
    }
    Ok(rows)
}

fn numbers(column: &ArrayRef, row: usize) -> Option<Vec<i64>> {
    let list = match (column.as_list_opt::<i32>(), column.as_list_opt::<i64>()) {
        (Some(lists), _) => lists.value(row),
        (_, Some(lists)) => lists.value(row),
        _ => return None,
    };
    Some(list.as_primitive_opt::<Int64Type>()?.values().to_vec())
}

/// The states of a row, all but the last one's, which nothing comes after. The ids must be the row's.
pub(super) fn read_states(
    path: &Path,
    name: &str,
    row: &DataRow,
    prompt_length: usize,
    layer_ids: &[u32],
) -> Result<TransferFile, TransferError> {
    let bytes = transfer::read_plain_file(path, MAX_FILE_BYTES)?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| TransferError::Format(error.to_string()))?;
    let (states, ids) = transfer::views(&file)?;
    let tensors = Tensors::read(&states, &ids, layer_ids.len())?;
    if tensors.token_ids != row.token_ids || tensors.rows != row.token_ids.len() {
        return Err(TransferError::Shape(format!(
            "{} rows for {} token ids are not those of the data set's row of {} ids",
            tensors.rows,
            tensors.token_ids.len(),
            row.token_ids.len()
        )));
    }
    let rows = tensors.rows - 1;
    let kept = states.data().len() / tensors.rows * rows;
    Ok(TransferFile {
        internal_id: name.to_owned(),
        layer_ids: layer_ids.to_vec(),
        prompt_length,
        head_digest: None,
        head_swapped: false,
        drafting: None,
        token_ids: tensors.token_ids,
        prefix_salt: String::new(),
        first_row: 0,
        rows,
        layers: tensors.layers,
        hidden: tensors.hidden,
        dtype: tensors.dtype,
        states: Bytes::copy_from_slice(&states.data()[..kept]),
    })
}
