//! The forward unroll.

use crate::compute::{Real, product_abt, rms_norm, silu_mul};
use crate::head::HeadTensors;

use super::super::Document;
use super::super::attention::{self, KeyValues, Rows, Turn, from_heads, to_heads};
use super::super::loss::ensure;
use super::Step;

impl<T: Real> Step<'_, T> {
    /// The forward unroll: fills the buffers up to the normed outputs of each step.
    pub(super) fn unroll(&mut self, weights: &HeadTensors<T>, documents: &[Document]) {
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
}

fn copy<T: Real>(target: &mut [T], source: &[f32]) {
    for (into, from) in target.iter_mut().zip(source) {
        *into = T::from_f32(*from);
    }
}

/// Rows of the embedding.
pub(super) fn embed<T: Real>(table: &[f32], tokens: &[u32], target: &mut [T], width: usize) {
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
