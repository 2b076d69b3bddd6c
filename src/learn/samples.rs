//! One side of the split, as the trainer wants it.

use std::error::Error;

use sha2::{Digest, Sha256};

use crate::states::{Reader, SampleEntry, StatesError};
use crate::store::DataDir;
use crate::train::{OwnedSample, SampleSource};

/// The layers that a sample must have: three aux states and the last one before the final norm.
const LAYERS: usize = 4;

/// Which side of the held-out split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Train,
    HeldOut,
}

/// The samples of one side, in a stable order.
pub struct Samples {
    reader: Reader,
    /// Into the reader's index.
    numbers: Vec<usize>,
    hidden: usize,
}

impl Samples {
    pub fn open(data: &DataDir, side: Side, hidden: usize) -> Result<Self, StatesError> {
        let reader = Reader::open(&data.states())?;
        let mut numbers: Vec<usize> = (0..reader.index().len())
            .filter(|number| usable(&reader.index()[*number], side, hidden))
            .collect();
        let key = |number: &usize| {
            let header = &reader.index()[*number].header;
            (header.captured_at, header.request_id.clone(), header.choice_index)
        };
        numbers.sort_by_key(key);
        Ok(Self { reader, numbers, hidden })
    }

    /// Names this very set of samples; scores on different sets must not be compared.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for number in &self.numbers {
            let header = &self.reader.index()[*number].header;
            hash.update(header.request_id.as_bytes());
            hash.update([0]);
            hash.update(header.choice_index.to_le_bytes());
        }
        format!("{:x}", hash.finalize())
    }
}

/// A draft needs at least the first output token and one after it.
fn usable(entry: &SampleEntry, side: Side, hidden: usize) -> bool {
    let header = &entry.header;
    header.held_out == (side == Side::HeldOut)
        && header.hidden == hidden
        && header.layers == LAYERS
        && header.prompt_length >= 1
        && header.rows > header.prompt_length
}

impl SampleSource for Samples {
    fn len(&self) -> usize {
        self.numbers.len()
    }

    fn load(&self, index: usize) -> Result<OwnedSample, Box<dyn Error + Send + Sync>> {
        let sample = self.reader.load(self.numbers[index])?;
        debug_assert_eq!(sample.states.len(), sample.header.rows * LAYERS * self.hidden);
        Ok(OwnedSample {
            token_ids: sample.token_ids,
            prompt_length: sample.header.prompt_length,
            states: sample.states,
        })
    }
}
