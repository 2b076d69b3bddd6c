//! The thread that turns transfer files and finished requests into stored samples.
//!
//! A file and the request that it belongs to come in either order. Whichever comes first waits for the other up to a
//! time-out. The thread sleeps in one place alone, its queue, until the next time-out is due.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use notify::Watcher;
use tokenizers::Tokenizer;

use super::accept::{self, Expected, OutcomeStatus, SampleKey};
use super::transfer::{self, Drafting, TransferFile, TransferName};
use super::{StateStore, StatesError, StoreStats, remove};

/// Requests and file events that may wait for the thread. A full queue drops requests (counted), never blocks a caller.
const QUEUE: usize = 16_384;

/// So many wrong files, and no good one between them, are no accident.
const SWITCH_OFF_AFTER: u64 = 16;

/// How the collector works.
#[derive(Clone, Debug)]
pub struct CollectorOptions {
    /// Where the plugin publishes; must exist. Nothing outside it is read.
    pub transfer_directory: PathBuf,
    /// How long a file waits for its request, and a request for its files.
    pub time_out: Duration,
    /// What a file must be like.
    pub expected: Expected,
    /// A larger file is refused unread.
    pub max_file_bytes: u64,
}

impl CollectorOptions {
    pub fn new(transfer_directory: impl Into<PathBuf>) -> Self {
        Self {
            transfer_directory: transfer_directory.into(),
            time_out: Duration::from_secs(60),
            expected: Expected::default(),
            max_file_bytes: 4 << 30,
        }
    }
}

/// What was recorded of one choice; the ids must decode to text that contains both parts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceText {
    pub content: String,
    pub reasoning: String,
    /// The text was parsed into tool calls, so that it cannot be compared.
    pub has_tool_calls: bool,
}

/// A finished request, as the recorder knows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestSummary {
    /// The `X-Request-Id` that went to vLLM.
    pub request_id: String,
    pub conversation_id: String,
    /// `live` or `replay`.
    pub source: String,
    pub held_out: bool,
    /// The record's status, for the log.
    pub status: String,
    /// The request's `n`, 1 where it gave none. A completions request with several prompts has n choices for each.
    pub n: usize,
    /// One per choice, by choice index. Empty: no states are wanted (opted out); files are deleted as they come.
    pub choices: Vec<ChoiceText>,
}

/// What came of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    pub request_id: String,
    pub choice_index: usize,
    /// Empty where the file's ids could not be trusted or there was no file.
    pub prompt_ids: Vec<u32>,
    pub output_ids: Vec<u32>,
    /// None where the ids are empty, or where vLLM does not count per request.
    pub drafting: Option<Drafting>,
    /// sha256 of the one draft head that drafted the whole answer; None where it is not known, or was swapped meanwhile.
    pub head_digest: Option<String>,
    pub status: OutcomeStatus,
}

/// Counts since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CollectorStats {
    pub by_status: BTreeMap<OutcomeStatus, u64>,
    /// Requests that found the queue full.
    pub dropped_requests: u64,
    pub store: StoreStats,
}

#[derive(Debug)]
enum Message {
    Event(notify::Result<notify::Event>),
    Request(Box<RequestSummary>),
    Forget(HashSet<String>, SyncSender<Result<usize, StatesError>>),
    Stop,
}

/// Removes samples from the collector's store.
#[derive(Clone, Debug)]
pub struct Forgetter {
    sender: SyncSender<Message>,
}

impl Forgetter {
    /// Removes every sample of these requests; returns how many went. Blocks the thread.
    pub fn forget(&self, request_ids: HashSet<String>) -> Result<usize, StatesError> {
        let (reply, answer) = sync_channel(1);
        // A collector that has ended drops the question, and with it the place for its answer.
        let _ = self.sender.send(Message::Forget(request_ids, reply));
        answer.recv().unwrap_or(Err(StatesError::Stopped))
    }
}

/// Runs the thread; stops it when dropped.
pub struct Collector {
    sender: SyncSender<Message>,
    stats: Arc<Mutex<CollectorStats>>,
    watcher: Option<notify::RecommendedWatcher>,
    thread: Option<JoinHandle<()>>,
}

impl Collector {
    /// Watches the transfer directory from now on; files that are there already are taken in as well.
    ///
    /// `on_outcome` is called from the collector's thread, once for each choice of each expected request.
    pub fn start(
        mut options: CollectorOptions,
        store: StateStore,
        tokenizer: Option<Tokenizer>,
        on_outcome: impl FnMut(Outcome) + Send + 'static,
    ) -> Result<Self, StatesError> {
        // The watcher reports absolute paths, and they are compared with this one.
        let directory = fs::canonicalize(&options.transfer_directory)
            .map_err(|error| StatesError::io("cannot find", &options.transfer_directory, error))?;
        options.transfer_directory = directory.clone();
        let (sender, receiver) = sync_channel(QUEUE);
        let events = sender.clone();
        let watch_failed =
            |error: notify::Error| StatesError::Watch { path: directory.clone(), reason: error.to_string() };
        // Blocking here is right: inotify then reports an overflow, and that leads to a scan.
        let mut watcher = notify::recommended_watcher(move |event| {
            let _ = events.send(Message::Event(event));
        })
        .map_err(watch_failed)?;
        watcher.watch(&directory, notify::RecursiveMode::NonRecursive).map_err(watch_failed)?;

        let stats = Arc::new(Mutex::new(CollectorStats { store: store.stats(), ..Default::default() }));
        let mut worker = Worker {
            options,
            store,
            tokenizer,
            on_outcome: Box::new(on_outcome),
            stats: Arc::clone(&stats),
            requests: HashMap::new(),
            request_deadlines: VecDeque::new(),
            files: HashMap::new(),
            file_deadlines: VecDeque::new(),
            asked_for_whole: SystemTime::UNIX_EPOCH,
            faults_in_a_row: 0,
        };
        metrics::gauge!("draftsmith_states_switched_off").set(0.0);
        worker.ask_for_whole_requests();
        let thread = std::thread::Builder::new()
            .name("states".to_string())
            .spawn(move || worker.run(&receiver))
            .map_err(|error| StatesError::io("cannot start a thread for", &directory, error))?;
        Ok(Self { sender, stats, watcher: Some(watcher), thread: Some(thread) })
    }

    /// Tells of a finished request. Never waits; false (and counted) where the queue is full or the thread has ended.
    pub fn expect(&self, request: RequestSummary) -> bool {
        match self.sender.try_send(Message::Request(Box::new(request))) {
            Ok(()) => true,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                lock(&self.stats).dropped_requests += 1;
                metrics::counter!("draftsmith_states_dropped_requests_total").increment(1);
                false
            }
        }
    }

    pub fn forgetter(&self) -> Forgetter {
        Forgetter { sender: self.sender.clone() }
    }

    pub fn stats(&self) -> CollectorStats {
        lock(&self.stats).clone()
    }

    /// Works off what was told so far, syncs the store and ends. Requests that still wait get no outcome.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // First the watcher, or its callback could fill the queue for ever.
        self.watcher = None;
        let _ = self.sender.send(Message::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the states thread has panicked");
        }
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.end();
        }
    }
}

fn lock(stats: &Mutex<CollectorStats>) -> std::sync::MutexGuard<'_, CollectorStats> {
    stats.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Worker {
    options: CollectorOptions,
    store: StateStore,
    tokenizer: Option<Tokenizer>,
    on_outcome: Box<dyn FnMut(Outcome) + Send>,
    stats: Arc<Mutex<CollectorStats>>,
    /// Requests whose files have not all come, by request id.
    requests: HashMap<String, WaitingRequest>,
    request_deadlines: VecDeque<(Instant, String)>,
    /// Files whose request has not come, by request id.
    files: HashMap<String, Vec<WaitingFile>>,
    file_deadlines: VecDeque<(Instant, String)>,
    /// When the plugin was last told to give whole requests; files from before it say nothing new.
    asked_for_whole: SystemTime,
    /// Files whose writer was at fault, since the last good one.
    faults_in_a_row: u64,
}

struct WaitingRequest {
    summary: RequestSummary,
    seen: HashSet<usize>,
    deadline: Instant,
}

struct WaitingFile {
    path: PathBuf,
    name: TransferName,
    deadline: Instant,
}

impl Worker {
    fn run(&mut self, receiver: &Receiver<Message>) {
        self.scan();
        loop {
            let message = match self.next_deadline() {
                Some(deadline) => receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())),
                None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match message {
                Ok(Message::Event(event)) => self.event(event),
                Ok(Message::Request(summary)) => self.request(*summary),
                Ok(Message::Forget(request_ids, reply)) => {
                    // A file of one that still waits would be stored after all.
                    for request_id in &request_ids {
                        if let Some(waiting) = self.requests.get_mut(request_id) {
                            waiting.summary.choices.clear();
                        }
                    }
                    let outcome = self.store.forget(|request_id| request_ids.contains(request_id));
                    // Whoever asked may have gone.
                    let _ = reply.send(outcome);
                }
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.expire(Instant::now());
        }
        if let Err(error) = self.store.sync() {
            tracing::warn!("{error}");
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let request = self.request_deadlines.front().map(|(deadline, _)| *deadline);
        let file = self.file_deadlines.front().map(|(deadline, _)| *deadline);
        match (request, file) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    fn event(&mut self, event: notify::Result<notify::Event>) {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                tracing::warn!("watching for states: {error}; scanning instead");
                self.scan();
                return;
            }
        };
        if event.need_rescan() {
            metrics::counter!("draftsmith_states_rescans_total").increment(1);
            self.scan();
            return;
        }
        // A file appears under its final name by a rename or a link; a plain create is allowed for moves between file
        // systems only once it is closed.
        use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind, RenameMode};
        match event.kind {
            EventKind::Modify(ModifyKind::Name(RenameMode::To | RenameMode::Any))
            | EventKind::Access(AccessKind::Close(AccessMode::Write)) => {
                for path in &event.paths {
                    self.file(path);
                }
            }
            EventKind::Modify(ModifyKind::Name(RenameMode::Both)) => {
                if let Some(path) = event.paths.last() {
                    self.file(path);
                }
            }
            _ => {}
        }
    }

    /// Tells the plugin that rows which it gave before may not be here: files of an earlier run, or of a request that was
    /// refused, or evicted since. From now on it gives each prefix again once.
    fn ask_for_whole_requests(&mut self) {
        self.asked_for_whole = SystemTime::now();
        let path = self.options.transfer_directory.join(transfer::RESEND);
        if let Err(error) = crate::store::publish(&path, b"") {
            tracing::warn!(
                "cannot write {}: {error}; samples whose prefix is missing stay partial",
                path.display()
            );
        }
    }

    /// Looks at all files of the directory.
    fn scan(&mut self) {
        let directory = self.options.transfer_directory.clone();
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::warn!("cannot list {}: {error}", directory.display());
                return;
            }
        };
        // A later file may leave out rows of an earlier one.
        let mut found: Vec<_> = entries
            .flatten()
            .map(|entry| (entry.metadata().and_then(|metadata| metadata.modified()).ok(), entry))
            .collect();
        found.sort_by_key(|(modified, _)| *modified);
        for (_, entry) in found {
            let path = entry.path();
            let file_name = entry.file_name();
            if file_name == transfer::RESEND {
                continue;
            }
            if file_name.as_encoded_bytes().starts_with(b".") {
                self.remove_if_abandoned(&path);
            } else {
                self.file(&path);
            }
        }
    }

    /// Deletes what a killed vLLM left half-written.
    fn remove_if_abandoned(&self, path: &Path) {
        let Ok(metadata) = fs::symlink_metadata(path) else { return };
        let Ok(modified) = metadata.modified() else { return };
        let age = SystemTime::now().duration_since(modified).unwrap_or_default();
        if metadata.is_file() && age > self.options.time_out.max(Duration::from_secs(600)) {
            remove(path);
        }
    }

    fn file(&mut self, path: &Path) {
        if path.parent() != Some(self.options.transfer_directory.as_path()) {
            return;
        }
        let Some(file_name) = path.file_name().and_then(|name| name.to_str()) else { return };
        if file_name.starts_with('.') || !file_name.ends_with(transfer::EXTENSION) {
            return;
        }
        let Some(name) = TransferName::parse(file_name) else {
            self.count(OutcomeStatus::BadName);
            remove(path);
            return;
        };
        if let Some(waiting) = self.requests.remove(&name.request_id) {
            self.matched(waiting, path, &name);
            return;
        }
        let waiting = self.files.entry(name.request_id.clone()).or_default();
        // The scan at the start and the watcher may both have seen it; after a match it is gone.
        if waiting.iter().any(|other| other.path == path) || fs::symlink_metadata(path).is_err() {
            if waiting.is_empty() {
                self.files.remove(&name.request_id);
            }
            return;
        }
        let deadline = Instant::now() + self.options.time_out;
        self.file_deadlines.push_back((deadline, name.request_id.clone()));
        waiting.push(WaitingFile { path: path.to_path_buf(), name, deadline });
    }

    fn request(&mut self, summary: RequestSummary) {
        let request_id = summary.request_id.clone();
        let deadline = Instant::now() + self.options.time_out;
        let wanted = !summary.choices.is_empty();
        if let Some(earlier) = self.requests.remove(&request_id) {
            self.give_up(earlier);
        }
        let waiting = WaitingRequest { summary, seen: HashSet::new(), deadline };
        self.requests.insert(request_id.clone(), waiting);
        self.request_deadlines.push_back((deadline, request_id.clone()));
        for file in self.files.remove(&request_id).unwrap_or_default() {
            match self.requests.remove(&request_id) {
                Some(waiting) => self.matched(waiting, &file.path, &file.name),
                // All its choices have their file; this one is one too many.
                None => {
                    self.count(if wanted {
                        OutcomeStatus::UnexpectedChoice
                    } else {
                        OutcomeStatus::NotWanted
                    });
                    remove(&file.path);
                }
            }
        }
    }

    /// Takes in a file of a request that is known; puts the request back where it waits for more.
    fn matched(&mut self, mut waiting: WaitingRequest, path: &Path, name: &TransferName) {
        // Seen by the scan and by the watcher: it was dealt with, and the request may wait for other files.
        if fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            self.requests.insert(name.request_id.clone(), waiting);
            return;
        }
        let choice_index = name.choice_index(waiting.summary.n);
        let choice = choice_index.and_then(|index| Some((index, waiting.summary.choices.get(index)?)));
        match choice {
            _ if waiting.summary.choices.is_empty() => {
                self.count(OutcomeStatus::NotWanted);
                remove(path);
            }
            Some((index, text)) if !waiting.seen.contains(&index) => {
                let outcome = self.take_in(path, name, index, &waiting.summary, text);
                self.watch_for_faults(outcome.status);
                remove(path);
                waiting.seen.insert(index);
                self.report(outcome);
            }
            _ => {
                self.count(OutcomeStatus::UnexpectedChoice);
                remove(path);
            }
        }
        if waiting.summary.choices.is_empty() || waiting.seen.len() < waiting.summary.choices.len() {
            self.requests.insert(name.request_id.clone(), waiting);
        }
    }

    /// Reads, verifies and stores one file.
    fn take_in(
        &mut self,
        path: &Path,
        name: &TransferName,
        choice_index: usize,
        summary: &RequestSummary,
        text: &ChoiceText,
    ) -> Outcome {
        let mut outcome =
            Outcome { request_id: summary.request_id.clone(), choice_index, ..Outcome::default() };
        if self.faults_in_a_row >= SWITCH_OFF_AFTER {
            outcome.status = OutcomeStatus::SwitchedOff;
            return outcome;
        }
        let written = fs::symlink_metadata(path).and_then(|metadata| metadata.modified());
        let file = match transfer::read(path, self.options.max_file_bytes) {
            Ok(file) => file,
            Err(error) => {
                tracing::warn!(file = %path.display(), "states file {error}");
                outcome.status = OutcomeStatus::from(&error);
                return outcome;
            }
        };
        if file.internal_id != name.internal_id {
            tracing::warn!(file = %path.display(), inside = file.internal_id, "a states file holds another request");
            outcome.status = OutcomeStatus::Shape;
            return outcome;
        }
        if let Err(status) = self.check_ids(&file, text) {
            tracing::warn!(request_id = summary.request_id, reason = status.as_str(), "states refused");
            outcome.status = status;
            return outcome;
        }
        outcome.prompt_ids = file.token_ids[..file.prompt_length].to_vec();
        outcome.output_ids = file.token_ids[file.prompt_length..].to_vec();
        outcome.drafting = file.drafting;
        outcome.head_digest = file.head_digest.clone().filter(|_| !file.head_swapped);
        let accepted = match u32::try_from(choice_index) {
            Ok(choice_index) => {
                let key = SampleKey {
                    request_id: &summary.request_id,
                    choice_index,
                    conversation_id: &summary.conversation_id,
                    source: &summary.source,
                    held_out: summary.held_out,
                };
                accept::check_and_store(&mut self.store, &mut self.options.expected, key, &file)
            }
            Err(_) => OutcomeStatus::UnexpectedChoice.into(),
        };
        outcome.status = accepted.status;
        if accepted.missing_rows > 0 {
            metrics::counter!("draftsmith_states_partial_total").increment(1);
            if written.is_ok_and(|written| written > self.asked_for_whole) {
                self.ask_for_whole_requests();
            }
        }
        if outcome.status != OutcomeStatus::Stored {
            tracing::warn!(
                request_id = summary.request_id,
                reason = outcome.status.as_str(),
                "states refused"
            );
        }
        outcome
    }

    /// Switches the source off, loudly, where it gives nothing but wrong files.
    fn watch_for_faults(&mut self, status: OutcomeStatus) {
        if !status.is_fault_of_the_source() {
            // Ids that do not match the text say nothing either way, and what was not looked at neither.
            if !matches!(status, OutcomeStatus::Text | OutcomeStatus::SwitchedOff) {
                self.faults_in_a_row = 0;
            }
            return;
        }
        self.faults_in_a_row += 1;
        if self.faults_in_a_row == SWITCH_OFF_AFTER {
            metrics::gauge!("draftsmith_states_switched_off").set(1.0);
            tracing::error!(
                directory = %self.options.transfer_directory.display(),
                last_reason = status.as_str(),
                "{SWITCH_OFF_AFTER} files of states in a row were wrong: no more are taken in until draftsmith starts again; \
                 does vLLM run the plugin and the head that belong to this draftsmith?"
            );
        }
    }

    fn check_ids(&self, file: &TransferFile, text: &ChoiceText) -> Result<(), OutcomeStatus> {
        self.options.expected.check_ids(&file.token_ids)?;
        let Some(tokenizer) = &self.tokenizer else { return Ok(()) };
        if text.has_tool_calls {
            return Ok(());
        }
        let output = &file.token_ids[file.prompt_length..];
        // A request may have asked for special tokens in its text, so both readings are tried.
        for skip_special_tokens in [true, false] {
            let Ok(decoded) = tokenizer.decode(output, skip_special_tokens) else {
                return Err(OutcomeStatus::Text);
            };
            if contains_text(&decoded, &text.content) && contains_text(&decoded, &text.reasoning) {
                return Ok(());
            }
        }
        Err(OutcomeStatus::Text)
    }

    /// Ends the waits that are over.
    fn expire(&mut self, now: Instant) {
        while self.request_deadlines.front().is_some_and(|(deadline, _)| *deadline <= now) {
            let Some((_, request_id)) = self.request_deadlines.pop_front() else { break };
            // A later request under the same id has its own deadline.
            let due = self.requests.get(&request_id).is_some_and(|waiting| waiting.deadline <= now);
            if due && let Some(waiting) = self.requests.remove(&request_id) {
                self.give_up(waiting);
            }
        }
        while self.file_deadlines.front().is_some_and(|(deadline, _)| *deadline <= now) {
            let Some((_, request_id)) = self.file_deadlines.pop_front() else { break };
            let Some(waiting) = self.files.get_mut(&request_id) else { continue };
            let due: Vec<WaitingFile> = waiting.extract_if(.., |file| file.deadline <= now).collect();
            if waiting.is_empty() {
                self.files.remove(&request_id);
            }
            for file in due {
                self.count(OutcomeStatus::Unmatched);
                remove(&file.path);
            }
        }
    }

    /// Reports the choices of a request that got no file.
    fn give_up(&mut self, waiting: WaitingRequest) {
        for choice_index in 0..waiting.summary.choices.len() {
            if waiting.seen.contains(&choice_index) {
                continue;
            }
            tracing::debug!(
                request_id = waiting.summary.request_id,
                status = waiting.summary.status,
                "no states came"
            );
            self.report(Outcome {
                request_id: waiting.summary.request_id.clone(),
                choice_index,
                status: OutcomeStatus::Missing,
                ..Outcome::default()
            });
        }
    }

    fn report(&mut self, outcome: Outcome) {
        self.count(outcome.status);
        (self.on_outcome)(outcome);
    }

    /// A file that gets no outcome is counted before it is deleted: whoever sees it gone sees it counted.
    fn count(&self, status: OutcomeStatus) {
        metrics::counter!("draftsmith_states_total", "status" => status.as_str()).increment(1);
        let mut stats = lock(&self.stats);
        *stats.by_status.entry(status).or_default() += 1;
        stats.store = self.store.stats();
    }
}

/// Whether recorded text is in the decoded one. The ends are trimmed: vLLM strips white space around reasoning, and a
/// last, incomplete character decodes to a replacement character.
fn contains_text(decoded: &str, recorded: &str) -> bool {
    decoded.contains(recorded.trim_matches(|c: char| c.is_whitespace() || c == char::REPLACEMENT_CHARACTER))
}
