//! A batch in GPU memory: documents packed as rows (seen as keys) and chains (drafts), as on the CPU.

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::compute::cuda::{Buffer, Device, KeyTile, QueryTile};
use crate::head::HeadConfig;

use super::super::{Document, TrainError};

/// Rows of a tile of attention.
const TILE: usize = 64;

/// Documents on the GPU, ready for a step.
pub struct CudaBatch {
    pub(super) rows: usize,
    pub(super) chains: usize,
    /// [R, 3H]
    pub(super) aux: Buffer<bf16>,
    /// The verifier's last states behind each chain's first target. [N, H]
    pub(super) last_states: Buffer<bf16>,
    pub(super) row_tokens: Buffer<u32>,
    pub(super) row_positions: Buffer<i32>,
    pub(super) chain_positions: Buffer<i32>,
    pub(super) row_of_chain: Buffer<i32>,
    /// -1 where a row starts no chain.
    pub(super) chain_of_row: Buffer<i32>,
    /// [N] end of each chain's document, in packed chains.
    pub(super) ends: Buffer<i32>,
    pub(super) query_tiles: Buffer<i32>,
    pub(super) query_tile_count: usize,
    pub(super) key_tiles: Buffer<i32>,
    pub(super) key_tile_count: usize,
    /// Positions that RoPE needs.
    pub(super) positions: usize,
    pub(super) host_ends: Vec<usize>,
    /// The verifier's token of each chain's first target.
    pub(super) labels: Vec<u32>,
    /// Supervised chains of each step.
    pub(super) supervised: Vec<u64>,
    pub(super) tokens: u64,
}

#[derive(Default)]
struct Host {
    row_tokens: Vec<u32>,
    row_positions: Vec<i32>,
    chain_positions: Vec<i32>,
    row_of_chain: Vec<i32>,
    chain_of_row: Vec<i32>,
    ends: Vec<usize>,
    labels: Vec<u32>,
    query_tiles: Vec<QueryTile>,
    key_tiles: Vec<KeyTile>,
    positions: usize,
}

impl CudaBatch {
    /// Checks documents and copies them to the GPU, for an unroll of `steps`.
    pub fn new(
        device: &Device,
        config: &HeadConfig,
        steps: usize,
        documents: &[Document],
    ) -> Result<Self, TrainError> {
        let h = config.hidden_size;
        let mut host = Host::default();
        let mut supervised = vec![0; steps];
        let (mut aux_rows, mut last_rows): (Vec<&[f32]>, Vec<&[f32]>) = (Vec::new(), Vec::new());
        for (number, document) in documents.iter().enumerate() {
            check(number, document, config)?;
            let ids = document.token_ids;
            let last_row = ids.len() - 1;
            let chains = last_row.saturating_sub(document.prompt_length);
            if chains == 0 {
                continue;
            }
            let (rows, first_row) = (last_row - 1, document.prompt_length - 1);
            host.tiles(rows, chains, first_row);
            let (row_start, chain_start) = (host.row_tokens.len(), host.ends.len());
            for row in 0..rows {
                aux_rows.push(&document.states[row * 4 * h..][..3 * h]);
                host.row_tokens.push(ids[row + 1]);
                host.row_positions.push(row as i32);
                let chain = row.checked_sub(first_row).map(|chain| (chain_start + chain) as i32);
                host.chain_of_row.push(chain.unwrap_or(-1));
            }
            for chain in 0..chains {
                let row = first_row + chain;
                last_rows.push(&document.states[(row + 1) * 4 * h + 3 * h..][..h]);
                host.chain_positions.push(row as i32);
                host.row_of_chain.push((row_start + row) as i32);
                host.ends.push(chain_start + chains);
                host.labels.push(ids[row + 2]);
            }
            for (step, count) in supervised.iter_mut().enumerate() {
                *count += chains.saturating_sub(step) as u64;
            }
            host.positions = host.positions.max(rows + steps);
        }
        // The longest first: the last blocks to run then end together.
        host.query_tiles.sort_by_key(|tile| std::cmp::Reverse(tile[3] + tile[1]));
        host.key_tiles.sort_by_key(|tile| std::cmp::Reverse(tile[4] + tile[5] - tile[2]));
        let ends: Vec<i32> = host.ends.iter().map(|end| *end as i32).collect();
        Ok(Self {
            rows: host.row_tokens.len(),
            chains: host.ends.len(),
            aux: device.upload(&rounded(&aux_rows, 3 * h))?,
            last_states: device.upload(&rounded(&last_rows, h))?,
            row_tokens: device.upload(&host.row_tokens)?,
            row_positions: device.upload(&host.row_positions)?,
            chain_positions: device.upload(&host.chain_positions)?,
            row_of_chain: device.upload(&host.row_of_chain)?,
            chain_of_row: device.upload(&host.chain_of_row)?,
            ends: device.upload(&ends)?,
            query_tiles: device.upload(host.query_tiles.as_flattened())?,
            query_tile_count: host.query_tiles.len(),
            key_tiles: device.upload(host.key_tiles.as_flattened())?,
            key_tile_count: host.key_tiles.len(),
            positions: host.positions,
            host_ends: host.ends,
            labels: host.labels,
            supervised,
            tokens: documents.iter().map(|document| document.token_ids.len() as u64).sum(),
        })
    }

    /// Whether every row starts a chain: then rows and chains are one.
    pub(super) fn is_dense(&self) -> bool {
        self.rows == self.chains
    }
}

impl Host {
    /// Tiles of the document that comes next.
    fn tiles(&mut self, rows: usize, chains: usize, first_row: usize) {
        let (row_start, chain_start) = (self.row_tokens.len(), self.ends.len());
        for start in (0..chains).step_by(TILE) {
            let count = TILE.min(chains - start);
            self.query_tiles
                .push([chain_start + start, count, row_start, first_row + start].map(|n| n as i32));
        }
        for start in (0..rows).step_by(TILE) {
            let count = TILE.min(rows - start);
            let tile = [row_start + start, count, start, chain_start, chains, first_row];
            self.key_tiles.push(tile.map(|n| n as i32));
        }
    }
}

fn check(number: usize, document: &Document, config: &HeadConfig) -> Result<(), TrainError> {
    let fail = |reason: String| Err(TrainError::Document { document: number, reason });
    let length = document.token_ids.len();
    if length < 2 || document.prompt_length == 0 || document.prompt_length > length {
        return fail(format!("{length} tokens with a prompt of {}", document.prompt_length));
    }
    let (got, wanted) = (document.states.len(), (length - 1) * 4 * config.hidden_size);
    if got != wanted {
        return fail(format!("{got} state values, {length} tokens need {wanted}"));
    }
    match document.token_ids.iter().find(|id| **id as usize >= config.vocab_size) {
        Some(id) => fail(format!("token {id} is outside the vocabulary of {}", config.vocab_size)),
        None => Ok(()),
    }
}

/// Rows of `width` floats, rounded.
fn rounded(rows: &[&[f32]], width: usize) -> Vec<bf16> {
    let mut values = vec![bf16::ZERO; rows.len() * width];
    values.par_chunks_mut(width.max(1)).zip(rows).for_each(|(to, from)| to.convert_from_f32_slice(from));
    values
}
