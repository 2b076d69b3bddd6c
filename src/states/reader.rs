//! Reading samples, from any process, while the writer goes on appending, evicting and moving blocks.
//!
//! The index says which samples there are, the segments where their blocks lie. A segment that the writer empties is gone
//! under a reader's hands: its blocks are looked for again, and a sample whose blocks are nowhere was evicted. Segments are
//! mapped, and let go as soon as they are seen to be deleted, or their room on the disk would not come free.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::block::BlockKey;
use super::frame::{Damage, FILE_HEADER, Generation, open_if_there, read_file_header};
use super::index::{self, IndexedSample, SampleHeader};
use super::segment::{self, Block};
use super::{StatesError, store, values};
use crate::store::Map;

/// How often blocks are looked for that the writer may be moving just then.
const LOOKS: usize = 2;

/// One sample of the index.
#[derive(Clone, Debug)]
pub struct SampleEntry {
    pub header: SampleHeader,
    /// [T + 1], prompt and output.
    pub token_ids: Arc<[u32]>,
    keys: Arc<[BlockKey]>,
    blocks: Arc<Blocks>,
}

/// A sample in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub header: SampleHeader,
    /// [T + 1], prompt and output.
    pub token_ids: Vec<u32>,
    /// [T, L * H].
    pub states: Vec<f32>,
}

/// What a [`Reader::refresh`] changed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Refreshed {
    pub added: usize,
    pub removed: usize,
}

/// What [`Reader::verify`] saw.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct VerifyReport {
    pub segments: usize,
    pub samples: usize,
    pub blocks: usize,
    pub bytes: u64,
    pub damaged: Vec<Damage>,
}

/// How much the store holds, and how much it is spared.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct ReaderStats {
    pub samples: usize,
    pub held_out_samples: usize,
    /// Samples whose first rows were missing.
    pub partial_samples: usize,
    pub tokens: u64,
    /// Of all files.
    pub bytes: u64,
    /// Of the states of all samples, had each been stored whole.
    pub whole_bytes: u64,
}

/// Reads a state directory. It takes no lock and never writes.
#[derive(Debug)]
pub struct Reader {
    directory: PathBuf,
    index: Vec<SampleEntry>,
    blocks: Arc<Blocks>,
    /// Of the index as it was read, and how far.
    generation: Option<Generation>,
    position: u64,
}

impl Reader {
    /// Opens a directory and reads its index. The directory must exist; it may be empty.
    pub fn open(directory: &Path) -> Result<Self, StatesError> {
        let blocks = Blocks { directory: directory.to_path_buf(), table: Mutex::default() };
        let mut reader = Self {
            directory: directory.to_path_buf(),
            index: Vec::new(),
            blocks: Arc::new(blocks),
            generation: None,
            position: 0,
        };
        fs::read_dir(directory).map_err(|error| StatesError::io("cannot list", directory, error))?;
        reader.refresh()?;
        Ok(reader)
    }

    /// Takes in what was appended since, and drops what was evicted. Indices of earlier samples change where something
    /// was removed.
    pub fn refresh(&mut self) -> Result<Refreshed, StatesError> {
        let path = index::path_of(&self.directory);
        let opened = match open_if_there(&path)? {
            Some(file) => read_file_header(&file, &path, index::MAGIC)?.map(|generation| (file, generation)),
            None => None,
        };
        let Some((file, generation)) = opened else {
            let removed = self.index.len();
            self.index.clear();
            (self.generation, self.position) = (None, 0);
            return Ok(Refreshed { added: 0, removed });
        };
        if self.generation == Some(generation) {
            // A torn end is either a sample that is just being written, or what the writer cuts at its next start.
            let scanned = index::scan(&file, &path, self.position)?;
            self.position = scanned.end;
            let added = scanned.samples.len();
            self.index.extend(scanned.samples.into_iter().map(|sample| entry(sample, &self.blocks)));
            return Ok(Refreshed { added, removed: 0 });
        }
        let scanned = index::scan(&file, &path, FILE_HEADER)?;
        let mut old = HashMap::new();
        for known in self.index.drain(..) {
            old.insert(known.header.name(), known);
        }
        let before = old.len();
        let mut kept = 0;
        for sample in scanned.samples {
            match old.remove(&sample.header.name()) {
                Some(known) if *known.keys == *sample.keys && known.header == sample.header => {
                    kept += 1;
                    self.index.push(known);
                }
                _ => self.index.push(entry(sample, &self.blocks)),
            }
        }
        (self.generation, self.position) = (Some(generation), scanned.end);
        Ok(Refreshed { added: self.index.len() - kept, removed: before - kept })
    }

    /// The samples, in the order in which they were stored.
    pub fn index(&self) -> &[SampleEntry] {
        &self.index
    }

    /// Loads sample `index`, its checksums verified.
    pub fn load(&self, index: usize) -> Result<Sample, StatesError> {
        let entry =
            self.index.get(index).ok_or(StatesError::NoSuchSample { index, len: self.index.len() })?;
        entry.load()
    }

    pub fn stats(&self) -> Result<ReaderStats, StatesError> {
        let mut stats = ReaderStats { samples: self.index.len(), ..ReaderStats::default() };
        for entry in &self.index {
            let header = &entry.header;
            stats.held_out_samples += usize::from(header.held_out);
            stats.partial_samples += usize::from(header.missing_rows > 0);
            stats.tokens += header.rows as u64;
            stats.whole_bytes += header.row_bytes().unwrap_or(0) as u64 * header.rows as u64;
        }
        let mut paths = vec![index::path_of(&self.directory)];
        paths.extend(segment::list(&self.directory)?.into_iter().map(|(_, path)| path));
        for path in paths {
            stats.bytes += fs::metadata(&path).map_or(0, |metadata| metadata.len());
        }
        Ok(stats)
    }

    /// Reads everything once and says what is damaged. A writer may go on meanwhile.
    pub fn verify(&self) -> Result<VerifyReport, StatesError> {
        let mut report = VerifyReport::default();
        let writing = store::is_locked(&self.directory)?;
        // First what samples there are: later ones have blocks that may be missed.
        let samples = self.verify_index(writing, &mut report)?;
        let mut good = HashSet::new();
        let mut seen = HashSet::new();
        loop {
            let listed = segment::list(&self.directory)?;
            let youngest = listed.last().map(|(number, _)| *number);
            let fresh: Vec<_> = listed.into_iter().filter(|(number, _)| seen.insert(*number)).collect();
            // Blocks may have been moved to a segment that began meanwhile.
            if fresh.is_empty() {
                break;
            }
            for (number, path) in fresh {
                verify_segment(&path, writing && youngest == Some(number), &mut good, &mut report)?;
            }
        }
        let path = index::path_of(&self.directory);
        let still_there = match open_if_there(&path)? {
            Some(file) => index::scan(&file, &path, FILE_HEADER)?.samples,
            None => Vec::new(),
        };
        let still_there: HashSet<_> = still_there.into_iter().map(|sample| sample.header.name()).collect();
        for sample in &samples {
            let lost = sample.keys.iter().filter(|key| !good.contains(*key)).count();
            if lost > 0 && still_there.contains(&sample.header.name()) {
                let header = &sample.header;
                let reason = format!(
                    "choice {} of request {} lacks {lost} of its {} blocks",
                    header.choice_index,
                    header.request_id,
                    sample.keys.len()
                );
                report.damaged.push(Damage { path: path.clone(), offset: sample.offset, reason });
            }
        }
        report.samples = samples.len();
        Ok(report)
    }

    fn verify_index(
        &self,
        writing: bool,
        report: &mut VerifyReport,
    ) -> Result<Vec<IndexedSample>, StatesError> {
        let path = index::path_of(&self.directory);
        let Some(file) = open_if_there(&path)? else { return Ok(Vec::new()) };
        let mut damage = |offset, reason: String| {
            report.damaged.push(Damage { path: path.clone(), offset, reason });
        };
        if let Some(reason) = fault_of_header(&file, &path, index::MAGIC, false)? {
            damage(0, reason);
            return Ok(Vec::new());
        }
        let scanned = index::scan(&file, &path, FILE_HEADER)?;
        for (offset, reason) in scanned.damaged {
            damage(offset, reason);
        }
        if let Some(reason) = scanned.torn.filter(|_| !writing) {
            damage(scanned.end, reason);
        }
        Ok(scanned.samples)
    }
}

/// What is wrong with the header of a file. `growing`: it may be being written.
fn fault_of_header(
    file: &File,
    path: &Path,
    magic: &[u8; 8],
    growing: bool,
) -> Result<Option<String>, StatesError> {
    match read_file_header(file, path, magic) {
        Ok(Some(_)) => Ok(None),
        Ok(None) => Ok((!growing).then(|| "the file ends inside its header".to_owned())),
        Err(error @ StatesError::Foreign { .. }) => Ok(Some(error.to_string())),
        Err(error) => Err(error),
    }
}

/// Adds the keys of a segment's good blocks. `growing`: its end may be being written.
fn verify_segment(
    path: &Path,
    growing: bool,
    good: &mut HashSet<BlockKey>,
    report: &mut VerifyReport,
) -> Result<(), StatesError> {
    let Some(file) = open_if_there(path)? else { return Ok(()) };
    report.segments += 1;
    let mut damage = |offset, reason: &str| {
        report.damaged.push(Damage { path: path.to_path_buf(), offset, reason: reason.to_owned() });
    };
    if let Some(reason) = fault_of_header(&file, path, segment::MAGIC, growing)? {
        damage(0, &reason);
        return Ok(());
    }
    let scanned = segment::scan(&file, path, FILE_HEADER)?;
    for (offset, reason) in scanned.damaged {
        damage(offset, reason);
    }
    for block in scanned.blocks {
        report.blocks += 1;
        report.bytes += block.bytes();
        if segment::read_payload(&file, path, &block).is_some() {
            good.insert(block.key);
        } else {
            damage(block.offset, "a block does not match its checksum");
        }
    }
    if let Some((offset, reason)) = scanned.torn.filter(|_| !growing) {
        damage(offset, reason);
    }
    Ok(())
}

fn entry(sample: IndexedSample, blocks: &Arc<Blocks>) -> SampleEntry {
    SampleEntry {
        header: sample.header,
        token_ids: sample.token_ids.into(),
        keys: sample.keys.into(),
        blocks: Arc::clone(blocks),
    }
}

impl SampleEntry {
    /// Loads the sample, its checksums verified; may be called from any thread, and without the reader.
    pub fn load(&self) -> Result<Sample, StatesError> {
        let width = self.header.layers * self.header.hidden;
        let mut states = vec![0.0; self.header.rows * width];
        self.load_states(&mut states)?;
        Ok(Sample { header: self.header.clone(), token_ids: self.token_ids.to_vec(), states })
    }

    /// Reads the states [T, L * H] out of the mapped segments into their place.
    pub fn load_states(&self, states: &mut [f32]) -> Result<(), StatesError> {
        let header = &self.header;
        let width = header.layers * header.hidden;
        let mut rest = states;
        for place in self.blocks.find(&self.keys)? {
            let block = &place.block;
            let payload = place.payload();
            let count = block.rows as usize * width;
            let fits = header.row_bytes().map(|bytes| bytes * block.rows as usize) == Some(payload.len());
            let damaged = |reason: &str| StatesError::Damaged {
                path: place.segment.path.clone(),
                offset: block.offset,
                reason: reason.to_owned(),
            };
            if !fits || count > rest.len() {
                return Err(damaged("the block's length does not fit the sample"));
            }
            if crc32fast::hash(payload) != block.payload_crc {
                return Err(damaged("the block does not match its checksum"));
            }
            let (part, after) = std::mem::take(&mut rest).split_at_mut(count);
            values::decode(header.dtype, payload, header.hidden, part);
            rest = after;
        }
        Ok(())
    }
}

/// Where the blocks of a directory lie, for all entries of a reader.
#[derive(Debug)]
struct Blocks {
    directory: PathBuf,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    segments: HashMap<u64, Known>,
    places: HashMap<BlockKey, (u64, Block)>,
    /// The segments that were there when all were last read from their beginning.
    read_whole: Vec<u64>,
}

/// How far a segment was read.
#[derive(Debug, Default)]
struct Known {
    position: u64,
    keys: Vec<BlockKey>,
    mapped: Option<Arc<Mapped>>,
}

#[derive(Debug)]
struct Mapped {
    path: PathBuf,
    map: Map,
}

/// A block in a mapped segment.
struct Place {
    segment: Arc<Mapped>,
    block: Block,
}

impl Place {
    fn payload(&self) -> &[u8] {
        let start = self.block.payload_offset() as usize;
        &self.segment.map[start..start + self.block.payload_length as usize]
    }
}

impl Blocks {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The places of these blocks, in their order.
    fn find(&self, keys: &[BlockKey]) -> Result<Vec<Place>, StatesError> {
        let mut table = self.table();
        for _ in 0..LOOKS {
            if let Some(places) = table.find(&self.directory, keys)? {
                return Ok(places);
            }
            // Appended or moved since the last look.
            table.refresh(&self.directory)?;
        }
        // A block of a segment that a crash has cost may count in an older one again.
        table.start_again_once(&self.directory)?;
        table
            .find(&self.directory, keys)?
            .ok_or_else(|| StatesError::Evicted { directory: self.directory.clone() })
    }
}

impl Table {
    /// None where a block is not known, or its segment is gone.
    fn find(&mut self, directory: &Path, keys: &[BlockKey]) -> Result<Option<Vec<Place>>, StatesError> {
        let mut places = Vec::with_capacity(keys.len());
        // Each segment is looked at once for a sample.
        let mut segments: HashMap<u64, Arc<Mapped>> = HashMap::new();
        for key in keys {
            let Some((number, block)) = self.places.get(key).copied() else { return Ok(None) };
            let segment = match segments.get(&number) {
                Some(segment) if segment.map.len() as u64 >= block.end() => Arc::clone(segment),
                _ => {
                    let Some(segment) = self.map(directory, number, block.end())? else { return Ok(None) };
                    segments.insert(number, Arc::clone(&segment));
                    segment
                }
            };
            places.push(Place { segment, block });
        }
        Ok(Some(places))
    }

    /// A segment, mapped at least up to `end`; None where it is gone.
    fn map(&mut self, directory: &Path, number: u64, end: u64) -> Result<Option<Arc<Mapped>>, StatesError> {
        let Some(known) = self.segments.get_mut(&number) else { return Ok(None) };
        let path = segment::path_of(directory, number);
        let Ok(metadata) = fs::metadata(&path) else {
            self.forget(number);
            return Ok(None);
        };
        // A map of a file that was cut would end the process.
        let mapped_length = known.mapped.as_ref().map_or(0, |mapped| mapped.map.len() as u64);
        if metadata.len() < end.max(mapped_length) {
            self.start_again();
            return Ok(None);
        }
        if let Some(mapped) = &known.mapped
            && mapped.map.len() as u64 >= end
        {
            return Ok(Some(Arc::clone(mapped)));
        }
        let Some(file) = open_if_there(&path)? else {
            self.forget(number);
            return Ok(None);
        };
        let map = Map::of(&file).map_err(|error| StatesError::io("cannot map", &path, error))?;
        if (map.len() as u64) < end {
            self.start_again();
            return Ok(None);
        }
        let mapped = Arc::new(Mapped { path, map });
        known.mapped = Some(Arc::clone(&mapped));
        Ok(Some(mapped))
    }

    /// Reads all segments from their beginning, once for each set of them.
    fn start_again_once(&mut self, directory: &Path) -> Result<(), StatesError> {
        let numbers: Vec<u64> = segment::list(directory)?.into_iter().map(|(number, _)| number).collect();
        if self.read_whole == numbers {
            return Ok(());
        }
        *self = Self { read_whole: numbers, ..Self::default() };
        self.refresh(directory)
    }

    /// A segment was cut by a writer that started after a crash.
    fn start_again(&mut self) {
        *self = Self::default();
    }

    fn forget(&mut self, number: u64) {
        let Some(known) = self.segments.remove(&number) else { return };
        for key in known.keys {
            if self.places.get(&key).is_some_and(|(segment, _)| *segment == number) {
                self.places.remove(&key);
            }
        }
    }

    /// Reads the headers of the blocks that were appended since, and forgets segments that are gone.
    fn refresh(&mut self, directory: &Path) -> Result<(), StatesError> {
        let listed = segment::list(directory)?;
        let gone: Vec<u64> = self
            .segments
            .keys()
            .filter(|number| listed.binary_search_by_key(number, |(number, _)| number).is_err())
            .copied()
            .collect();
        for number in gone {
            self.forget(number);
        }
        for (number, path) in listed {
            let Some(file) = open_if_there(&path)? else { continue };
            let known = self.segments.entry(number).or_default();
            if known.position == 0 {
                match read_file_header(&file, &path, segment::MAGIC) {
                    Ok(Some(_)) => known.position = FILE_HEADER,
                    Ok(None) => continue,
                    Err(error @ StatesError::Foreign { .. }) => {
                        tracing::warn!("{error}");
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            }
            for block in segment::scan(&file, &path, known.position)?.blocks {
                known.position = block.end();
                known.keys.push(block.key);
                // A dead copy in an older segment must not hide the live one.
                let younger = self.places.get(&block.key).is_none_or(|(known, _)| *known <= number);
                if younger {
                    self.places.insert(block.key, (number, block));
                }
            }
        }
        Ok(())
    }
}
