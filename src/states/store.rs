//! The writer of the state store: blocks that samples share, quotas, eviction, recovery.
//!
//! Blocks are appended to segments, and a sample to the index once its blocks are there. A block that no sample needs any
//! more is dead; the segment with the most dead bytes is emptied into the youngest one when room is needed. So no byte is
//! written in place, and a reader in another process sees whole samples alone.
//!
//! What goes first: training samples, by age and by how badly their drafts fared. Age counts in bytes of states that came
//! since, shared or not: a sample none of whose drafted tokens was accepted lives half a quota of them longer than one all of
//! whose were. Held-out samples have a quota of their own, and the oldest goes first.
//!
//! A crash of the process loses nothing that was appended; a power cut loses at most what was appended since the last
//! [`StateStore::sync`].

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, IoSlice, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::block::{BLOCK_ROWS, BlockKey, Layout, block_keys};
use super::frame::{FILE_HEADER, Generation, file_header, open_if_there, read_file_header, read_fully};
use super::index::{self, IndexedSample, SampleHeader, SampleName};
use super::segment::{self, Block};
use super::{StateDtype, StatesError, fp8};
use crate::config::{StateEncoding, StatesConfig};
use crate::store::Replaced;

/// The share of the quota that held-out samples may take.
const HELD_OUT_QUOTA_SHARE: u64 = 4;
/// Evictions come in groups, since each one writes the index anew: so much of a quota is freed at once.
const EVICTION_SHARE: u64 = 32;
const LOCK_NAME: &str = ".writer.lock";
/// Slices in one write; the system takes no more than 1,024.
const SLICES: usize = 512;

/// Bounds of the store.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreOptions {
    /// A segment is closed when it would grow over this. Bytes. It is never more than a sixteenth of the quota.
    pub segment_bytes: u64,
    /// How values are kept.
    pub encoding: StateEncoding,
    /// Bytes of all files together.
    pub quota_bytes: u64,
    /// Bytes that held-out samples need, out of `quota_bytes`.
    pub held_out_quota_bytes: u64,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            segment_bytes: 256 << 20,
            encoding: StateEncoding::AsReceived,
            quota_bytes: 32 << 30,
            held_out_quota_bytes: 4 << 30,
        }
    }
}

impl StoreOptions {
    /// The bounds that the configuration sets.
    pub fn of(config: &StatesConfig) -> Self {
        Self {
            segment_bytes: config.segment_bytes,
            encoding: config.encoding,
            quota_bytes: config.quota_bytes,
            held_out_quota_bytes: config.quota_bytes / HELD_OUT_QUOTA_SHARE,
        }
    }

    fn segment_limit(&self) -> u64 {
        self.segment_bytes.min(self.quota_bytes / 16)
    }

    /// What live blocks may take, so that the rest, dead blocks, leaves segments worth emptying.
    fn live_limit(&self) -> u64 {
        self.quota_bytes - self.quota_bytes / 8
    }
}

/// What the store holds now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoreStats {
    pub segments: usize,
    pub train_samples: usize,
    pub held_out_samples: usize,
    /// Of all files.
    pub bytes: u64,
    /// Of blocks that samples need, and of the index.
    pub live_bytes: u64,
    pub held_out_bytes: u64,
    /// Samples evicted since the store was opened.
    pub evicted_samples: u64,
}

/// A sample to be stored.
#[derive(Clone, Copy, Debug)]
pub struct NewSample<'a> {
    /// Of the whole request: `rows` is T, `dtype` that of `states`, `missing_rows` 0.
    pub header: &'a SampleHeader,
    /// [T + 1]
    pub token_ids: &'a [u32],
    /// Rows before it are not in `states`; the store has them from another request with this prefix, or they are missing.
    pub first_row: usize,
    /// [T - first_row, L, H], little-endian.
    pub states: &'a [u8],
}

/// Where the rows of a sample that was stored came from.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Appended {
    pub new_rows: usize,
    pub shared_rows: usize,
    /// Neither given nor in the store; the sample begins after them.
    pub missing_rows: usize,
}

/// The only writer of a state directory.
#[derive(Debug)]
pub struct StateStore {
    directory: PathBuf,
    options: StoreOptions,
    samples: HashMap<SampleName, Sample>,
    /// What goes first comes first: (kept until, sequence).
    train_order: BTreeMap<(u64, u64), SampleName>,
    held_out_order: BTreeMap<(u64, u64), SampleName>,
    blocks: HashMap<BlockKey, Stored>,
    segments: BTreeMap<u64, Segment>,
    /// Open for appending; it belongs to the last segment. None after the start: what was cut off a segment may be known to
    /// a reader, so nothing else may take its place.
    current: Option<File>,
    index: Index,
    /// Bytes of all samples that were ever appended, as far as this store remembers: its clock.
    clock: u64,
    next_sequence: u64,
    next_segment: u64,
    held_out_bytes: u64,
    evicted_samples: u64,
    /// Held for as long as the store lives; the kernel lets go of it even after a kill.
    _lock: File,
}

#[derive(Debug)]
struct Sample {
    keys: Vec<BlockKey>,
    held_out: bool,
    order: (u64, u64),
    /// Of its frame in the index.
    offset: u64,
    length: u64,
}

/// A block that some sample needs.
#[derive(Debug)]
struct Stored {
    segment: u64,
    block: Block,
    references: u32,
    held_out_references: u32,
}

#[derive(Debug)]
struct Segment {
    path: PathBuf,
    bytes: u64,
    live_bytes: u64,
}

impl Segment {
    fn dead_bytes(&self) -> u64 {
        self.bytes - FILE_HEADER - self.live_bytes
    }
}

#[derive(Debug)]
struct Index {
    path: PathBuf,
    /// None after a failed write that could not be undone: the file is written anew before anything is appended.
    file: Option<File>,
    bytes: u64,
    /// What it would have if it were written anew.
    live_bytes: u64,
}

impl Index {
    /// Whether it has samples that are gone, or cannot be appended to.
    fn is_stale(&self) -> bool {
        self.file.is_none() || self.bytes != self.live_bytes
    }
}

impl StateStore {
    /// Opens (or makes) a store, takes the writer's lock, cuts the torn end off the youngest segment, and forgets samples
    /// that lack a block.
    pub fn open(directory: &Path, options: StoreOptions) -> Result<Self, StatesError> {
        fs::create_dir_all(directory).map_err(|error| StatesError::io("cannot make", directory, error))?;
        let lock = take_lock(directory)?;
        remove_temporaries(directory)?;
        let mut segments = BTreeMap::new();
        let mut found = HashMap::new();
        let listed = segment::list(directory)?;
        let youngest = listed.last().map(|(number, _)| *number);
        for (number, path) in listed {
            let Some(Recovered { bytes, blocks }) = recover_segment(&path, youngest == Some(number))? else {
                continue;
            };
            segments.insert(number, Segment { path, bytes, live_bytes: 0 });
            // Where a crash came between the copy of a block and the end of the segment that it was copied from, the
            // younger copy counts.
            found.extend(blocks.into_iter().map(|block| (block.key, (number, block))));
        }
        let index_path = index::path_of(directory);
        let (scanned, clean) = recover_index(&index_path)?;
        let mut store = Self {
            directory: directory.to_path_buf(),
            options,
            samples: HashMap::new(),
            train_order: BTreeMap::new(),
            held_out_order: BTreeMap::new(),
            blocks: HashMap::new(),
            // Never one that there was before: readers know segments by their numbers.
            next_segment: segments
                .last_key_value()
                .map_or(0, |(number, _)| number + 1)
                .max(now_milliseconds().unsigned_abs()),
            segments,
            current: None,
            index: Index { path: index_path, file: None, bytes: 0, live_bytes: FILE_HEADER },
            clock: 0,
            next_sequence: 0,
            held_out_bytes: 0,
            evicted_samples: 0,
            _lock: lock,
        };
        let mut lost = 0;
        for sample in scanned {
            let name = sample.header.name();
            let whole = sample.keys.iter().all(|key| found.contains_key(key));
            if !whole || store.samples.contains_key(&name) {
                lost += 1;
                continue;
            }
            for key in &sample.keys {
                let (segment, block) = found[key];
                store.reference(segment, block, sample.header.held_out);
            }
            store.remember(name, sample);
        }
        if lost > 0 {
            tracing::warn!(
                directory = %directory.display(), samples = lost,
                "samples of states are gone: their blocks were lost in a crash or damaged"
            );
        }
        if clean && lost == 0 {
            store.index.file = Some(open_to_append(&store.index.path)?);
            store.index.bytes = fs::metadata(&store.index.path)
                .map_err(|error| StatesError::io("cannot read", &store.index.path, error))?
                .len();
        } else {
            store.rewrite_index()?;
        }
        store.make_room(0, false)?;
        store.make_room(0, true)?;
        store.publish_metrics();
        Ok(store)
    }

    /// Appends a sample; rows that the store has under the same prefix are not written again.
    ///
    /// Evicts where there is no room. A (request, choice) that is stored already is refused, as is a sample none of whose
    /// rows follows the last missing one.
    pub fn append(&mut self, sample: NewSample<'_>) -> Result<Appended, StatesError> {
        let name = sample.header.name();
        if self.samples.contains_key(&name) {
            return Err(StatesError::Duplicate { request_id: name.0, choice_index: name.1 });
        }
        let given_row_bytes = check_shape(&sample)?;
        let header = sample.header;
        let rows = header.rows;
        let dtype = match self.options.encoding {
            StateEncoding::AsReceived => header.dtype,
            StateEncoding::Fp8 => StateDtype::Fp8,
        };
        let layout =
            Layout { layer_ids: &header.layer_ids, hidden: header.hidden, dtype, salt: &header.prefix_salt };
        let keys = block_keys(layout, &sample.token_ids[..rows]);
        let first_block = self.first_complete_block(&keys, sample.first_row);
        if first_block == keys.len() {
            return Err(StatesError::NoCompleteRows { request_id: name.0, missing: rows });
        }
        let missing_rows = first_block * BLOCK_ROWS;
        let stored_header = SampleHeader {
            prompt_length: header.prompt_length.saturating_sub(missing_rows).max(1),
            rows: rows - missing_rows,
            missing_rows,
            dtype,
            ..header.clone()
        };
        let row_bytes = stored_header.row_bytes().ok_or_else(|| StatesError::Shape {
            request_id: name.0.clone(),
            reason: format!("a hidden size of {} is too large for {dtype:?}", header.hidden),
        })?;
        let keys = keys[first_block..].to_vec();
        let frame = index::encode(&stored_header, &sample.token_ids[missing_rows..], &keys)?;
        let index_bytes = frame.len() as u64;
        let whole = index_bytes
            + ((rows - missing_rows) * row_bytes) as u64
            + keys.len() as u64 * segment::BLOCK_HEADER;
        self.check_size(whole, header.held_out)?;

        // Referenced before room is made, or that could evict the very blocks that are shared.
        let mut appended = Appended { missing_rows, ..Appended::default() };
        let (mut referenced, mut missing) = (Vec::new(), Vec::new());
        for (number, key) in keys.iter().enumerate() {
            let first = missing_rows + number * BLOCK_ROWS;
            let count = (rows - first).min(BLOCK_ROWS);
            if let Some(stored) = self.blocks.get(key) {
                let (segment, block) = (stored.segment, stored.block);
                self.reference(segment, block, header.held_out);
                referenced.push(*key);
                appended.shared_rows += count;
            } else {
                let start = (first - sample.first_row) * given_row_bytes;
                let given = &sample.states[start..start + count * given_row_bytes];
                let payload = encode(header, dtype, given);
                missing.push(Piece { key: *key, rows: count, payload });
                appended.new_rows += count;
            }
        }
        if let Err(error) = self.write_sample(&missing, &mut referenced, &frame, header.held_out) {
            for key in &referenced {
                self.release(key, header.held_out);
            }
            return Err(error);
        }
        let indexed = IndexedSample {
            header: stored_header,
            token_ids: Vec::new(),
            keys,
            offset: self.index.bytes - index_bytes,
            length: index_bytes,
        };
        self.remember(name, indexed);
        self.publish_metrics();
        Ok(appended)
    }

    /// Makes what was appended survive a power cut.
    pub fn sync(&mut self) -> Result<(), StatesError> {
        self.sync_segment()?;
        let Some(file) = &self.index.file else { return Ok(()) };
        file.sync_data().map_err(|error| StatesError::io("cannot sync", &self.index.path, error))
    }

    pub fn contains(&self, request_id: &str, choice_index: u32) -> bool {
        self.samples.contains_key(&(request_id.to_string(), choice_index))
    }

    pub fn stats(&self) -> StoreStats {
        StoreStats {
            segments: self.segments.len(),
            train_samples: self.train_order.len(),
            held_out_samples: self.held_out_order.len(),
            bytes: self.bytes(),
            live_bytes: self.live_bytes(),
            held_out_bytes: self.held_out_bytes,
            evicted_samples: self.evicted_samples,
        }
    }

    /// Removes every sample of the requests for which `forget` says so, and all rows that no other sample has. Returns how
    /// many went.
    ///
    /// Rows of a prefix that other samples share stay, as theirs.
    pub fn forget(&mut self, mut forget: impl FnMut(&str) -> bool) -> Result<usize, StatesError> {
        let mut gone: Vec<SampleName> = self.samples.keys().cloned().collect();
        gone.retain(|(request_id, _)| forget(request_id));
        for name in &gone {
            self.drop_sample(name);
        }
        // Also where nothing is forgotten now: an earlier call may have ended early.
        if self.index.is_stale() {
            self.rewrite_index()?;
        }
        self.compact()?;
        Ok(gone.len())
    }

    /// Writes every segment anew that holds a dead block. Returns the bytes that this freed.
    pub fn compact(&mut self) -> Result<u64, StatesError> {
        let before = self.bytes();
        let with_dead = |store: &Self| {
            let mut segments = store.segments.iter();
            segments.find(|(_, segment)| segment.dead_bytes() > 0).map(|(number, _)| *number)
        };
        while let Some(number) = with_dead(self) {
            self.empty_segment(number)?;
        }
        self.sync_directory()?;
        self.publish_metrics();
        Ok(before.saturating_sub(self.bytes()))
    }

    fn bytes(&self) -> u64 {
        self.index.bytes + self.segments.values().map(|segment| segment.bytes).sum::<u64>()
    }

    fn live_bytes(&self) -> u64 {
        self.index.live_bytes + self.segments.values().map(|segment| segment.live_bytes).sum::<u64>()
    }

    /// The first block after the last one that neither the store nor the sample has.
    fn first_complete_block(&self, keys: &[BlockKey], first_row: usize) -> usize {
        let given_from = first_row.div_ceil(BLOCK_ROWS).min(keys.len());
        let missing = keys[..given_from].iter().rposition(|key| !self.blocks.contains_key(key));
        missing.map_or(0, |block| block + 1)
    }

    /// A sample must leave room for others, or each one would empty the store.
    fn check_size(&self, bytes: u64, held_out: bool) -> Result<(), StatesError> {
        let mut quota = self.options.live_limit();
        if held_out {
            quota = quota.min(self.options.held_out_quota_bytes);
        }
        if bytes > quota {
            return Err(StatesError::TooLarge { bytes, quota });
        }
        Ok(())
    }

    fn write_sample(
        &mut self,
        pieces: &[Piece<'_>],
        referenced: &mut Vec<BlockKey>,
        frame: &[u8],
        held_out: bool,
    ) -> Result<(), StatesError> {
        let blocks: u64 = pieces.iter().map(Piece::bytes).sum();
        self.make_room(blocks + frame.len() as u64, held_out)?;
        let mut rest = pieces;
        while !rest.is_empty() {
            let (segment, written) = self.write_blocks(rest)?;
            for block in &written {
                self.reference(segment, *block, held_out);
                referenced.push(block.key);
            }
            rest = &rest[written.len()..];
        }
        // Making room reads blocks that it moves, and may find one that this sample shares damaged.
        if let Some(lost) = referenced.iter().find(|key| !self.blocks.contains_key(key)) {
            let reason = format!("block {lost:?}, which the sample shares, is damaged");
            return Err(StatesError::Damaged { path: self.directory.clone(), offset: 0, reason });
        }
        self.append_to_index(frame)
    }

    /// Writes the first blocks of `pieces`, as many as the segment takes, at least one.
    fn write_blocks(&mut self, pieces: &[Piece<'_>]) -> Result<(u64, Vec<Block>), StatesError> {
        let limit = self.options.segment_limit();
        let full = self.segments.last_key_value().is_some_and(|(_, segment)| {
            segment.bytes > FILE_HEADER && segment.bytes + pieces[0].bytes() > limit
        });
        if full {
            self.close_segment()?;
        }
        if self.current.is_none() {
            self.start_segment()?;
        }
        let (Some(file), Some(mut last)) = (&mut self.current, self.segments.last_entry()) else {
            return Ok((0, Vec::new()));
        };
        let number = *last.key();
        let segment = last.get_mut();
        let (mut blocks, mut headers) = (Vec::new(), Vec::new());
        let mut offset = segment.bytes;
        for piece in pieces.iter().take(SLICES / 2) {
            if !blocks.is_empty() && offset + piece.bytes() > limit {
                break;
            }
            let block = Block::new(piece.key, piece.rows, &piece.payload, offset);
            offset = block.end();
            headers.push(block.header());
            blocks.push(block);
        }
        let mut slices = Vec::with_capacity(2 * blocks.len());
        for (header, piece) in headers.iter().zip(pieces) {
            slices.push(IoSlice::new(header));
            slices.push(IoSlice::new(&piece.payload));
        }
        if let Err(error) = write_all_slices(file, &mut slices) {
            let failure = StatesError::io("cannot append to", &segment.path, error);
            // What was written of it is no use to anyone. A reader may have seen it, so nothing else may take its place.
            if file.set_len(segment.bytes).is_err() {
                segment.bytes = file.metadata().map_or(segment.bytes, |metadata| metadata.len());
            }
            self.current = None;
            return Err(failure);
        }
        segment.bytes = offset;
        Ok((number, blocks))
    }

    fn append_to_index(&mut self, frame: &[u8]) -> Result<(), StatesError> {
        if self.index.is_stale() {
            self.rewrite_index()?;
        }
        let index = &mut self.index;
        let Some(file) = &mut index.file else { return Ok(()) };
        if let Err(error) = file.write_all(frame) {
            let failure = StatesError::io("cannot append to", &index.path, error);
            if file.set_len(index.bytes).is_err() {
                index.file = None;
            }
            return Err(failure);
        }
        index.bytes += frame.len() as u64;
        Ok(())
    }

    /// Takes a sample into the tables; its blocks are referenced already.
    fn remember(&mut self, name: SampleName, sample: IndexedSample) {
        let header = &sample.header;
        let held_out = header.held_out;
        let bytes = header.row_bytes().unwrap_or(0).saturating_mul(header.rows) as u64;
        self.clock = self.clock.saturating_add(bytes);
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let order = if held_out { (0, sequence) } else { (self.kept_until(header), sequence) };
        self.index.live_bytes += sample.length;
        if held_out {
            self.held_out_bytes += sample.length;
            self.held_out_order.insert(order, name.clone());
        } else {
            self.train_order.insert(order, name.clone());
        }
        let known =
            Sample { keys: sample.keys, held_out, order, offset: sample.offset, length: sample.length };
        self.samples.insert(name, known);
    }

    /// When its turn to be evicted comes, by the store's clock. Where nothing is known of its drafts, half of them count
    /// as accepted.
    fn kept_until(&self, header: &SampleHeader) -> u64 {
        let refused = match header.drafting {
            Some(drafting) if drafting.drafted_tokens > 0 => {
                1.0 - (drafting.accepted_tokens as f64 / drafting.drafted_tokens as f64).clamp(0.0, 1.0)
            }
            _ => 0.5,
        };
        self.clock.saturating_add((self.options.quota_bytes as f64 * 0.5 * refused) as u64)
    }

    fn reference(&mut self, segment: u64, block: Block, held_out: bool) {
        let stored = self.blocks.entry(block.key).or_insert_with(|| {
            if let Some(holder) = self.segments.get_mut(&segment) {
                holder.live_bytes += block.bytes();
            }
            Stored { segment, block, references: 0, held_out_references: 0 }
        });
        stored.references += 1;
        if held_out {
            stored.held_out_references += 1;
            if stored.held_out_references == 1 {
                self.held_out_bytes += block.bytes();
            }
        }
    }

    fn release(&mut self, key: &BlockKey, held_out: bool) {
        let Some(stored) = self.blocks.get_mut(key) else { return };
        stored.references -= 1;
        if held_out {
            stored.held_out_references -= 1;
            if stored.held_out_references == 0 {
                self.held_out_bytes -= stored.block.bytes();
            }
        }
        if stored.references == 0 {
            self.bury(key);
        }
    }

    /// Nobody needs this block any more, or it is of no use.
    fn bury(&mut self, key: &BlockKey) {
        let Some(stored) = self.blocks.remove(key) else { return };
        if let Some(holder) = self.segments.get_mut(&stored.segment) {
            holder.live_bytes -= stored.block.bytes();
        }
        if stored.held_out_references > 0 {
            self.held_out_bytes -= stored.block.bytes();
        }
    }

    /// Takes a sample out of the tables. The index has it until it is written anew.
    fn drop_sample(&mut self, name: &SampleName) {
        let Some(sample) = self.samples.remove(name) else { return };
        self.index.live_bytes -= sample.length;
        if sample.held_out {
            self.held_out_order.remove(&sample.order);
            self.held_out_bytes -= sample.length;
        } else {
            self.train_order.remove(&sample.order);
        }
        for key in &sample.keys {
            self.release(key, sample.held_out);
        }
    }

    fn make_room(&mut self, needed: u64, held_out: bool) -> Result<(), StatesError> {
        let mut evicted = 0;
        let quota = self.options.held_out_quota_bytes.min(self.options.live_limit());
        if held_out && self.held_out_bytes + needed > quota {
            let goal = quota.saturating_sub(needed).min(quota - quota / EVICTION_SHARE);
            while self.held_out_bytes > goal && self.evict_first(true) {
                evicted += 1;
            }
        }
        let quota = self.options.live_limit();
        if self.live_bytes() + needed > quota {
            let goal = quota.saturating_sub(needed).min(quota - quota / EVICTION_SHARE);
            while self.live_bytes() > goal && (self.evict_first(false) || self.evict_first(true)) {
                evicted += 1;
            }
        }
        if evicted > 0 {
            self.evicted_samples += evicted;
            metrics::counter!("draftsmith_states_evicted_samples_total").increment(evicted);
            tracing::info!(samples = evicted, "evicted states");
        }
        // Before any block goes, so that no reader learns of a sample without them.
        if self.index.is_stale() {
            self.rewrite_index()?;
        }
        // Emptying a segment takes as much room as it has live blocks, before it gives any.
        let spare = self.options.segment_limit();
        while self.bytes() + needed + spare > self.options.quota_bytes {
            let emptiest = self.segments.iter().max_by_key(|(_, segment)| segment.dead_bytes());
            let Some((number, segment)) = emptiest else { break };
            if segment.dead_bytes() == 0 {
                break;
            }
            self.empty_segment(*number)?;
        }
        Ok(())
    }

    /// False where there is none.
    fn evict_first(&mut self, held_out: bool) -> bool {
        let order = if held_out { &self.held_out_order } else { &self.train_order };
        let Some((_, name)) = order.first_key_value() else { return false };
        let name = name.clone();
        self.drop_sample(&name);
        true
    }

    /// Moves the live blocks of a segment to the youngest one and deletes it.
    fn empty_segment(&mut self, number: u64) -> Result<(), StatesError> {
        let Some(segment) = self.segments.get(&number) else { return Ok(()) };
        let path = segment.path.clone();
        if self.segments.last_key_value().is_some_and(|(last, _)| *last == number) {
            self.close_segment()?;
        }
        let mut live: Vec<Block> = self
            .blocks
            .values()
            .filter(|stored| stored.segment == number)
            .map(|stored| stored.block)
            .collect();
        live.sort_by_key(|block| block.offset);
        // One that somebody deleted is damaged as a whole.
        let source = open_if_there(&path)?;
        let mut damaged = HashSet::new();
        for block in live {
            let payload = source.as_ref().and_then(|source| segment::read_payload(source, &path, &block));
            let Some(payload) = payload else {
                damaged.insert(block.key);
                continue;
            };
            let piece = Piece { key: block.key, rows: block.rows as usize, payload: payload.into() };
            let (target, written) = self.write_blocks(&[piece])?;
            for moved in written {
                self.relocate(target, moved);
            }
        }
        if !damaged.is_empty() {
            self.drop_damaged(&damaged)?;
        }
        // The old copy goes only once the new one would survive a power cut.
        self.sync_segment()?;
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(StatesError::io("cannot delete", &path, error)),
        }
        self.segments.remove(&number);
        Ok(())
    }

    fn relocate(&mut self, segment: u64, moved: Block) {
        let Some(stored) = self.blocks.get_mut(&moved.key) else { return };
        if let Some(old) = self.segments.get_mut(&stored.segment) {
            old.live_bytes -= stored.block.bytes();
        }
        if let Some(new) = self.segments.get_mut(&segment) {
            new.live_bytes += moved.bytes();
        }
        stored.segment = segment;
        stored.block = moved;
    }

    /// Samples of damaged blocks are of no use to anyone.
    fn drop_damaged(&mut self, damaged: &HashSet<BlockKey>) -> Result<(), StatesError> {
        let mut gone = Vec::new();
        for (name, sample) in &self.samples {
            if sample.keys.iter().any(|key| damaged.contains(key)) {
                gone.push(name.clone());
            }
        }
        tracing::warn!(blocks = damaged.len(), samples = gone.len(), "damaged states were found and dropped");
        for name in &gone {
            self.drop_sample(name);
        }
        // A sample that is just being stored may hold on to one.
        for key in damaged {
            self.bury(key);
        }
        self.rewrite_index()
    }

    /// Writes the index anew, with the samples that the tables have, in the order in which they were stored.
    fn rewrite_index(&mut self) -> Result<(), StatesError> {
        let path = self.index.path.clone();
        let failed = |error| StatesError::io("cannot rewrite", &path, error);
        let mut kept: Vec<(u64, u64, SampleName)> = Vec::with_capacity(self.samples.len());
        for (name, sample) in &self.samples {
            kept.push((sample.offset, sample.length, name.clone()));
        }
        kept.sort();
        let mut bytes = file_header(index::MAGIC, Generation::new()).to_vec();
        let mut places = Vec::with_capacity(kept.len());
        let mut damaged = Vec::new();
        if !kept.is_empty() {
            // The very file that the offsets are of, whatever has its name now.
            let opened = self.index.file.take();
            let source = opened.map_or_else(|| File::open(&path), Ok).map_err(failed)?;
            for (offset, length, name) in kept {
                let start = bytes.len();
                bytes.resize(start + length as usize, 0);
                let whole = read_fully(&source, &mut bytes[start..], offset).map_err(failed)?;
                if whole && index::is_whole(&bytes[start..]) {
                    places.push((name, start as u64));
                } else {
                    bytes.truncate(start);
                    damaged.push(name);
                }
            }
            self.index.file = Some(source);
        }
        let Replaced { file, directory } = crate::store::replace(&path, &bytes).map_err(failed)?;
        self.index.file = Some(file);
        self.index.bytes = bytes.len() as u64;
        for (name, offset) in places {
            if let Some(sample) = self.samples.get_mut(&name) {
                sample.offset = offset;
            }
        }
        if !damaged.is_empty() {
            tracing::warn!(
                samples = damaged.len(),
                "damaged samples of states were found in the index and dropped"
            );
        }
        for name in &damaged {
            self.drop_sample(name);
        }
        directory.sync_all().map_err(failed)
    }

    fn start_segment(&mut self) -> Result<(), StatesError> {
        let number = self.next_segment;
        let path = segment::path_of(&self.directory, number);
        let failed = |error| StatesError::io("cannot make", &path, error);
        let mut file =
            OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
        self.next_segment += 1;
        let made = file.write_all(&file_header(segment::MAGIC, Generation::new()));
        if let Err(error) = made {
            let _ = fs::remove_file(&path);
            return Err(failed(error));
        }
        self.segments.insert(number, Segment { path, bytes: FILE_HEADER, live_bytes: 0 });
        self.current = Some(file);
        self.sync_directory()
    }

    fn sync_directory(&self) -> Result<(), StatesError> {
        let synced = File::open(&self.directory).and_then(|directory| directory.sync_all());
        synced.map_err(|error| StatesError::io("cannot sync", &self.directory, error))
    }

    fn sync_segment(&mut self) -> Result<(), StatesError> {
        let (Some(file), Some((_, segment))) = (&self.current, self.segments.last_key_value()) else {
            return Ok(());
        };
        file.sync_data().map_err(|error| StatesError::io("cannot sync", &segment.path, error))
    }

    fn close_segment(&mut self) -> Result<(), StatesError> {
        let synced = self.sync();
        self.current = None;
        synced
    }

    fn publish_metrics(&self) {
        let bytes = self.bytes();
        let held_out = self.held_out_bytes.min(bytes);
        metrics::gauge!("draftsmith_states_bytes", "split" => "train").set((bytes - held_out) as f64);
        metrics::gauge!("draftsmith_states_bytes", "split" => "held_out").set(held_out as f64);
    }
}

/// A block to be written.
struct Piece<'a> {
    key: BlockKey,
    rows: usize,
    payload: Cow<'a, [u8]>,
}

impl Piece<'_> {
    fn bytes(&self) -> u64 {
        segment::BLOCK_HEADER + self.payload.len() as u64
    }
}

/// The rows as they are kept.
fn encode<'a>(header: &SampleHeader, dtype: StateDtype, given: &'a [u8]) -> Cow<'a, [u8]> {
    if dtype == header.dtype {
        return given.into();
    }
    let mut encoded = Vec::new();
    fp8::encode(header.dtype, given, header.hidden, &mut encoded);
    encoded.into()
}

/// Bytes of one row of the sample, all its lengths checked.
fn check_shape(sample: &NewSample<'_>) -> Result<usize, StatesError> {
    let header = sample.header;
    let shape = |reason: String| StatesError::Shape { request_id: header.request_id.clone(), reason };
    if header.rows == 0 || header.rows.checked_add(1) != Some(sample.token_ids.len()) {
        return Err(shape(format!(
            "{} token ids for {} rows; there must be a row, and ids must be rows + 1",
            sample.token_ids.len(),
            header.rows
        )));
    }
    if sample.first_row >= header.rows {
        return Err(shape(format!("its first row is {} of {}", sample.first_row, header.rows)));
    }
    let given = header.rows - sample.first_row;
    let row_bytes = header.row_bytes().filter(|bytes| *bytes > 0);
    if row_bytes.and_then(|bytes| bytes.checked_mul(given)) != Some(sample.states.len()) {
        return Err(shape(format!(
            "{} bytes of states for [{given}, {}, {}] {:?}",
            sample.states.len(),
            header.layers,
            header.hidden,
            header.dtype
        )));
    }
    Ok(row_bytes.unwrap_or(0))
}

fn take_lock(directory: &Path) -> Result<File, StatesError> {
    let path = directory.join(LOCK_NAME);
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(|error| StatesError::io("cannot open", &path, error))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(StatesError::Locked { path }),
        Err(TryLockError::Error(error)) => Err(StatesError::io("cannot lock", &path, error)),
    }
}

/// Whether some process writes to the directory.
pub(crate) fn is_locked(directory: &Path) -> Result<bool, StatesError> {
    let path = directory.join(LOCK_NAME);
    let Some(lock) = open_if_there(&path)? else { return Ok(false) };
    match lock.try_lock_shared() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(StatesError::io("cannot lock", &path, error)),
    }
}

/// What a writer that was killed left half-written.
fn remove_temporaries(directory: &Path) -> Result<(), StatesError> {
    let failed = |error| StatesError::io("cannot clean", directory, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let name = name.as_encoded_bytes();
        if name.starts_with(b".samples.index.") && name.ends_with(b".tmp") {
            fs::remove_file(entry.path()).map_err(failed)?;
        }
    }
    Ok(())
}

fn open_to_append(path: &Path) -> Result<File, StatesError> {
    OpenOptions::new()
        .read(true)
        .append(true)
        .open(path)
        .map_err(|error| StatesError::io("cannot open", path, error))
}

/// Writes all of it, however little the system takes at once.
fn write_all_slices(file: &mut File, mut slices: &mut [IoSlice<'_>]) -> std::io::Result<()> {
    while !slices.is_empty() {
        match file.write_vectored(slices) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut slices, written),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A segment of an earlier run.
struct Recovered {
    bytes: u64,
    blocks: Vec<Block>,
}

/// A segment of an earlier run; of the youngest the torn end is cut. None where it holds nothing (it is deleted)
/// or is no segment at all (it is left alone, and said in the log).
fn recover_segment(path: &Path, youngest: bool) -> Result<Option<Recovered>, StatesError> {
    let failed = |error| StatesError::io("cannot recover", path, error);
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
    let whole = match read_file_header(&file, path, segment::MAGIC) {
        Ok(generation) => generation.is_some(),
        Err(error @ StatesError::Foreign { .. }) => {
            tracing::warn!("{error}");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let length = file.metadata().map_err(failed)?.len();
    if !whole || length == FILE_HEADER {
        fs::remove_file(path).map_err(failed)?;
        return Ok(None);
    }
    let segment::Scanned { mut blocks, damaged, torn } = segment::scan(&file, path, FILE_HEADER)?;
    for (offset, reason) in damaged {
        tracing::warn!(segment = %path.display(), offset, reason, "a damaged place in a segment of states is passed over");
    }
    if !youngest {
        // What is no block is dead, and goes when the segment is emptied.
        return Ok(Some(Recovered { bytes: length, blocks }));
    }
    // After a power cut the last blocks can have their length but not their bytes.
    blocks.retain(|block| segment::read_payload(&file, path, block).is_some());
    let end = blocks.last().map_or(FILE_HEADER, Block::end);
    if end < length {
        let reason = torn.map_or("it does not match its checksum", |(_, reason)| reason);
        tracing::warn!(segment = %path.display(), from = end, to = length, reason, "cut the torn end of a segment of states");
        file.set_len(end).map_err(failed)?;
        file.sync_all().map_err(failed)?;
    }
    if blocks.is_empty() {
        fs::remove_file(path).map_err(failed)?;
        return Ok(None);
    }
    Ok(Some(Recovered { bytes: end, blocks }))
}

/// The samples of the index of an earlier run, and whether the file can stay as it is.
fn recover_index(path: &Path) -> Result<(Vec<IndexedSample>, bool), StatesError> {
    let Some(file) = open_if_there(path)? else { return Ok((Vec::new(), false)) };
    if read_file_header(&file, path, index::MAGIC)?.is_none() {
        return Ok((Vec::new(), false));
    }
    let scanned = index::scan(&file, path, FILE_HEADER)?;
    for (offset, reason) in &scanned.damaged {
        tracing::warn!(index = %path.display(), offset, reason, "a sample of states is damaged and dropped");
    }
    if let Some(reason) = &scanned.torn {
        tracing::warn!(index = %path.display(), from = scanned.end, reason, "cut the torn end of the index of states");
    }
    let clean = scanned.damaged.is_empty() && scanned.torn.is_none();
    Ok((scanned.samples, clean))
}

/// Unix time.
pub(crate) fn now_milliseconds() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}
