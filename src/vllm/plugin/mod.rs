//! The Python plugin, carried in the binary: written to a directory that goes on vLLM's PYTHONPATH, no pip needed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Path under the plugin directory, and content.
const FILES: [(&str, &str); 14] = [
    ("draftsmith_vllm/__init__.py", include_str!("draftsmith_vllm/__init__.py")),
    ("draftsmith_vllm/config.py", include_str!("draftsmith_vllm/config.py")),
    ("draftsmith_vllm/connector.py", include_str!("draftsmith_vllm/connector.py")),
    ("draftsmith_vllm/engine.py", include_str!("draftsmith_vllm/engine.py")),
    ("draftsmith_vllm/head_file.py", include_str!("draftsmith_vllm/head_file.py")),
    ("draftsmith_vllm/intake.py", include_str!("draftsmith_vllm/intake.py")),
    ("draftsmith_vllm/rows.py", include_str!("draftsmith_vllm/rows.py")),
    ("draftsmith_vllm/salt.py", include_str!("draftsmith_vllm/salt.py")),
    ("draftsmith_vllm/staging.py", include_str!("draftsmith_vllm/staging.py")),
    ("draftsmith_vllm/state.py", include_str!("draftsmith_vllm/state.py")),
    ("draftsmith_vllm/tap.py", include_str!("draftsmith_vllm/tap.py")),
    ("draftsmith_vllm/worker.py", include_str!("draftsmith_vllm/worker.py")),
    ("draftsmith_vllm-0.1.0.dist-info/METADATA", include_str!("draftsmith_vllm-0.1.0.dist-info/METADATA")),
    (
        "draftsmith_vllm-0.1.0.dist-info/entry_points.txt",
        include_str!("draftsmith_vllm-0.1.0.dist-info/entry_points.txt"),
    ),
];

/// A plugin file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the plugin file {}: {source}; give a directory that you may write to", path.display())]
pub struct WriteError {
    path: PathBuf,
    source: io::Error,
}

/// Writes the plugin into `directory` (made if missing). Each file is replaced whole, so a vLLM that starts at the same
/// time reads either version, never half a file; files already right are left alone.
pub fn write(directory: &Path) -> Result<(), WriteError> {
    for (name, content) in FILES {
        let path = directory.join(name);
        write_file(&path, content).map_err(|source| WriteError { path, source })?;
    }
    Ok(())
}

fn write_file(path: &Path, content: &str) -> io::Result<()> {
    if fs::read_to_string(path).is_ok_and(|present| present == content) {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    fs::write(&temporary, content)?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_every_file_and_replaces_an_old_one() {
        let directory = tempfile::tempdir().unwrap();
        let tap = directory.path().join("draftsmith_vllm/tap.py");
        fs::create_dir_all(tap.parent().unwrap()).unwrap();
        fs::write(&tap, "old").unwrap();
        write(directory.path()).unwrap();
        write(directory.path()).unwrap();
        for (name, content) in FILES {
            assert_eq!(fs::read_to_string(directory.path().join(name)).unwrap(), content);
        }
        assert_eq!(fs::read_dir(tap.parent().unwrap()).unwrap().count(), 12, "no temporary file stays");
    }

    #[test]
    fn carries_every_python_file_of_the_source() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/vllm/plugin/draftsmith_vllm");
        for entry in fs::read_dir(source).unwrap() {
            let name = format!("draftsmith_vllm/{}", entry.unwrap().file_name().to_string_lossy());
            if name.ends_with(".py") {
                assert!(FILES.iter().any(|(carried, _)| *carried == name), "{name} is not carried");
            }
        }
    }

    #[test]
    fn names_the_path_that_cannot_be_written() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = write(file.path()).unwrap_err().to_string();
        assert!(error.contains("draftsmith_vllm/__init__.py"), "{error}");
    }
}
