//! A copy of `records/` in an object store, kept in step by a thread of its own.
//!
//! The tree on the local disk is the truth; the store follows. A pass compares the tree with notes of what was copied
//! (`mirrored/<store>/dt=.../hour=.../NAME`, each with the length, time and inode of the file that it speaks of), stores
//! what is new or rewritten, and then removes the objects whose files draftsmith itself has removed: it marks their notes
//! before it does. A file that is gone without a mark was removed by an operator, to make room; what the store has stays.
//! New objects come first: a reader of the store may for a moment see the rows of a merged hour twice, never miss them.
//!
//! Nothing waits for the store but who asks to ([`Mirror::settle`]): recording and sealing do not know of it. What could
//! not be copied is tried again, by the next process too, since the notes are files.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::aside::be_nice;
use super::error::RecordError;
use super::read::files;
use super::recorder::Counters;
use crate::event_loop;
use crate::store::{DataDir, ObjectTarget, create_private_directory, hex, publish};

/// What failed is tried again after this.
const RETRY: Duration = Duration::from_secs(10);
/// Failures in a row after which a pass gives up: the store is away.
const MOST_FAILURES: usize = 3;
/// How long the last pass of a process may take.
const LAST_PASS: Duration = Duration::from_secs(30);

/// A note of an object that may be there, of which no answer came.
const UNKNOWN: &str = "unknown\n";
/// A note of an object whose file was removed here.
const GONE: &str = "gone\n";

/// The store is in step but for so many objects whose files an operator removed.
pub(super) type Settled = Result<usize, RecordError>;

enum Ask {
    Changed,
    Settle(Sender<Settled>),
}

/// The copier's other end, held by the one thread that edits the tree.
pub(super) struct Mirror {
    asks: UnboundedSender<Ask>,
    tree: Arc<Mutex<()>>,
    /// Dropped with the rest: the last pass begins, and its time runs.
    _stop: oneshot::Sender<()>,
}

impl Mirror {
    /// Starts the copier. It looks at once for what earlier processes left.
    pub fn start(
        url: &str,
        data: DataDir,
        counters: Arc<Counters>,
    ) -> Result<(Self, JoinHandle<()>), RecordError> {
        let target = ObjectTarget::open(url)?;
        let name = hex(&Sha256::digest(url.as_bytes())[..8]);
        let notes = Notes { records: data.records(), directory: data.mirrored().join(name) };
        let tree = Arc::<Mutex<()>>::default();
        let copier = Copier { target, data, notes, tree: Arc::clone(&tree), counters };
        let (asks, received) = unbounded_channel();
        let (stop, stopped) = oneshot::channel();
        let started = event_loop::start("record-mirror".to_owned(), move |runtime| {
            be_nice();
            runtime.block_on(copier.run_until_stopped(received, stopped));
            // A name that is being looked up would hold up the end.
            runtime.shutdown_background();
        });
        let (_, thread) = started.map_err(|source| RecordError::Thread { name: "record-mirror", source })?;
        Ok((Self { asks, tree, _stop: stop }, thread))
    }

    /// Something was sealed, merged or forgotten.
    pub fn changed(&self) {
        // The copier ends after this does, or has panicked, which its join tells.
        let _ = self.asks.send(Ask::Changed);
    }

    /// Answers when a pass that begins after this has ended.
    pub fn settle(&self, reply: Sender<Settled>) {
        // Whoever asked sees the reply dropped.
        let _ = self.asks.send(Ask::Settle(reply));
    }

    /// While this is held nothing looks at the tree: an hour that is being merged is neither its old self nor its new one.
    pub fn edit(&self) -> MutexGuard<'_, ()> {
        lock(&self.tree)
    }
}

/// What the store has, by file.
struct Notes {
    records: PathBuf,
    directory: PathBuf,
}

fn lock(tree: &Mutex<()>) -> MutexGuard<'_, ()> {
    tree.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Notes {
    /// `dt=.../hour=.../NAME` of a file in the tree.
    fn name_of(&self, path: &Path) -> Option<String> {
        Some(path.strip_prefix(&self.records).ok()?.to_string_lossy().into_owned())
    }

    fn read(&self, name: &str) -> Result<Option<String>, RecordError> {
        let note = self.directory.join(name);
        match fs::read_to_string(&note) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(RecordError::disk("read", &note)(error)),
        }
    }

    fn write(&self, name: &str, text: &str) -> Result<(), RecordError> {
        let note = self.directory.join(name);
        let directory = note.parent().unwrap_or(&self.directory);
        create_private_directory(directory).map_err(RecordError::disk("create", directory))?;
        publish(&note, text.as_bytes()).map_err(RecordError::disk("write", &note))
    }

    fn delete(&self, name: &str) -> Result<(), RecordError> {
        let note = self.directory.join(name);
        fs::remove_file(&note).map_err(RecordError::disk("delete", &note))?;
        // An hour without notes; not one that has others.
        let _ = note.parent().map(fs::remove_dir);
        Ok(())
    }

    fn names(&self) -> Result<Vec<String>, RecordError> {
        let mut names = Vec::new();
        for day in entries(&self.directory)? {
            for hour in entries(&day)? {
                for note in entries(&hour)? {
                    let Ok(relative) = note.strip_prefix(&self.directory) else { continue };
                    let name = relative.to_string_lossy().into_owned();
                    // Not a note that was being written when a process died.
                    if name.ends_with(".parquet") {
                        names.push(name);
                    }
                }
            }
        }
        Ok(names)
    }
}

/// A file is to be removed from the tree, now, under [`Mirror::edit`]: whatever store has it is to lose it, if not now.
pub(super) fn removes(data: &DataDir, path: &Path) -> Result<(), RecordError> {
    for directory in entries(&data.mirrored())? {
        let notes = Notes { records: data.records(), directory };
        // Without a note nothing of it is in that store.
        if let Some(name) = notes.name_of(path)
            && notes.read(&name)?.is_some()
        {
            notes.write(&name, GONE)?;
        }
    }
    Ok(())
}

/// Whether notes speak of copies, in whatever store.
pub fn has_copies(data: &DataDir) -> Result<bool, RecordError> {
    for store in entries(&data.mirrored())? {
        if !entries(&store)?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What there is to do.
struct Work {
    /// Names of files that are not in the store as they are.
    to_copy: Vec<String>,
    /// Names of objects to remove.
    to_remove: Vec<String>,
    /// Objects without a file that stay.
    kept: usize,
}

/// How a copy ended.
enum Copied {
    Done,
    /// The file has gone meanwhile: what came in its place is not among this pass's work.
    Gone,
}

struct Copier {
    target: ObjectTarget,
    data: DataDir,
    notes: Notes,
    tree: Arc<Mutex<()>>,
    counters: Arc<Counters>,
}

/// What tells one content of a file from another: every writer makes a new file.
fn identity(metadata: &fs::Metadata) -> String {
    let (length, inode) = (metadata.len(), metadata.ino());
    format!("{length} {}.{:09} {inode}\n", metadata.mtime(), metadata.mtime_nsec())
}

impl Copier {
    async fn run_until_stopped(self, asks: UnboundedReceiver<Ask>, stopped: oneshot::Receiver<()>) {
        let time_is_up = async {
            // Only ever dropped.
            let _ = stopped.await;
            tokio::time::sleep(LAST_PASS).await;
        };
        tokio::select! {
            () = self.run(asks) => {}
            () = time_is_up => {
                let waiting = self.work().map_or(0, |work| work.to_copy.len() + work.to_remove.len());
                tracing::warn!(waiting, "files are not copied to the object store yet; the next start does it");
            }
        }
    }

    async fn run(&self, mut asks: UnboundedReceiver<Ask>) {
        let mut replies = Vec::new();
        loop {
            let outcome = loop {
                match self.pass().await {
                    Ok(Some(kept)) => break Ok(kept),
                    Ok(None) => {}
                    Err(error) => break Err(error),
                }
            };
            self.counters.object_store.ended(outcome.as_ref().map(|_| ()).map_err(ToString::to_string));
            for reply in replies.drain(..) {
                let told: Settled = match &outcome {
                    Ok(kept) => Ok(*kept),
                    Err(error) => Err(RecordError::NotCopied(error.to_string())),
                };
                // Nobody waits for the answer any more: nothing to tell.
                let _: Result<(), _> = Sender::send(&reply, told);
            }
            if let Err(error) = &outcome {
                tracing::warn!(%error, "copying records to the object store: will try again");
                metrics::counter!("draftsmith_object_store_errors_total").increment(1);
            }
            // Until there is something to do; forever, if nothing failed.
            let retry = async {
                match &outcome {
                    Ok(_) => std::future::pending().await,
                    Err(_) => tokio::time::sleep(RETRY).await,
                }
            };
            tokio::select! {
                () = retry => {}
                ask = asks.recv() => match ask {
                    None => return,
                    Some(ask) => replies.extend(ask.reply()),
                },
            }
            while let Ok(ask) = asks.try_recv() {
                replies.extend(ask.reply());
            }
        }
    }

    /// Brings the store in step with the tree as it is now; gives the number of objects without a file that stay. None:
    /// the tree has changed meanwhile, and nothing was removed.
    async fn pass(&self) -> Result<Option<usize>, RecordError> {
        let work = self.work()?;
        let gauge = metrics::gauge!("draftsmith_object_store_waiting_files");
        let mut left = work.to_copy.len() + work.to_remove.len();
        gauge.set(left as f64);
        let mut first_failure = None;
        let mut failures_in_a_row = 0;
        let mut failed_hours: BTreeSet<&str> = BTreeSet::new();
        let mut stale = false;
        for name in &work.to_copy {
            match self.copy(name).await {
                Ok(copied) => {
                    stale |= matches!(copied, Copied::Gone);
                    left -= 1;
                    gauge.set(left as f64);
                    failures_in_a_row = 0;
                }
                Err(error) => {
                    // A file that cannot be read says nothing of the store.
                    failures_in_a_row += usize::from(matches!(error, RecordError::ObjectStore(_)));
                    failed_hours.insert(hour_of(name));
                    first_failure.get_or_insert(error);
                    if failures_in_a_row == MOST_FAILURES {
                        break;
                    }
                }
            }
        }
        if failures_in_a_row < MOST_FAILURES && !stale {
            for name in &work.to_remove {
                // What took its place may be what failed.
                if failed_hours.contains(hour_of(name)) {
                    continue;
                }
                match self.remove(name).await {
                    Ok(()) => {
                        left -= 1;
                        gauge.set(left as f64);
                    }
                    Err(error) => {
                        first_failure.get_or_insert(error);
                    }
                }
            }
        }
        match first_failure {
            Some(error) => Err(error),
            None if stale => Ok(None),
            None => Ok(Some(work.kept)),
        }
    }

    fn work(&self) -> Result<Work, RecordError> {
        let _no_edits = lock(&self.tree);
        let mut work = Work { to_copy: Vec::new(), to_remove: Vec::new(), kept: 0 };
        let mut present = BTreeSet::new();
        for path in files(&self.data)? {
            let Some(name) = self.notes.name_of(&path) else { continue };
            let metadata = match fs::metadata(&path) {
                Ok(metadata) => metadata,
                // Someone else's hand.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(RecordError::disk("look at", &path)(error)),
            };
            if self.notes.read(&name)?.as_deref() != Some(&identity(&metadata)) {
                work.to_copy.push(name.clone());
            }
            present.insert(name);
        }
        for name in self.notes.names()? {
            if present.contains(&name) {
                continue;
            }
            if self.notes.read(&name)?.as_deref() == Some(GONE) {
                work.to_remove.push(name);
            } else {
                work.kept += 1;
            }
        }
        Ok(work)
    }

    async fn copy(&self, name: &str) -> Result<Copied, RecordError> {
        let path = self.data.records().join(name);
        let mut file = {
            let _no_edits = lock(&self.tree);
            let file = match File::open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Copied::Gone),
                Err(error) => return Err(RecordError::disk("open", &path)(error)),
            };
            if self.notes.read(name)?.is_none() {
                // Before it is there, since an answer may be lost: whatever may be in the store is known.
                self.notes.write(name, UNKNOWN)?;
            }
            file
        };
        // Of what is read, not of what stands there then.
        let copied = identity(&file.metadata().map_err(RecordError::disk("look at", &path))?);
        let bytes = self.target.put(name, &mut file).await?;
        metrics::counter!("draftsmith_object_store_bytes_total").increment(bytes);
        metrics::counter!("draftsmith_object_store_files_total", "what" => "copied").increment(1);
        self.counters.copied();
        let _no_edits = lock(&self.tree);
        if self.notes.read(name)?.as_deref() == Some(GONE) && !path.exists() {
            return Ok(Copied::Gone);
        }
        self.notes.write(name, &copied)?;
        Ok(Copied::Done)
    }

    async fn remove(&self, name: &str) -> Result<(), RecordError> {
        self.target.delete(name).await?;
        metrics::counter!("draftsmith_object_store_files_total", "what" => "deleted").increment(1);
        self.notes.delete(name)
    }
}

fn hour_of(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(hour, _)| hour)
}

impl Ask {
    fn reply(self) -> Option<Sender<Settled>> {
        match self {
            Ask::Changed => None,
            Ask::Settle(reply) => Some(reply),
        }
    }
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>, RecordError> {
    let listed = match fs::read_dir(directory) {
        Ok(listed) => listed,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(RecordError::disk("list", directory)(error)),
    };
    let mut found = Vec::new();
    for entry in listed {
        found.push(entry.map_err(RecordError::disk("list", directory))?.path());
    }
    Ok(found)
}
