//! What segments and the index have in common: a file header, then frames that are appended and checked on their own.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::StatesError;

pub(crate) const VERSION: u32 = 2;
/// The bytes before the first frame, so of a file that holds nothing.
pub(crate) const FILE_HEADER: u64 = 16;

/// Tells a file from another one that had its name before. Inodes do not: a system uses them again at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Generation(u32);

impl Generation {
    pub fn new() -> Self {
        // Its last bits are random.
        Self(uuid::Uuid::now_v7().as_u128() as u32)
    }
}

/// The first bytes of a file of this kind.
pub(crate) fn file_header(magic: &[u8; 8], generation: Generation) -> [u8; FILE_HEADER as usize] {
    let mut bytes = [0; FILE_HEADER as usize];
    bytes[..8].copy_from_slice(magic);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..].copy_from_slice(&generation.0.to_le_bytes());
    bytes
}

/// None: shorter than its header (just being made, or torn).
pub(crate) fn read_file_header(
    file: &File,
    path: &Path,
    magic: &[u8; 8],
) -> Result<Option<Generation>, StatesError> {
    let mut bytes = [0; FILE_HEADER as usize];
    if !read_fully(file, &mut bytes, 0).map_err(|error| StatesError::io("cannot read", path, error))? {
        return Ok(None);
    }
    let generation = Generation(u32_at(&bytes, 12));
    if bytes == file_header(magic, generation) {
        return Ok(Some(generation));
    }
    Err(StatesError::Foreign {
        path: path.to_path_buf(),
        expected: VERSION,
        reason: format!("it begins with {:?}", String::from_utf8_lossy(&bytes)),
    })
}

/// Ok(false) where the file ends before the buffer is full.
pub(crate) fn read_fully(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
    match file.read_exact_at(buffer, offset) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Opens a file that may be gone: None.
pub(crate) fn open_if_there(path: &Path) -> Result<Option<File>, StatesError> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(StatesError::io("cannot open", path, error)),
    }
}

/// What is wrong in a file, and where.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Damage {
    pub path: PathBuf,
    pub offset: u64,
    pub reason: String,
}

/// Little-endian numbers in the first bytes of a frame.
pub(crate) fn u32_at(bytes: &[u8], position: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[position..position + 4]);
    u32::from_le_bytes(number)
}

pub(crate) fn u64_at(bytes: &[u8], position: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[position..position + 8]);
    u64::from_le_bytes(number)
}
