//! Forward KL divergence over the draft vocabulary, in chunks of rows, so that no [rows, Vd] matrix of a whole batch exists.

use rayon::prelude::*;

use crate::compute::{Real, dot, exp_in_place, max, product_ab, product_abt, product_atb, vectorised};

/// Elements of a chunk of logits: 16 MiB in f32.
const CHUNK: usize = 1 << 22;

/// Buffers of the loss, kept from step to step.
#[derive(Default)]
pub(super) struct LossBuffers<T> {
    target: Vec<T>,
    target_scale: Vec<T>,
    /// Sum of p * target logit, less its log-sum-exp: the negative entropy of each target row.
    target_entropy: Vec<f64>,
    draft: Vec<T>,
}

/// What the loss reads.
pub(super) struct LossInput<'a, T> {
    /// [N, H], the verifier's normed state behind each chain's first target.
    pub wanted: &'a [T],
    /// [Vd, H], the verifier's.
    pub target_head: &'a [T],
    /// [Vd, H], the draft's.
    pub head: &'a [T],
    /// [S][N, H], normed outputs of each step.
    pub outputs: &'a [&'a [T]],
    /// [N] end of each chain's document, in packed chains.
    pub ends: &'a [usize],
    /// [S]: decay^k / supervised count.
    pub weights: &'a [f64],
    pub width: usize,
    pub vocabulary: usize,
}

/// What the loss gives.
pub(super) struct LossOutput<T> {
    /// [S], sums of the KL divergence over supervised rows.
    pub sums: Vec<f64>,
    /// [S][N], the draft's best token (an index of the draft vocabulary); meaningless where unsupervised.
    pub best: Vec<Vec<u32>>,
    /// Whether gradients are wanted.
    pub gradients: Option<LossGradients<T>>,
}

/// Where gradients go.
pub(super) struct LossGradients<T> {
    /// [S][N, H]; set.
    pub outputs: Vec<Vec<T>>,
    /// [Vd, H], added to; empty when the head is not trained.
    pub head: Vec<T>,
}

/// Target row t of the packed chains is what chain t - k should predict at step k.
pub(super) fn compute<T: Real>(
    input: &LossInput<T>,
    buffers: &mut LossBuffers<T>,
    result: &mut LossOutput<T>,
) {
    let (width, vocabulary) = (input.width, input.vocabulary);
    let chains = input.ends.len();
    let steps = input.outputs.len();
    let chunk = (CHUNK / vocabulary).clamp(32, 1024).min(chains.max(1));
    ensure(&mut buffers.target, chunk * vocabulary);
    ensure(&mut buffers.draft, chunk * vocabulary);
    ensure(&mut buffers.target_scale, chunk);
    ensure(&mut buffers.target_entropy, chunk);
    result.sums.clear();
    result.sums.resize(steps, 0.0);
    for best in &mut result.best {
        best.clear();
        best.resize(chains, 0);
    }
    if let Some(gradients) = &mut result.gradients {
        for gradient in &mut gradients.outputs {
            gradient.clear();
            gradient.resize(chains * width, T::ZERO);
        }
    }
    let mut losses = vec![0.0_f64; chunk];
    for start in (0..chains).step_by(chunk) {
        let end = chains.min(start + chunk);
        let count = end - start;
        let target = &mut buffers.target[..count * vocabulary];
        let wanted = &input.wanted[start * width..end * width];
        product_abt(target, wanted, input.target_head, [count, vocabulary, width], false);
        target
            .par_chunks_mut(vocabulary)
            .zip(buffers.target_scale.par_iter_mut())
            .zip(buffers.target_entropy.par_iter_mut())
            .for_each(|((row, scale), entropy)| vectorised!((*scale, *entropy) = softmax_of_target(row)));
        for step in 0..steps {
            // Chains whose target at this step lies in the chunk; some may be of the document before: they weigh nothing.
            let first = start.saturating_sub(step);
            let last = end.saturating_sub(step);
            if first >= last {
                continue;
            }
            let rows = last - first;
            let draft = &mut buffers.draft[..rows * vocabulary];
            let outputs = &input.outputs[step][first * width..last * width];
            product_abt(draft, outputs, input.head, [rows, vocabulary, width], false);
            let weight = T::from_f64(input.weights[step]);
            let targets = &buffers.target[..count * vocabulary];
            let (scales, entropies) = (&buffers.target_scale, &buffers.target_entropy);
            let wants_gradient = result.gradients.is_some();
            draft
                .par_chunks_mut(vocabulary)
                .zip(losses.par_iter_mut())
                .zip(result.best[step][first..last].par_iter_mut())
                .enumerate()
                .for_each(|(i, ((row, loss), best))| {
                    let chain = first + i;
                    if chain + step >= input.ends[chain] {
                        row.fill(T::ZERO);
                        *loss = 0.0;
                        return;
                    }
                    let local = chain + step - start;
                    let powers = &targets[local * vocabulary..(local + 1) * vocabulary];
                    vectorised!({
                        let top = max(row);
                        *best = row.iter().position(|value| *value == top).unwrap_or(0) as u32;
                        let product = dot(powers, row) * scales[local];
                        let sum = exp_in_place(row, T::ONE, top);
                        *loss = entropies[local] - (product.to_f64() - top.to_f64() - sum.to_f64().ln());
                        if wants_gradient {
                            let (draft_scale, target_scale) = (weight / sum, weight * scales[local]);
                            for (value, power) in row.iter_mut().zip(powers) {
                                *value = *value * draft_scale - *power * target_scale;
                            }
                        }
                    });
                });
            result.sums[step] += losses[..rows].iter().sum::<f64>();
            if let Some(gradients) = &mut result.gradients {
                let into = &mut gradients.outputs[step][first * width..last * width];
                // Each (chain, step) has its target in one chunk alone, so each row is set once.
                product_ab(into, draft, input.head, [rows, width, vocabulary], false);
                if !gradients.head.is_empty() {
                    product_atb(&mut gradients.head, draft, outputs, [vocabulary, width, rows], true);
                }
            }
        }
    }
}

/// Turns logits into exp(logit - top); returns 1 / their sum and the negative entropy.
#[inline(always)]
fn softmax_of_target<T: Real>(row: &mut [T]) -> (T, f64) {
    let top = max(row);
    // Sum of e^(z - top) * (z - top), taken while z is still there.
    const LANES: usize = 32;
    let mut sums = [T::ZERO; LANES];
    let mut products = [T::ZERO; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for i in 0..LANES {
            let shifted = chunk[i] - top;
            let power = shifted.exp();
            chunk[i] = power;
            sums[i] += power;
            products[i] += power * shifted;
        }
    }
    for (i, value) in chunks.into_remainder().iter_mut().enumerate() {
        let shifted = *value - top;
        let power = shifted.exp();
        *value = power;
        sums[i] += power;
        products[i] += power * shifted;
    }
    let sum: f64 = sums.iter().map(|value| value.to_f64()).sum();
    let product: f64 = products.iter().map(|value| value.to_f64()).sum();
    (T::from_f64(1.0 / sum), product / sum - sum.ln())
}

/// Makes a buffer at least this long.
pub(super) fn ensure<T: Clone + Default>(buffer: &mut Vec<T>, length: usize) {
    if buffer.len() < length {
        buffer.resize(length, T::default());
    }
}
