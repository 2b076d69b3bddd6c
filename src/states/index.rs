//! The index: what each stored sample is, its tokens, and the keys of its blocks.
//!
//! ```text
//! index  = "DSINDEX2" version:u32 generation:u32 sample*
//! sample = "DSS1" header_length:u32 payload_length:u32 crc:u32 header payload
//! header = JSON, see SampleHeader
//! payload = token ids u32 [T + 1], block keys [u8; 16] [ceil(T / 16)]
//! ```
//!
//! All numbers are little-endian. `crc` (CRC-32) covers the twelve bytes before it, the header and the payload. A sample is
//! appended after its blocks; samples are taken out by writing the whole file anew (it holds some five bytes for a token).

use std::fs::File;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::block::{BlockKey, KEY_BYTES, block_count};
use super::frame::{read_fully, u32_at};
use super::transfer::Drafting;
use super::{StatesError, fp8};

pub(crate) const MAGIC: &[u8; 8] = b"DSINDEX2";
const FILE_NAME: &str = "samples.index";
const FRAME_MAGIC: &[u8; 4] = b"DSS1";
const FRAME_PREFIX: usize = 16;
/// A JSON header is a few hundred bytes; more is damage.
const MAX_HEADER: u32 = 1 << 20;

/// How states are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateDtype {
    F32,
    Bf16,
    /// One byte a value, with a scale and the few largest values of each row and layer.
    Fp8,
}

impl StateDtype {
    /// Bytes of the H values of one row and layer; None where the number overflows.
    pub fn vector_bytes(self, hidden: usize) -> Option<usize> {
        match self {
            Self::F32 => hidden.checked_mul(4),
            Self::Bf16 => hidden.checked_mul(2),
            Self::Fp8 => fp8::vector_bytes(hidden),
        }
    }

    /// In the keys of blocks; never to be changed.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::F32 => 0,
            Self::Bf16 => 1,
            Self::Fp8 => 2,
        }
    }
}

/// What a stored sample says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleHeader {
    pub request_id: String,
    pub choice_index: u32,
    pub conversation_id: String,
    /// `live` or `replay`, as recorded.
    pub source: String,
    pub held_out: bool,
    /// How many of the T + 1 token ids are the prompt.
    pub prompt_length: usize,
    /// T.
    pub rows: usize,
    /// Tokens of the request before the sample's first: their states were to be had nowhere, so that the sample begins
    /// after them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub missing_rows: usize,
    /// L.
    pub layers: usize,
    /// H.
    pub hidden: usize,
    pub dtype: StateDtype,
    /// L ids, in the order of the states.
    pub layer_ids: Vec<u32>,
    /// What else than tokens and layers its states depend on; empty for most requests.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub prefix_salt: String,
    /// The draft head that was live, where known.
    #[serde(default)]
    pub head_digest: Option<String>,
    /// How its drafts fared, where known.
    #[serde(default)]
    pub drafting: Option<Drafting>,
    /// Unix time in milliseconds.
    pub captured_at: i64,
}

/// A sample's name for ever: request and choice.
pub type SampleName = (String, u32);

fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl SampleHeader {
    pub fn name(&self) -> SampleName {
        (self.request_id.clone(), self.choice_index)
    }

    /// Bytes of one token's states [L, H], None where the numbers overflow.
    pub fn row_bytes(&self) -> Option<usize> {
        self.dtype.vector_bytes(self.hidden)?.checked_mul(self.layers)
    }
}

/// A sample as the index has it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct IndexedSample {
    pub header: SampleHeader,
    /// [T + 1]
    pub token_ids: Vec<u32>,
    /// One for each block of the T rows.
    pub keys: Vec<BlockKey>,
    /// Of its frame.
    pub offset: u64,
    pub length: u64,
}

/// A whole frame, so that it goes out in one write.
pub(crate) fn encode(
    header: &SampleHeader,
    token_ids: &[u32],
    keys: &[BlockKey],
) -> Result<Vec<u8>, StatesError> {
    let shape = |reason: String| StatesError::Shape { request_id: header.request_id.clone(), reason };
    let json = serde_json::to_vec(header).map_err(|error| shape(error.to_string()))?;
    if json.len() > MAX_HEADER as usize {
        return Err(shape(format!("its header has {} bytes, more than {MAX_HEADER}", json.len())));
    }
    let payload_length = token_ids.len() * 4 + keys.len() * KEY_BYTES;
    let payload_length32 = u32::try_from(payload_length)
        .map_err(|_| shape(format!("{} token ids are too many", token_ids.len())))?;
    let mut frame = Vec::with_capacity(FRAME_PREFIX + json.len() + payload_length);
    frame.extend_from_slice(FRAME_MAGIC);
    frame.extend_from_slice(&(json.len() as u32).to_le_bytes());
    frame.extend_from_slice(&payload_length32.to_le_bytes());
    frame.extend_from_slice(&[0; 4]);
    frame.extend_from_slice(&json);
    for id in token_ids {
        frame.extend_from_slice(&id.to_le_bytes());
    }
    for key in keys {
        frame.extend_from_slice(&key.0);
    }
    let crc = frame_crc(&frame);
    frame[12..16].copy_from_slice(&crc.to_le_bytes());
    Ok(frame)
}

/// Of a whole frame, its own field left out.
fn frame_crc(frame: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&frame[..12]);
    hasher.update(&frame[FRAME_PREFIX..]);
    hasher.finalize()
}

fn decode(frame: &[u8], offset: u64) -> Result<IndexedSample, String> {
    let header_length = u32_at(frame, 4) as usize;
    let (json, payload) = frame[FRAME_PREFIX..].split_at(header_length);
    let header: SampleHeader = serde_json::from_slice(json)
        .map_err(|error| format!("the sample's header is not understood: {error}"))?;
    let values = header.layers.checked_mul(header.hidden).and_then(|width| width.checked_mul(header.rows));
    if values.is_none() || header.row_bytes().and_then(|bytes| bytes.checked_mul(header.rows)).is_none() {
        return Err(format!(
            "{} rows of {} layers of {} are too many",
            header.rows, header.layers, header.hidden
        ));
    }
    let blocks = block_count(header.rows);
    let ids_bytes = header.rows.checked_add(1).and_then(|ids| ids.checked_mul(4));
    let expected = ids_bytes.and_then(|bytes| bytes.checked_add(blocks.checked_mul(KEY_BYTES)?));
    if expected != Some(payload.len()) || header.rows == 0 {
        return Err(format!("{} bytes of tokens and keys do not fit {} rows", payload.len(), header.rows));
    }
    let (ids, keys) = payload.split_at(4 * (header.rows + 1));
    Ok(IndexedSample {
        token_ids: ids.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)).collect(),
        keys: keys.as_chunks::<KEY_BYTES>().0.iter().map(|key| BlockKey(*key)).collect(),
        header,
        offset,
        length: frame.len() as u64,
    })
}

/// What a scan of the index found.
#[derive(Debug, Default)]
pub(crate) struct Scanned {
    pub samples: Vec<IndexedSample>,
    /// The end of the last whole frame, good or damaged.
    pub end: u64,
    /// Damaged frames that others follow: offset and reason.
    pub damaged: Vec<(u64, String)>,
    /// Why the frames end before the file does: being written just now, torn by a crash, or damaged beyond its length.
    pub torn: Option<String>,
}

/// All samples from `offset` on.
pub(crate) fn scan(file: &File, path: &Path, offset: u64) -> Result<Scanned, StatesError> {
    let failed = |error| StatesError::io("cannot read", path, error);
    let length = file.metadata().map_err(failed)?.len();
    let mut scanned = Scanned { end: offset, ..Scanned::default() };
    let mut bytes = vec![0; usize::try_from(length.saturating_sub(offset)).unwrap_or(0)];
    if !read_fully(file, &mut bytes, offset).map_err(failed)? {
        // Cut just now by a writer that starts again; the next look sees what is there.
        return Ok(scanned);
    }
    let mut position = 0;
    while position < bytes.len() {
        let at = offset + position as u64;
        match frame_at(&bytes[position..]) {
            Ok(frame) => {
                match decode(frame, at) {
                    Ok(sample) => scanned.samples.push(sample),
                    Err(reason) => scanned.damaged.push((at, reason)),
                }
                position += frame.len();
            }
            // Lengths in what is damaged cannot be trusted: the next good sample is looked for.
            Err(reason) => match next_frame(&bytes, position + 1) {
                Some(next) => {
                    scanned.damaged.push((at, reason.to_owned()));
                    position = next;
                }
                None => {
                    scanned.torn = Some(reason.to_owned());
                    break;
                }
            },
        }
        scanned.end = offset + position as u64;
    }
    Ok(scanned)
}

/// The whole frame that begins here, or why there is none.
fn frame_at(bytes: &[u8]) -> Result<&[u8], &'static str> {
    if bytes.len() < FRAME_PREFIX {
        return Err("the file ends inside a sample");
    }
    let (header_length, payload_length) = (u32_at(bytes, 4), u32_at(bytes, 8));
    if &bytes[..4] != FRAME_MAGIC || header_length > MAX_HEADER {
        return Err("no sample begins here");
    }
    let length = FRAME_PREFIX + header_length as usize + payload_length as usize;
    let frame = bytes.get(..length).ok_or("the file ends inside a sample")?;
    if frame_crc(frame) != u32_at(frame, 12) {
        return Err("the sample does not match its checksum");
    }
    Ok(frame)
}

/// Where the next whole frame begins.
fn next_frame(bytes: &[u8], from: usize) -> Option<usize> {
    let mut found = memchr::memmem::find_iter(bytes.get(from..)?, FRAME_MAGIC);
    found.find(|place| frame_at(&bytes[from + place..]).is_ok()).map(|place| from + place)
}

/// Whether these bytes are one whole frame.
pub(crate) fn is_whole(frame: &[u8]) -> bool {
    frame_at(frame).is_ok_and(|found| found.len() == frame.len())
}

pub(crate) fn path_of(directory: &Path) -> PathBuf {
    directory.join(FILE_NAME)
}
