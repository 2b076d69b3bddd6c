//! The format of a shard, shared by the writer and the readers.
//!
//! ```text
//! shard  = "DSSTATES" version:u32 zero:u32 frame*
//! frame  = "DSF1" header_length:u32 payload_length:u64 header_crc:u32 payload_crc:u32 header payload
//! header = JSON, see SampleHeader
//! payload = token ids u32 [T + 1], states in their dtype [T, L, H]
//! ```
//!
//! All numbers are little-endian. `header_crc` (CRC-32) covers the sixteen bytes before it and the header, so that an
//! index can be trusted without reading any payload.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::StatesError;

pub(crate) const MAGIC: &[u8; 8] = b"DSSTATES";
pub(crate) const VERSION: u32 = 1;
/// Length of a shard without frames.
pub(crate) const SHARD_HEADER: u64 = 16;
pub(crate) const FRAME_PREFIX: u64 = 24;
const FRAME_MAGIC: &[u8; 4] = b"DSF1";
/// A JSON header is a few hundred bytes; more is damage.
const MAX_HEADER: u32 = 1 << 20;

/// How states are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateDtype {
    F32,
    Bf16,
}

impl StateDtype {
    /// Bytes of one value.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
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
    /// L.
    pub layers: usize,
    /// H.
    pub hidden: usize,
    pub dtype: StateDtype,
    /// L ids, in the order of the states.
    pub layer_ids: Vec<u32>,
    /// The draft head that was live, where known.
    #[serde(default)]
    pub head_digest: Option<String>,
    /// Unix time in milliseconds.
    pub captured_at: i64,
}

impl SampleHeader {
    /// Bytes of the states, None where the numbers overflow.
    pub fn states_bytes(&self) -> Option<usize> {
        self.rows.checked_mul(self.layers)?.checked_mul(self.hidden)?.checked_mul(self.dtype.size())
    }

    /// Bytes of ids and states, None where the numbers overflow.
    pub(crate) fn payload_bytes(&self) -> Option<usize> {
        self.rows.checked_add(1)?.checked_mul(4)?.checked_add(self.states_bytes()?)
    }
}

pub(crate) fn shard_header() -> [u8; SHARD_HEADER as usize] {
    let mut bytes = [0; SHARD_HEADER as usize];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// A whole frame, so that it goes out in one write.
pub(crate) fn encode(
    header: &SampleHeader,
    token_ids: &[u32],
    states: &[u8],
) -> Result<Vec<u8>, StatesError> {
    let shape = |reason: String| StatesError::Shape { request_id: header.request_id.clone(), reason };
    if header.rows.checked_add(1) != Some(token_ids.len()) {
        return Err(shape(format!(
            "{} token ids for {} rows; ids must be rows + 1",
            token_ids.len(),
            header.rows
        )));
    }
    if header.states_bytes() != Some(states.len()) {
        return Err(shape(format!(
            "{} bytes of states for [{}, {}, {}] {:?}",
            states.len(),
            header.rows,
            header.layers,
            header.hidden,
            header.dtype
        )));
    }
    let json = serde_json::to_vec(header).map_err(|error| shape(error.to_string()))?;
    if json.len() > MAX_HEADER as usize {
        return Err(shape(format!("its header has {} bytes, more than {MAX_HEADER}", json.len())));
    }
    let payload_length = token_ids.len() * 4 + states.len();
    let mut frame = Vec::with_capacity(FRAME_PREFIX as usize + json.len() + payload_length);
    frame.extend_from_slice(FRAME_MAGIC);
    frame.extend_from_slice(&(json.len() as u32).to_le_bytes());
    frame.extend_from_slice(&(payload_length as u64).to_le_bytes());
    frame.extend_from_slice(&[0; 8]);
    frame.extend_from_slice(&json);
    for id in token_ids {
        frame.extend_from_slice(&id.to_le_bytes());
    }
    frame.extend_from_slice(states);
    let payload_start = FRAME_PREFIX as usize + json.len();
    let header_crc = header_crc(&frame[..16], &json);
    let payload_crc = crc32fast::hash(&frame[payload_start..]);
    frame[16..20].copy_from_slice(&header_crc.to_le_bytes());
    frame[20..24].copy_from_slice(&payload_crc.to_le_bytes());
    Ok(frame)
}

fn header_crc(prefix: &[u8], json: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(prefix);
    hasher.update(json);
    hasher.finalize()
}

/// A frame whose header was verified and whose bytes are all in the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frame {
    pub header: SampleHeader,
    /// Where the frame begins.
    pub offset: u64,
    pub header_crc: u32,
    pub payload_offset: u64,
    pub payload_length: u64,
    pub payload_crc: u32,
}

impl Frame {
    pub fn end(&self) -> u64 {
        self.payload_offset + self.payload_length
    }
}

/// What stands at an offset of a shard.
pub(crate) enum Found {
    Frame(Box<Frame>),
    /// The file ends here.
    End,
    /// Not a whole frame: being written just now, torn by a crash, or damaged.
    Torn(String),
}

/// Checks the first bytes of a shard. Ok(false): shorter than its header (just being made, or torn).
pub(crate) fn check_shard_header(file: &File, path: &Path) -> Result<bool, StatesError> {
    let mut bytes = [0; SHARD_HEADER as usize];
    if !read_fully(file, &mut bytes, 0).map_err(|error| StatesError::io("cannot read", path, error))? {
        return Ok(false);
    }
    if bytes == shard_header() {
        return Ok(true);
    }
    Err(StatesError::NotAShard {
        path: path.to_path_buf(),
        expected: VERSION,
        reason: format!("it begins with {:?}", String::from_utf8_lossy(&bytes)),
    })
}

/// Reads the frame at `offset`, without its payload.
pub(crate) fn frame_at(file: &File, path: &Path, offset: u64) -> Result<Found, StatesError> {
    let failed = |error| StatesError::io("cannot read", path, error);
    let length = file.metadata().map_err(failed)?.len();
    if offset >= length {
        return Ok(Found::End);
    }
    let mut prefix = [0; FRAME_PREFIX as usize];
    if !read_fully(file, &mut prefix, offset).map_err(failed)? {
        return Ok(Found::Torn("the file ends inside a frame".to_string()));
    }
    let [magic, header_length, low, high, header_crc_stored, payload_crc] = words(&prefix);
    let payload_length = u64::from(high) << 32 | u64::from(low);
    if magic != u32::from_le_bytes(*FRAME_MAGIC) || header_length > MAX_HEADER {
        return Ok(Found::Torn("no frame begins here".to_string()));
    }
    let mut json = vec![0; header_length as usize];
    if !read_fully(file, &mut json, offset + FRAME_PREFIX).map_err(failed)? {
        return Ok(Found::Torn("the file ends inside a frame's header".to_string()));
    }
    if header_crc(&prefix[..16], &json) != header_crc_stored {
        return Ok(Found::Torn("the frame's header does not match its checksum".to_string()));
    }
    let header: SampleHeader = match serde_json::from_slice(&json) {
        Ok(header) => header,
        Err(error) => return Ok(Found::Torn(format!("the frame's header is not understood: {error}"))),
    };
    if header.payload_bytes().map(|bytes| bytes as u64) != Some(payload_length) {
        return Ok(Found::Torn(format!("the payload's length of {payload_length} does not fit the header")));
    }
    let payload_offset = offset + FRAME_PREFIX + u64::from(header_length);
    let whole = payload_offset.checked_add(payload_length).is_some_and(|end| end <= length);
    if !whole {
        return Ok(Found::Torn("the file ends inside a frame's payload".to_string()));
    }
    Ok(Found::Frame(Box::new(Frame {
        header,
        offset,
        header_crc: header_crc_stored,
        payload_offset,
        payload_length,
        payload_crc,
    })))
}

fn words(prefix: &[u8; FRAME_PREFIX as usize]) -> [u32; 6] {
    let mut words = [0; 6];
    for (word, bytes) in words.iter_mut().zip(prefix.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    words
}

/// The payload of a frame, its checksum verified.
pub(crate) fn read_payload(file: &File, path: &Path, frame: &Frame) -> Result<Vec<u8>, StatesError> {
    let damaged = |reason: &str| StatesError::Damaged {
        path: path.to_path_buf(),
        offset: frame.offset,
        reason: reason.to_string(),
    };
    let length =
        usize::try_from(frame.payload_length).map_err(|_| damaged("its payload does not fit into memory"))?;
    let mut payload = vec![0; length];
    let whole = read_fully(file, &mut payload, frame.payload_offset)
        .map_err(|error| StatesError::io("cannot read", path, error))?;
    if !whole {
        return Err(damaged("the file was cut inside the sample"));
    }
    if crc32fast::hash(&payload) != frame.payload_crc {
        return Err(damaged("the sample does not match its checksum"));
    }
    Ok(payload)
}

/// Ok(false) where the file ends before the buffer is full.
fn read_fully(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
    match file.read_exact_at(buffer, offset) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Where and why the frames of a shard end before the file does.
pub(crate) type TornTail = (u64, String);

/// All whole frames from `offset` on, and the torn tail, None at a clean end.
pub(crate) fn scan(
    file: &File,
    path: &Path,
    offset: u64,
) -> Result<(Vec<Frame>, Option<TornTail>), StatesError> {
    let mut frames = Vec::new();
    let mut position = offset;
    loop {
        match frame_at(file, path, position)? {
            Found::Frame(frame) => {
                position = frame.end();
                frames.push(*frame);
            }
            Found::End => return Ok((frames, None)),
            Found::Torn(reason) => return Ok((frames, Some((position, reason)))),
        }
    }
}
