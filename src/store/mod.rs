//! Paths, atomic publishing and manifests.
//!
//! A file that a reader can see under its final name is whole: it was written under a temporary name, synced, renamed,
//! and its directory synced.

mod disk;
mod map;
mod object;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

pub use disk::{Disk, DiskFile, Fault, Operation, create_private_directory};
pub use map::Map;
pub use object::{ObjectError, ObjectTarget};

/// Where everything that draftsmith keeps lives.
#[derive(Clone, Debug, PartialEq)]
pub struct DataDir {
    root: PathBuf,
}

impl DataDir {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Makes the directories; safe to call again. What is captured is its owner's alone; heads may be another user's
    /// to read, vLLM's for one.
    pub fn create(&self) -> io::Result<()> {
        fs::create_dir_all(self.heads())?;
        for directory in [self.records(), self.wal(), self.states(), self.runs()] {
            create_private_directory(&directory)?;
        }
        Ok(())
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Parquet and nothing else.
    pub fn records(&self) -> PathBuf {
        self.root.join("records")
    }

    /// Notes of what object stores have of `records/`.
    pub fn mirrored(&self) -> PathBuf {
        self.root.join("mirrored")
    }

    pub fn wal(&self) -> PathBuf {
        self.root.join("wal")
    }

    pub fn states(&self) -> PathBuf {
        self.root.join("states")
    }

    pub fn heads(&self) -> PathBuf {
        self.root.join("heads")
    }

    /// What tenants' names are hashed with.
    pub fn tenant_salt(&self) -> PathBuf {
        self.root.join("tenant.salt")
    }

    pub fn runs(&self) -> PathBuf {
        self.root.join("runs")
    }
}

/// Writes a file so that a reader sees all of it or none of it. Mode 0600: what is captured is private.
pub fn publish(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, bytes)?.directory.sync_all()
}

/// A file that was just put into its place.
pub struct Replaced {
    /// Open for reading and appending.
    pub file: File,
    /// The file survives a power cut once this is synced.
    pub directory: File,
}

/// The first part of [`publish`], for a writer that goes on with the file: after an error the old file stands, afterwards
/// the new one does, whatever comes of syncing the directory.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<Replaced> {
    let temporary = temporary_name(path);
    let replaced = replace_by_way_of(&temporary, path, bytes);
    if replaced.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    replaced
}

fn replace_by_way_of(temporary: &Path, path: &Path, bytes: &[u8]) -> io::Result<Replaced> {
    let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(temporary)?;
    file.set_len(0)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    // Before the rename: after it nothing may fail.
    let directory = File::open(path.parent().unwrap_or(Path::new(".")))?;
    fs::rename(temporary, path)?;
    Ok(Replaced { file, directory })
}

/// The name under which a file is written until it is whole: hidden, so that globs for data files pass it by.
pub fn temporary_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
}

/// Renames a synced file into its place and makes the rename itself durable.
pub fn rename_durably(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    let directory = to.parent().unwrap_or(Path::new("."));
    File::open(directory)?.sync_all()
}

/// A new id for a head or a run: sorts by time, reads as one, and differs between machines: `20261129-173000-5f3a09c2`.
pub fn new_id(now: jiff::Timestamp) -> String {
    let random = uuid::Uuid::now_v7().simple().to_string();
    format!("{}-{}", now.strftime("%Y%m%d-%H%M%S"), &random[24..])
}

/// Two lower-case digits a byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a conversation belongs to the held-out split. Decided by the conversation alone, so that no conversation is
/// on both sides, in any process, for ever.
pub fn is_held_out(conversation_id: &str, fraction: f64) -> bool {
    is_drawn(conversation_id, fraction)
}

/// Draws the given share of all keys, each key always alike.
pub fn is_drawn(key: &str, fraction: f64) -> bool {
    use sha2::{Digest, Sha256};
    let digest = Sha256::digest(key.as_bytes());
    let mut first = [0u8; 8];
    first.copy_from_slice(&digest[..8]);
    (u64::from_be_bytes(first) as f64) < fraction * (u64::MAX as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_file_is_whole_and_leaves_no_temporary() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("manifest.json");
        publish(&path, b"one").unwrap();
        publish(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn held_out_fraction_is_kept() {
        let held_out = (0..10_000).filter(|i| is_held_out(&format!("conversation {i}"), 0.125)).count();
        assert!((1100..1400).contains(&held_out), "{held_out}");
        assert!(!is_held_out("any", 0.0));
        assert!(is_held_out("any", 1.0));
    }
}
