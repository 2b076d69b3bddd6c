//! The training step on a GPU: the same loss and gradients as [`super::Step`], within bf16's rounding.
//!
//! What makes it fast beside plain products: weight gradients of all steps of the unroll are one product each, over the
//! steps' rows together; a token's embedding meets the attention's matrices once, whatever the step that embeds it (step k of
//! chain c embeds what step 0 of chain c + k does); frozen inputs (embedding, aux states) get no gradient at all, their norms' weights have theirs
//! from the gradient of the matrix behind (`frozen_norm_gradient`); gradients of step 0's keys come from all steps' queries
//! in one pass.

mod backend;
mod batch;
mod buffers;
mod parameters;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::compute::RopeTable;
use crate::compute::cuda::{Attention, Buffer, Device, Form, Matrix, Shape, Update};
use crate::head::{HeadConfig, HeadTensors};

use super::optimizer::{AdamW, AdamWOptions};
use super::tensors::{check_shapes, zeros};
use super::{Document, DraftTarget, StepReport, TrainError};

pub(super) use backend::CudaBackend;
pub use batch::CudaBatch;
use buffers::Buffers;
use parameters::Parameters;

/// The name of the norm behind the last layer.
const FINAL_NORM: &str = "norm";

/// A head on a GPU with its gradients, its optimizer and what its verifier gives.
pub struct CudaStep {
    device: Device,
    config: HeadConfig,
    steps: usize,
    decay: f64,
    options: AdamWOptions,
    updates: u64,
    /// Target rows of one chunk of logits.
    loss_rows: usize,
    draft_ids: Vec<u32>,
    parameters: Parameters,
    /// Where `lm_head` is not trained.
    frozen_head: Option<Buffer<bf16>>,
    target_head: Buffer<bf16>,
    target_norm: Buffer<f32>,
    target_eps: f32,
    embed: Buffer<bf16>,
    rope: RopeTable<f32>,
    /// Cosine and sine, [positions, D / 2, 2].
    rope_table: Buffer<f32>,
    rope_positions: usize,
    buffers: Buffers,
    /// Gradient norm and clipping factor.
    clip: Buffer<f32>,
}

/// Sizes of the batch at hand.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    chains: usize,
    steps: usize,
    hidden: usize,
    inner: usize,
    query_width: usize,
    key_width: usize,
}

impl Sizes {
    fn qkv_width(&self) -> usize {
        self.query_width + 2 * self.key_width
    }
}

impl CudaStep {
    /// Puts a head on GPU `ordinal`. `steps` (S) >= 1 is the length of the unroll, `decay` the weight of each further step.
    pub fn new(
        ordinal: usize,
        config: &HeadConfig,
        (steps, decay): (usize, f64),
        target: &DraftTarget,
        weights: &HeadTensors<f32>,
        train_lm_head: bool,
        options: AdamWOptions,
    ) -> Result<Self, TrainError> {
        check_shapes(config, weights)?;
        if steps == 0 {
            return Err(TrainError::Config("steps 0 must be at least 1".into()));
        }
        let shape = Shape {
            hidden: config.hidden_size,
            inner: config.intermediate_size,
            heads: config.num_attention_heads,
            key_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            vocabulary: config.draft_vocab_size,
        };
        let device = Device::open(ordinal, shape)?;
        let parameters = Parameters::new(&device, weights, train_lm_head)?;
        let frozen_head = if train_lm_head { None } else { Some(device.upload(&rounded(&weights.lm_head))?) };
        Ok(Self {
            config: config.clone(),
            steps,
            decay,
            options,
            updates: 0,
            loss_rows: buffers::loss_chunk(config.draft_vocab_size),
            draft_ids: target.draft_ids.clone(),
            parameters,
            frozen_head,
            target_head: device.upload(&rounded(&target.head_rows))?,
            target_norm: device.upload(&target.norm)?,
            target_eps: target.eps as f32,
            embed: device.upload(&rounded(target.embed))?,
            rope: RopeTable::new(config.head_dim, config.rope.theta, config.rope.scaling.as_ref())?,
            rope_table: device.zeros(0)?,
            rope_positions: 0,
            buffers: Buffers::new(&device)?,
            clip: device.zeros(2)?,
            device,
        })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Target rows of one chunk of logits, at most what the GPU's memory was planned for.
    pub fn set_loss_rows(&mut self, rows: usize) {
        self.loss_rows = rows.clamp(1, buffers::loss_chunk(self.config.draft_vocab_size));
    }

    /// Documents on the GPU.
    pub fn batch(&self, documents: &[Document]) -> Result<CudaBatch, TrainError> {
        CudaBatch::new(&self.device, &self.config, self.steps, documents)
    }

    /// The trained weights; a frozen `lm_head` is 0 there.
    pub fn weights(&self) -> Result<HeadTensors<f32>, TrainError> {
        let mut weights = zeros(&self.config);
        self.parameters.download(&self.device, &self.parameters.weights, &mut weights)?;
        Ok(weights)
    }

    /// The gradients of the last batch, before clipping.
    pub fn gradients(&self) -> Result<HeadTensors<f32>, TrainError> {
        let mut gradients = zeros(&self.config);
        self.parameters.download(&self.device, &self.parameters.gradients, &mut gradients)?;
        Ok(gradients)
    }

    /// Takes over an optimizer's moments and its count of updates.
    pub fn set_optimizer(&mut self, optimizer: &AdamW) -> Result<(), TrainError> {
        check_shapes(&self.config, &optimizer.first)?;
        check_shapes(&self.config, &optimizer.second)?;
        self.parameters.upload(&self.device, &optimizer.first, &self.parameters.first)?;
        self.parameters.upload(&self.device, &optimizer.second, &self.parameters.second)?;
        self.options = optimizer.options.clone();
        self.updates = optimizer.updates;
        Ok(())
    }

    /// Waits; writes weights and moments over those given. A frozen `lm_head` is left alone.
    pub fn save(&self, weights: &mut HeadTensors<f32>, optimizer: &mut AdamW) -> Result<(), TrainError> {
        let parameters = &self.parameters;
        parameters.download(&self.device, &parameters.weights, weights)?;
        parameters.download(&self.device, &parameters.first, &mut optimizer.first)?;
        parameters.download(&self.device, &parameters.second, &mut optimizer.second)?;
        optimizer.updates = self.updates;
        Ok(())
    }

    /// Loss of a batch; returns before it is computed.
    pub fn forward_only(&mut self, batch: &CudaBatch) -> Result<(), TrainError> {
        if batch.chains == 0 {
            return Ok(());
        }
        self.prepare(batch)?;
        let sizes = self.sizes(batch);
        self.forward(batch, sizes)?;
        self.losses(batch, sizes, false)
    }

    /// Loss and gradients of a batch; returns before they are computed.
    pub fn forward_backward(&mut self, batch: &CudaBatch) -> Result<(), TrainError> {
        if batch.chains == 0 {
            let gradients = &self.parameters.gradients;
            return Ok(self.device.clear(gradients.head(1, gradients.len()))?);
        }
        self.prepare(batch)?;
        let sizes = self.sizes(batch);
        self.forward(batch, sizes)?;
        self.losses(batch, sizes, true)?;
        self.backward(batch, sizes)?;
        self.weight_gradients(batch, sizes)
    }

    /// Measures the gradients, so that the next update scales them to a joint norm of at most `limit`; returns before it
    /// is done.
    pub fn clip(&mut self, limit: f64) -> Result<(), TrainError> {
        let scratch = &self.buffers.partial;
        self.device.gradient_norm(&self.parameters.gradients, limit as f32, scratch, &self.clip)?;
        Ok(())
    }

    /// One update by the gradients, clipped; returns before it is done.
    pub fn update(&mut self, learning_rate: f64) -> Result<(), TrainError> {
        self.updates += 1;
        let power = i32::try_from(self.updates).unwrap_or(i32::MAX);
        let options = &self.options;
        let parameters = &self.parameters;
        self.device.adamw(
            (&parameters.weights, &parameters.copies, &parameters.gradients),
            (&parameters.first, &parameters.second),
            parameters.matrices,
            &self.clip,
            Update {
                beta1: options.beta1 as f32,
                beta2: options.beta2 as f32,
                rate: (learning_rate / (1.0 - options.beta1.powi(power))) as f32,
                second_scale: (1.0 / (1.0 - options.beta2.powi(power))) as f32,
                epsilon: options.epsilon as f32,
                keep: (1.0 - learning_rate * options.weight_decay) as f32,
            },
        )?;
        Ok(())
    }

    /// Waits; the joint norm of the gradients when they were last clipped, before it.
    pub fn gradient_norm(&self) -> Result<f64, TrainError> {
        Ok(f64::from(self.device.copy_out(self.clip.head(1, 2))?[0]))
    }

    /// Waits; what the last step saw of this batch.
    pub fn report(&self, batch: &CudaBatch) -> Result<StepReport, TrainError> {
        let (chains, steps) = (batch.chains, self.steps);
        let mut report = StepReport {
            tokens: batch.tokens,
            supervised: batch.supervised.clone(),
            correct: vec![0; steps],
            step_losses: vec![0.0; steps],
            ..StepReport::default()
        };
        if chains == 0 {
            return Ok(report);
        }
        let losses = self.device.copy_out(self.buffers.losses.head(steps, chains))?;
        for step in 0..steps {
            let sum: f64 =
                losses[step * chains..(step + 1) * chains].iter().map(|loss| f64::from(*loss)).sum();
            if batch.supervised[step] > 0 {
                report.step_losses[step] = sum / batch.supervised[step] as f64;
            }
            report.loss += self.decay.powi(step as i32) * report.step_losses[step];
        }
        for hits in self.hits(batch)? {
            for chain in hits.chunks(steps) {
                for (step, _) in chain.iter().enumerate().take_while(|(_, hit)| **hit) {
                    report.correct[step] += 1;
                }
            }
        }
        Ok(report)
    }

    /// Waits; for each document with chains, as [`super::Step::hits`] has it.
    pub fn hits(&self, batch: &CudaBatch) -> Result<Vec<Vec<bool>>, TrainError> {
        let (chains, steps) = (batch.chains, self.steps);
        if chains == 0 {
            return Ok(Vec::new());
        }
        let best = self.device.copy_out(self.buffers.best.head(steps, chains))?;
        let mut list = Vec::new();
        for document in batch.host_ends.chunk_by(|a, b| a == b) {
            let end = document[0];
            let mut hits = Vec::with_capacity(document.len() * steps);
            for chain in end - document.len()..end {
                for step in 0..steps {
                    // Step k of chain c is about the same token as step 0 of chain c + k. Where the logits are no numbers,
                    // the best token is none.
                    let token = self.draft_ids.get(best[step * chains + chain] as usize);
                    let is_hit = chain + step < end && token == batch.labels.get(chain + step);
                    hits.push(is_hit);
                }
            }
            list.push(hits);
        }
        Ok(list)
    }

    fn sizes(&self, batch: &CudaBatch) -> Sizes {
        Sizes {
            rows: batch.rows,
            chains: batch.chains,
            steps: self.steps,
            hidden: self.config.hidden_size,
            inner: self.config.intermediate_size,
            query_width: self.config.num_attention_heads * self.config.head_dim,
            key_width: self.config.num_key_value_heads * self.config.head_dim,
        }
    }

    /// Makes room for the batch.
    fn prepare(&mut self, batch: &CudaBatch) -> Result<(), TrainError> {
        let sizes = self.sizes(batch);
        self.buffers.reserve(&self.device, sizes, &self.config)?;
        if self.rope_positions < batch.positions {
            let half = self.config.head_dim / 2;
            self.rope.reserve(batch.positions);
            // A vector of ones, then zeros, turns into the cosines, then the sines.
            let mut source = vec![0.0; 2 * half];
            source[..half].fill(1.0);
            let mut turned = vec![0.0; 2 * half];
            let mut table = Vec::with_capacity(batch.positions * 2 * half);
            for position in 0..batch.positions {
                self.rope.turn(&mut turned, &source, position);
                table.extend((0..half).flat_map(|i| [turned[i], turned[i + half]]));
            }
            self.rope_table = self.device.upload(&table)?;
            self.rope_positions = batch.positions;
        }
        Ok(())
    }

    fn lm_head(&self, sizes: Sizes) -> Matrix<'_, bf16> {
        let rows = self.config.draft_vocab_size;
        match &self.frozen_head {
            Some(head) => head.head(rows, sizes.hidden),
            None => self.parameters.matrix("lm_head", rows, sizes.hidden),
        }
    }

    fn attention<'a>(&'a self, batch: &'a CudaBatch, sizes: Sizes) -> Attention<'a> {
        let (qkv, buffers) = (self.buffers.qkv(sizes), &self.buffers);
        let (all, key_width) = (sizes.steps * sizes.chains, sizes.key_width);
        let (keys, values) = if batch.is_dense() {
            let first = qkv.rows_from(0, sizes.chains);
            (
                first.columns_from(sizes.query_width, key_width),
                first.columns_from(sizes.query_width + key_width, key_width),
            )
        } else {
            let both = buffers.row_keys.head(sizes.rows, 2 * key_width);
            (both.columns_from(0, key_width), both.columns_from(key_width, key_width))
        };
        Attention {
            query_tiles: batch.query_tiles.head(batch.query_tile_count, 4),
            key_tiles: batch.key_tiles.head(batch.key_tile_count, 6),
            qkv,
            keys,
            values,
            output: buffers.attended.head(all, sizes.query_width),
            log_sums: buffers.log_sums.head(1, all * self.config.num_attention_heads),
            chains: sizes.chains,
            steps: sizes.steps,
        }
    }

    /// The hidden state that a step starts from. [N, H]
    fn hidden(&self, batch: &CudaBatch, sizes: Sizes, step: usize) -> Matrix<'_, bf16> {
        let buffers = &self.buffers;
        if step > 0 {
            let source = if self.config.norm_output { &buffers.output } else { &buffers.last };
            return buffers.step(source, sizes, step - 1, sizes.hidden);
        }
        let source = if batch.is_dense() { &buffers.fused } else { &buffers.first_hidden };
        source.head(sizes.chains, sizes.hidden)
    }

    /// The input of fc: aux states, normed or as they are.
    fn fc_input<'a>(&'a self, batch: &'a CudaBatch, sizes: Sizes) -> Matrix<'a, bf16> {
        let source = if self.config.fc_norm { &self.buffers.aux_normed } else { &batch.aux };
        source.head(sizes.rows, 3 * sizes.hidden)
    }

    /// A step's hidden state, normed. [N, H]
    fn hidden_normed(&self, sizes: Sizes, step: usize) -> Matrix<'_, bf16> {
        self.buffers.step(&self.buffers.hidden_normed, sizes, step, sizes.hidden)
    }

    /// The unroll, up to the normed outputs of each step.
    fn forward(&self, batch: &CudaBatch, sizes: Sizes) -> Result<(), TrainError> {
        let (device, buffers, parameters) = (&self.device, &self.buffers, &self.parameters);
        let Sizes { rows, chains, hidden: h, inner, query_width, key_width, .. } = sizes;
        let eps = self.config.rms_norm_eps as f32;
        let (heads, key_heads) = (self.config.num_attention_heads, self.config.num_key_value_heads);
        let norm = |name| parameters.norm(name, h);
        let dense = batch.is_dense();

        let wanted = buffers.wanted.head(chains, h);
        device.rms_norm(
            batch.last_states.head(chains, h),
            self.target_norm.head(1, h),
            self.target_eps,
            wanted,
            None,
        )?;
        if self.config.fc_norm {
            let (from, to) = (batch.aux.head(rows, 3 * h), self.fc_input(batch, sizes));
            for (i, name) in ["fc_norm.0", "fc_norm.1", "fc_norm.2"].into_iter().enumerate() {
                device.rms_norm(
                    from.columns_from(i * h, h),
                    norm(name),
                    eps,
                    to.columns_from(i * h, h),
                    None,
                )?;
            }
        }
        let fused = buffers.fused.head(rows, h);
        device.product(
            Form::Abt,
            self.fc_input(batch, sizes),
            parameters.matrix("fc", h, 3 * h),
            None,
            fused,
        )?;
        let attention = self.attention(batch, sizes);
        let all_heads = parameters.matrix("q_proj", sizes.qkv_width(), 2 * h);
        let positions = batch.chain_positions.head(1, chains);
        let embedded = buffers.embedded.head(chains, h);
        let tokens = batch.row_tokens.head(1, rows);
        let scale = buffers.fused_scale.head(1, rows);
        if dense {
            device.embed_norm(tokens, &self.embed, norm("input_layernorm"), eps, embedded)?;
            device.rms_norm(fused, norm("hidden_norm"), eps, self.hidden_normed(sizes, 0), Some(scale))?;
        } else {
            let joined = buffers.joined_rows.head(rows, 2 * h);
            let (left, right) = (joined.columns_from(0, h), joined.columns_from(h, h));
            device.embed_norm(tokens, &self.embed, norm("input_layernorm"), eps, left)?;
            device.rms_norm(fused, norm("hidden_norm"), eps, right, Some(scale))?;
            let map = batch.row_of_chain.head(1, chains);
            device.gather_rows(left, map, embedded)?;
            device.gather_rows(right, map, self.hidden_normed(sizes, 0))?;
            device.gather_rows(fused, map, buffers.first_hidden.head(chains, h))?;
            let keys = buffers.row_keys.head(rows, 2 * key_width);
            let matrix = parameters.matrix("k_proj", 2 * key_width, 2 * h);
            device.product(Form::Abt, joined, matrix, None, keys)?;
            let row_positions = batch.row_positions.head(1, rows);
            device.rope(keys, key_heads, (row_positions, 0), &self.rope_table, false)?;
        }
        let (embedding_half, hidden_half) = (all_heads.columns_from(0, h), all_heads.columns_from(h, h));
        // Chain c + k of the last rows does not exist, or is another document's: nothing is supervised there.
        let from_embedding = buffers.embedded_qkv.head(chains + sizes.steps - 1, sizes.qkv_width());
        device.product(Form::Abt, embedded, embedding_half, None, from_embedding.rows_from(0, chains))?;
        for step in 0..sizes.steps {
            let hidden = self.hidden(batch, sizes, step);
            let hidden_normed = self.hidden_normed(sizes, step);
            if step > 0 {
                let scale = buffers.scale(&buffers.hidden_scale, sizes, step);
                device.rms_norm(hidden, norm("hidden_norm"), eps, hidden_normed, Some(scale))?;
            }
            let added = from_embedding.rows_from(step, chains);
            let qkv = attention.qkv.rows_from(step * chains, chains);
            if step > 0 || dense {
                device.product(Form::Abt, hidden_normed, hidden_half, Some(added), qkv)?;
                device.rope(qkv, heads + key_heads, (positions, step), &self.rope_table, false)?;
            } else {
                let queries = qkv.columns_from(0, query_width);
                let added = added.columns_from(0, query_width);
                let matrix = hidden_half.rows_from(0, query_width);
                device.product(Form::Abt, hidden_normed, matrix, Some(added), queries)?;
                device.rope(queries, heads, (positions, 0), &self.rope_table, false)?;
            }
            device.attention_forward(&attention, step)?;

            let residual = if self.config.norm_before_residual { hidden_normed } else { hidden };
            let middle = buffers.step(&buffers.middle, sizes, step, h);
            device.product(
                Form::Abt,
                attention.output.rows_from(step * chains, chains),
                parameters.matrix("o_proj", h, query_width),
                Some(residual),
                middle,
            )?;
            let normed = buffers.step(&buffers.normed, sizes, step, h);
            let scale = buffers.scale(&buffers.middle_scale, sizes, step);
            device.rms_norm(middle, norm("post_attention_layernorm"), eps, normed, Some(scale))?;
            let gate_up = buffers.step(&buffers.gate_up, sizes, step, 2 * inner);
            device.product(Form::Abt, normed, parameters.matrix("gate_proj", 2 * inner, h), None, gate_up)?;
            let activated = buffers.step(&buffers.activated, sizes, step, inner);
            device.silu_mul(gate_up, activated)?;
            let last = buffers.step(&buffers.last, sizes, step, h);
            let down = parameters.matrix("down_proj", h, inner);
            device.product(Form::Abt, activated, down, Some(middle), last)?;
            let output = buffers.step(&buffers.output, sizes, step, h);
            let scale = buffers.scale(&buffers.last_scale, sizes, step);
            device.rms_norm(last, norm(FINAL_NORM), eps, output, Some(scale))?;
        }
        Ok(())
    }

    /// Losses and best tokens, and the gradients of the normed outputs into `last_gradient`. Targets go in chunks, each
    /// used by all steps.
    fn losses(&self, batch: &CudaBatch, sizes: Sizes, wants_gradients: bool) -> Result<(), TrainError> {
        let (device, buffers) = (&self.device, &self.buffers);
        let (chains, h) = (sizes.chains, sizes.hidden);
        let vocabulary = self.config.draft_vocab_size;
        let chunk = self.loss_rows.min(chains);
        let head = self.lm_head(sizes);
        let target_head = self.target_head.head(vocabulary, h);
        let ends = batch.ends.head(1, chains);
        let mut accumulates = false;
        for start in (0..chains).step_by(chunk) {
            let end = chains.min(start + chunk);
            let targets = buffers.wide.head(end - start, vocabulary);
            let log_sums = buffers.target_log_sums.head(1, end - start);
            let wanted = buffers.wanted.head(chains, h).rows_from(start, end - start);
            device.product(Form::Abt, wanted, target_head, None, targets)?;
            device.target_log_sums(targets, log_sums)?;
            for step in 0..sizes.steps {
                // Chains whose target at this step lies in the chunk. The last chunk takes those without a target too,
                // which get gradients of 0.
                let first = start.saturating_sub(step);
                let last = if end == chains { chains } else { end.saturating_sub(step) };
                if first >= last {
                    continue;
                }
                let rows = last - first;
                let logits = buffers.wide.matrix(chunk * vocabulary, rows, vocabulary);
                let outputs = buffers.step(&buffers.output, sizes, step, h).rows_from(first, rows);
                device.product(Form::Abt, outputs, head, None, logits)?;
                let count = batch.supervised[step];
                let weight = if count == 0 { 0.0 } else { self.decay.powi(step as i32) / count as f64 };
                device.loss(
                    logits,
                    (targets, log_sums),
                    ends,
                    (first, step, start),
                    wants_gradients.then_some(weight as f32),
                    buffers.losses.head(sizes.steps, chains).rows_from(step, 1),
                    buffers.best.head(sizes.steps, chains).rows_from(step, 1),
                )?;
                if !wants_gradients {
                    continue;
                }
                let gradient = buffers.step(&buffers.last_gradient, sizes, step, h).rows_from(first, rows);
                device.product(Form::Ab, logits, head, None, gradient)?;
                if self.frozen_head.is_none() {
                    let into = self.parameters.gradient("lm_head", vocabulary, h);
                    device.product(Form::Atb, logits, outputs, accumulates.then_some(into), into)?;
                    accumulates = true;
                }
            }
        }
        Ok(())
    }

    /// The way back through the unroll, from the gradients of the normed outputs. Leaves what the weight gradients need.
    fn backward(&self, batch: &CudaBatch, sizes: Sizes) -> Result<(), TrainError> {
        let (device, buffers, parameters) = (&self.device, &self.buffers, &self.parameters);
        let Sizes { rows, chains, steps, hidden: h, inner, query_width, key_width, .. } = sizes;
        let (heads, key_heads) = (self.config.num_attention_heads, self.config.num_key_value_heads);
        let residual_is_normed = self.config.norm_before_residual;
        let norm = |name| parameters.norm(name, h);
        let norm_gradient = |name| parameters.gradient(name, 1, h);
        let dense = batch.is_dense();
        let attention = self.attention(batch, sizes);
        let qkv_gradient = buffers.qkv_gradient.head(steps * chains, sizes.qkv_width());
        let slopes = buffers.attended_gradient.head(steps * chains, query_width);
        let means = buffers.means.head(1, steps * chains * heads);
        let normed_gradient = buffers.normed_gradient.head(chains, h);
        let hidden_gradient = buffers.hidden_gradient.head(chains, h);
        // Of the half of the layer's input that is the hidden state: the embedding is frozen.
        let all_heads = parameters.matrix("q_proj", sizes.qkv_width(), 2 * h).columns_from(h, h);
        let positions = batch.chain_positions.head(1, chains);

        for step in (0..steps).rev() {
            let is_later = step + 1 < steps;
            let fed_back = is_later.then_some(hidden_gradient);
            let (extra, added) = if self.config.norm_output { (fed_back, None) } else { (None, fed_back) };
            let last_gradient = buffers.step(&buffers.last_gradient, sizes, step, h);
            let last = buffers.step(&buffers.last, sizes, step, h);
            device.rms_norm_backward(
                (last, buffers.scale(&buffers.last_scale, sizes, step), norm(FINAL_NORM)),
                last_gradient,
                extra,
                added,
                None,
                last_gradient,
                (norm_gradient(FINAL_NORM), is_later),
                &buffers.partial,
            )?;

            let wide = buffers.wide.head(chains, inner);
            device.product(Form::Ab, last_gradient, parameters.matrix("down_proj", h, inner), None, wide)?;
            let gate_up = buffers.step(&buffers.gate_up, sizes, step, 2 * inner);
            device.silu_mul_backward(gate_up, wide)?;
            let matrix = parameters.matrix("gate_proj", 2 * inner, h);
            device.product(Form::Ab, gate_up, matrix, None, normed_gradient)?;
            let middle_gradient = buffers.step(&buffers.middle_gradient, sizes, step, h);
            let middle = buffers.step(&buffers.middle, sizes, step, h);
            let scale = buffers.scale(&buffers.middle_scale, sizes, step);
            device.rms_norm_backward(
                (middle, scale, norm("post_attention_layernorm")),
                normed_gradient,
                None,
                Some(last_gradient),
                None,
                middle_gradient,
                (norm_gradient("post_attention_layernorm"), is_later),
                &buffers.partial,
            )?;

            let slope = slopes.rows_from(step * chains, chains);
            device.product(
                Form::Ab,
                middle_gradient,
                parameters.matrix("o_proj", h, query_width),
                None,
                slope,
            )?;
            device.attention_query_gradient(&attention, step, slopes, means, qkv_gradient)?;
            let now = qkv_gradient.rows_from(step * chains, chains);
            let normed_residual = residual_is_normed.then_some(middle_gradient);
            let plain_residual = (!residual_is_normed).then_some(middle_gradient);
            if step > 0 {
                device.attention_own_gradient(&attention, step, slopes, means, qkv_gradient)?;
                device.rope(now, heads + key_heads, (positions, step), &self.rope_table, true)?;
                device.product(Form::Ab, now, all_heads, normed_residual, normed_gradient)?;
                let scale = buffers.scale(&buffers.hidden_scale, sizes, step);
                device.rms_norm_backward(
                    (self.hidden(batch, sizes, step), scale, norm("hidden_norm")),
                    normed_gradient,
                    None,
                    plain_residual,
                    None,
                    hidden_gradient,
                    (norm_gradient("hidden_norm"), is_later),
                    &buffers.partial,
                )?;
                continue;
            }

            // Step 0: queries came from the chains' rows, keys and values from all rows.
            let (row_gradient, extra, map) = if dense {
                let keys = now.columns_from(query_width, key_width);
                let values = now.columns_from(query_width + key_width, key_width);
                device.attention_key_gradient(&attention, slopes, means, keys, values)?;
                device.rope(now, heads + key_heads, (positions, 0), &self.rope_table, true)?;
                device.product(Form::Ab, now, all_heads, normed_residual, normed_gradient)?;
                (normed_gradient, None, None)
            } else {
                let both = buffers.row_keys_gradient.head(rows, 2 * key_width);
                let (keys, values) =
                    (both.columns_from(0, key_width), both.columns_from(key_width, key_width));
                device.attention_key_gradient(&attention, slopes, means, keys, values)?;
                let queries = now.columns_from(0, query_width);
                device.rope(queries, heads, (positions, 0), &self.rope_table, true)?;
                device.rope(
                    both,
                    key_heads,
                    (batch.row_positions.head(1, rows), 0),
                    &self.rope_table,
                    true,
                )?;
                let query_rows = all_heads.rows_from(0, query_width);
                device.product(Form::Ab, queries, query_rows, normed_residual, normed_gradient)?;
                let from_keys = buffers.row_gradient.head(rows, h);
                let key_rows = all_heads.rows_from(query_width, 2 * key_width);
                device.product(Form::Ab, both, key_rows, None, from_keys)?;
                (from_keys, Some(normed_gradient), Some(batch.chain_of_row.head(1, rows)))
            };
            device.rms_norm_backward(
                (buffers.fused.head(rows, h), buffers.fused_scale.head(1, rows), norm("hidden_norm")),
                row_gradient,
                extra,
                plain_residual,
                map,
                buffers.fused_gradient.head(rows, h),
                (norm_gradient("hidden_norm"), is_later),
                &buffers.partial,
            )?;
        }
        Ok(())
    }

    /// The gradients of all matrices but `lm_head`, over all steps at once.
    fn weight_gradients(&self, batch: &CudaBatch, sizes: Sizes) -> Result<(), TrainError> {
        let (device, buffers, parameters) = (&self.device, &self.buffers, &self.parameters);
        let Sizes { rows, chains, steps, hidden: h, inner, query_width, key_width, .. } = sizes;
        let all = steps * chains;
        let down = parameters.gradient("down_proj", h, inner);
        let last_gradient = buffers.last_gradient.head(all, h);
        device.product(Form::Atb, last_gradient, buffers.activated.head(all, inner), None, down)?;
        let gate_up = parameters.gradient("gate_proj", 2 * inner, h);
        let normed = buffers.normed.head(all, h);
        device.product(Form::Atb, buffers.gate_up.head(all, 2 * inner), normed, None, gate_up)?;
        let output = parameters.gradient("o_proj", h, query_width);
        let attended = buffers.attended.head(all, query_width);
        device.product(Form::Atb, buffers.middle_gradient.head(all, h), attended, None, output)?;

        let heads = parameters.gradient("q_proj", sizes.qkv_width(), 2 * h);
        let qkv_gradient = buffers.qkv_gradient.head(all, sizes.qkv_width());
        let hidden_normed = buffers.hidden_normed.head(all, h);
        let embedded = buffers.embedded.head(chains, h);
        // What each embedding did at all steps; the products that it went into are no longer needed.
        let summed = buffers.embedded_qkv.head(chains, sizes.qkv_width());
        let (left, right) = (heads.columns_from(0, h), heads.columns_from(h, h));
        if batch.is_dense() {
            device.sum_shifted(qkv_gradient, summed, 0)?;
            device.product(Form::Atb, qkv_gradient, hidden_normed, None, right)?;
            device.product(Form::Atb, summed, embedded, None, left)?;
        } else {
            // Step 0's keys and values are those of all rows.
            device.sum_shifted(qkv_gradient, summed, 1)?;
            let queries = qkv_gradient.columns_from(0, query_width);
            device.product(Form::Atb, queries, hidden_normed, None, right.rows_from(0, query_width))?;
            let queries = summed.columns_from(0, query_width);
            device.product(Form::Atb, queries, embedded, None, left.rows_from(0, query_width))?;
            let (start, width) = (query_width, 2 * key_width);
            let row_keys = buffers.row_keys_gradient.head(rows, width);
            let joined = buffers.joined_rows.head(rows, 2 * h);
            device.product(Form::Atb, row_keys, joined, None, heads.rows_from(start, width))?;
            if steps > 1 {
                let later = all - chains;
                let keys = qkv_gradient.rows_from(chains, later).columns_from(start, width);
                let into = right.rows_from(start, width);
                device.product(Form::Atb, keys, hidden_normed.rows_from(chains, later), Some(into), into)?;
                let into = left.rows_from(start, width);
                device.product(Form::Atb, summed.columns_from(start, width), embedded, Some(into), into)?;
            }
        }
        let fc = parameters.gradient("fc", h, 3 * h);
        let fused_gradient = buffers.fused_gradient.head(rows, h);
        device.product(Form::Atb, fused_gradient, self.fc_input(batch, sizes), None, fc)?;

        device.frozen_norm_gradient(
            parameters.matrix("q_proj", sizes.qkv_width(), 2 * h).columns_from(0, h),
            heads.columns_from(0, h),
            parameters.norm("input_layernorm", h),
            parameters.gradient("input_layernorm", 1, h),
            &buffers.partial,
        )?;
        if self.config.fc_norm {
            device.frozen_norm_gradient(
                parameters.matrix("fc", h, 3 * h),
                fc,
                parameters.norm("fc_norm.0", 3 * h),
                parameters.gradient("fc_norm.0", 1, 3 * h),
                &buffers.partial,
            )?;
        }
        Ok(())
    }
}

fn rounded(values: &[f32]) -> Vec<bf16> {
    const BLOCK: usize = 1 << 16;
    let mut copies = vec![bf16::ZERO; values.len()];
    copies
        .par_chunks_mut(BLOCK)
        .zip(values.par_chunks(BLOCK))
        .for_each(|(to, from)| to.convert_from_f32_slice(from));
    copies
}
