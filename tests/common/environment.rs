//! Where a real vLLM and its model are installed.

use std::path::PathBuf;

/// The directory of vLLM and the model: DRAFTSMITH_ENVIRONMENT, or where `draftsmith demo` keeps it.
pub fn environment() -> PathBuf {
    match std::env::var_os("DRAFTSMITH_ENVIRONMENT") {
        Some(directory) => PathBuf::from(directory),
        None => std::env::home_dir().unwrap().join(".cache/draftsmith/environment"),
    }
}
