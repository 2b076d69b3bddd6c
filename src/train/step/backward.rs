//! The way back through the unroll, by hand.

use crate::compute::{
    Real, add, product_ab, product_atb, rms_norm_backward, rms_norm_weight_gradient, silu_mul_backward,
};
use crate::head::HeadTensors;

use super::super::attention::{self, KeyValueGradients, KeyValues, Rows, Turn, from_heads, to_heads};
use super::super::loss::ensure;
use super::Step;
use super::forward::embed;

impl<T: Real> Step<'_, T> {
    /// The way back, from the gradients of the normed outputs of each step.
    pub(super) fn back(
        &mut self,
        weights: &HeadTensors<T>,
        outputs: &[Vec<T>],
        gradients: &mut HeadTensors<T>,
    ) {
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
            let input = LayerInput {
                tokens: &now.tokens,
                joined: &now.joined,
                embedding_scale: &now.embedding_scale,
                hidden: &now.hidden,
                hidden_scale: &now.hidden_scale,
                embedding: &mut packed.embedding,
                joined_gradient: &mut packed.joined_gradient,
                hidden_gradient: &mut packed.hidden_gradient,
            };
            let middle = Some((&packed.middle_gradient[..chains * h], self.config.norm_before_residual));
            let sources = (&packed.rows_b[..], &packed.rows_c[..]);
            input_back(input, sources, middle, self.embed, weights, gradients);
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
        let input = LayerInput {
            tokens: &packed.tokens,
            joined: &packed.joined,
            embedding_scale: &packed.embedding_scale,
            hidden: &packed.fused,
            hidden_scale: &packed.fused_scale,
            embedding: &mut packed.embedding,
            joined_gradient: &mut packed.joined_gradient,
            hidden_gradient: &mut packed.fused_gradient,
        };
        input_back(input, (&packed.rows_b, &packed.rows_c), None, self.embed, weights, gradients);

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

/// The layer's input for some rows: all rows for step 0, the chains for each later step.
struct LayerInput<'b, T> {
    /// [rows], embedded.
    tokens: &'b [u32],
    /// [rows, 2H]
    joined: &'b [T],
    embedding_scale: &'b [T],
    /// [rows, H]
    hidden: &'b [T],
    hidden_scale: &'b [T],
    /// Scratch. [rows, H]
    embedding: &'b mut [T],
    /// What the queries gave; keys and values are added. [rows, 2H]
    joined_gradient: &'b mut [T],
    /// [rows, H]
    hidden_gradient: &'b mut [T],
}

/// The way back through keys and values, the embedding's norm and the hidden state's norm. `middle`: the gradient of the
/// residual stream behind the same rows and `norm_before_residual`, where it is not in `hidden_gradient` yet.
fn input_back<T: Real>(
    input: LayerInput<'_, T>,
    (keys, values): (&[T], &[T]),
    middle: Option<(&[T], bool)>,
    embeddings: &[f32],
    weights: &HeadTensors<T>,
    gradients: &mut HeadTensors<T>,
) {
    let LayerInput { tokens, embedding, joined_gradient, hidden_gradient, .. } = input;
    let (rows, h) = (tokens.len(), weights.hidden_norm.len());
    let width = weights.k_proj.len() / (2 * h);
    for (gradient, source, weight) in
        [(&mut gradients.k_proj, keys, &weights.k_proj), (&mut gradients.v_proj, values, &weights.v_proj)]
    {
        product_atb(gradient, source, input.joined, [width, 2 * h, rows], true);
        product_ab(joined_gradient, source, weight, [rows, 2 * h, width], true);
    }
    embed(embeddings, tokens, embedding, h);
    rms_norm_weight_gradient(
        (embedding, h),
        &input.embedding_scale[..rows],
        (joined_gradient, 2 * h),
        &mut gradients.input_layernorm,
    );
    if let Some((middle, norm_before_residual)) = middle {
        residual_back(middle, joined_gradient, &mut hidden_gradient[..rows * h], h, norm_before_residual);
    }
    norm_back(
        (&input.hidden[..rows * h], h),
        &weights.hidden_norm,
        &input.hidden_scale[..rows],
        (&joined_gradient[h..rows * 2 * h], 2 * h),
        &mut hidden_gradient[..rows * h],
        &mut gradients.hidden_norm,
    );
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
