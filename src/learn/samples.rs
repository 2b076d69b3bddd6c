//! One side of the split, as the trainer wants it.

use std::collections::HashMap;
use std::error::Error;

use sha2::{Digest, Sha256};

use crate::head::HeadConfig;
use crate::states::{Reader, SampleEntry, SampleName, StatesError};
use crate::store::DataDir;
use crate::train::{OwnedSample, SampleSource};

/// The layers that a sample must have: three aux states and the last one before the final norm.
const LAYERS: usize = 4;

/// Which states a head learns from. States of other layers have the same shape, so only their ids tell them apart.
#[derive(Clone, Debug, PartialEq)]
pub struct StateLayout {
    /// H
    pub hidden: usize,
    /// The head's three, and the last one.
    pub layer_ids: [u32; LAYERS],
}

impl StateLayout {
    /// What this head reads.
    pub fn of(config: &HeadConfig) -> Self {
        let [low, middle, high] = config.aux_layer_ids;
        let layer_ids = [low, middle, high, config.num_verifier_layers].map(|id| id as u32);
        Self { hidden: config.hidden_size, layer_ids }
    }

    /// The three layers of the newest stored sample, for a head that has none yet; None where nothing is stored.
    pub(super) fn newest_aux_layer_ids(data: &DataDir) -> Result<Option<[usize; 3]>, StatesError> {
        let reader = Reader::open(&data.states())?;
        let newest = reader.index().iter().max_by_key(|entry| entry.header.captured_at);
        Ok(newest.and_then(|entry| match entry.header.layer_ids[..] {
            [low, middle, high, _] => Some([low, middle, high].map(|id| id as usize)),
            _ => None,
        }))
    }
}

/// Which side of the held-out split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Train,
    HeldOut,
}

/// A fixed list of samples in a stable order. What the store evicts meanwhile keeps its place and loads as none.
pub struct Samples {
    names: Vec<SampleName>,
    /// None: gone before this list was made.
    entries: Vec<Option<SampleEntry>>,
    hidden: usize,
}

impl Samples {
    /// All samples of one side, oldest first.
    pub fn open(data: &DataDir, side: Side, layout: &StateLayout) -> Result<Self, StatesError> {
        let reader = Reader::open(&data.states())?;
        let all = reader.index().iter().filter(|entry| usable(entry, side, layout));
        Ok(Self::from_entries(all.cloned().collect(), layout.hidden))
    }

    /// The given samples, oldest first.
    pub(super) fn from_entries(mut entries: Vec<SampleEntry>, hidden: usize) -> Self {
        entries.sort_by_key(|entry| {
            let header = &entry.header;
            (header.captured_at, header.request_id.clone(), header.choice_index)
        });
        let names = entries.iter().map(|entry| entry.header.name()).collect();
        Self { names, entries: entries.into_iter().map(Some).collect(), hidden }
    }

    /// The samples of these names, in this order.
    pub(super) fn named(
        data: &DataDir,
        names: Vec<SampleName>,
        side: Side,
        layout: &StateLayout,
    ) -> Result<Self, StatesError> {
        let reader = Reader::open(&data.states())?;
        let all = reader.index().iter().filter(|entry| usable(entry, side, layout));
        let mut known: HashMap<SampleName, &SampleEntry> =
            all.map(|entry| (entry.header.name(), entry)).collect();
        let entries = names.iter().map(|name| known.remove(name).cloned()).collect();
        Ok(Self { names, entries, hidden: layout.hidden })
    }

    pub(super) fn names(&self) -> &[SampleName] {
        &self.names
    }

    /// How many were gone when the list was made.
    pub(super) fn gone(&self) -> usize {
        self.entries.iter().filter(|entry| entry.is_none()).count()
    }

    /// When the newest was captured, in milliseconds since the Unix epoch.
    pub(super) fn newest(&self) -> Option<i64> {
        self.entries.iter().flatten().map(|entry| entry.header.captured_at).max()
    }

    /// Names this very set of samples; scores on different sets must not be compared.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for (request_id, choice_index) in &self.names {
            hash.update(request_id.as_bytes());
            hash.update([0]);
            hash.update(choice_index.to_le_bytes());
        }
        format!("{:x}", hash.finalize())
    }
}

/// A draft needs at least the first output token and one after it.
pub(super) fn usable(entry: &SampleEntry, side: Side, layout: &StateLayout) -> bool {
    let header = &entry.header;
    header.held_out == (side == Side::HeldOut)
        && header.hidden == layout.hidden
        && header.layer_ids == layout.layer_ids
        && header.prompt_length >= 1
        && header.rows > header.prompt_length
}

impl SampleSource for Samples {
    fn len(&self) -> usize {
        self.entries.len()
    }

    fn load(&self, index: usize) -> Result<Option<OwnedSample>, Box<dyn Error + Send + Sync>> {
        let Some(entry) = &self.entries[index] else { return Ok(None) };
        let sample = match entry.load() {
            Ok(sample) => sample,
            Err(StatesError::Evicted { .. }) => return Ok(None),
            Err(error @ StatesError::Damaged { .. }) => {
                tracing::warn!("{error}");
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        debug_assert_eq!(sample.states.len(), sample.header.rows * LAYERS * self.hidden);
        Ok(Some(OwnedSample {
            token_ids: sample.token_ids,
            prompt_length: sample.header.prompt_length,
            states: sample.states,
        }))
    }
}
