//! A file seen as memory. The one place outside `compute/` that needs unsafe code.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Deref;

/// The first bytes of a file, read as they are touched. They stay readable after the file was deleted.
#[derive(Debug)]
pub struct Map(memmap2::Mmap);

impl Map {
    /// Maps the file as long as it is now.
    ///
    /// For files that only grow: what is mapped must never be cut off or written again. A disk that fails under it ends
    /// the process (SIGBUS), as does a file that is cut in spite of this; so only a trainer maps, never the proxy.
    pub fn of(file: &File) -> io::Result<Self> {
        // SAFETY: the bytes are borrowed as shared. A writer appends to a segment and deletes it; what it cuts off, after a
        // crash or a failed write, is no whole block, and readers look at those alone. So nothing that is read changes.
        unsafe { memmap2::Mmap::map(file) }.map(Self)
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
