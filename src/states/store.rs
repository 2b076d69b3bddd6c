//! The writer of the state store: rotation, quotas, eviction, recovery.
//!
//! Shards are named `train-<number>.states` and `heldout-<number>.states`; a higher number is younger. A crash of the
//! process loses nothing that was appended; a power cut loses at most what was appended to the current shard since the
//! last [`StateStore::sync`].

use std::collections::{HashSet, VecDeque};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::StatesError;
use super::shard::{self, SHARD_HEADER, SampleHeader};
use crate::config::StatesConfig;

/// The share of the quota that held-out samples may take.
const HELD_OUT_QUOTA_SHARE: u64 = 4;
const LOCK_NAME: &str = ".writer.lock";
pub(crate) const SHARD_EXTENSION: &str = ".states";

/// Bounds of the store.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreOptions {
    /// A shard is closed when it would grow over this. Bytes. It is never more than an eighth of its quota, so that an
    /// eviction never empties the store.
    pub shard_bytes: u64,
    /// Bytes of all shards together.
    pub quota_bytes: u64,
    /// Bytes of the held-out shards, out of `quota_bytes`.
    pub held_out_quota_bytes: u64,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { shard_bytes: 256 << 20, quota_bytes: 32 << 30, held_out_quota_bytes: 4 << 30 }
    }
}

impl StoreOptions {
    /// The bounds that the configuration sets.
    pub fn of(config: &StatesConfig) -> Self {
        Self {
            shard_bytes: config.shard_bytes,
            quota_bytes: config.quota_bytes,
            held_out_quota_bytes: config.quota_bytes / HELD_OUT_QUOTA_SHARE,
        }
    }
}

/// What the store holds now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoreStats {
    pub shards: usize,
    pub train_samples: usize,
    pub held_out_samples: usize,
    pub bytes: u64,
    pub held_out_bytes: u64,
    /// Samples evicted since the store was opened.
    pub evicted_samples: u64,
}

/// The only writer of a state directory.
#[derive(Debug)]
pub struct StateStore {
    directory: PathBuf,
    options: StoreOptions,
    train: Lane,
    held_out: Lane,
    stored: HashSet<(String, u32)>,
    next_number: u64,
    evicted_samples: u64,
    /// Held for as long as the store lives; the kernel lets go of it even after a kill.
    _lock: File,
}

/// The shards of one split, oldest first.
#[derive(Debug)]
struct Lane {
    prefix: &'static str,
    shards: VecDeque<Shard>,
    /// Open for appending; it belongs to the last shard.
    current: Option<File>,
    bytes: u64,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    bytes: u64,
    samples: Vec<(String, u32)>,
}

impl StateStore {
    /// Opens (or makes) a store, takes the writer's lock and cuts a torn tail off each shard.
    pub fn open(directory: &Path, options: StoreOptions) -> Result<Self, StatesError> {
        fs::create_dir_all(directory).map_err(|error| StatesError::io("cannot make", directory, error))?;
        let lock_path = directory.join(LOCK_NAME);
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&lock_path)
            .map_err(|error| StatesError::io("cannot open", &lock_path, error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StatesError::Locked { path: lock_path }),
            Err(TryLockError::Error(error)) => return Err(StatesError::io("cannot lock", &lock_path, error)),
        }
        let mut store = Self {
            directory: directory.to_path_buf(),
            options,
            train: Lane::new("train"),
            held_out: Lane::new("heldout"),
            stored: HashSet::new(),
            next_number: now_milliseconds().unsigned_abs(),
            evicted_samples: 0,
            _lock: lock,
        };
        for (number, held_out, path) in list_shards(directory)? {
            store.next_number = store.next_number.max(number + 1);
            let Some(shard) = recover(&path)? else { continue };
            store.stored.extend(shard.samples.iter().cloned());
            store.lane(held_out).push(shard);
        }
        store.make_room(0, false)?;
        store.make_room(0, true)?;
        store.publish_metrics();
        Ok(store)
    }

    /// Appends a sample: `token_ids` [T + 1], `states` [T, L, H] little-endian in the header's dtype.
    ///
    /// Evicts the oldest training shard (for held-out samples over their own quota: the oldest held-out shard) where
    /// there is no room. A (request, choice) that is stored already is refused.
    pub fn append(
        &mut self,
        header: &SampleHeader,
        token_ids: &[u32],
        states: &[u8],
    ) -> Result<(), StatesError> {
        let key = (header.request_id.clone(), header.choice_index);
        if self.stored.contains(&key) {
            return Err(StatesError::Duplicate { request_id: key.0, choice_index: key.1 });
        }
        let frame = shard::encode(header, token_ids, states)?;
        let length = frame.len() as u64;
        let held_out = header.held_out;
        let quota = if held_out {
            self.options.held_out_quota_bytes.min(self.options.quota_bytes)
        } else {
            self.options.quota_bytes
        };
        if length + SHARD_HEADER > quota {
            return Err(StatesError::TooLarge { bytes: length, quota });
        }
        let limit = self.options.shard_bytes.min(quota / 8);
        let lane = self.lane(held_out);
        if lane.shards.back().is_some_and(|shard| shard.bytes > SHARD_HEADER && shard.bytes + length > limit)
        {
            lane.close()?;
        }
        // The header is counted always: making room may evict the current shard.
        self.make_room(length + SHARD_HEADER, held_out)?;
        if self.lane(held_out).current.is_none() {
            self.start_shard(held_out)?;
        }
        self.lane(held_out).write(&frame, key.clone())?;
        self.stored.insert(key);
        self.publish_metrics();
        Ok(())
    }

    /// Makes what was appended survive a power cut.
    pub fn sync(&mut self) -> Result<(), StatesError> {
        self.train.sync()?;
        self.held_out.sync()
    }

    pub fn contains(&self, request_id: &str, choice_index: u32) -> bool {
        self.stored.contains(&(request_id.to_string(), choice_index))
    }

    pub fn stats(&self) -> StoreStats {
        let samples = |lane: &Lane| lane.shards.iter().map(|shard| shard.samples.len()).sum();
        StoreStats {
            shards: self.train.shards.len() + self.held_out.shards.len(),
            train_samples: samples(&self.train),
            held_out_samples: samples(&self.held_out),
            bytes: self.train.bytes + self.held_out.bytes,
            held_out_bytes: self.held_out.bytes,
            evicted_samples: self.evicted_samples,
        }
    }

    /// Removes every sample for which `forget` says so, rewriting the shards that hold one. Returns how many went.
    pub fn forget(&mut self, mut forget: impl FnMut(&SampleHeader) -> bool) -> Result<usize, StatesError> {
        let mut removed = 0;
        for lane in [&mut self.train, &mut self.held_out] {
            lane.close()?;
            for index in 0..lane.shards.len() {
                let gone = lane.rewrite(index, &mut forget)?;
                removed += gone.len();
                for key in &gone {
                    self.stored.remove(key);
                }
            }
            lane.bytes = lane.shards.iter().map(|shard| shard.bytes).sum();
        }
        self.publish_metrics();
        Ok(removed)
    }

    fn lane(&mut self, held_out: bool) -> &mut Lane {
        if held_out { &mut self.held_out } else { &mut self.train }
    }

    fn make_room(&mut self, length: u64, held_out: bool) -> Result<(), StatesError> {
        while held_out && self.held_out.bytes + length > self.options.held_out_quota_bytes {
            if !self.evict_oldest(true)? {
                break;
            }
        }
        while self.train.bytes + self.held_out.bytes + length > self.options.quota_bytes {
            if !self.evict_oldest(false)? && !self.evict_oldest(true)? {
                break;
            }
        }
        Ok(())
    }

    /// Ok(false) where there is none.
    fn evict_oldest(&mut self, held_out: bool) -> Result<bool, StatesError> {
        let lane = self.lane(held_out);
        let Some(shard) = lane.shards.front() else { return Ok(false) };
        fs::remove_file(&shard.path).map_err(|error| StatesError::io("cannot evict", &shard.path, error))?;
        let Some(evicted) = lane.shards.pop_front() else { return Ok(false) };
        if lane.shards.is_empty() {
            lane.current = None;
        }
        lane.bytes -= evicted.bytes;
        self.evicted_samples += evicted.samples.len() as u64;
        metrics::counter!("draftsmith_states_evicted_samples_total").increment(evicted.samples.len() as u64);
        tracing::info!(shard = %evicted.path.display(), samples = evicted.samples.len(), "evicted the oldest states");
        for key in &evicted.samples {
            self.stored.remove(key);
        }
        Ok(true)
    }

    fn start_shard(&mut self, held_out: bool) -> Result<(), StatesError> {
        let number = self.next_number;
        self.next_number += 1;
        let directory = self.directory.clone();
        let lane = self.lane(held_out);
        let path = directory.join(format!("{}-{number:016}{SHARD_EXTENSION}", lane.prefix));
        let failed = |error| StatesError::io("cannot make", &path, error);
        let mut file =
            OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
        file.write_all(&shard::shard_header()).map_err(failed)?;
        File::open(&directory).and_then(|directory| directory.sync_all()).map_err(failed)?;
        lane.push(Shard { path: path.clone(), bytes: SHARD_HEADER, samples: Vec::new() });
        lane.current = Some(file);
        Ok(())
    }

    fn publish_metrics(&self) {
        metrics::gauge!("draftsmith_states_bytes", "split" => "train").set(self.train.bytes as f64);
        metrics::gauge!("draftsmith_states_bytes", "split" => "held_out").set(self.held_out.bytes as f64);
    }
}

impl Lane {
    fn new(prefix: &'static str) -> Self {
        Self { prefix, shards: VecDeque::new(), current: None, bytes: 0 }
    }

    fn push(&mut self, shard: Shard) {
        self.bytes += shard.bytes;
        self.shards.push_back(shard);
    }

    fn sync(&mut self) -> Result<(), StatesError> {
        let (Some(file), Some(shard)) = (&self.current, self.shards.back()) else { return Ok(()) };
        file.sync_data().map_err(|error| StatesError::io("cannot sync", &shard.path, error))
    }

    fn close(&mut self) -> Result<(), StatesError> {
        let result = self.sync();
        self.current = None;
        result
    }

    fn write(&mut self, frame: &[u8], key: (String, u32)) -> Result<(), StatesError> {
        let (Some(file), Some(shard)) = (&mut self.current, self.shards.back_mut()) else { return Ok(()) };
        if let Err(error) = file.write_all(frame) {
            let failure = StatesError::io("cannot append to", &shard.path, error);
            // What was written of the frame must not stand before a later frame. Where it cannot be cut off, readers
            // stop there, so nothing more may go into this shard.
            if file.set_len(shard.bytes).is_err() {
                self.current = None;
            }
            return Err(failure);
        }
        shard.bytes += frame.len() as u64;
        self.bytes += frame.len() as u64;
        shard.samples.push(key);
        Ok(())
    }

    /// Writes shard `index` anew without the samples to forget; returns their keys.
    fn rewrite(
        &mut self,
        index: usize,
        forget: &mut impl FnMut(&SampleHeader) -> bool,
    ) -> Result<Vec<(String, u32)>, StatesError> {
        let Some(shard) = self.shards.get_mut(index) else { return Ok(Vec::new()) };
        let path = shard.path.clone();
        let failed = |error| StatesError::io("cannot rewrite", &path, error);
        let source = File::open(&path).map_err(failed)?;
        let (frames, _) = shard::scan(&source, &path, SHARD_HEADER)?;
        let (mut kept, mut gone) = (Vec::new(), Vec::new());
        for frame in frames {
            let key = (frame.header.request_id.clone(), frame.header.choice_index);
            if forget(&frame.header) {
                gone.push(key);
            } else {
                kept.push((frame, key));
            }
        }
        if gone.is_empty() {
            return Ok(gone);
        }
        let temporary = crate::store::temporary_name(&path);
        let mut target = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(failed)?;
        target.write_all(&shard::shard_header()).map_err(failed)?;
        let (mut bytes, mut samples) = (SHARD_HEADER, Vec::new());
        for (frame, key) in kept {
            // A damaged sample is of no use to anyone; it goes too.
            let Ok(payload) = shard::read_payload(&source, &path, &frame) else {
                gone.push(key);
                continue;
            };
            let (ids, states) = payload.split_at(4 * (frame.header.rows + 1));
            let encoded = shard::encode(&frame.header, &decode_ids(ids), states)?;
            target.write_all(&encoded).map_err(failed)?;
            bytes += encoded.len() as u64;
            samples.push(key);
        }
        target.sync_all().map_err(failed)?;
        crate::store::rename_durably(&temporary, &path).map_err(failed)?;
        shard.bytes = bytes;
        shard.samples = samples;
        Ok(gone)
    }
}

pub(crate) fn decode_ids(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)).collect()
}

/// The shards of a directory as (number, held out, path), oldest first.
pub(crate) fn list_shards(directory: &Path) -> Result<Vec<(u64, bool, PathBuf)>, StatesError> {
    let failed = |error| StatesError::io("cannot list", directory, error);
    let mut shards = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let Some((split, number)) = name
            .to_str()
            .and_then(|name| name.strip_suffix(SHARD_EXTENSION))
            .and_then(|name| name.split_once('-'))
        else {
            continue;
        };
        let held_out = match split {
            "train" => false,
            "heldout" => true,
            _ => continue,
        };
        let plain = entry.file_type().is_ok_and(|kind| kind.is_file());
        if let (Ok(number), true) = (number.parse(), plain) {
            shards.push((number, held_out, entry.path()));
        }
    }
    shards.sort();
    Ok(shards)
}

/// Reads back a shard of an earlier run and cuts its torn tail. None where it holds nothing (it is deleted) or is no
/// shard at all (it is left alone, and said in the log).
fn recover(path: &Path) -> Result<Option<Shard>, StatesError> {
    let failed = |error| StatesError::io("cannot recover", path, error);
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
    let whole = match shard::check_shard_header(&file, path) {
        Ok(whole) => whole,
        Err(error @ StatesError::NotAShard { .. }) => {
            tracing::warn!("{error}");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let (mut frames, torn) = if whole { shard::scan(&file, path, SHARD_HEADER)? } else { (Vec::new(), None) };
    let length = file.metadata().map_err(failed)?.len();
    // After a power cut the last frames can have their length but not their bytes.
    while let Some(last) = frames.last() {
        match shard::read_payload(&file, path, last) {
            Ok(_) => break,
            Err(StatesError::Damaged { .. }) => frames.pop(),
            Err(error) => return Err(error),
        };
    }
    let end = frames.last().map_or(SHARD_HEADER, |frame| frame.end());
    if end < length {
        let reason = torn.map_or("it does not match its checksum".to_string(), |(_, reason)| reason);
        tracing::warn!(shard = %path.display(), from = end, to = length, %reason, "cut the torn tail of a state shard");
        file.set_len(end).map_err(failed)?;
        file.sync_all().map_err(failed)?;
    }
    if frames.is_empty() {
        fs::remove_file(path).map_err(failed)?;
        return Ok(None);
    }
    let samples =
        frames.iter().map(|frame| (frame.header.request_id.clone(), frame.header.choice_index)).collect();
    Ok(Some(Shard { path: path.to_path_buf(), bytes: end, samples }))
}

/// Unix time.
pub(crate) fn now_milliseconds() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}
