//! What is filled in, from wherever: the store with its bounds, the layers, and the count of what came of it.

use std::path::Path;

use anyhow::{Context, ensure};

use super::BackfillReport;
use crate::config::Config;
use crate::head::VerifierShape;
use crate::states::{
    Expected, OutcomeStatus, Reader, SampleKey, StateStore, StoreOptions, TransferFile, store_stock,
};
use crate::store::DataDir;

/// A run of failures this long means that the set-up is wrong rather than a sample.
const GIVE_UP_AFTER: u64 = 20;
/// Of one value, until a file shows what it is.
const F32_BYTES: usize = 4;

pub(super) struct Sink {
    pub store: StateStore,
    expected: Expected,
    pub layer_ids: Vec<u32>,
    train: Budget,
    held_out: Budget,
    /// Bytes of one token's states; those of f32 until a file came.
    row_bytes: u64,
    failures_in_a_row: u64,
    pub report: BackfillReport,
}

/// What the states to come may push out of the store.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Room {
    /// All that is older: the samples come newest first, and those that are stored count too.
    WholeQuota,
    /// Nothing.
    WhatIsFree,
}

/// How many bytes of states still fit one side of the split.
struct Budget {
    left: u64,
}

impl Budget {
    fn take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.left;
        // The first one that does not fit ends it: what comes after is older.
        self.left = if fits { self.left - bytes } else { 0 };
        fits
    }
}

/// The verifier's directory that is configured.
pub(super) fn verifier_directory(config: &Config) -> anyhow::Result<&Path> {
    let directory = config.verifier.directory.as_deref();
    directory.context("verifier.directory is not set; give the directory of the model that vLLM serves")
}

impl Sink {
    pub fn open(config: &Config, given_layers: Option<&[u32]>, room: Room) -> anyhow::Result<Self> {
        let shape = VerifierShape::read(verifier_directory(config)?)?;
        let layer_ids = layers(&shape, given_layers)?;
        let data = DataDir::new(&config.data.directory);
        let bounds = StoreOptions::of(&config.states);
        let store = StateStore::open(&data.states(), bounds.clone()).context(
            "the state store cannot be written; `draftsmith serve` holds it while states.transfer_directory is set",
        )?;
        if let Some(entry) = Reader::open(&data.states())?.index().last() {
            ensure!(
                entry.header.layer_ids == layer_ids,
                "the store has states of layers {:?}, not {layer_ids:?}; compute those and say --layers, or move {} away",
                entry.header.layer_ids,
                data.states().display()
            );
        }
        let stats = store.stats();
        let taken = |bytes: u64| if room == Room::WhatIsFree { bytes } else { 0 };
        // Less than what the store fills before it evicts.
        let budget = |quota: u64, stored: u64| Budget { left: (quota - quota / 4).saturating_sub(stored) };
        Ok(Self {
            expected: Expected {
                layer_ids: Some(layer_ids.clone()),
                hidden_size: Some(shape.hidden_size),
                vocab_size: Some(shape.vocab_size),
            },
            train: budget(
                bounds.quota_bytes - bounds.held_out_quota_bytes,
                taken(stats.live_bytes - stats.held_out_bytes),
            ),
            held_out: budget(bounds.held_out_quota_bytes, taken(stats.held_out_bytes)),
            row_bytes: (layer_ids.len() * shape.hidden_size * F32_BYTES) as u64,
            store,
            layer_ids,
            failures_in_a_row: 0,
            report: BackfillReport::default(),
        })
    }

    /// Whether so many rows still fit; counts them as taken.
    pub fn take_room(&mut self, held_out: bool, rows: usize) -> bool {
        let budget = if held_out { &mut self.held_out } else { &mut self.train };
        budget.take(rows as u64 * self.row_bytes)
    }

    /// Checks and stores a sample.
    pub fn keep(&mut self, key: SampleKey<'_>, file: &TransferFile) -> OutcomeStatus {
        let status = store_stock(&mut self.store, &mut self.expected, key, file);
        if status == OutcomeStatus::Stored {
            self.row_bytes = file.states.len() as u64 / file.rows as u64;
            self.report.tokens += file.rows as u64;
        }
        status
    }

    /// Counts what came of a sample. `name` is for people.
    pub fn count(&mut self, name: &str, status: OutcomeStatus) {
        if status == OutcomeStatus::Stored {
            self.report.stored += 1;
            self.failures_in_a_row = 0;
            return;
        }
        tracing::warn!(record_id = name, reason = status.as_str(), "states refused");
        *self.report.failed.entry(status.as_str()).or_default() += 1;
        self.failures_in_a_row += 1;
        if self.failures_in_a_row == GIVE_UP_AFTER {
            self.end(format!(
                "{GIVE_UP_AFTER} records in a row gave no states, the last one by reason {}",
                status.as_str()
            ));
        }
    }

    /// Takes no more. The first reason stays.
    pub fn end(&mut self, reason: String) {
        self.report.ended_early.get_or_insert(reason);
    }
}

/// The layers whose states are stored: three for the head, and the last one, which the target is made from.
fn layers(shape: &VerifierShape, given: Option<&[u32]>) -> anyhow::Result<Vec<u32>> {
    let last = u32::try_from(shape.num_hidden_layers)?;
    let layer_ids = match given {
        Some(given) => given.to_vec(),
        None => {
            let aux = shape.default_aux_layer_ids().context("the verifier has too few layers for a head")?;
            aux.iter().map(|layer| *layer as u32).chain([last]).collect()
        }
    };
    ensure!(
        layer_ids.len() == 4 && layer_ids.is_sorted_by(|one, next| one < next) && layer_ids[3] == last,
        "--layers {layer_ids:?}: give three ascending layers and then {last}, the verifier's last"
    );
    Ok(layer_ids)
}
