//! Reads keys and certificates again when their files change, and at SIGHUP.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use crate::keys::KeyFile;
use crate::proxy::Proxy;

/// Watches for as long as the process runs; the watcher must be kept so long.
pub(super) fn watch(
    proxy: Arc<Proxy>,
    control_keys: Option<Arc<KeyFile>>,
) -> anyhow::Result<RecommendedWatcher> {
    let mut files = proxy.watched_files();
    files.extend(control_keys.iter().map(|keys| keys.path().to_owned()));
    let changed = Arc::new(Notify::new());
    let told = changed.clone();
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Our own reading is an event too.
        if !event.is_ok_and(|event| event.kind.is_access() && !is_written(&event) && !event.need_rescan()) {
            told.notify_one();
        }
    })
    .context("cannot watch files")?;
    // Not the files themselves: they are replaced by renaming, or by a change of a link beside them (Kubernetes).
    let directories: BTreeSet<PathBuf> = files.iter().map(|file| directory_of(file)).collect();
    for directory in directories {
        watcher
            .watch(&directory, RecursiveMode::NonRecursive)
            .with_context(|| format!("cannot watch {}", directory.display()))?;
    }
    // What changed since the files were read has had no event.
    changed.notify_one();
    let mut hang_up = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = changed.notified() => {}
                signalled = hang_up.recv() => match signalled {
                    Some(()) => tracing::info!("SIGHUP: reading keys and certificates again"),
                    None => return,
                },
            }
            proxy.reload();
            let Some(keys) = &control_keys else { continue };
            match keys.reload() {
                Ok(true) => tracing::info!("the control port's keys were read again"),
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "the control port's keys of before stay in force"),
            }
        }
    });
    Ok(watcher)
}

fn is_written(event: &notify::Event) -> bool {
    use notify::event::{AccessKind, AccessMode, EventKind};
    matches!(event.kind, EventKind::Access(AccessKind::Close(AccessMode::Write)))
}

fn directory_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
