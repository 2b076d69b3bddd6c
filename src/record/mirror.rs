//! A copy of `records/` in an object store, kept in step by a thread of its own.
//!
//! The tree on the local disk is the truth; the store follows. A pass compares the tree with notes of what was copied
//! (`mirrored/<store>/dt=.../hour=.../NAME`, each with the length, time and inode of the file that it speaks of), stores
//! what is new or rewritten, and then removes the objects whose files are gone. New objects come first: a reader of
//! the store may for a moment see the rows of a merged hour twice, never miss them. When an hour's whole directory is gone,
//! or the disk with it, its objects stay: an operator who makes room on the local disk keeps what the store has.
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

use super::error::RecordError;
use super::read::files;
use super::recorder::Counters;
use super::seal::give_way;
use crate::store::{DataDir, ObjectTarget, create_private_directory, publish};

/// What failed is tried again after this.
const RETRY: Duration = Duration::from_secs(10);
/// Failures in a row after which a pass gives up: the store is away.
const MOST_FAILURES: usize = 3;
/// How long the last pass of a process may take.
const LAST_PASS: Duration = Duration::from_secs(30);

enum Ask {
    Changed,
    Settle(Sender<Result<(), RecordError>>),
}

/// Where to copy to, and what the tree's editor and the copier must agree on.
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
        let tree = Arc::new(Mutex::default());
        let name: String =
            Sha256::digest(url.as_bytes()).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let notes = data.mirrored().join(name);
        let copier = Copier { target, data, notes, tree: Arc::clone(&tree), counters };
        let (asks, received) = unbounded_channel();
        let (stop, stopped) = oneshot::channel();
        let failed = |source| RecordError::Thread { name: "record-mirror", source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let thread = std::thread::Builder::new()
            .name("record-mirror".into())
            .spawn(move || {
                give_way();
                runtime.block_on(copier.run_until_stopped(received, stopped));
            })
            .map_err(failed)?;
        Ok((Self { asks, tree, _stop: stop }, thread))
    }

    /// Something was sealed, merged or forgotten.
    pub fn changed(&self) {
        // The copier ends after this does, or has panicked, which its join tells.
        let _ = self.asks.send(Ask::Changed);
    }

    /// Answers when a pass that begins after this has ended.
    pub fn settle(&self, reply: Sender<Result<(), RecordError>>) {
        // Whoever asked sees the reply dropped.
        let _ = self.asks.send(Ask::Settle(reply));
    }

    /// While this is held nothing looks at the tree: an hour that is being merged is neither its old self nor its new one.
    pub fn edit(&self) -> MutexGuard<'_, ()> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Copier {
    target: ObjectTarget,
    data: DataDir,
    notes: PathBuf,
    tree: Arc<Mutex<()>>,
    counters: Arc<Counters>,
}

/// What tells one content of a file from another: every writer makes a new file.
#[derive(Clone, Debug, PartialEq)]
struct Identity(String);

impl Identity {
    fn of(metadata: &fs::Metadata) -> Self {
        let (length, inode) = (metadata.len(), metadata.ino());
        Self(format!("{length} {}.{:09} {inode}\n", metadata.mtime(), metadata.mtime_nsec()))
    }
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
                let waiting = self.waiting().map_or(0, |(waiting, _)| waiting.len());
                tracing::warn!(waiting, "files are not copied to the object store yet; the next start does it");
            }
        }
    }

    async fn run(&self, mut asks: UnboundedReceiver<Ask>) {
        let mut replies = Vec::new();
        loop {
            let outcome = self.pass().await;
            self.counters.object_store.ended(outcome.as_ref().copied().map_err(ToString::to_string));
            for reply in replies.drain(..) {
                let told: Result<(), RecordError> = match &outcome {
                    Ok(()) => Ok(()),
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
                    Ok(()) => std::future::pending().await,
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

    /// Brings the store in step with the tree as it is now.
    async fn pass(&self) -> Result<(), RecordError> {
        let (waiting, gone) = self.waiting()?;
        let gauge = metrics::gauge!("draftsmith_object_store_waiting_files");
        let mut left = waiting.len();
        gauge.set(left as f64);
        let mut first_failure = None;
        let mut failures_in_a_row = 0;
        for name in &waiting {
            match self.copy(name).await {
                Ok(()) => {
                    left -= 1;
                    gauge.set(left as f64);
                    failures_in_a_row = 0;
                }
                Err(error) => {
                    failures_in_a_row += 1;
                    first_failure.get_or_insert(error);
                    if failures_in_a_row == MOST_FAILURES {
                        break;
                    }
                }
            }
        }
        // What took the place of a file that is gone may be among what failed.
        if let Some(error) = first_failure {
            return Err(error);
        }
        for name in &gone {
            self.remove(name).await?;
        }
        Ok(())
    }

    /// The names of files that are not in the store as they are, and of noted ones that are gone.
    fn waiting(&self) -> Result<(Vec<String>, Vec<String>), RecordError> {
        let _no_edits = self.tree.lock().unwrap_or_else(PoisonError::into_inner);
        let records = self.data.records();
        let mut waiting = Vec::new();
        let mut present = BTreeSet::new();
        for path in files(&self.data)? {
            let Ok(relative) = path.strip_prefix(&records) else { continue };
            let name = relative.to_string_lossy().into_owned();
            let metadata = match fs::metadata(&path) {
                Ok(metadata) => metadata,
                // Someone else's hand.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(RecordError::disk("look at", &path)(error)),
            };
            if self.noted(&name)?.as_ref() != Some(&Identity::of(&metadata)) {
                waiting.push(name.clone());
            }
            present.insert(name);
        }
        let mut gone = Vec::new();
        for name in self.all_noted()? {
            if !present.contains(&name) {
                gone.push(name);
            }
        }
        Ok((waiting, gone))
    }

    async fn copy(&self, name: &str) -> Result<(), RecordError> {
        let path = self.data.records().join(name);
        let mut file = match File::open(&path) {
            Ok(file) => file,
            // Merged or forgotten since: the next pass sees what came of it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(RecordError::disk("open", &path)(error)),
        };
        // Of what is read, not of what stands there then.
        let identity = Identity::of(&file.metadata().map_err(RecordError::disk("look at", &path))?);
        let note = self.notes.join(name);
        if self.noted(name)?.is_none() {
            // Before it is there, since an answer may be lost: whatever may be in the store is known to be removed one day.
            self.write_note(&note, "unknown\n")?;
        }
        let bytes = self.target.put(name, &mut file).await?;
        metrics::counter!("draftsmith_object_store_bytes_total").increment(bytes);
        metrics::counter!("draftsmith_object_store_files_total", "what" => "copied").increment(1);
        self.counters.copied();
        self.write_note(&note, &identity.0)
    }

    fn write_note(&self, note: &Path, text: &str) -> Result<(), RecordError> {
        let directory = note.parent().unwrap_or(&self.notes);
        create_private_directory(directory).map_err(RecordError::disk("create", directory))?;
        publish(note, text.as_bytes()).map_err(RecordError::disk("write", note))
    }

    async fn remove(&self, name: &str) -> Result<(), RecordError> {
        let hour = self.data.records().join(name);
        if hour.parent().is_some_and(Path::is_dir) {
            self.target.delete(name).await?;
            metrics::counter!("draftsmith_object_store_files_total", "what" => "deleted").increment(1);
        }
        let note = self.notes.join(name);
        fs::remove_file(&note).map_err(RecordError::disk("delete", &note))?;
        // An hour without notes; not one that has others.
        let _ = note.parent().map(fs::remove_dir);
        Ok(())
    }

    fn noted(&self, name: &str) -> Result<Option<Identity>, RecordError> {
        let note = self.notes.join(name);
        match fs::read_to_string(&note) {
            Ok(text) => Ok(Some(Identity(text))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(RecordError::disk("read", &note)(error)),
        }
    }

    fn all_noted(&self) -> Result<Vec<String>, RecordError> {
        let mut names = Vec::new();
        for day in entries(&self.notes)? {
            for hour in entries(&day)? {
                for note in entries(&hour)? {
                    let Ok(relative) = note.strip_prefix(&self.notes) else { continue };
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

impl Ask {
    fn reply(self) -> Option<Sender<Result<(), RecordError>>> {
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
