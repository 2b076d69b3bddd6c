//! Reading tensors from safetensors by ranges: only what is asked for is read, and memory mapping (unsafe, and fatal
//! when another process truncates the file) is not needed.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value;

use super::error::HeadError;
use super::fields::read_object;

const LARGEST_HEADER: u64 = 100_000_000;
/// Bytes read at once; a multiple of every element's size.
const CHUNK: usize = 4 << 20;

/// The tensors of a checkpoint's directory: `model.safetensors`, or shards named by `model.safetensors.index.json`.
#[derive(Debug)]
pub struct TensorSource {
    directory: PathBuf,
    /// Tensor name to file name.
    files: BTreeMap<String, String>,
    open: BTreeMap<String, TensorFile>,
}

#[derive(Debug)]
struct TensorFile {
    file: File,
    metadata: Metadata,
    /// Where the tensors begin, bytes.
    start: u64,
}

impl TensorSource {
    /// Opens the directory. Of a sharded checkpoint, a shard is opened when a tensor of it is read, so that the others
    /// need not be there.
    pub fn open(directory: &Path) -> Result<Self, HeadError> {
        let single = "model.safetensors".to_owned();
        let index = directory.join("model.safetensors.index.json");
        let mut files = BTreeMap::new();
        let mut open = BTreeMap::new();
        if directory.join(&single).is_file() {
            let file = TensorFile::open(&directory.join(&single))?;
            for name in file.metadata.tensors().into_keys() {
                files.insert(name, single.clone());
            }
            open.insert(single, file);
        } else if index.is_file() {
            let object = read_object(&index)?;
            let Some(Value::Object(map)) = object.get("weight_map") else {
                return Err(HeadError::MissingField {
                    path: index,
                    field: "weight_map".into(),
                    expected: "an object from tensor name to file name".into(),
                });
            };
            for (name, shard) in map {
                // A plain name only: an index from elsewhere must not reach outside its directory.
                match shard.as_str() {
                    Some(shard_name) if !shard_name.contains('/') => {
                        files.insert(name.clone(), shard_name.to_owned());
                    }
                    _ => {
                        let field = format!("weight_map.{name}");
                        return Err(HeadError::bad_field(
                            &index,
                            &field,
                            shard,
                            "the name of a file beside it",
                        ));
                    }
                }
            }
        } else {
            return Err(HeadError::NoWeights { directory: directory.to_path_buf() });
        }
        Ok(Self { directory: directory.to_path_buf(), files, open })
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    pub fn contains(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    /// The file that holds (or should hold) a tensor.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.directory.join(self.files.get(name).map_or("model.safetensors", String::as_str))
    }

    /// The shape as stored.
    pub fn shape(&mut self, name: &str) -> Result<Vec<usize>, HeadError> {
        Ok(self.locate(name, &[])?.1.shape.clone())
    }

    /// A bf16 or f32 tensor as f32; with `accept_f16` also f16. Every value is checked to be finite.
    pub fn read_f32(&mut self, name: &str, shape: &[usize], accept_f16: bool) -> Result<Vec<f32>, HeadError> {
        let path = self.path_of(name);
        let (file, info) = self.locate(name, shape)?;
        check_shape(&path, name, info, shape)?;
        let mut values: Vec<f32> = Vec::with_capacity(shape.iter().product());
        let dtype = info.dtype;
        match dtype {
            Dtype::BF16 => file.read(&path, info, |bytes| {
                values
                    .extend(bytes.as_chunks::<2>().0.iter().map(|pair| bf16::from_le_bytes(*pair).to_f32()));
            })?,
            Dtype::F16 if accept_f16 => file.read(&path, info, |bytes| {
                values.extend(
                    bytes.as_chunks::<2>().0.iter().map(|pair| half::f16::from_le_bytes(*pair).to_f32()),
                );
            })?,
            Dtype::F32 => file.read(&path, info, |bytes| {
                values.extend(bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)));
            })?,
            other => {
                let expected = if accept_f16 { "BF16, F16 or F32" } else { "BF16 or F32" };
                return Err(HeadError::BadDtype {
                    path,
                    name: name.into(),
                    found: format!("{other:?}"),
                    expected,
                });
            }
        }
        if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            return Err(HeadError::NotFinite { path, name: name.into(), index, found: values[index] });
        }
        Ok(values)
    }

    /// An i64 (or i32) tensor.
    pub fn read_i64(&mut self, name: &str, shape: &[usize]) -> Result<Vec<i64>, HeadError> {
        let path = self.path_of(name);
        let (file, info) = self.locate(name, shape)?;
        check_shape(&path, name, info, shape)?;
        let mut values = Vec::with_capacity(shape.iter().product());
        match info.dtype {
            Dtype::I64 => file.read(&path, info, |bytes| {
                values.extend(bytes.as_chunks::<8>().0.iter().map(|eight| i64::from_le_bytes(*eight)));
            })?,
            Dtype::I32 => file.read(&path, info, |bytes| {
                values
                    .extend(bytes.as_chunks::<4>().0.iter().map(|four| i64::from(i32::from_le_bytes(*four))));
            })?,
            other => {
                let found = format!("{other:?}");
                return Err(HeadError::BadDtype { path, name: name.into(), found, expected: "I64 or I32" });
            }
        }
        Ok(values)
    }

    pub fn read_bool(&mut self, name: &str, shape: &[usize]) -> Result<Vec<bool>, HeadError> {
        let path = self.path_of(name);
        let (file, info) = self.locate(name, shape)?;
        check_shape(&path, name, info, shape)?;
        if info.dtype != Dtype::BOOL {
            let found = format!("{:?}", info.dtype);
            return Err(HeadError::BadDtype { path, name: name.into(), found, expected: "BOOL" });
        }
        let mut values = Vec::with_capacity(shape.iter().product());
        file.read(&path, info, |bytes| values.extend(bytes.iter().map(|byte| *byte != 0)))?;
        Ok(values)
    }

    fn locate(&mut self, name: &str, expected: &[usize]) -> Result<(&TensorFile, &TensorInfo), HeadError> {
        let path = self.path_of(name);
        let missing =
            || HeadError::MissingTensor { path: path.clone(), name: name.into(), expected: expected.into() };
        let file_name = self.files.get(name).ok_or_else(missing)?;
        if !self.open.contains_key(file_name) {
            self.open.insert(file_name.clone(), TensorFile::open(&path)?);
        }
        let file = self.open.get(file_name).ok_or_else(missing)?;
        let info = file.metadata.info(name).ok_or_else(missing)?;
        Ok((file, info))
    }
}

impl TensorFile {
    fn open(path: &Path) -> Result<Self, HeadError> {
        let bad = |problem: String| HeadError::Safetensors { path: path.to_path_buf(), problem };
        let file = File::open(path).map_err(HeadError::io(path))?;
        let length = file.metadata().map_err(HeadError::io(path))?.len();
        if length < 8 {
            return Err(bad(format!("{length} bytes; a header alone takes more")));
        }
        let mut first = [0u8; 8];
        file.read_exact_at(&mut first, 0).map_err(HeadError::io(path))?;
        let header_length = u64::from_le_bytes(first);
        if header_length > LARGEST_HEADER || header_length + 8 > length {
            return Err(bad(format!("its header claims {header_length} bytes, the file has {length}")));
        }
        let mut header = vec![0u8; header_length as usize];
        file.read_exact_at(&mut header, 8).map_err(HeadError::io(path))?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| bad(error.to_string()))?;
        let start = header_length + 8;
        let expected = start + metadata.data_len() as u64;
        if expected != length {
            return Err(bad(format!(
                "its header describes {expected} bytes, the file has {length}; copy it again"
            )));
        }
        Ok(Self { file, metadata, start })
    }

    /// Hands the tensor's bytes to `take`, a chunk at a time.
    fn read(&self, path: &Path, info: &TensorInfo, mut take: impl FnMut(&[u8])) -> Result<(), HeadError> {
        let (begin, end) = info.data_offsets;
        let mut buffer = vec![0u8; CHUNK.min(end - begin)];
        let mut at = begin;
        while at < end {
            let part = &mut buffer[..CHUNK.min(end - at)];
            self.file.read_exact_at(part, self.start + at as u64).map_err(HeadError::io(path))?;
            take(part);
            at += part.len();
        }
        Ok(())
    }
}

fn check_shape(path: &Path, name: &str, info: &TensorInfo, expected: &[usize]) -> Result<(), HeadError> {
    if info.shape == expected {
        return Ok(());
    }
    let found = info.shape.clone();
    Err(HeadError::BadShape { path: path.to_path_buf(), name: name.into(), found, expected: expected.into() })
}
