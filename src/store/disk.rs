//! The file operations that must survive a failing disk, in one thin layer, so that a test can make each of them fail,
//! stall, or stop for good as a killed process does.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What is about to be done to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    Create,
    Write,
    Sync,
    /// The path is the name that the file gets.
    Rename,
    Delete,
    MakeDirectory,
    SyncDirectory,
}

/// Asked before each operation. An error takes its place; a write then leaves half of its bytes behind, as a full disk
/// may. Whoever does not return stalls the disk.
pub type Fault = dyn Fn(Operation, &Path) -> io::Result<()> + Send + Sync;

/// The disk, as it is or with faults.
#[derive(Clone, Default)]
pub struct Disk {
    fault: Option<Arc<Fault>>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.fault.is_some() { "Disk with faults" } else { "Disk" })
    }
}

impl Disk {
    pub fn with_faults(fault: impl Fn(Operation, &Path) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self { fault: Some(Arc::new(fault)) }
    }

    fn before(&self, operation: Operation, path: &Path) -> io::Result<()> {
        self.fault.as_ref().map_or(Ok(()), |fault| fault(operation, path))
    }

    /// Opens a file for writing, mode 0600. `new`: it must not be there yet; otherwise what is there is overwritten.
    pub fn create(&self, path: &Path, new: bool) -> io::Result<DiskFile> {
        self.before(Operation::Create, path)?;
        let mut options = OpenOptions::new();
        options.write(true).mode(0o600);
        let file =
            if new { options.create_new(true) } else { options.create(true).truncate(true) }.open(path)?;
        Ok(DiskFile { file, path: path.to_path_buf(), disk: self.clone() })
    }

    /// Renames a synced file into its place and makes the rename itself durable.
    pub fn rename_durably(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.before(Operation::Rename, to)?;
        fs::rename(from, to)?;
        self.sync_directory(to.parent().unwrap_or(Path::new(".")))
    }

    /// Exchanges two directories in one step, durably. Not every file system can.
    pub fn exchange(&self, from: &Path, to: &Path) -> io::Result<()> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        self.before(Operation::Rename, to)?;
        renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE)?;
        for changed in [from, to] {
            self.sync_directory(changed.parent().unwrap_or(Path::new(".")))?;
        }
        Ok(())
    }

    pub fn delete(&self, path: &Path) -> io::Result<()> {
        self.before(Operation::Delete, path)?;
        fs::remove_file(path)
    }

    pub fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.before(Operation::SyncDirectory, path)?;
        File::open(path)?.sync_all()
    }

    /// Makes a directory and those above it that are missing, mode 0700.
    pub fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.before(Operation::MakeDirectory, path)?;
        create_private_directory(path)
    }
}

/// Makes a directory that only its owner can look into, and those above it that are missing. One that is there is
/// closed to others.
pub fn create_private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let mode = fs::metadata(path)?.permissions().mode();
    if mode & 0o077 != 0 {
        fs::set_permissions(path, fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// A file being written.
#[derive(Debug)]
pub struct DiskFile {
    file: File,
    path: PathBuf,
    disk: Disk,
}

impl DiskFile {
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if let Err(error) = self.disk.before(Operation::Write, &self.path) {
            self.file.write_all_at(&bytes[..bytes.len() / 2], offset)?;
            return Err(error);
        }
        self.file.write_all_at(bytes, offset)
    }

    /// Content and length.
    pub fn sync_data(&self) -> io::Result<()> {
        self.disk.before(Operation::Sync, &self.path)?;
        self.file.sync_data()
    }

    pub fn sync_all(&self) -> io::Result<()> {
        self.disk.before(Operation::Sync, &self.path)?;
        self.file.sync_all()
    }
}

impl Write for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(error) = self.disk.before(Operation::Write, &self.path) {
            self.file.write_all(&bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_fails_leaves_half_and_the_next_one_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let left = std::sync::atomic::AtomicUsize::new(1);
        let disk = Disk::with_faults(move |operation, _| {
            let fails = operation == Operation::Write
                && left
                    .fetch_update(
                        std::sync::atomic::Ordering::Relaxed,
                        std::sync::atomic::Ordering::Relaxed,
                        |n| n.checked_sub(1),
                    )
                    .is_ok();
            if fails { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        });
        let file = disk.create(&path, true).unwrap();
        assert_eq!(file.write_all_at(b"abcd", 0).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"ab");
        file.write_all_at(b"abcd", 0).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"abcd");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn an_open_directory_is_closed_to_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        create_private_directory(&path.join("records")).unwrap();
        create_private_directory(&path).unwrap();
        for made in [path.join("records"), path] {
            assert_eq!(fs::metadata(made).unwrap().permissions().mode() & 0o777, 0o700);
        }
    }
}
