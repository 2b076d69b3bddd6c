//! The files that vLLM's plugin hands over: their names, their contents, their checksum.
//!
//! A file is published by rename as `<internal id>.safetensors`. vLLM makes the internal id from our request id:
//! `chatcmpl-<request id>-<8 hex>` for chat, `cmpl-<request id>-<prompt index>-<8 hex>` for completions, and with n > 1
//! each of them gets `<i>_` in front.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use bytes::Bytes;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use super::{StateDtype, values};
use crate::store::hex;

/// The value of `format` in the metadata of a file that we read.
pub const FORMAT: &str = "draftsmith-states-2";

/// The file in the transfer directory whose replacement tells the plugin that rows which it gave before are not here.
pub const RESEND: &str = ".resend";

/// The extension of a published file, with its dot.
pub const EXTENSION: &str = ".safetensors";

/// What the name of a transfer file says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TransferName {
    /// vLLM's id: the file name without its extension.
    pub internal_id: String,
    /// The `X-Request-Id` that the proxy sent.
    pub request_id: String,
    /// Which prompt of a completions request; 0 for chat.
    pub prompt_index: usize,
    /// Which of the n answers to this prompt.
    pub sample_index: usize,
}

impl TransferName {
    /// Parses a file name; None where it is not the name of a published file.
    pub fn parse(file_name: &str) -> Option<Self> {
        Self::parse_internal_id(file_name.strip_suffix(EXTENSION)?)
    }

    /// Parses vLLM's internal request id.
    pub fn parse_internal_id(internal_id: &str) -> Option<Self> {
        let (sample_index, external) = match internal_id.split_once('_') {
            Some((number, rest)) if is_number(number) => (number.parse().ok()?, rest),
            _ => (0, internal_id),
        };
        let (external, suffix) = external.rsplit_once('-')?;
        if suffix.len() != 8 || !suffix.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return None;
        }
        let (request_id, prompt_index) = if let Some(request_id) = external.strip_prefix("chatcmpl-") {
            (request_id, 0)
        } else {
            let (request_id, number) = external.strip_prefix("cmpl-")?.rsplit_once('-')?;
            if !is_number(number) {
                return None;
            }
            (request_id, number.parse().ok()?)
        };
        if request_id.is_empty() {
            return None;
        }
        Some(Self {
            internal_id: internal_id.to_string(),
            request_id: request_id.to_string(),
            prompt_index,
            sample_index,
        })
    }

    /// The index of the choice in the response, where each prompt got `n` answers. None if it overflows.
    pub fn choice_index(&self, n: usize) -> Option<usize> {
        self.prompt_index.checked_mul(n.max(1))?.checked_add(self.sample_index)
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// What one request added to vLLM's counters of speculative decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Drafting {
    /// Steps in which drafted tokens were verified.
    pub drafts: i64,
    /// Tokens verified in them.
    pub drafted_tokens: i64,
    /// Of these, tokens accepted.
    pub accepted_tokens: i64,
}

/// The contents of a transfer file, checksum and shapes verified.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferFile {
    pub internal_id: String,
    /// vLLM's meaning: id k is the residual stream after k layers. As many as `layers`.
    pub layer_ids: Vec<u32>,
    /// How many of the token ids are the prompt.
    pub prompt_length: usize,
    /// sha256 of the draft head that was live at the end, where the plugin knows it.
    pub head_digest: Option<String>,
    /// Another head may have drafted a part: one was loaded while the request ran, or just after.
    pub head_swapped: bool,
    /// None where vLLM does not count per request.
    pub drafting: Option<Drafting>,
    /// [T + 1], prompt and output.
    pub token_ids: Vec<u32>,
    /// What else than the tokens decides the rows (LoRA, images); empty for most requests.
    pub prefix_salt: String,
    /// Rows before it were given with an earlier request of the same prefix.
    pub first_row: usize,
    /// T.
    pub rows: usize,
    /// L.
    pub layers: usize,
    /// H.
    pub hidden: usize,
    pub dtype: StateDtype,
    /// [T - first_row, L, H], little-endian, in `dtype`.
    pub states: Bytes,
}

impl TransferFile {
    /// Its states [T - first_row, L * H].
    pub fn decoded(&self) -> Vec<f32> {
        let mut decoded = vec![0.0; (self.rows - self.first_row) * self.layers * self.hidden];
        values::decode(self.dtype, &self.states, self.hidden, &mut decoded);
        decoded
    }
}

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    #[error("cannot be read: {0}")]
    Unreadable(String),
    #[error("has a wrong format: {0}")]
    Format(String),
    #[error("its checksum is {actual}, its metadata says {expected}")]
    Checksum { expected: String, actual: String },
    #[error("has wrong shapes: {0}")]
    Shape(String),
}

/// Reads a file. Links, and anything else that is not a plain file, are refused, as is a file of more than `max_bytes`.
pub fn read(path: &Path, max_bytes: u64) -> Result<TransferFile, TransferError> {
    parse(read_plain_file(path, max_bytes)?)
}

/// The bytes of a file that is no link and has at most `max_bytes`.
pub(crate) fn read_plain_file(path: &Path, max_bytes: u64) -> Result<Vec<u8>, TransferError> {
    let unreadable = |error: std::io::Error| TransferError::Unreadable(error.to_string());
    let named = fs::symlink_metadata(path).map_err(unreadable)?;
    if !named.file_type().is_file() {
        return Err(TransferError::Unreadable("it is not a plain file".to_string()));
    }
    let file = File::open(path).map_err(unreadable)?;
    let opened = file.metadata().map_err(unreadable)?;
    // The name may have been made a link between the two calls.
    if (named.dev(), named.ino()) != (opened.dev(), opened.ino()) {
        return Err(TransferError::Unreadable("it was replaced while it was opened".to_string()));
    }
    if opened.len() > max_bytes {
        return Err(TransferError::Unreadable(format!(
            "it has {} bytes, more than {max_bytes}",
            opened.len()
        )));
    }
    let mut bytes = Vec::with_capacity(opened.len() as usize);
    file.take(max_bytes).read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

/// Parses and verifies the bytes of a file.
pub fn parse(bytes: Vec<u8>) -> Result<TransferFile, TransferError> {
    let format = |reason: String| TransferError::Format(reason);
    let bytes = Bytes::from(bytes);
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| format(error.to_string()))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| format(error.to_string()))?;
    let metadata = header.metadata().as_ref().ok_or_else(|| format("it has no metadata".to_string()))?;
    let field = |name: &str| {
        metadata.get(name).map(String::as_str).ok_or_else(|| format(format!("its metadata lacks {name}")))
    };
    let found = field("format")?;
    if found != FORMAT {
        return Err(format(format!("its format is {found:?}")));
    }
    let (states, ids) = views(&tensors)?;
    let layer_ids: Vec<u32> = serde_json::from_str(field("layer_ids")?)
        .map_err(|error| format(format!("layer_ids are no list of numbers: {error}")))?;
    let number = |name: &str| -> Result<usize, TransferError> {
        field(name)?.parse().map_err(|error| format(format!("{name} is no number: {error}")))
    };
    let prompt_length = number("prompt_tokens")?;
    let first_row = number("first_row")?;

    let expected = field("sha256")?;
    let actual = checksum(states.data(), ids.data());
    if !expected.eq_ignore_ascii_case(&actual) {
        return Err(TransferError::Checksum { expected: expected.to_string(), actual });
    }

    let Tensors { token_ids, rows: given, layers, hidden, dtype } =
        Tensors::read(&states, &ids, layer_ids.len())?;
    let rows = token_ids.len().saturating_sub(1);
    if first_row.checked_add(given) != Some(rows) {
        return Err(TransferError::Shape(format!(
            "{given} rows from row {first_row} on for {} token ids; the last row must be that of the last id but one",
            token_ids.len()
        )));
    }
    if prompt_length == 0 || prompt_length > token_ids.len() {
        return Err(TransferError::Shape(format!(
            "prompt_tokens is {prompt_length} of {} token ids",
            token_ids.len()
        )));
    }
    Ok(TransferFile {
        internal_id: field("request_id")?.to_string(),
        layer_ids,
        prompt_length,
        head_digest: metadata.get("head_digest").filter(|digest| !digest.is_empty()).cloned(),
        head_swapped: metadata.get("head_swapped").is_some_and(|word| word == "true"),
        drafting: parse_drafting(metadata)?,
        token_ids,
        prefix_salt: metadata.get("prefix_salt").cloned().unwrap_or_default(),
        first_row,
        rows,
        layers,
        hidden,
        dtype,
        states: bytes.slice_ref(states.data()),
    })
}

/// All three counts or none.
fn parse_drafting(metadata: &HashMap<String, String>) -> Result<Option<Drafting>, TransferError> {
    if !metadata.contains_key("drafts") {
        return Ok(None);
    }
    let count = |name: &str| {
        let text = metadata.get(name).map_or("", String::as_str);
        let number: Option<u32> = text.parse().ok();
        number.map(i64::from).ok_or_else(|| TransferError::Format(format!("{name} is {text:?}, no number")))
    };
    Ok(Some(Drafting {
        drafts: count("drafts")?,
        drafted_tokens: count("drafted_tokens")?,
        accepted_tokens: count("accepted_tokens")?,
    }))
}

/// The two tensors of any states file, ours or vLLM's own: states, ids.
pub(crate) fn views<'data>(
    tensors: &SafeTensors<'data>,
) -> Result<(TensorView<'data>, TensorView<'data>), TransferError> {
    let view = |name: &str| tensors.tensor(name).map_err(|error| TransferError::Format(error.to_string()));
    Ok((view("hidden_states")?, view("token_ids")?))
}

/// What the two tensors hold, types and shapes verified. How rows and ids relate is the format's own matter.
pub(crate) struct Tensors {
    pub token_ids: Vec<u32>,
    pub rows: usize,
    pub layers: usize,
    pub hidden: usize,
    pub dtype: StateDtype,
}

impl Tensors {
    pub fn read(
        states: &TensorView<'_>,
        ids: &TensorView<'_>,
        layer_count: usize,
    ) -> Result<Self, TransferError> {
        let dtype = match states.dtype() {
            Dtype::F32 => StateDtype::F32,
            Dtype::BF16 => StateDtype::Bf16,
            other => {
                return Err(TransferError::Format(format!("hidden_states are {other:?}, not F32 or BF16")));
            }
        };
        let &[rows, layers, hidden] = states.shape() else {
            return Err(TransferError::Shape(format!(
                "hidden_states are {:?}, not [T, L, H]",
                states.shape()
            )));
        };
        if ids.dtype() != Dtype::I64 || ids.shape().len() != 1 {
            return Err(TransferError::Shape(format!(
                "token_ids are {:?} {:?}, not a list of I64",
                ids.dtype(),
                ids.shape()
            )));
        }
        let token_ids = parse_token_ids(ids.data())?;
        if rows == 0 || layers == 0 || hidden == 0 {
            return Err(TransferError::Shape(format!("{rows} rows of {layers} layers of {hidden}")));
        }
        if layer_count != layers {
            return Err(TransferError::Shape(format!("{layer_count} layer ids for {layers} layers")));
        }
        Ok(Self { token_ids, rows, layers, hidden, dtype })
    }
}

/// Hex of SHA-256 over the raw bytes of the states, then of the ids.
pub fn checksum(states: &[u8], token_ids: &[u8]) -> String {
    let mut hasher = Sha256::new();
    hasher.update(states);
    hasher.update(token_ids);
    hex(&hasher.finalize())
}

fn parse_token_ids(bytes: &[u8]) -> Result<Vec<u32>, TransferError> {
    let mut ids = Vec::with_capacity(bytes.len() / 8);
    for chunk in bytes.as_chunks::<8>().0 {
        let value = i64::from_le_bytes(*chunk);
        let id = u32::try_from(value)
            .map_err(|_| TransferError::Shape(format!("token id {value} is no 32-bit unsigned number")))?;
        ids.push(id);
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(name: &str) -> Option<(String, usize, usize)> {
        TransferName::parse(name).map(|name| (name.request_id, name.prompt_index, name.sample_index))
    }

    #[test]
    fn names_as_vllm_makes_them() {
        assert_eq!(parsed("chatcmpl-abc-0123abcd.safetensors"), Some(("abc".into(), 0, 0)));
        assert_eq!(parsed("2_chatcmpl-abc-0123abcd.safetensors"), Some(("abc".into(), 0, 2)));
        assert_eq!(parsed("cmpl-a-b-3-0123abcd.safetensors"), Some(("a-b".into(), 3, 0)));
        assert_eq!(parsed("1_cmpl-a_b-3-0123abcd.safetensors"), Some(("a_b".into(), 3, 1)));
        assert_eq!(TransferName::parse("1_cmpl-a-3-0123abcd.safetensors").unwrap().choice_index(2), Some(7));
    }

    #[test]
    fn other_names_are_refused() {
        for name in [
            "chatcmpl-abc-0123abcd.safetensors.lock",
            ".chatcmpl-abc-0123abcd.safetensors.1.tmp",
            "chatcmpl-abc-0123abc.safetensors",
            "chatcmpl-abc-0123ABCD.safetensors",
            "chatcmpl--0123abcd.safetensors",
            "chatcmpl-0123abcd.safetensors",
            "cmpl-abc-0123abcd.safetensors",
            "x_chatcmpl-abc-0123abcd.safetensors",
            "99999999999999999999999_chatcmpl-abc-0123abcd.safetensors",
        ] {
            assert_eq!(parsed(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn any_request_id_comes_back(
            id in "[A-Za-z0-9_.:-]{1,40}", suffix in "[0-9a-f]{8}", prompt in 0usize..1000, sample in 0usize..100, many: bool
        ) {
            let front = if many { format!("{sample}_") } else { String::new() };
            let wanted = if many { sample } else { 0 };
            let chat = format!("{front}chatcmpl-{id}-{suffix}{EXTENSION}");
            prop_assert_eq!(parsed(&chat), Some((id.clone(), 0, wanted)));
            let completion = format!("{front}cmpl-{id}-{prompt}-{suffix}{EXTENSION}");
            prop_assert_eq!(parsed(&completion), Some((id, prompt, wanted)));
        }

        #[test]
        fn no_name_and_no_bytes_panic(name in "\\PC{0,60}", bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = TransferName::parse(&name);
            prop_assert!(parse(bytes).is_err());
        }
    }
}
