//! Segments: the files that hold the blocks.
//!
//! ```text
//! segment = "DSBLOCKS" version:u32 generation:u32 block*
//! block   = "DSB1" rows:u32 payload_length:u64 key:[u8; 16] payload_crc:u32 header_crc:u32 payload
//! payload = states in their dtype [rows, L, H]
//! ```
//!
//! All numbers are little-endian. `header_crc` (CRC-32) covers the 36 bytes before it, so that blocks can be found
//! without reading any payload; a file is named `blocks-<number>.states`, a higher number is younger, and none is used
//! twice.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::StatesError;
use super::block::{BLOCK_ROWS, BlockKey, KEY_BYTES};
use super::frame::{read_fully, u32_at, u64_at};

pub(crate) const MAGIC: &[u8; 8] = b"DSBLOCKS";
pub(crate) const BLOCK_HEADER: u64 = 40;
const BLOCK_MAGIC: &[u8; 4] = b"DSB1";
const PREFIX: &str = "blocks-";
const EXTENSION: &str = ".states";

/// A block that is whole in its file; its payload was not looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Block {
    pub key: BlockKey,
    pub rows: u32,
    /// Of the frame.
    pub offset: u64,
    pub payload_length: u64,
    pub payload_crc: u32,
}

impl Block {
    /// A block that is about to be written at `offset`.
    pub fn new(key: BlockKey, rows: usize, payload: &[u8], offset: u64) -> Self {
        let payload_length = payload.len() as u64;
        Self { key, rows: rows as u32, offset, payload_length, payload_crc: crc32fast::hash(payload) }
    }

    /// What stands before its payload.
    pub fn header(&self) -> [u8; BLOCK_HEADER as usize] {
        let mut header = [0; BLOCK_HEADER as usize];
        header[..4].copy_from_slice(BLOCK_MAGIC);
        header[4..8].copy_from_slice(&self.rows.to_le_bytes());
        header[8..16].copy_from_slice(&self.payload_length.to_le_bytes());
        header[16..32].copy_from_slice(&self.key.0);
        header[32..36].copy_from_slice(&self.payload_crc.to_le_bytes());
        let header_crc = crc32fast::hash(&header[..36]);
        header[36..].copy_from_slice(&header_crc.to_le_bytes());
        header
    }

    pub fn payload_offset(&self) -> u64 {
        self.offset + BLOCK_HEADER
    }

    pub fn end(&self) -> u64 {
        self.payload_offset() + self.payload_length
    }

    /// What it takes on disk.
    pub fn bytes(&self) -> u64 {
        BLOCK_HEADER + self.payload_length
    }
}

/// What a scan of a segment found.
#[derive(Debug, Default)]
pub(crate) struct Scanned {
    /// Whole, as far as their headers say.
    pub blocks: Vec<Block>,
    /// Places that are no block, and that others follow.
    pub damaged: Vec<(u64, &'static str)>,
    /// Where and why the blocks end before the file does: being written just now, torn by a crash, or damaged.
    pub torn: Option<(u64, &'static str)>,
}

/// All blocks from `offset` on.
pub(crate) fn scan(file: &File, path: &Path, offset: u64) -> Result<Scanned, StatesError> {
    let failed = |error| StatesError::io("cannot read", path, error);
    let length = file.metadata().map_err(failed)?.len();
    let mut scanned = Scanned::default();
    let mut position = offset;
    while position < length {
        match block_at(file, position, length).map_err(failed)? {
            Ok(block) => {
                position = block.end();
                scanned.blocks.push(block);
            }
            Err(reason) => match next_block(file, position + 1, length).map_err(failed)? {
                Some(next) => {
                    scanned.damaged.push((position, reason));
                    position = next;
                }
                None => {
                    scanned.torn = Some((position, reason));
                    break;
                }
            },
        }
    }
    Ok(scanned)
}

/// The block that begins here, or why there is none.
fn block_at(file: &File, position: u64, length: u64) -> io::Result<Result<Block, &'static str>> {
    let mut header = [0; BLOCK_HEADER as usize];
    if !read_fully(file, &mut header, position)? {
        return Ok(Err("the file ends inside a block's header"));
    }
    if &header[..4] != BLOCK_MAGIC || crc32fast::hash(&header[..36]) != u32_at(&header, 36) {
        return Ok(Err("no block begins here"));
    }
    let rows = u32_at(&header, 4);
    let payload_length = u64_at(&header, 8);
    if rows == 0 || rows as usize > BLOCK_ROWS || !payload_length.is_multiple_of(u64::from(rows)) {
        return Ok(Err("the block's length does not fit its rows"));
    }
    if length - position - BLOCK_HEADER < payload_length {
        return Ok(Err("the file ends inside a block"));
    }
    let mut key = [0; KEY_BYTES];
    key.copy_from_slice(&header[16..32]);
    let payload_crc = u32_at(&header, 32);
    Ok(Ok(Block { key: BlockKey(key), rows, offset: position, payload_length, payload_crc }))
}

/// Where the next block begins.
fn next_block(file: &File, from: u64, length: u64) -> io::Result<Option<u64>> {
    let mut window = vec![0; 1 << 20];
    let mut start = from;
    while start < length {
        let count = (length - start).min(window.len() as u64) as usize;
        if !read_fully(file, &mut window[..count], start)? {
            return Ok(None);
        }
        for place in memchr::memmem::find_iter(&window[..count], BLOCK_MAGIC) {
            let position = start + place as u64;
            if block_at(file, position, length)?.is_ok() {
                return Ok(Some(position));
            }
        }
        if count < window.len() {
            break;
        }
        // Four bytes may lie across the end of the window.
        start += (count - BLOCK_MAGIC.len() + 1) as u64;
    }
    Ok(None)
}

/// The payload of a block; None where it cannot be read or does not match its checksum: damaged either way.
pub(crate) fn read_payload(file: &File, path: &Path, block: &Block) -> Option<Vec<u8>> {
    let mut payload = vec![0; usize::try_from(block.payload_length).ok()?];
    match read_fully(file, &mut payload, block.payload_offset()) {
        Ok(whole) => (whole && crc32fast::hash(&payload) == block.payload_crc).then_some(payload),
        Err(error) => {
            tracing::warn!("cannot read {} at {}: {error}", path.display(), block.offset);
            None
        }
    }
}

pub(crate) fn path_of(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{PREFIX}{number:016}{EXTENSION}"))
}

/// The segments of a directory, oldest first. Other files are passed by.
pub(crate) fn list(directory: &Path) -> Result<Vec<(u64, PathBuf)>, StatesError> {
    let failed = |error: io::Error| StatesError::io("cannot list", directory, error);
    let mut segments = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|name| name.strip_suffix(EXTENSION))
            .and_then(|number| number.parse().ok());
        let plain = entry.file_type().is_ok_and(|kind| kind.is_file());
        if let (Some(number), true) = (number, plain) {
            segments.push((number, entry.path()));
        }
    }
    segments.sort();
    Ok(segments)
}
