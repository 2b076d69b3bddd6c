//! Every buffer of the step, planned for the largest batch so far.

use half::bf16;

use crate::compute::cuda::{Buffer, CudaError, Device, Matrix};
use crate::head::HeadConfig;

use super::Sizes;

/// Elements of a chunk of logits: 512 MiB in bf16.
const CHUNK: usize = 1 << 28;

/// Rows of a chunk of logits.
pub(super) fn loss_chunk(vocabulary: usize) -> usize {
    (CHUNK / vocabulary).max(256)
}

/// [S * N, ..] where nothing else is said: a row for each chain of each step.
pub(super) struct Buffers {
    /// Rows and chains that there is room for.
    capacity: [usize; 3],
    /// The verifier's normed states. [N, H]
    pub wanted: Buffer<bf16>,
    /// [R, 3H]
    pub aux_normed: Buffer<bf16>,
    /// fc's output. [R, H]
    pub fused: Buffer<bf16>,
    pub fused_scale: Buffer<f32>,
    pub fused_gradient: Buffer<bf16>,
    /// Where rows are more than chains: step 0's layer input of all rows [R, 2H], keys and values [R, 2 * key heads * D],
    /// gradients, and fc's output of the chains' rows [N, H].
    pub joined_rows: Buffer<bf16>,
    pub row_keys: Buffer<bf16>,
    pub row_keys_gradient: Buffer<bf16>,
    pub row_gradient: Buffer<bf16>,
    pub first_hidden: Buffer<bf16>,
    /// Normed embeddings of the chains' step 0 [N, H], their products with the attention's matrices [N + S - 1, ..], and the
    /// normed hidden states.
    pub embedded: Buffer<bf16>,
    pub embedded_qkv: Buffer<bf16>,
    pub hidden_normed: Buffer<bf16>,
    pub hidden_scale: Buffer<f32>,
    qkv: Buffer<bf16>,
    pub qkv_gradient: Buffer<bf16>,
    pub attended: Buffer<bf16>,
    pub attended_gradient: Buffer<bf16>,
    pub log_sums: Buffer<f32>,
    pub means: Buffer<f32>,
    pub middle: Buffer<bf16>,
    pub middle_scale: Buffer<f32>,
    pub middle_gradient: Buffer<bf16>,
    pub normed: Buffer<bf16>,
    /// Replaced by its gradient on the way back.
    pub gate_up: Buffer<bf16>,
    pub activated: Buffer<bf16>,
    pub last: Buffer<bf16>,
    pub last_scale: Buffer<f32>,
    /// First the gradient of the normed output, then of `last`.
    pub last_gradient: Buffer<bf16>,
    pub output: Buffer<bf16>,
    /// [N, H]
    pub normed_gradient: Buffer<bf16>,
    pub hidden_gradient: Buffer<bf16>,
    /// Target logits and draft logits of a chunk; later the gradient of the activation.
    pub wide: Buffer<bf16>,
    pub target_log_sums: Buffer<f32>,
    pub losses: Buffer<f32>,
    pub best: Buffer<u32>,
    /// Partial sums of the norms' gradients and of the gradient norm.
    pub partial: Buffer<f32>,
}

impl Buffers {
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let empty = || device.zeros::<bf16>(0);
        let floats = || device.zeros::<f32>(0);
        Ok(Self {
            capacity: [0; 3],
            wanted: empty()?,
            aux_normed: empty()?,
            fused: empty()?,
            fused_scale: floats()?,
            fused_gradient: empty()?,
            joined_rows: empty()?,
            row_keys: empty()?,
            row_keys_gradient: empty()?,
            row_gradient: empty()?,
            first_hidden: empty()?,
            embedded: empty()?,
            embedded_qkv: empty()?,
            hidden_normed: empty()?,
            hidden_scale: floats()?,
            qkv: empty()?,
            qkv_gradient: empty()?,
            attended: empty()?,
            attended_gradient: empty()?,
            log_sums: floats()?,
            means: floats()?,
            middle: empty()?,
            middle_scale: floats()?,
            middle_gradient: empty()?,
            normed: empty()?,
            gate_up: empty()?,
            activated: empty()?,
            last: empty()?,
            last_scale: floats()?,
            last_gradient: empty()?,
            output: empty()?,
            normed_gradient: empty()?,
            hidden_gradient: empty()?,
            wide: empty()?,
            target_log_sums: floats()?,
            losses: floats()?,
            best: device.zeros(0)?,
            partial: device.zeros(device.norm_scratch())?,
        })
    }

    /// Makes room. What was there is lost.
    pub fn reserve(&mut self, device: &Device, sizes: Sizes, config: &HeadConfig) -> Result<(), CudaError> {
        let Sizes { rows, chains, steps, hidden, inner, query_width, key_width } = sizes;
        let sparse_rows = if rows == chains { 0 } else { rows };
        let wanted = [rows, chains, sparse_rows];
        if wanted.iter().zip(&self.capacity).all(|(wanted, there)| wanted <= there) {
            return Ok(());
        }
        let [rows, chains, sparse_rows] = [0, 1, 2].map(|i| wanted[i].max(self.capacity[i]));
        // The old ones go first, so that both never exist together.
        *self = Self::new(device)?;
        self.capacity = [rows, chains, sparse_rows];
        let all = steps * chains;
        let vocabulary = config.draft_vocab_size;
        let chunk = loss_chunk(vocabulary).min(chains);
        let aux = if config.fc_norm { rows * 3 * hidden } else { 0 };
        let sparse_chains = if sparse_rows == 0 { 0 } else { chains };
        let lengths = [
            (&mut self.wanted, chains * hidden),
            (&mut self.aux_normed, aux),
            (&mut self.fused, rows * hidden),
            (&mut self.fused_gradient, rows * hidden),
            (&mut self.joined_rows, sparse_rows * 2 * hidden),
            (&mut self.row_keys, sparse_rows * 2 * key_width),
            (&mut self.row_keys_gradient, sparse_rows * 2 * key_width),
            (&mut self.row_gradient, sparse_rows * hidden),
            (&mut self.first_hidden, sparse_chains * hidden),
            (&mut self.embedded, chains * hidden),
            (&mut self.embedded_qkv, (chains + steps - 1) * sizes.qkv_width()),
            (&mut self.hidden_normed, all * hidden),
            (&mut self.qkv, all * sizes.qkv_width()),
            (&mut self.qkv_gradient, all * sizes.qkv_width()),
            (&mut self.attended, all * query_width),
            (&mut self.attended_gradient, all * query_width),
            (&mut self.middle, all * hidden),
            (&mut self.middle_gradient, all * hidden),
            (&mut self.normed, all * hidden),
            (&mut self.gate_up, all * 2 * inner),
            (&mut self.activated, all * inner),
            (&mut self.last, all * hidden),
            (&mut self.last_gradient, all * hidden),
            (&mut self.output, all * hidden),
            (&mut self.normed_gradient, chains * hidden),
            (&mut self.hidden_gradient, chains * hidden),
            (&mut self.wide, ((2 * chunk + steps) * vocabulary).max(chains * inner)),
        ];
        for (buffer, length) in lengths {
            *buffer = device.zeros(length)?;
        }
        let lengths = [
            (&mut self.fused_scale, rows),
            (&mut self.hidden_scale, all),
            (&mut self.middle_scale, all),
            (&mut self.last_scale, all),
            (&mut self.log_sums, all * config.num_attention_heads),
            (&mut self.means, all * config.num_attention_heads),
            (&mut self.target_log_sums, chunk),
            (&mut self.losses, all),
        ];
        for (buffer, length) in lengths {
            *buffer = device.zeros(length)?;
        }
        self.best = device.zeros(all)?;
        Ok(())
    }

    /// One step's rows of a buffer.
    pub fn step<'a>(
        &self,
        buffer: &'a Buffer<bf16>,
        sizes: Sizes,
        step: usize,
        width: usize,
    ) -> Matrix<'a, bf16> {
        buffer.matrix(step * sizes.chains * width, sizes.chains, width)
    }

    /// One step's scalars.
    pub fn scale<'a>(&self, buffer: &'a Buffer<f32>, sizes: Sizes, step: usize) -> Matrix<'a, f32> {
        buffer.matrix(step * sizes.chains, 1, sizes.chains)
    }

    /// Queries, keys and values of all steps.
    pub fn qkv(&self, sizes: Sizes) -> Matrix<'_, bf16> {
        self.qkv.head(sizes.steps * sizes.chains, sizes.qkv_width())
    }
}
