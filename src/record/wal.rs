//! The WAL: segment files of checksummed frames.
//!
//! ```text
//! header   "DRAFTWAL"  version u16  length of the writer's name u16  name  crc32 u32
//! frame    length of the payload u32  crc32 of length, kind and payload u32  kind u8  payload (postcard)
//! ```
//! Numbers are little-endian. Reading stops at the first frame that is not whole; what precedes it is good. A segment is
//! self-contained: its rows, the ids joined to them, and the requests still running when it was left.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::error::RecordError;
use super::row::Record;
use crate::store::{Disk, DiskFile};

const MAGIC: &[u8; 8] = b"DRAFTWAL";
const VERSION: u16 = 2;
const FRAME_HEADER: usize = 9;
pub(super) const EXTENSION: &str = "wal";

/// What the engine knows of one choice and its answer does not say. The fields are those of [`Record`]; empty ids are
/// unknown ones.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Join {
    pub request_id: String,
    pub choice_index: u32,
    pub prompt_token_ids: Vec<i32>,
    pub output_token_ids: Vec<i32>,
    pub draft_head: Option<String>,
    pub drafts: Option<i64>,
    pub drafted_tokens: Option<i64>,
    pub accepted_tokens: Option<i64>,
    pub states_status: String,
}

impl Join {
    pub(super) fn apply(&self, record: &mut Record) {
        // No prompt is empty.
        if !self.prompt_token_ids.is_empty() {
            record.prompt_token_ids = Some(self.prompt_token_ids.clone());
            record.output_token_ids = Some(self.output_token_ids.clone());
        }
        record.draft_head = self.draft_head.clone();
        record.drafts = self.drafts;
        record.drafted_tokens = self.drafted_tokens;
        record.accepted_tokens = self.accepted_tokens;
        record.states_status = Some(self.states_status.clone());
    }

    /// About how many bytes it holds in memory; what the recorder's bound counts.
    pub(super) fn approximate_bytes(&self) -> usize {
        let ids = self.prompt_token_ids.len() + self.output_token_ids.len();
        size_of::<Join>() + 256 + ids * size_of::<i32>()
    }
}

/// A request that has started; the row it becomes if nothing else is heard of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Begun {
    /// Of that row.
    pub record_id: String,
    pub request_id: String,
    pub endpoint: String,
    /// Microseconds since the Unix epoch.
    pub started_at: i64,
}

impl Begun {
    pub fn new(request_id: &str, endpoint: &str, started_at: i64) -> Self {
        Self {
            record_id: Uuid::now_v7().to_string(),
            request_id: request_id.to_owned(),
            endpoint: endpoint.to_owned(),
            started_at,
        }
    }

    /// About how many bytes it holds in memory; what the recorder's bound counts.
    pub fn approximate_bytes(&self) -> usize {
        size_of::<Begun>() + 64 + self.request_id.len() + self.endpoint.len()
    }

    pub fn into_row(self) -> Record {
        let record_id = self.record_id;
        Record { record_id, ..Record::new(self.request_id, self.endpoint, self.started_at) }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Frame {
    /// All rows of one request, so that they are kept or lost together.
    Records(Vec<Record>),
    Join(Join),
    Begin(Begun),
    /// A request that had begun will have no row.
    Abandon(String),
    /// The requests still running were begun again in the next segment, which is synced; they are not this one's.
    Carried,
}

impl Frame {
    fn kind(&self) -> u8 {
        match self {
            Frame::Records(_) => 1,
            Frame::Join(_) => 2,
            Frame::Begin(_) => 3,
            Frame::Abandon(_) => 4,
            Frame::Carried => 5,
        }
    }

    /// Appends the payload.
    fn payload(&self, buffer: &mut Vec<u8>) -> postcard::Result<()> {
        match self {
            Frame::Records(records) => postcard::to_io(records, buffer)?,
            Frame::Join(join) => postcard::to_io(join, buffer)?,
            Frame::Begin(begun) => postcard::to_io(begun, buffer)?,
            Frame::Abandon(request_id) => postcard::to_io(request_id, buffer)?,
            Frame::Carried => buffer,
        };
        Ok(())
    }

    fn decode(kind: u8, payload: &[u8]) -> Option<Frame> {
        match kind {
            1 => postcard::from_bytes(payload).ok().map(Frame::Records),
            2 => postcard::from_bytes(payload).ok().map(Frame::Join),
            3 => postcard::from_bytes(payload).ok().map(Frame::Begin),
            4 => postcard::from_bytes(payload).ok().map(Frame::Abandon),
            5 => Some(Frame::Carried),
            _ => None,
        }
    }

    /// Appends the frame to a buffer. Fails for a payload beyond 4 GiB, and leaves the buffer as it was then.
    pub fn encode(&self, buffer: &mut Vec<u8>) -> io::Result<()> {
        let start = buffer.len();
        let payload_start = start + FRAME_HEADER;
        // Filled in when the payload is known.
        buffer.resize(payload_start, 0);
        if let Err(error) = self.payload(buffer) {
            buffer.truncate(start);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, error));
        }
        let Ok(length) = u32::try_from(buffer.len() - payload_start) else {
            buffer.truncate(start);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a request of more than 4 GiB"));
        };
        let length_bytes = length.to_le_bytes();
        let sum = checksum(&length_bytes, self.kind(), &buffer[payload_start..]);
        buffer[start..start + 4].copy_from_slice(&length_bytes);
        buffer[start + 4..start + 8].copy_from_slice(&sum.to_le_bytes());
        buffer[start + 8] = self.kind();
        Ok(())
    }
}

fn checksum(length: &[u8], kind: u8, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(length);
    hasher.update(&[kind]);
    hasher.update(payload);
    hasher.finalize()
}

fn header(writer: &str) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    let length = u16::try_from(writer.len()).unwrap_or(0);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&writer.as_bytes()[..usize::from(length)]);
    bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
    bytes
}

/// Why reading stopped before the end of the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Stop {
    /// The file ends inside a frame: the write was cut by a crash.
    Torn { at: usize },
    /// The bytes at this place are not what was written: the file is kept for a person to look at.
    Damaged { at: usize },
}

#[derive(Debug)]
pub(super) struct SegmentContent {
    /// Empty when the header itself was cut.
    pub writer: String,
    pub frames: Vec<Frame>,
    pub stop: Option<Stop>,
}

pub(super) fn read(path: &Path) -> Result<SegmentContent, RecordError> {
    let bytes = fs::read(path).map_err(RecordError::disk("read", path))?;
    Ok(parse(&bytes))
}

fn parse(bytes: &[u8]) -> SegmentContent {
    let mut content = SegmentContent { writer: String::new(), frames: Vec::new(), stop: None };
    let (writer, mut at) = match parse_header(bytes) {
        Ok(parsed) => parsed,
        Err(stop) => {
            content.stop = Some(stop);
            return content;
        }
    };
    content.writer = writer;
    while at < bytes.len() {
        match parse_frame(&bytes[at..]) {
            Ok((frame, length)) => {
                content.frames.push(frame);
                at += length;
            }
            Err(whole) => {
                content.stop = Some(if whole { Stop::Damaged { at } } else { Stop::Torn { at } });
                break;
            }
        }
    }
    content
}

fn parse_header(bytes: &[u8]) -> Result<(String, usize), Stop> {
    if bytes.len() < 12 {
        return Err(Stop::Torn { at: 0 });
    }
    let length = usize::from(u16::from_le_bytes([bytes[10], bytes[11]]));
    let end = 12 + length;
    if bytes[..8] != *MAGIC || u16::from_le_bytes([bytes[8], bytes[9]]) != VERSION {
        return Err(Stop::Damaged { at: 0 });
    }
    let Some(sum) = bytes.get(end..end + 4) else {
        return Err(Stop::Torn { at: 0 });
    };
    if crc32fast::hash(&bytes[..end]).to_le_bytes() != sum {
        return Err(Stop::Damaged { at: 0 });
    }
    match std::str::from_utf8(&bytes[12..end]) {
        Ok(writer) => Ok((writer.to_owned(), end + 4)),
        Err(_) => Err(Stop::Damaged { at: 0 }),
    }
}

/// The frame and its length in bytes, or whether the bad frame was there in full length.
fn parse_frame(bytes: &[u8]) -> Result<(Frame, usize), bool> {
    if bytes.len() < FRAME_HEADER {
        return Err(false);
    }
    let length_bytes = [bytes[0], bytes[1], bytes[2], bytes[3]];
    let sum = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
    let end = FRAME_HEADER + u32::from_le_bytes(length_bytes) as usize;
    let Some(payload) = bytes.get(FRAME_HEADER..end) else {
        return Err(false);
    };
    if checksum(&length_bytes, bytes[8], payload) != sum {
        return Err(true);
    }
    Frame::decode(bytes[8], payload).map(|frame| (frame, end)).ok_or(true)
}

/// A segment being written. What was appended is on disk after `flush` returned.
#[derive(Debug)]
pub(super) struct SegmentFile {
    disk: Disk,
    path: PathBuf,
    file: Option<DiskFile>,
    directory_synced: bool,
    /// Bytes known to be on disk.
    durable: u64,
    pending: Vec<u8>,
}

impl SegmentFile {
    /// The file itself is made by the first flush, so that a full disk is an error like any other there.
    pub fn new(disk: &Disk, directory: &Path, writer: &str) -> SegmentFile {
        let path = directory.join(format!("{}.{EXTENSION}", Uuid::now_v7()));
        let disk = disk.clone();
        SegmentFile { disk, path, file: None, directory_synced: false, durable: 0, pending: header(writer) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn append(&mut self, frame: &Frame) -> io::Result<()> {
        frame.encode(&mut self.pending)
    }

    pub fn pending_bytes(&self) -> usize {
        self.pending.len()
    }

    pub fn bytes(&self) -> u64 {
        self.durable + self.pending.len() as u64
    }

    /// Writes and syncs. After an error nothing is given up: the next call writes the same bytes at the same place again
    /// (a sync that failed may have marked pages clean that never reached the disk, so they must be made dirty again).
    pub fn flush(&mut self) -> Result<(), RecordError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        if self.file.is_none() {
            let opened = self.disk.create(&self.path, true);
            self.file = Some(opened.map_err(RecordError::disk("create", &self.path))?);
        }
        let Some(file) = self.file.as_ref() else {
            return Ok(());
        };
        file.write_all_at(&self.pending, self.durable).map_err(RecordError::disk("write", &self.path))?;
        file.sync_data().map_err(RecordError::disk("sync", &self.path))?;
        if !self.directory_synced {
            let directory = self.path.parent().unwrap_or(Path::new("."));
            self.disk.sync_directory(directory).map_err(RecordError::disk("sync", directory))?;
            self.directory_synced = true;
        }
        self.durable += self.pending.len() as u64;
        self.pending.clear();
        // One large group should not hold its memory for ever.
        self.pending.shrink_to(1 << 20);
        Ok(())
    }
}

/// The segments in a directory, oldest first (their names are UUIDv7).
pub(super) fn segments(directory: &Path) -> Result<Vec<PathBuf>, RecordError> {
    with_extension(directory, EXTENSION)
}

/// What ends so in a directory, sorted.
pub(super) fn with_extension(directory: &Path, wanted: &str) -> Result<Vec<PathBuf>, RecordError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(RecordError::disk("list", directory))? {
        let path = entry.map_err(RecordError::disk("list", directory))?.path();
        if path.extension().is_some_and(|extension| extension == wanted) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::row::tests::full_record;

    fn frames() -> Vec<Frame> {
        let join = Join {
            request_id: "a".into(),
            choice_index: 1,
            prompt_token_ids: vec![7],
            draft_head: Some("digest".into()),
            drafts: Some(2),
            states_status: "stored".into(),
            ..Join::default()
        };
        vec![
            Frame::Begin(Begun::new("a", "/v1/completions", 1)),
            Frame::Records(vec![full_record("a"), full_record("b")]),
            Frame::Abandon("c".into()),
            Frame::Join(join),
            Frame::Carried,
            Frame::Records(vec![full_record("d")]),
        ]
    }

    /// The segment's bytes and where each frame ends.
    fn segment(frames: &[Frame]) -> (Vec<u8>, Vec<usize>) {
        let mut bytes = header("writer");
        let mut ends = vec![bytes.len()];
        for frame in frames {
            frame.encode(&mut bytes).unwrap();
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    /// Nothing in a frame tells its fields apart: what an older build wrote would be read wrong.
    #[test]
    fn the_encoding_changes_with_the_version_alone() {
        let record = Record { record_id: "r".into(), ..full_record("a") };
        let begun = Begun { record_id: "r".into(), ..Begun::new("a", "/v1/completions", 1) };
        let join = Join { request_id: "a".into(), drafts: Some(2), ..Join::default() };
        let mut bytes = Vec::new();
        for frame in [Frame::Records(vec![record]), Frame::Begin(begun), Frame::Join(join)] {
            frame.encode(&mut bytes).unwrap();
        }
        let found = (VERSION, bytes.len(), crc32fast::hash(&bytes));
        assert_eq!(found, (2, 305, 1_510_361_397), "raise VERSION");
    }

    #[test]
    fn cut_at_every_byte_keeps_exactly_the_whole_frames() {
        let frames = frames();
        let (bytes, ends) = segment(&frames);
        for cut in 0..=bytes.len() {
            let content = parse(&bytes[..cut]);
            let whole = ends.iter().filter(|end| **end <= cut).count().saturating_sub(1);
            assert_eq!(content.frames, frames[..whole], "cut at {cut}");
            let at_boundary = ends.contains(&cut);
            let expected =
                if cut < ends[0] { Some(Stop::Torn { at: 0 }) } else { Some(Stop::Torn { at: ends[whole] }) };
            assert_eq!(content.stop, if at_boundary { None } else { expected }, "cut at {cut}");
        }
    }

    #[test]
    fn flip_of_any_byte_keeps_the_frames_before_it_and_nothing_wrong() {
        let frames = frames();
        let (bytes, ends) = segment(&frames);
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            let content = parse(&flipped);
            let before = ends.iter().filter(|end| **end <= at).count().saturating_sub(1);
            assert_eq!(content.frames, frames[..before], "flip at {at}");
            assert!(content.stop.is_some(), "flip at {at}");
        }
    }

    #[test]
    fn zeroed_tail_of_a_machine_crash_is_no_row() {
        let frames = frames();
        let (mut bytes, ends) = segment(&frames);
        bytes.extend_from_slice(&[0; 64]);
        let content = parse(&bytes);
        assert_eq!(content.frames, frames);
        assert_eq!(content.stop, Some(Stop::Damaged { at: ends[6] }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic_and_give_only_frames_that_were_written(
            tail in proptest::collection::vec(any::<u8>(), 0..200), keep in 0usize..6,
        ) {
            let frames = frames();
            let (mut bytes, ends) = segment(&frames);
            bytes.truncate(ends[keep]);
            bytes.extend_from_slice(&tail);
            let content = parse(&bytes);
            prop_assert_eq!(&content.frames[..], &frames[..keep]);
            prop_assert_eq!(content.stop.is_some(), !tail.is_empty());
        }
    }

    #[test]
    fn flush_is_tried_again_after_a_failure_and_writes_each_frame_once() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("wal");
        let mut file = SegmentFile::new(&Disk::default(), &inner, "writer");
        file.append(&Frame::Abandon("a".into())).unwrap();
        file.flush().unwrap_err();
        fs::create_dir(&inner).unwrap();
        file.append(&Frame::Abandon("b".into())).unwrap();
        file.flush().unwrap();
        file.append(&Frame::Carried).unwrap();
        file.flush().unwrap();
        let content = read(file.path()).unwrap();
        assert_eq!(content.frames, [Frame::Abandon("a".into()), Frame::Abandon("b".into()), Frame::Carried],);
        assert_eq!(content.writer, "writer");
        assert_eq!(content.stop, None);
        assert_eq!(segments(&inner).unwrap(), [file.path()]);
    }
}
