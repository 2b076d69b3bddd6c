//! The operations on our own kernels.

use half::bf16;

use super::buffer::{Buffer, Matrix};
use super::device::{Argument, CudaError, Device};

/// Threads of a block of most kernels, as in rows.cu.
const THREADS: usize = 256;
const LOSS_THREADS: usize = 512;
const ATTENTION_THREADS: usize = 128;
/// Rows of a tile of attention.
pub(super) const TILE: usize = 64;
/// Slices of rows that column_products sums apart.
const SLICES: usize = 64;

/// Query rows of one block: `[first chain, chains, first packed row of the document, the document's row of the chain]`.
pub type QueryTile = [i32; 4];
/// Keys of one block: `[first packed row, rows, the document's row of the first key, first chain of the document, chains
/// of the document, the document's row of its first chain]`.
pub type KeyTile = [i32; 6];

/// What all kernels of attention read. Widths are those of the head's shape.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// [tiles, 4], see [`QueryTile`].
    pub query_tiles: Matrix<'a, i32>,
    /// [tiles, 6], see [`KeyTile`].
    pub key_tiles: Matrix<'a, i32>,
    /// [steps * chains, (heads + 2 * key heads) * D]: queries, keys, values.
    pub qkv: Matrix<'a, bf16>,
    /// Of step 0. [rows, key heads * D]
    pub keys: Matrix<'a, bf16>,
    /// As `keys`, of the same stride.
    pub values: Matrix<'a, bf16>,
    /// [steps * chains, heads * D]
    pub output: Matrix<'a, bf16>,
    /// [steps * heads * chains]
    pub log_sums: Matrix<'a, f32>,
    pub chains: usize,
    pub steps: usize,
}

/// Constants of one update of AdamW.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    pub beta1: f32,
    pub beta2: f32,
    /// The learning rate over the first moment's correction.
    pub rate: f32,
    /// 1 over the second moment's correction.
    pub second_scale: f32,
    pub epsilon: f32,
    /// 1 - learning rate * decay, on matrices.
    pub keep: f32,
}

fn address<T>(matrix: Matrix<T>) -> Argument {
    Argument::Address(matrix.address)
}

fn optional<T>(matrix: Option<Matrix<T>>) -> Argument {
    Argument::Address(matrix.map_or(0, |matrix| matrix.address))
}

fn int(value: usize) -> Argument {
    Argument::Int(i32::try_from(value).unwrap_or(i32::MAX))
}

fn float(value: f32) -> Argument {
    Argument::Float(value)
}

fn stride_of<T>(matrix: Option<Matrix<T>>) -> Argument {
    int(matrix.map_or(0, |matrix| matrix.stride))
}

impl Device {
    /// output = input / rms(input) * weight for rows of H; `scale[row]` = 1 / rms where it is wanted.
    pub fn rms_norm(
        &self,
        input: Matrix<bf16>,
        weight: Matrix<f32>,
        epsilon: f32,
        output: Matrix<bf16>,
        scale: Option<Matrix<f32>>,
    ) -> Result<(), CudaError> {
        let hidden = self.shape().hidden;
        assert!(input.width == hidden && output.width == hidden && weight.width == hidden, "width of a norm");
        assert!(
            output.rows == input.rows && scale.is_none_or(|scale| scale.width == input.rows),
            "rows of a norm"
        );
        self.launch(
            "rms_norm",
            ([input.rows, 1, 1], THREADS, 0),
            &[
                address(input),
                int(input.stride),
                address(weight),
                float(epsilon),
                address(output),
                int(output.stride),
                optional(scale),
            ],
        )
    }

    /// The normed rows of `table` that `tokens` name; each token lies inside the table.
    pub fn embed_norm(
        &self,
        tokens: Matrix<u32>,
        table: &Buffer<bf16>,
        weight: Matrix<f32>,
        epsilon: f32,
        output: Matrix<bf16>,
    ) -> Result<(), CudaError> {
        let hidden = self.shape().hidden;
        assert!(output.width == hidden && weight.width == hidden && tokens.width == output.rows, "embedding");
        self.launch(
            "embed_norm",
            ([output.rows, 1, 1], THREADS, 0),
            &[
                address(tokens),
                address(table.head(1, table.len())),
                address(weight),
                float(epsilon),
                address(output),
                int(output.stride),
            ],
        )
    }

    /// Blocks of [`Device::rms_norm_backward`], each with a row of partial sums.
    pub fn norm_blocks(&self) -> usize {
        self.multiprocessors() * 3
    }

    /// input_gradient = added + the gradient of [`Device::rms_norm`] for output_gradient + extra (`extra` and `added` by
    /// `map`, where there is one: row of each, or negative). The input gradient may be the output gradient or `added`.
    /// The weight's gradient is added to `weight_gradient`, or set. `partial` is scratch: [norm_blocks, H].
    #[allow(clippy::too_many_arguments)]
    pub fn rms_norm_backward(
        &self,
        (input, scale, weight): (Matrix<bf16>, Matrix<f32>, Matrix<f32>),
        output_gradient: Matrix<bf16>,
        extra: Option<Matrix<bf16>>,
        added: Option<Matrix<bf16>>,
        map: Option<Matrix<i32>>,
        input_gradient: Matrix<bf16>,
        (weight_gradient, accumulate): (Matrix<f32>, bool),
        partial: &Buffer<f32>,
    ) -> Result<(), CudaError> {
        let (hidden, rows) = (self.shape().hidden, input.rows);
        let blocks = self.norm_blocks().min(rows);
        let partial = partial.head(blocks, hidden);
        assert!(
            scale.width == rows && output_gradient.rows == rows && input_gradient.rows == rows,
            "rows of a norm"
        );
        assert!(map.is_none_or(|map| map.width == rows), "map of a norm");
        if map.is_none() {
            for matrix in [extra, added].into_iter().flatten() {
                assert_eq!(matrix.rows, rows, "rows of what is added to a norm");
            }
        }
        for width in
            [input.width, weight.width, output_gradient.width, input_gradient.width, weight_gradient.width]
        {
            assert_eq!(width, hidden, "width of a norm");
        }
        self.launch(
            "rms_norm_backward",
            ([blocks, 1, 1], THREADS, 0),
            &[
                address(input),
                int(input.stride),
                address(output_gradient),
                int(output_gradient.stride),
                optional(extra),
                stride_of(extra),
                optional(added),
                stride_of(added),
                optional(map),
                address(scale),
                address(weight),
                address(input_gradient),
                int(input_gradient.stride),
                address(partial),
                int(rows),
            ],
        )?;
        self.reduce_columns(partial, None, weight_gradient, accumulate)
    }

    fn reduce_columns(
        &self,
        partial: Matrix<f32>,
        divisor: Option<Matrix<f32>>,
        output: Matrix<f32>,
        accumulate: bool,
    ) -> Result<(), CudaError> {
        self.launch(
            "reduce_columns",
            ([partial.width.div_ceil(32), 1, 1], 1024, 0),
            &[
                address(partial),
                int(partial.rows),
                int(partial.width),
                optional(divisor),
                address(output),
                int(usize::from(accumulate)),
            ],
        )
    }

    /// The gradient of a norm's weight whose output feeds a product with `matrix` and whose input is frozen, out of the
    /// gradient of `matrix`: sum of matrix * matrix_gradient over each column, over the weight. `partial` is scratch.
    pub fn frozen_norm_gradient(
        &self,
        matrix: Matrix<bf16>,
        matrix_gradient: Matrix<f32>,
        weight: Matrix<f32>,
        weight_gradient: Matrix<f32>,
        partial: &Buffer<f32>,
    ) -> Result<(), CudaError> {
        let width = matrix.width;
        assert!(
            matrix_gradient.width == width && weight.width == width && weight_gradient.width == width,
            "width of a norm's product"
        );
        assert_eq!(matrix.rows, matrix_gradient.rows, "rows of a norm's product");
        let partial = partial.head(SLICES, width);
        self.launch(
            "column_products",
            ([width.div_ceil(2 * THREADS), SLICES, 1], THREADS, 0),
            &[
                address(matrix),
                int(matrix.stride),
                address(matrix_gradient),
                int(matrix_gradient.stride),
                int(matrix.rows),
                int(width),
                address(partial),
            ],
        )?;
        self.reduce_columns(partial, Some(weight), weight_gradient, false)
    }

    /// Floats of scratch that the norms' gradients need.
    pub fn norm_scratch(&self) -> usize {
        self.shape().hidden * self.norm_blocks().max(3 * SLICES)
    }

    /// output[i] = input[map[i]]; each entry of the map is a row of the input.
    pub fn gather_rows(
        &self,
        input: Matrix<bf16>,
        map: Matrix<i32>,
        output: Matrix<bf16>,
    ) -> Result<(), CudaError> {
        assert!(map.width == output.rows && input.width == output.width, "shape of gathered rows");
        self.launch(
            "gather_rows",
            ([output.rows, 1, 1], THREADS, 0),
            &[
                address(input),
                int(input.stride),
                address(map),
                address(output),
                int(output.stride),
                int(output.width),
            ],
        )
    }

    /// Turns `heads` heads of each row in place to `positions` + `offset`, or back. `table`: cosine and sine of
    /// [positions, D / 2].
    pub fn rope(
        &self,
        rows: Matrix<bf16>,
        heads: usize,
        (positions, offset): (Matrix<i32>, usize),
        table: &Buffer<f32>,
        back: bool,
    ) -> Result<(), CudaError> {
        assert!(heads * self.shape().head_dim <= rows.width && positions.width == rows.rows, "heads to turn");
        self.launch(
            "rope",
            ([rows.rows, 1, 1], THREADS, 0),
            &[
                address(rows),
                int(rows.stride),
                int(heads),
                address(positions),
                int(offset),
                address(table.head(1, table.len())),
                float(if back { -1.0 } else { 1.0 }),
            ],
        )
    }

    /// output = silu(gate) * up; a row of `gate_up` is the gate, then up. [rows, 2I] to [rows, I].
    pub fn silu_mul(&self, gate_up: Matrix<bf16>, output: Matrix<bf16>) -> Result<(), CudaError> {
        let inner = self.shape().inner;
        assert!(gate_up.stride == 2 * inner && output.stride == inner && gate_up.rows == output.rows, "silu");
        self.launch(
            "silu_mul",
            ([inner.div_ceil(THREADS * 8), output.rows, 1], THREADS, 0),
            &[address(gate_up), address(output)],
        )
    }

    /// Replaces `gate_up` by its gradient, given that of [`Device::silu_mul`]'s output.
    pub fn silu_mul_backward(&self, gate_up: Matrix<bf16>, gradient: Matrix<bf16>) -> Result<(), CudaError> {
        let inner = self.shape().inner;
        assert!(
            gate_up.stride == 2 * inner && gradient.stride == inner && gate_up.rows == gradient.rows,
            "silu"
        );
        self.launch(
            "silu_mul_backward",
            ([inner.div_ceil(THREADS * 8), gradient.rows, 1], THREADS, 0),
            &[address(gate_up), address(gradient)],
        )
    }

    fn check(&self, attention: &Attention) -> f32 {
        let shape = self.shape();
        let (rows, size) = (attention.steps * attention.chains, shape.head_dim);
        let qkv = attention.qkv;
        assert!(qkv.rows == rows && qkv.stride == (shape.heads + 2 * shape.key_heads) * size, "qkv");
        assert!(attention.output.rows == rows && attention.output.stride == shape.heads * size, "attended");
        assert_eq!(attention.log_sums.width, rows * shape.heads, "log-sums");
        assert!(
            attention.keys.width == shape.key_heads * size
                && attention.values.width == attention.keys.width
                && attention.values.stride == attention.keys.stride,
            "keys and values"
        );
        1.0 / (size as f32).sqrt()
    }

    fn tile_bytes(&self, tiles: usize) -> usize {
        tiles * TILE * (self.shape().head_dim + 8) * 2
    }

    /// The output and the log-sums of one step.
    pub fn attention_forward(&self, attention: &Attention, step: usize) -> Result<(), CudaError> {
        let scale = self.check(attention);
        self.launch(
            "attention_forward",
            ([attention.query_tiles.rows, self.shape().heads, 1], ATTENTION_THREADS, self.tile_bytes(3)),
            &[
                address(attention.query_tiles),
                address(attention.qkv),
                int(attention.chains),
                int(step),
                address(attention.keys),
                address(attention.values),
                int(attention.keys.stride),
                address(attention.output),
                address(attention.log_sums),
                float(scale),
            ],
        )
    }

    /// The gradient of one step's queries, into `gradient` (laid out as `qkv`), from `slopes`, that of the output. Fills
    /// the step's `means` (laid out as `log_sums`), which the gradients of keys read.
    pub fn attention_query_gradient(
        &self,
        attention: &Attention,
        step: usize,
        slopes: Matrix<bf16>,
        means: Matrix<f32>,
        gradient: Matrix<bf16>,
    ) -> Result<(), CudaError> {
        let scale = self.check(attention);
        self.check_gradients(attention, slopes, means, gradient);
        self.launch(
            "attention_query_gradient",
            ([attention.query_tiles.rows, self.shape().heads, 1], ATTENTION_THREADS, self.tile_bytes(4)),
            &[
                address(attention.query_tiles),
                address(attention.qkv),
                int(attention.chains),
                int(step),
                address(attention.keys),
                address(attention.values),
                int(attention.keys.stride),
                address(attention.output),
                address(slopes),
                address(attention.log_sums),
                address(means),
                address(gradient),
                float(scale),
            ],
        )
    }

    /// The gradients of the chains' own keys and values of step `slot` >= 1, into `gradient`; the query gradients of this
    /// and all later steps are there.
    pub fn attention_own_gradient(
        &self,
        attention: &Attention,
        slot: usize,
        slopes: Matrix<bf16>,
        means: Matrix<f32>,
        gradient: Matrix<bf16>,
    ) -> Result<(), CudaError> {
        let scale = self.check(attention);
        self.check_gradients(attention, slopes, means, gradient);
        let warps = attention.chains * self.shape().key_heads;
        self.launch(
            "attention_own_gradient",
            ([warps.div_ceil(8), 1, 1], THREADS, 0),
            &[
                address(attention.qkv),
                int(attention.chains),
                int(slot),
                int(attention.steps),
                address(slopes),
                address(attention.log_sums),
                address(means),
                address(gradient),
                float(scale),
            ],
        )
    }

    /// The gradients of step 0's keys and values, from the queries of all steps.
    pub fn attention_key_gradient(
        &self,
        attention: &Attention,
        slopes: Matrix<bf16>,
        means: Matrix<f32>,
        key_gradient: Matrix<bf16>,
        value_gradient: Matrix<bf16>,
    ) -> Result<(), CudaError> {
        let scale = self.check(attention);
        assert_eq!(key_gradient.stride, value_gradient.stride, "strides of the gradients of keys and values");
        assert!(
            key_gradient.rows == attention.keys.rows && value_gradient.rows == attention.keys.rows,
            "keys"
        );
        let parts = if self.shape().head_dim > 128 { 2 } else { 1 };
        self.launch(
            "attention_key_gradient",
            (
                [attention.key_tiles.rows, self.shape().key_heads, parts],
                ATTENTION_THREADS,
                self.tile_bytes(6),
            ),
            &[
                address(attention.key_tiles),
                address(attention.qkv),
                int(attention.chains),
                int(attention.steps),
                address(attention.keys),
                address(attention.values),
                int(attention.keys.stride),
                address(slopes),
                address(attention.log_sums),
                address(means),
                address(key_gradient),
                address(value_gradient),
                int(key_gradient.stride),
                float(scale),
            ],
        )
    }

    fn check_gradients(
        &self,
        attention: &Attention,
        slopes: Matrix<bf16>,
        means: Matrix<f32>,
        gradient: Matrix<bf16>,
    ) {
        assert!(slopes.rows == attention.output.rows && slopes.stride == attention.output.stride, "slopes");
        assert_eq!(means.width, attention.log_sums.width, "means");
        assert!(gradient.rows == attention.qkv.rows && gradient.stride == attention.qkv.stride, "gradients");
    }

    /// output[t] = the sum over steps k of row t - k of step k of `gradient`, which is laid out as `qkv`; keys and values
    /// from step `first_key_step` on.
    pub fn sum_shifted(
        &self,
        gradient: Matrix<bf16>,
        output: Matrix<bf16>,
        first_key_step: usize,
    ) -> Result<(), CudaError> {
        let shape = self.shape();
        let width = (shape.heads + 2 * shape.key_heads) * shape.head_dim;
        assert!(gradient.stride == width && output.stride == width, "width of a sum over steps");
        assert!(output.rows > 0 && gradient.rows.is_multiple_of(output.rows), "rows of a sum over steps");
        self.launch(
            "sum_shifted",
            ([output.rows, 1, 1], THREADS, 0),
            &[
                address(gradient),
                int(output.rows),
                int(gradient.rows / output.rows),
                int(first_key_step),
                address(output),
            ],
        )
    }

    /// Log-sum-exp of each row of target logits, for [`Device::loss`] alone.
    pub fn target_log_sums(&self, logits: Matrix<bf16>, log_sums: Matrix<f32>) -> Result<(), CudaError> {
        assert!(logits.stride == self.shape().vocabulary && log_sums.width >= logits.rows, "target logits");
        self.launch(
            "target_log_sums",
            ([logits.rows, 1, 1], LOSS_THREADS, 0),
            &[address(logits), address(log_sums)],
        )
    }

    /// Row i of `logits` is chain `first` + i of a step; its target is row `first` + i + step - `start` of `targets`.
    /// Fills the chains' losses (in nats) and best tokens, and replaces the logits by `weight` times the loss's gradient,
    /// where that is wanted. A chain whose `ends` is not beyond its target weighs nothing; its target is not read.
    #[allow(clippy::too_many_arguments)]
    pub fn loss(
        &self,
        logits: Matrix<bf16>,
        (targets, log_sums): (Matrix<bf16>, Matrix<f32>),
        ends: Matrix<i32>,
        (first, step, start): (usize, usize, usize),
        weight: Option<f32>,
        losses: Matrix<f32>,
        best: Matrix<u32>,
    ) -> Result<(), CudaError> {
        let vocabulary = self.shape().vocabulary;
        assert!(logits.stride == vocabulary && targets.stride == vocabulary, "logits");
        assert!(first + logits.rows <= ends.width.min(losses.width).min(best.width), "chains of the loss");
        assert!(first + step >= start && log_sums.width >= targets.rows, "targets of the loss");
        self.launch(
            "loss_and_gradient",
            ([logits.rows, 1, 1], LOSS_THREADS, 0),
            &[
                address(logits),
                address(targets),
                address(log_sums),
                address(ends),
                int(first),
                int(step),
                int(start),
                float(weight.unwrap_or(0.0)),
                address(losses),
                address(best),
                int(usize::from(weight.is_some())),
            ],
        )
    }

    /// The joint norm of all gradients into `clip[0]`, the factor that brings it to at most `limit` into `clip[1]`.
    /// `partial` is scratch of [`Device::norm_scratch`] floats.
    pub fn gradient_norm(
        &self,
        gradients: &Buffer<f32>,
        limit: f32,
        partial: &Buffer<f32>,
        clip: &Buffer<f32>,
    ) -> Result<(), CudaError> {
        assert!(gradients.len().is_multiple_of(4) && clip.len() >= 2, "flat gradients");
        let blocks = (self.multiprocessors() * 8).min(partial.len());
        let partial = partial.head(1, blocks);
        self.launch(
            "square_sums",
            ([blocks, 1, 1], THREADS, 0),
            &[
                address(gradients.head(1, gradients.len())),
                Argument::Long(gradients.len() as i64),
                address(partial),
            ],
        )?;
        self.launch(
            "clip_factor",
            ([1, 1, 1], 32, 0),
            &[address(partial), int(blocks), float(limit), address(clip.head(1, 2))],
        )
    }

    /// One update of all weights and of their bf16 copies, with gradients scaled by `clip`. The first `decayed` are
    /// matrices. Nothing changes where the gradients' norm is not finite.
    pub fn adamw(
        &self,
        (weights, copies, gradients): (&Buffer<f32>, &Buffer<bf16>, &Buffer<f32>),
        (first, second): (&Buffer<f32>, &Buffer<f32>),
        decayed: usize,
        clip: &Buffer<f32>,
        update: Update,
    ) -> Result<(), CudaError> {
        let count = weights.len();
        for length in [copies.len(), gradients.len(), first.len(), second.len()] {
            assert_eq!(length, count, "flat parameters");
        }
        assert!(count.is_multiple_of(4) && decayed.is_multiple_of(4), "flat parameters");
        self.launch(
            "adamw",
            ([self.multiprocessors() * 8, 1, 1], THREADS, 0),
            &[
                address(weights.head(1, count)),
                address(copies.head(1, count)),
                address(gradients.head(1, count)),
                address(first.head(1, count)),
                address(second.head(1, count)),
                Argument::Long(count as i64),
                Argument::Long(decayed as i64),
                address(clip.head(1, 2)),
                float(update.beta1),
                float(update.beta2),
                float(update.rate),
                float(update.second_scale),
                float(update.epsilon),
                float(update.keep),
            ],
        )
    }

    /// bf16 copies of f32 values.
    pub fn round_copies(&self, values: &Buffer<f32>, copies: &Buffer<bf16>) -> Result<(), CudaError> {
        assert!(values.len() == copies.len() && values.len().is_multiple_of(4), "copies");
        self.launch(
            "round_copies",
            ([self.multiprocessors() * 8, 1, 1], THREADS, 0),
            &[
                address(values.head(1, values.len())),
                address(copies.head(1, copies.len())),
                Argument::Long(values.len() as i64),
            ],
        )
    }
}
