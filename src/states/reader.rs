//! Reading samples, from any process, while the writer goes on appending and evicting.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::StatesError;
use super::shard::{self, Found, Frame, SHARD_HEADER, SampleHeader, StateDtype};
use super::store::{decode_ids, list_shards};

/// One sample of the index.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleEntry {
    pub header: SampleHeader,
    pub shard: Arc<Path>,
    /// Where its frame begins.
    pub offset: u64,
    header_crc: u32,
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
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerifyReport {
    pub shards: usize,
    pub samples: usize,
    pub bytes: u64,
    /// Samples (or tails) that cannot be read: shard, offset, reason.
    pub damaged: Vec<(PathBuf, u64, String)>,
}

/// Reads a state directory. It takes no lock and never writes.
#[derive(Debug)]
pub struct Reader {
    directory: PathBuf,
    index: Vec<SampleEntry>,
    shards: HashMap<PathBuf, Known>,
}

/// Device and inode: a rewritten shard is another file under the same name.
type Identity = (u64, u64);

/// How far a shard was read.
#[derive(Clone, Debug)]
struct Known {
    path: Arc<Path>,
    identity: Identity,
    position: u64,
}

impl Reader {
    /// Opens a directory and reads its index. The directory must exist; it may be empty.
    pub fn open(directory: &Path) -> Result<Self, StatesError> {
        let mut reader =
            Self { directory: directory.to_path_buf(), index: Vec::new(), shards: HashMap::new() };
        reader.refresh()?;
        Ok(reader)
    }

    /// Takes in what was appended since, and drops what was evicted. Indices of earlier samples change where something
    /// was removed.
    pub fn refresh(&mut self) -> Result<Refreshed, StatesError> {
        let before = self.index.len();
        let mut still_there = HashMap::new();
        let mut added = Vec::new();
        for (_, _, path) in list_shards(&self.directory)? {
            let Some((file, identity)) = open_shard(&path)? else { continue };
            let mut known = match self.shards.get(&path) {
                Some(known) if known.identity == identity => known.clone(),
                _ => Known { path: Arc::from(path.as_path()), identity, position: 0 },
            };
            if known.position == 0 {
                match shard::check_shard_header(&file, &path) {
                    Ok(true) => known.position = SHARD_HEADER,
                    Ok(false) => {}
                    Err(error @ StatesError::NotAShard { .. }) => tracing::warn!("{error}"),
                    Err(error) => return Err(error),
                }
            }
            if known.position > 0 {
                // A torn end is either a frame that is just being written, or what the writer cuts at its next start.
                let (frames, _) = shard::scan(&file, &path, known.position)?;
                for frame in frames {
                    known.position = frame.end();
                    added.push(SampleEntry {
                        header: frame.header,
                        shard: Arc::clone(&known.path),
                        offset: frame.offset,
                        header_crc: frame.header_crc,
                    });
                }
            }
            still_there.insert(path, known);
        }
        // A shard that was rewritten is known under a new Arc; entries of the old file go.
        self.index.retain(|entry| {
            still_there.get(&*entry.shard).is_some_and(|known: &Known| Arc::ptr_eq(&known.path, &entry.shard))
        });
        let removed = before - self.index.len();
        let refreshed = Refreshed { added: added.len(), removed };
        self.index.extend(added);
        self.shards = still_there;
        Ok(refreshed)
    }

    /// The samples, in the order in which they were seen (by shard, then by offset, within one refresh).
    pub fn index(&self) -> &[SampleEntry] {
        &self.index
    }

    /// Loads sample `index`, its checksum verified.
    pub fn load(&self, index: usize) -> Result<Sample, StatesError> {
        let entry =
            self.index.get(index).ok_or(StatesError::NoSuchSample { index, len: self.index.len() })?;
        entry.load()
    }

    /// Reads everything once and says what is damaged.
    pub fn verify(&self) -> Result<VerifyReport, StatesError> {
        let mut report = VerifyReport::default();
        for (_, _, path) in list_shards(&self.directory)? {
            let Some((file, _)) = open_shard(&path)? else { continue };
            report.shards += 1;
            match shard::check_shard_header(&file, &path) {
                Ok(true) => {}
                Ok(false) => {
                    report.damaged.push((path, 0, "the file ends inside its header".to_string()));
                    continue;
                }
                Err(error @ StatesError::NotAShard { .. }) => {
                    report.damaged.push((path, 0, error.to_string()));
                    continue;
                }
                Err(error) => return Err(error),
            }
            let (frames, torn) = shard::scan(&file, &path, SHARD_HEADER)?;
            for frame in frames {
                report.samples += 1;
                report.bytes += frame.end() - frame.offset;
                match shard::read_payload(&file, &path, &frame) {
                    Ok(_) => {}
                    Err(StatesError::Damaged { offset, reason, .. }) => {
                        report.damaged.push((path.clone(), offset, reason));
                    }
                    Err(error) => return Err(error),
                }
            }
            if let Some((offset, reason)) = torn {
                report.damaged.push((path, offset, reason));
            }
        }
        Ok(report)
    }
}

impl SampleEntry {
    /// Loads the sample, its checksum verified; may be called from any thread, and without the reader.
    pub fn load(&self) -> Result<Sample, StatesError> {
        let path = &self.shard;
        let Some((file, _)) = open_shard(path)? else {
            return Err(StatesError::Evicted { path: path.to_path_buf() });
        };
        let damaged =
            |reason: String| StatesError::Damaged { path: path.to_path_buf(), offset: self.offset, reason };
        let frame: Frame = match shard::frame_at(&file, path, self.offset)? {
            Found::Frame(frame) => *frame,
            Found::End => return Err(damaged("the file was cut before the sample".to_string())),
            Found::Torn(reason) => return Err(damaged(reason)),
        };
        if frame.header_crc != self.header_crc || frame.header != self.header {
            return Err(damaged("another sample stands here now; refresh the reader".to_string()));
        }
        let payload = shard::read_payload(&file, path, &frame)?;
        let (ids, states) = payload.split_at(4 * (frame.header.rows + 1));
        let states = match frame.header.dtype {
            StateDtype::F32 => {
                states.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
            }
            StateDtype::Bf16 => states
                .as_chunks::<2>()
                .0
                .iter()
                .map(|value| half::bf16::from_le_bytes(*value).to_f32())
                .collect(),
        };
        Ok(Sample { token_ids: decode_ids(ids), states, header: frame.header })
    }
}

/// None where the shard is gone.
fn open_shard(path: &Path) -> Result<Option<(File, Identity)>, StatesError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(StatesError::io("cannot open", path, error)),
    };
    let metadata = file.metadata().map_err(|error| StatesError::io("cannot read", path, error))?;
    Ok(Some((file, (metadata.dev(), metadata.ino()))))
}
