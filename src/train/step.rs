//! One step: forward and backward of the head over a batch of packed documents.
//!
//! Only what the loss needs is computed: fc, keys and values of step 0 for all rows, all else for chains alone. Logits come
//! last, in chunks (see `loss`), which teacher forcing allows: no step waits for another's logits.

use std::borrow::Cow;

use crate::compute::{
    Real, RopeTable, add, product_ab, product_abt, product_atb, rms_norm, rms_norm_backward,
    rms_norm_weight_gradient, silu_mul, silu_mul_backward,
};
use crate::head::{HeadConfig, HeadTensors};

use super::attention::{
    self, Heads, KeyValueGradients, KeyValues, Rows, Span, Tiles, Turn, from_heads, to_heads,
};
use super::loss::{self, LossBuffers, LossGradients, LossInput, LossOutput, ensure};
use super::tensors::{check_shapes, named_mut};
use super::{Document, DraftTarget, TrainError};

/// What a step, or an evaluation, saw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// The sum over steps of decay^k times `step_losses[k]`, in nats.
    pub loss: f64,
    /// Mean KL divergence of each step; 0 where nothing was supervised.
    pub step_losses: Vec<f64>,
    /// Supervised positions of each step.
    pub supervised: Vec<u64>,
    /// Chains right at every step up to this one, against the token that the model really said.
    pub correct: Vec<u64>,
    /// Tokens of all documents.
    pub tokens: u64,
}

/// Buffers of one step of the unroll; [N, ..] unless said otherwise.
#[derive(Default)]
struct Unrolled<T> {
    /// The hidden state that the step starts from. [N, H]
    hidden: Vec<T>,
    hidden_scale: Vec<T>,
    /// Normed embedding and normed hidden state. [N, 2H]
    joined: Vec<T>,
    embedding_scale: Vec<T>,
    /// Head-major.
    queries: Vec<T>,
    attended: Vec<T>,
    log_sums: Vec<T>,
    /// Row-major. [N, heads * D]
    attended_rows: Vec<T>,
    /// After attention. [N, H]
    middle: Vec<T>,
    middle_scale: Vec<T>,
    middle_normed: Vec<T>,
    /// [N, I]
    gate: Vec<T>,
    up: Vec<T>,
    activated: Vec<T>,
    /// After the MLP. [N, H]
    last: Vec<T>,
    last_scale: Vec<T>,
    output: Vec<T>,
    /// Token that each chain embeds.
    tokens: Vec<u32>,
}

/// Buffers over all rows, and scratch of the way back.
#[derive(Default)]
struct Packed<T> {
    /// [R, 3H]
    aux: Vec<T>,
    aux_normed: Vec<T>,
    aux_scale: [Vec<T>; 3],
    /// fc's output. [R, H]
    fused: Vec<T>,
    fused_scale: Vec<T>,
    joined: Vec<T>,
    embedding_scale: Vec<T>,
    tokens: Vec<u32>,
    keys: Vec<T>,
    values: Vec<T>,
    own_keys: Vec<T>,
    own_values: Vec<T>,
    key_gradient: Vec<T>,
    value_gradient: Vec<T>,
    own_key_gradient: Vec<T>,
    own_value_gradient: Vec<T>,
    /// The verifier's last states behind the first target of each chain, raw and normed. [N, H]
    last_states: Vec<T>,
    wanted: Vec<T>,
    wanted_scale: Vec<T>,
    rows_a: Vec<T>,
    rows_b: Vec<T>,
    rows_c: Vec<T>,
    embedding: Vec<T>,
    /// Gradients along the unroll.
    hidden_gradient: Vec<T>,
    last_gradient: Vec<T>,
    middle_gradient: Vec<T>,
    normed_gradient: Vec<T>,
    joined_gradient: Vec<T>,
    wide: Vec<T>,
    query_gradient: Vec<T>,
    fused_gradient: Vec<T>,
}

/// The head's forward and backward for one configuration. Keeps its buffers from call to call.
pub struct Step<'a, T: Real> {
    config: HeadConfig,
    steps: usize,
    decay: f64,
    train_lm_head: bool,
    draft_ids: Vec<u32>,
    target_head: Cow<'a, [T]>,
    target_norm: Vec<T>,
    target_eps: f64,
    embed: &'a [f32],
    heads: Heads,
    rope: RopeTable<T>,
    tiles: Tiles<T>,
    spans: Vec<Span>,
    ends: Vec<usize>,
    unrolled: Vec<Unrolled<T>>,
    packed: Packed<T>,
    loss_buffers: LossBuffers<T>,
    loss_output: LossOutput<T>,
    /// Kept while a forward-only call runs.
    spare_gradients: Option<LossGradients<T>>,
    labels: Vec<u32>,
}

impl<'a, T: Real> Step<'a, T> {
    /// `steps` (S) >= 1 is the length of the unroll, `decay` the weight of each further step.
    pub fn new(
        config: &HeadConfig,
        steps: usize,
        decay: f64,
        target: &'a DraftTarget,
    ) -> Result<Self, TrainError> {
        let h = config.hidden_size;
        let heads = Heads {
            query: config.num_attention_heads,
            key: config.num_key_value_heads,
            size: config.head_dim,
        };
        if heads.key == 0
            || !heads.query.is_multiple_of(heads.key)
            || heads.size == 0
            || !heads.size.is_multiple_of(2)
        {
            return Err(TrainError::Config(format!(
                "{} query heads, {} key heads of {} elements do not fit; key heads must divide query heads, head_dim be even",
                heads.query, heads.key, heads.size
            )));
        }
        if steps == 0 || h == 0 || config.draft_vocab_size == 0 {
            return Err(TrainError::Config(format!(
                "steps {steps}, hidden_size {h} and draft_vocab_size {} must be at least 1",
                config.draft_vocab_size
            )));
        }
        let lengths = [
            ("draft_ids", target.draft_ids.len(), config.draft_vocab_size),
            ("verifier head rows", target.head_rows.len(), config.draft_vocab_size * h),
            ("verifier norm", target.norm.len(), h),
            ("embed_tokens", target.embed.len(), config.vocab_size * h),
        ];
        for (tensor, got, wanted) in lengths {
            if got != wanted {
                return Err(TrainError::Shape { tensor: tensor.into(), got, wanted });
            }
        }
        let ascending = target.draft_ids.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || target.draft_ids.last().is_some_and(|id| *id as usize >= config.vocab_size) {
            return Err(TrainError::Config(format!(
                "draft_ids must ascend and stay below vocab_size {}; build the vocabulary map again",
                config.vocab_size
            )));
        }
        let gradients = LossGradients { outputs: vec![Vec::new(); steps], head: Vec::new() };
        Ok(Self {
            config: config.clone(),
            steps,
            decay,
            train_lm_head: true,
            draft_ids: target.draft_ids.clone(),
            target_head: T::convert(&target.head_rows),
            target_norm: T::convert(&target.norm).into_owned(),
            target_eps: target.eps,
            embed: target.embed,
            heads,
            rope: RopeTable::new(heads.size, config.rope.theta, config.rope.scaling.as_ref())?,
            tiles: Tiles::new(),
            spans: Vec::new(),
            ends: Vec::new(),
            unrolled: (0..steps).map(|_| Unrolled::default()).collect(),
            packed: Packed::default(),
            loss_buffers: LossBuffers::default(),
            loss_output: LossOutput { sums: Vec::new(), best: vec![Vec::new(); steps], gradients: None },
            spare_gradients: Some(gradients),
            labels: Vec::new(),
        })
    }

    /// Whether `lm_head` gets a gradient; it does unless told otherwise.
    pub fn set_train_lm_head(&mut self, train: bool) {
        self.train_lm_head = train;
    }

    /// S, the length of the unroll.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The weight of each further step.
    pub fn decay(&self) -> f64 {
        self.decay
    }

    /// Loss and metrics of a batch, without gradients.
    pub fn forward(
        &mut self,
        weights: &HeadTensors<T>,
        documents: &[Document],
    ) -> Result<StepReport, TrainError> {
        check_shapes(&self.config, weights)?;
        self.pack(documents)?;
        self.unroll(weights, documents);
        self.loss_output.gradients = None;
        self.losses(weights);
        Ok(self.report(documents))
    }

    /// Loss, metrics and gradients of a batch. `gradients` is overwritten.
    pub fn forward_backward(
        &mut self,
        weights: &HeadTensors<T>,
        documents: &[Document],
        gradients: &mut HeadTensors<T>,
    ) -> Result<StepReport, TrainError> {
        check_shapes(&self.config, weights)?;
        check_shapes(&self.config, gradients)?;
        for (_, values) in named_mut(gradients) {
            values.fill(T::ZERO);
        }
        self.pack(documents)?;
        self.unroll(weights, documents);
        let mut buffers = self
            .spare_gradients
            .take()
            .unwrap_or(LossGradients { outputs: vec![Vec::new(); self.steps], head: Vec::new() });
        if self.train_lm_head {
            buffers.head = std::mem::take(&mut gradients.lm_head);
        }
        self.loss_output.gradients = Some(buffers);
        self.losses(weights);
        let mut buffers = self
            .loss_output
            .gradients
            .take()
            .unwrap_or(LossGradients { outputs: vec![Vec::new(); self.steps], head: Vec::new() });
        if self.train_lm_head {
            gradients.lm_head = std::mem::take(&mut buffers.head);
        }
        self.back(weights, &buffers.outputs, gradients);
        self.spare_gradients = Some(buffers);
        Ok(self.report(documents))
    }

    /// For each document of the last batch, for each of its chains in order, for each step: whether the step is supervised
    /// and the draft's best token is the one that the model said. [chains * S] each.
    pub fn hits(&self, documents: usize) -> Vec<Vec<bool>> {
        let mut list = vec![Vec::new(); documents];
        for span in &self.spans {
            let hits = &mut list[span.document];
            for chain in span.chain_start..span.chain_start + span.chains {
                hits.extend((0..self.steps).map(|step| self.is_hit(chain, step)));
            }
        }
        list
    }

    fn is_hit(&self, chain: usize, step: usize) -> bool {
        if chain + step >= self.ends[chain] {
            return false;
        }
        // Step k of chain c is about the same token as step 0 of chain c + k.
        self.draft_ids[self.loss_output.best[step][chain] as usize] == self.labels[chain + step]
    }

    fn rows(&self) -> usize {
        self.spans.last().map_or(0, |span| span.row_start + span.rows)
    }

    fn chains(&self) -> usize {
        self.ends.len()
    }

    /// Checks the documents and lays them out.
    fn pack(&mut self, documents: &[Document]) -> Result<(), TrainError> {
        self.spans.clear();
        self.ends.clear();
        self.labels.clear();
        let h = self.config.hidden_size;
        let (mut row_start, mut chain_start, mut positions) = (0, 0, 0);
        for (number, document) in documents.iter().enumerate() {
            let fail = |reason: String| Err(TrainError::Document { document: number, reason });
            let length = document.token_ids.len();
            if length < 2 || document.prompt_length == 0 || document.prompt_length > length {
                return fail(format!("{length} tokens with a prompt of {}", document.prompt_length));
            }
            let last_row = length - 1;
            if document.states.len() != last_row * 4 * h {
                let (got, wanted) = (document.states.len(), last_row * 4 * h);
                return fail(format!("{got} state values, {length} tokens need {wanted}"));
            }
            if let Some(id) = document.token_ids.iter().find(|id| **id as usize >= self.config.vocab_size) {
                return fail(format!("token {id} is outside the vocabulary of {}", self.config.vocab_size));
            }
            // T - prompt_length chains: the last one predicts x[T].
            let chains = last_row.saturating_sub(document.prompt_length);
            if chains == 0 {
                continue;
            }
            let rows = last_row - 1;
            let first_row = document.prompt_length - 1;
            self.spans.push(Span { document: number, row_start, rows, chain_start, chains, first_row });
            self.ends.extend(std::iter::repeat_n(chain_start + chains, chains));
            self.labels.extend_from_slice(&document.token_ids[first_row + 2..first_row + 2 + chains]);
            row_start += rows;
            chain_start += chains;
            positions = positions.max(rows + self.steps);
        }
        self.rope.reserve(positions);
        Ok(())
    }

    /// The forward unroll: fills the buffers up to the normed outputs of each step.
    fn unroll(&mut self, weights: &HeadTensors<T>, documents: &[Document]) {
        let (h, steps, heads) = (self.config.hidden_size, self.steps, self.heads);
        let (rows, chains) = (self.rows(), self.chains());
        let eps = self.config.rms_norm_eps;
        let inner = self.config.intermediate_size;
        let (query_width, key_width) = (heads.query * heads.size, heads.key * heads.size);
        let slots = steps - 1;
        let norms_aux = self.config.fc_norm;
        let spans = &self.spans;
        let packed = &mut self.packed;
        if chains == 0 {
            return;
        }

        ensure(&mut packed.aux, rows * 3 * h);
        ensure(&mut packed.last_states, chains * h);
        packed.tokens.clear();
        for span in spans {
            let document = &documents[span.document];
            for row in 0..span.rows {
                let states = &document.states[row * 4 * h..][..3 * h];
                let into = &mut packed.aux[(span.row_start + row) * 3 * h..][..3 * h];
                copy(into, states);
            }
            packed.tokens.extend_from_slice(&document.token_ids[1..1 + span.rows]);
            for chain in 0..span.chains {
                let row = span.first_row + chain + 1;
                let states = &document.states[row * 4 * h + 3 * h..][..h];
                copy(&mut packed.last_states[(span.chain_start + chain) * h..][..h], states);
            }
        }
        ensure(&mut packed.wanted, chains * h);
        ensure(&mut packed.wanted_scale, chains);
        rms_norm(
            (&packed.last_states[..chains * h], h),
            &self.target_norm,
            self.target_eps,
            (&mut packed.wanted[..chains * h], h),
            &mut packed.wanted_scale[..chains],
        );

        // fc of all rows.
        ensure(&mut packed.fused, rows * h);
        let fc_input = if norms_aux {
            ensure(&mut packed.aux_normed, rows * 3 * h);
            for (i, norm) in weights.fc_norm.iter().enumerate() {
                ensure(&mut packed.aux_scale[i], rows);
                rms_norm(
                    (&packed.aux[i * h..rows * 3 * h], 3 * h),
                    norm,
                    eps,
                    (&mut packed.aux_normed[i * h..rows * 3 * h], 3 * h),
                    &mut packed.aux_scale[i][..rows],
                );
            }
            &packed.aux_normed
        } else {
            &packed.aux
        };
        product_abt(&mut packed.fused, fc_input, &weights.fc, [rows, h, 3 * h], false);

        // Step 0's keys and values of all rows.
        ensure(&mut packed.joined, rows * 2 * h);
        ensure(&mut packed.embedding_scale, rows);
        ensure(&mut packed.fused_scale, rows);
        ensure(&mut packed.embedding, rows * h);
        embed(self.embed, &packed.tokens, &mut packed.embedding, h);
        join(
            (&packed.embedding[..rows * h], &weights.input_layernorm, &mut packed.embedding_scale[..rows]),
            (&packed.fused[..rows * h], &weights.hidden_norm, &mut packed.fused_scale[..rows]),
            eps,
            &mut packed.joined[..rows * 2 * h],
        );
        for buffer in [&mut packed.rows_a, &mut packed.rows_b] {
            ensure(buffer, rows * query_width.max(key_width));
        }
        for buffer in [&mut packed.keys, &mut packed.values] {
            ensure(buffer, rows * key_width);
        }
        for buffer in [&mut packed.own_keys, &mut packed.own_values] {
            ensure(buffer, chains * key_width * slots);
        }
        let size = [rows, key_width, 2 * h];
        let key_heads = (heads.key, heads.size);
        product_abt(&mut packed.rows_a, &packed.joined, &weights.k_proj, size, false);
        product_abt(&mut packed.rows_b, &packed.joined, &weights.v_proj, size, false);
        let turn = Turn::By { table: &self.rope, offset: 0 };
        to_heads(&packed.rows_a, &mut packed.keys, spans, key_heads, Rows::All, turn, (0, 1));
        to_heads(&packed.rows_b, &mut packed.values, spans, key_heads, Rows::All, Turn::None, (0, 1));

        for step in 0..steps {
            let (before, rest) = self.unrolled.split_at_mut(step);
            let now = &mut rest[0];
            for buffer in
                [&mut now.hidden, &mut now.middle, &mut now.middle_normed, &mut now.last, &mut now.output]
            {
                ensure(buffer, chains * h);
            }
            for buffer in [&mut now.gate, &mut now.up, &mut now.activated] {
                ensure(buffer, chains * inner);
            }
            for buffer in [&mut now.queries, &mut now.attended, &mut now.attended_rows] {
                ensure(buffer, chains * query_width);
            }
            for buffer in
                [&mut now.hidden_scale, &mut now.embedding_scale, &mut now.middle_scale, &mut now.last_scale]
            {
                ensure(buffer, chains);
            }
            ensure(&mut now.log_sums, chains * heads.query);
            ensure(&mut now.joined, chains * 2 * h);

            match before.last() {
                None => {
                    for span in spans {
                        let (from, into) = (span.row_start + span.first_row, span.chain_start);
                        let count = span.chains;
                        now.hidden[into * h..(into + count) * h]
                            .copy_from_slice(&packed.fused[from * h..(from + count) * h]);
                        now.joined[into * 2 * h..(into + count) * 2 * h]
                            .copy_from_slice(&packed.joined[from * 2 * h..(from + count) * 2 * h]);
                        now.hidden_scale[into..into + count]
                            .copy_from_slice(&packed.fused_scale[from..from + count]);
                    }
                }
                Some(previous) => {
                    let source = if self.config.norm_output { &previous.output } else { &previous.last };
                    now.hidden[..chains * h].copy_from_slice(&source[..chains * h]);
                    now.tokens.clear();
                    for span in spans {
                        let ids = documents[span.document].token_ids;
                        for chain in 0..span.chains {
                            // Past the end nothing is supervised, so any token serves.
                            let index = (span.first_row + chain + 1 + step).min(ids.len() - 1);
                            now.tokens.push(ids[index]);
                        }
                    }
                    embed(self.embed, &now.tokens, &mut packed.embedding, h);
                    join(
                        (
                            &packed.embedding[..chains * h],
                            &weights.input_layernorm,
                            &mut now.embedding_scale[..chains],
                        ),
                        (&now.hidden[..chains * h], &weights.hidden_norm, &mut now.hidden_scale[..chains]),
                        eps,
                        &mut now.joined[..chains * 2 * h],
                    );
                    let size = [chains, key_width, 2 * h];
                    product_abt(&mut packed.rows_a, &now.joined, &weights.k_proj, size, false);
                    product_abt(&mut packed.rows_b, &now.joined, &weights.v_proj, size, false);
                    let turn = Turn::By { table: &self.rope, offset: step };
                    let slot = (step - 1, slots);
                    to_heads(
                        &packed.rows_a,
                        &mut packed.own_keys,
                        spans,
                        key_heads,
                        Rows::Chains,
                        turn,
                        slot,
                    );
                    to_heads(
                        &packed.rows_b,
                        &mut packed.own_values,
                        spans,
                        key_heads,
                        Rows::Chains,
                        Turn::None,
                        slot,
                    );
                }
            }

            ensure(&mut packed.rows_a, chains * query_width);
            product_abt(
                &mut packed.rows_a,
                &now.joined,
                &weights.q_proj,
                [chains, query_width, 2 * h],
                false,
            );
            let turn = Turn::By { table: &self.rope, offset: step };
            let query_heads = (heads.query, heads.size);
            to_heads(&packed.rows_a, &mut now.queries, spans, query_heads, Rows::Chains, turn, (0, 1));
            let seen = KeyValues {
                keys: &packed.keys,
                values: &packed.values,
                own_keys: &packed.own_keys,
                own_values: &packed.own_values,
                slots,
                step,
            };
            attention::forward(
                &now.queries,
                seen,
                (&mut now.attended, &mut now.log_sums),
                spans,
                heads,
                &self.tiles,
            );
            from_heads(
                &now.attended,
                &mut now.attended_rows,
                spans,
                query_heads,
                Rows::Chains,
                Turn::None,
                (0, 1),
            );

            // The residual stream.
            if self.config.norm_before_residual {
                for row in 0..chains {
                    now.middle[row * h..(row + 1) * h]
                        .copy_from_slice(&now.joined[row * 2 * h + h..(row + 1) * 2 * h]);
                }
            } else {
                now.middle[..chains * h].copy_from_slice(&now.hidden[..chains * h]);
            }
            product_abt(&mut now.middle, &now.attended_rows, &weights.o_proj, [chains, h, query_width], true);
            rms_norm(
                (&now.middle[..chains * h], h),
                &weights.post_attention_layernorm,
                eps,
                (&mut now.middle_normed[..chains * h], h),
                &mut now.middle_scale[..chains],
            );
            product_abt(&mut now.gate, &now.middle_normed, &weights.gate_proj, [chains, inner, h], false);
            product_abt(&mut now.up, &now.middle_normed, &weights.up_proj, [chains, inner, h], false);
            let length = chains * inner;
            silu_mul(&now.gate[..length], &now.up[..length], &mut now.activated[..length]);
            now.last[..chains * h].copy_from_slice(&now.middle[..chains * h]);
            product_abt(&mut now.last, &now.activated, &weights.down_proj, [chains, h, inner], true);
            rms_norm(
                (&now.last[..chains * h], h),
                &weights.norm,
                eps,
                (&mut now.output[..chains * h], h),
                &mut now.last_scale[..chains],
            );
        }
    }

    fn losses(&mut self, weights: &HeadTensors<T>) {
        let counts = self.supervised();
        let scales: Vec<f64> = counts
            .iter()
            .enumerate()
            .map(|(step, count)| if *count == 0 { 0.0 } else { self.decay.powi(step as i32) / *count as f64 })
            .collect();
        let outputs: Vec<&[T]> = self.unrolled.iter().map(|step| step.output.as_slice()).collect();
        let input = LossInput {
            wanted: &self.packed.wanted,
            target_head: &self.target_head,
            head: &weights.lm_head,
            outputs: &outputs,
            ends: &self.ends,
            weights: &scales,
            width: self.config.hidden_size,
            vocabulary: self.config.draft_vocab_size,
        };
        loss::compute(&input, &mut self.loss_buffers, &mut self.loss_output);
    }

    fn supervised(&self) -> Vec<u64> {
        (0..self.steps)
            .map(|step| self.spans.iter().map(|span| span.chains.saturating_sub(step) as u64).sum())
            .collect()
    }

    fn report(&self, documents: &[Document]) -> StepReport {
        let supervised = self.supervised();
        let mut report = StepReport {
            tokens: documents.iter().map(|document| document.token_ids.len() as u64).sum(),
            correct: vec![0; self.steps],
            ..StepReport::default()
        };
        for (step, count) in supervised.iter().enumerate() {
            let mean = if *count == 0 { 0.0 } else { self.loss_output.sums[step] / *count as f64 };
            report.step_losses.push(mean);
            report.loss += self.decay.powi(step as i32) * mean;
        }
        for chain in 0..self.chains() {
            for step in 0..self.steps {
                if !self.is_hit(chain, step) {
                    break;
                }
                report.correct[step] += 1;
            }
        }
        report.supervised = supervised;
        report
    }

    /// The way back, from the gradients of the normed outputs of each step.
    fn back(&mut self, weights: &HeadTensors<T>, outputs: &[Vec<T>], gradients: &mut HeadTensors<T>) {
        let (h, steps, heads) = (self.config.hidden_size, self.steps, self.heads);
        let (rows, chains) = (self.rows(), self.chains());
        let inner = self.config.intermediate_size;
        let (query_width, key_width) = (heads.query * heads.size, heads.key * heads.size);
        let slots = steps - 1;
        let (key_heads, query_heads) = ((heads.key, heads.size), (heads.query, heads.size));
        let spans = &self.spans;
        let packed = &mut self.packed;
        if chains == 0 {
            return;
        }
        for buffer in [&mut packed.key_gradient, &mut packed.value_gradient] {
            ensure(buffer, rows * key_width);
            buffer[..rows * key_width].fill(T::ZERO);
        }
        for buffer in [&mut packed.own_key_gradient, &mut packed.own_value_gradient] {
            ensure(buffer, chains * key_width * slots);
            buffer[..chains * key_width * slots].fill(T::ZERO);
        }
        for buffer in [
            &mut packed.hidden_gradient,
            &mut packed.last_gradient,
            &mut packed.middle_gradient,
            &mut packed.normed_gradient,
        ] {
            ensure(buffer, chains * h);
        }
        ensure(&mut packed.joined_gradient, rows.max(chains) * 2 * h);
        ensure(&mut packed.wide, chains * inner);
        ensure(&mut packed.query_gradient, chains * query_width);
        ensure(&mut packed.rows_a, chains * query_width);
        ensure(&mut packed.rows_b, rows * key_width);
        ensure(&mut packed.rows_c, rows * key_width.max(query_width));
        ensure(&mut packed.embedding, rows * h);
        ensure(&mut packed.fused_gradient, rows * h);
        packed.hidden_gradient[..chains * h].fill(T::ZERO);

        for step in (0..steps).rev() {
            let now = &mut self.unrolled[step];
            // hidden_gradient is that of what the step feeds to the next.
            packed.normed_gradient[..chains * h].copy_from_slice(&outputs[step][..chains * h]);
            if self.config.norm_output {
                add(&mut packed.normed_gradient[..chains * h], &packed.hidden_gradient[..chains * h]);
                packed.last_gradient[..chains * h].fill(T::ZERO);
            } else {
                packed.last_gradient[..chains * h].copy_from_slice(&packed.hidden_gradient[..chains * h]);
            }
            norm_back(
                (&now.last[..chains * h], h),
                &weights.norm,
                &now.last_scale[..chains],
                (&packed.normed_gradient[..chains * h], h),
                &mut packed.last_gradient[..chains * h],
                &mut gradients.norm,
            );

            // The MLP; gate and up are replaced by their gradients.
            let length = chains * inner;
            product_ab(
                &mut packed.wide,
                &packed.last_gradient,
                &weights.down_proj,
                [chains, inner, h],
                false,
            );
            product_atb(
                &mut gradients.down_proj,
                &packed.last_gradient,
                &now.activated,
                [h, inner, chains],
                true,
            );
            silu_mul_backward(&mut now.gate[..length], &mut now.up[..length], &packed.wide[..length]);
            product_atb(&mut gradients.gate_proj, &now.gate, &now.middle_normed, [inner, h, chains], true);
            product_atb(&mut gradients.up_proj, &now.up, &now.middle_normed, [inner, h, chains], true);
            product_ab(&mut packed.normed_gradient, &now.gate, &weights.gate_proj, [chains, h, inner], false);
            product_ab(&mut packed.normed_gradient, &now.up, &weights.up_proj, [chains, h, inner], true);
            packed.middle_gradient[..chains * h].copy_from_slice(&packed.last_gradient[..chains * h]);
            norm_back(
                (&now.middle[..chains * h], h),
                &weights.post_attention_layernorm,
                &now.middle_scale[..chains],
                (&packed.normed_gradient[..chains * h], h),
                &mut packed.middle_gradient[..chains * h],
                &mut gradients.post_attention_layernorm,
            );

            // Attention.
            product_ab(
                &mut packed.rows_a,
                &packed.middle_gradient,
                &weights.o_proj,
                [chains, query_width, h],
                false,
            );
            product_atb(
                &mut gradients.o_proj,
                &packed.middle_gradient,
                &now.attended_rows,
                [h, query_width, chains],
                true,
            );
            to_heads(
                &packed.rows_a,
                &mut packed.rows_c,
                spans,
                query_heads,
                Rows::Chains,
                Turn::None,
                (0, 1),
            );
            let seen = KeyValues {
                keys: &packed.keys,
                values: &packed.values,
                own_keys: &packed.own_keys,
                own_values: &packed.own_values,
                slots,
                step,
            };
            let into = KeyValueGradients {
                keys: &mut packed.key_gradient,
                values: &mut packed.value_gradient,
                own_keys: &mut packed.own_key_gradient,
                own_values: &mut packed.own_value_gradient,
            };
            attention::backward(
                (&now.queries, &mut packed.query_gradient),
                seen,
                into,
                (&now.attended, &packed.rows_c, &now.log_sums),
                spans,
                heads,
                &self.tiles,
            );
            let turn = Turn::By { table: &self.rope, offset: step };
            from_heads(
                &packed.query_gradient,
                &mut packed.rows_a,
                spans,
                query_heads,
                Rows::Chains,
                turn,
                (0, 1),
            );
            product_atb(
                &mut gradients.q_proj,
                &packed.rows_a,
                &now.joined,
                [query_width, 2 * h, chains],
                true,
            );
            product_ab(
                &mut packed.joined_gradient,
                &packed.rows_a,
                &weights.q_proj,
                [chains, 2 * h, query_width],
                false,
            );
            if step == 0 {
                break;
            }

            // Keys and values of this step are complete: only this and later steps saw them.
            let slot = (step - 1, slots);
            from_heads(
                &packed.own_key_gradient,
                &mut packed.rows_b,
                spans,
                key_heads,
                Rows::Chains,
                turn,
                slot,
            );
            from_heads(
                &packed.own_value_gradient,
                &mut packed.rows_c,
                spans,
                key_heads,
                Rows::Chains,
                Turn::None,
                slot,
            );
            for (gradient, source, weight) in [
                (&mut gradients.k_proj, &packed.rows_b, &weights.k_proj),
                (&mut gradients.v_proj, &packed.rows_c, &weights.v_proj),
            ] {
                product_atb(gradient, source, &now.joined, [key_width, 2 * h, chains], true);
                product_ab(&mut packed.joined_gradient, source, weight, [chains, 2 * h, key_width], true);
            }
            embed(self.embed, &now.tokens, &mut packed.embedding, h);
            rms_norm_weight_gradient(
                (&packed.embedding, h),
                &now.embedding_scale[..chains],
                (&packed.joined_gradient, 2 * h),
                &mut gradients.input_layernorm,
            );
            residual_back(
                &packed.middle_gradient[..chains * h],
                &mut packed.joined_gradient,
                &mut packed.hidden_gradient[..chains * h],
                h,
                self.config.norm_before_residual,
            );
            norm_back(
                (&now.hidden[..chains * h], h),
                &weights.hidden_norm,
                &now.hidden_scale[..chains],
                (&packed.joined_gradient[h..chains * 2 * h], 2 * h),
                &mut packed.hidden_gradient[..chains * h],
                &mut gradients.hidden_norm,
            );
        }

        // Step 0: queries came from the chains' rows, keys and values from all rows.
        let turn = Turn::By { table: &self.rope, offset: 0 };
        from_heads(&packed.key_gradient, &mut packed.rows_b, spans, key_heads, Rows::All, turn, (0, 1));
        from_heads(
            &packed.value_gradient,
            &mut packed.rows_c,
            spans,
            key_heads,
            Rows::All,
            Turn::None,
            (0, 1),
        );
        packed.fused_gradient[..rows * h].fill(T::ZERO);
        // From the last span on, since a chain's packed row never lies after its row among all rows.
        for span in spans.iter().rev() {
            let (into, from) = (span.row_start + span.first_row, span.chain_start);
            packed.joined_gradient.copy_within(from * 2 * h..(from + span.chains) * 2 * h, into * 2 * h);
            packed.joined_gradient[span.row_start * 2 * h..into * 2 * h].fill(T::ZERO);
            let middle = &packed.middle_gradient[from * h..(from + span.chains) * h];
            residual_back(
                middle,
                &mut packed.joined_gradient[into * 2 * h..(into + span.chains) * 2 * h],
                &mut packed.fused_gradient[into * h..(into + span.chains) * h],
                h,
                self.config.norm_before_residual,
            );
        }
        for (gradient, source, weight) in [
            (&mut gradients.k_proj, &packed.rows_b, &weights.k_proj),
            (&mut gradients.v_proj, &packed.rows_c, &weights.v_proj),
        ] {
            product_atb(gradient, source, &packed.joined, [key_width, 2 * h, rows], true);
            product_ab(&mut packed.joined_gradient, source, weight, [rows, 2 * h, key_width], true);
        }
        embed(self.embed, &packed.tokens, &mut packed.embedding, h);
        rms_norm_weight_gradient(
            (&packed.embedding, h),
            &packed.embedding_scale[..rows],
            (&packed.joined_gradient, 2 * h),
            &mut gradients.input_layernorm,
        );
        norm_back(
            (&packed.fused[..rows * h], h),
            &weights.hidden_norm,
            &packed.fused_scale[..rows],
            (&packed.joined_gradient[h..rows * 2 * h], 2 * h),
            &mut packed.fused_gradient[..rows * h],
            &mut gradients.hidden_norm,
        );

        // fc; its input is frozen, so its norms need only their weights' gradients.
        if !self.config.fc_norm {
            product_atb(&mut gradients.fc, &packed.fused_gradient, &packed.aux, [h, 3 * h, rows], true);
            return;
        }
        product_atb(&mut gradients.fc, &packed.fused_gradient, &packed.aux_normed, [h, 3 * h, rows], true);
        product_ab(&mut packed.aux_normed, &packed.fused_gradient, &weights.fc, [rows, 3 * h, h], false);
        for (i, gradient) in gradients.fc_norm.iter_mut().enumerate() {
            rms_norm_weight_gradient(
                (&packed.aux[i * h..], 3 * h),
                &packed.aux_scale[i][..rows],
                (&packed.aux_normed[i * h..], 3 * h),
                gradient,
            );
        }
    }
}

fn copy<T: Real>(target: &mut [T], source: &[f32]) {
    for (into, from) in target.iter_mut().zip(source) {
        *into = T::from_f32(*from);
    }
}

/// Rows of the embedding.
fn embed<T: Real>(table: &[f32], tokens: &[u32], target: &mut [T], width: usize) {
    for (row, token) in tokens.iter().enumerate() {
        copy(&mut target[row * width..(row + 1) * width], &table[*token as usize * width..][..width]);
    }
}

/// The layer's input: normed embedding first, normed hidden state second.
fn join<T: Real>(
    (embedding, embedding_norm, embedding_scale): (&[T], &[T], &mut [T]),
    (hidden, hidden_norm, hidden_scale): (&[T], &[T], &mut [T]),
    eps: f64,
    joined: &mut [T],
) {
    let h = embedding_norm.len();
    rms_norm((embedding, h), embedding_norm, eps, (joined, 2 * h), embedding_scale);
    rms_norm((hidden, h), hidden_norm, eps, (&mut joined[h..], 2 * h), hidden_scale);
}

/// Both gradients of a norm; that of the input is added.
fn norm_back<T: Real>(
    input: (&[T], usize),
    weight: &[T],
    scale: &[T],
    output_gradient: (&[T], usize),
    input_gradient: &mut [T],
    weight_gradient: &mut [T],
) {
    rms_norm_weight_gradient(input, scale, output_gradient, weight_gradient);
    rms_norm_backward(input, weight, scale, output_gradient, input_gradient);
}

/// Sets the hidden state's gradient to what the residual gives, or adds it to the normed half's.
fn residual_back<T: Real>(
    middle: &[T],
    joined: &mut [T],
    hidden: &mut [T],
    h: usize,
    norm_before_residual: bool,
) {
    if !norm_before_residual {
        hidden.copy_from_slice(middle);
        return;
    }
    hidden.fill(T::ZERO);
    for (row, values) in middle.chunks(h).enumerate() {
        for (into, from) in joined[row * 2 * h + h..(row + 1) * 2 * h].iter_mut().zip(values) {
            *into += *from;
        }
    }
}
