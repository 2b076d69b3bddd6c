//! One step: forward and backward of the head over a batch of packed documents.
//!
//! Only what the loss needs is computed: fc, keys and values of step 0 for all rows, all else for chains alone. Logits come
//! last, in chunks (see `loss`), which teacher forcing allows: no step waits for another's logits.

mod backward;
mod forward;

use std::borrow::Cow;
use std::time::{Duration, Instant};

use crate::compute::{Real, RopeTable};
use crate::head::{HeadConfig, HeadTensors};

use super::attention::{Heads, Span, Tiles};
use super::loss::{self, LossBuffers, LossGradients, LossInput, LossOutput};
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
    laps: StepLaps,
}

/// Where the time of a step went.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepLaps {
    pub forward: Duration,
    /// Logits, their gradients, and what these give to the outputs and the output head.
    pub loss: Duration,
    pub backward: Duration,
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
            laps: StepLaps::default(),
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

    /// Of the last [`Step::forward_backward`].
    pub fn laps(&self) -> StepLaps {
        self.laps
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
        let began = Instant::now();
        for (_, values) in named_mut(gradients) {
            values.fill(T::ZERO);
        }
        self.pack(documents)?;
        self.unroll(weights, documents);
        let unrolled = Instant::now();
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
        let judged = Instant::now();
        self.back(weights, &buffers.outputs, gradients);
        self.laps =
            StepLaps { forward: unrolled - began, loss: judged - unrolled, backward: judged.elapsed() };
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
}
