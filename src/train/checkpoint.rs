//! Resumable checkpoints of a run.
//!
//! A checkpoint is a directory: `state-<step>.safetensors` (weights and both moments in f32) and `checkpoint.json`, which
//! names the former. The JSON is published last, so a crash leaves the old checkpoint or the new one, never a mixture.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use crate::head::{HeadConfig, HeadTensors};
use crate::store;

use super::TrainError;
use super::optimizer::{AdamW, AdamWOptions};
use super::tensors::{check_shapes, named, named_mut, zeros};

const MANIFEST: &str = "checkpoint.json";

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Optimizer steps done.
    pub step: u64,
    /// Tokens of the documents trained on, prompts included.
    pub tokens: u64,
    /// The current pass over the source.
    pub pass: u64,
    /// Next place in the order of the pass. The order follows from seed and pass alone.
    pub cursor: u64,
    pub seed: u64,
}

/// Everything that a run needs to go on.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    pub weights: HeadTensors<f32>,
    pub optimizer: AdamW,
    pub progress: Progress,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    format: u32,
    state_file: String,
    head: HeadConfig,
    optimizer: AdamWOptions,
    updates: u64,
    progress: Progress,
}

impl Checkpoint {
    /// Writes the checkpoint into `directory`, which is made, and removes the one before.
    pub fn save(&self, directory: &Path, config: &HeadConfig) -> Result<(), TrainError> {
        let file_error = |source| TrainError::CheckpointFile { path: directory.to_owned(), source };
        fs::create_dir_all(directory).map_err(file_error)?;
        let state_file = format!("state-{:08}.safetensors", self.progress.step);
        let mut bytes: Vec<(String, Vec<u8>)> = Vec::new();
        let parts = [
            ("weights", &self.weights),
            ("first", &self.optimizer.first),
            ("second", &self.optimizer.second),
        ];
        for (part, tensors) in parts {
            for (name, values) in named(tensors) {
                bytes.push((
                    format!("{part}.{name}"),
                    values.iter().flat_map(|value| value.to_le_bytes()).collect(),
                ));
            }
        }
        let content = |reason: String| TrainError::CheckpointContent { path: directory.to_owned(), reason };
        let mut views = Vec::with_capacity(bytes.len());
        for (name, data) in &bytes {
            let view = TensorView::new(Dtype::F32, vec![data.len() / 4], data)
                .map_err(|e| content(e.to_string()))?;
            views.push((name.as_str(), view));
        }
        let packed = safetensors::serialize(views, None).map_err(|e| content(e.to_string()))?;
        store::publish(&directory.join(&state_file), &packed).map_err(file_error)?;
        let manifest = Manifest {
            format: 1,
            state_file: state_file.clone(),
            head: config.clone(),
            optimizer: self.optimizer.options.clone(),
            updates: self.optimizer.updates,
            progress: self.progress.clone(),
        };
        let json = serde_json::to_vec_pretty(&manifest).map_err(|e| content(e.to_string()))?;
        store::publish(&directory.join(MANIFEST), &json).map_err(file_error)?;
        remove_states(directory, &state_file).map_err(file_error)
    }

    /// Removes the checkpoint in `directory`, if there is one.
    pub fn remove(directory: &Path) -> Result<(), TrainError> {
        let file_error = |source| TrainError::CheckpointFile { path: directory.to_owned(), source };
        let manifest = directory.join(MANIFEST);
        if !manifest.exists() {
            return Ok(());
        }
        fs::remove_file(manifest).map_err(file_error)?;
        remove_states(directory, "").map_err(file_error)
    }

    /// The checkpoint in `directory`, or none where there is none. One of another head is refused.
    pub fn load(directory: &Path, config: &HeadConfig) -> Result<Option<Self>, TrainError> {
        let path = directory.join(MANIFEST);
        let json = match fs::read(&path) {
            Ok(json) => json,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(TrainError::CheckpointFile { path, source }),
        };
        let content = |reason: String| TrainError::CheckpointContent { path: directory.to_owned(), reason };
        let manifest: Manifest = serde_json::from_slice(&json).map_err(|e| content(e.to_string()))?;
        if manifest.format != 1 {
            return Err(content(format!("format {} is not 1", manifest.format)));
        }
        if manifest.head != *config {
            return Err(content("it belongs to a head of another configuration".to_owned()));
        }
        let state_path = directory.join(&manifest.state_file);
        let bytes = fs::read(&state_path)
            .map_err(|source| TrainError::CheckpointFile { path: state_path.clone(), source })?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| content(e.to_string()))?;
        let found: HashMap<String, TensorView> = file.tensors().into_iter().collect();
        let part = |part: &str| -> Result<HeadTensors<f32>, TrainError> {
            let mut tensors = zeros(config);
            for (name, values) in named_mut(&mut tensors) {
                let key = format!("{part}.{name}");
                let view = found.get(&key).ok_or_else(|| content(format!("tensor {key} is missing")))?;
                if view.dtype() != Dtype::F32 {
                    return Err(content(format!("tensor {key} is {:?}, not F32", view.dtype())));
                }
                values.clear();
                let numbers = view.data().chunks_exact(4);
                values.extend(numbers.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            }
            check_shapes(config, &tensors)?;
            Ok(tensors)
        };
        let optimizer = AdamW {
            options: manifest.optimizer,
            updates: manifest.updates,
            first: part("first")?,
            second: part("second")?,
        };
        Ok(Some(Self { weights: part("weights")?, optimizer, progress: manifest.progress }))
    }
}

/// Removes all state files but `kept`.
fn remove_states(directory: &Path, kept: &str) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("state-") && name.ends_with(".safetensors") && name != kept {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
