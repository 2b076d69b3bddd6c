//! What wakes or ends a long training: the store's changes and the process's signals.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use notify::{RecursiveMode, Watcher};

use crate::states::StatesError;

/// Shared between a training and those who wake or end it. Cheap to clone.
#[derive(Clone, Default)]
pub struct Wake {
    shared: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Default)]
struct State {
    stopped: bool,
    changed: bool,
}

impl Wake {
    /// Asks the training to end: at the end of its step, with a checkpoint.
    pub fn stop(&self) {
        self.lock().stopped = true;
        self.shared.1.notify_all();
    }

    pub fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// Tells that there may be new samples.
    fn change(&self) {
        self.lock().changed = true;
        self.shared.1.notify_all();
    }

    /// Waits for a change since the last call; false where the training shall end.
    pub(super) fn wait(&self) -> bool {
        let idle = |state: &mut State| !state.stopped && !state.changed;
        let waited = self.shared.1.wait_while(self.lock(), idle);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.changed = false;
        !state.stopped
    }

    /// Tells of every change in `directory` for as long as the watcher lives.
    pub(super) fn watch(&self, directory: &Path) -> Result<impl Watcher + use<>, StatesError> {
        let failed =
            |error: notify::Error| StatesError::Watch { path: directory.into(), reason: error.to_string() };
        let wake = self.clone();
        let told = move |event: notify::Result<notify::Event>| {
            // Reading the files is an event too; it must not wake the reader again.
            if !event.is_ok_and(|event| event.kind.is_access() && !event.need_rescan()) {
                wake.change();
            }
        };
        let mut watcher = notify::recommended_watcher(told).map_err(failed)?;
        watcher.watch(directory, RecursiveMode::NonRecursive).map_err(failed)?;
        Ok(watcher)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
