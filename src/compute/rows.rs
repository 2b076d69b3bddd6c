//! Operations row by row: norms and activations, forward and backward.

use rayon::prelude::*;

use super::Real;
use super::lanes::{dot, vectorised};

/// Rows given to one task at least; less is not worth the hand-over.
const MIN_ROWS: usize = 16;
/// Elements of an element-wise task.
const BLOCK: usize = 16 * 1024;
/// Columns of a task that sums over rows.
const COLUMNS: usize = 64;

/// output = input / rms(input) * weight for each row of `weight.len()` elements; `scale[row]` = 1 / rms, for the way back.
/// Rows start every `input_stride` and `output_stride` elements; as many rows as `scale` has.
pub fn rms_norm<T: Real>(
    (input, input_stride): (&[T], usize),
    weight: &[T],
    epsilon: f64,
    (output, output_stride): (&mut [T], usize),
    scale: &mut [T],
) {
    let width = weight.len();
    let epsilon = T::from_f64(epsilon);
    let per_width = T::from_f64(1.0 / width as f64);
    output
        .par_chunks_mut(output_stride)
        .zip(input.par_chunks(input_stride))
        .zip(scale.par_iter_mut())
        .with_min_len(MIN_ROWS)
        .for_each(|((target, source), scale)| {
            vectorised!({
                let (target, source) = (&mut target[..width], &source[..width]);
                let inverse = T::ONE / (dot(source, source) * per_width + epsilon).sqrt();
                for i in 0..width {
                    target[i] = source[i] * inverse * weight[i];
                }
                *scale = inverse;
            });
        });
}

/// The gradient of [`rms_norm`] to its input, added to `input_gradient` (dense rows).
pub fn rms_norm_backward<T: Real>(
    (input, input_stride): (&[T], usize),
    weight: &[T],
    scale: &[T],
    (output_gradient, gradient_stride): (&[T], usize),
    input_gradient: &mut [T],
) {
    let width = weight.len();
    let per_width = T::from_f64(1.0 / width as f64);
    input_gradient
        .par_chunks_mut(width)
        .zip(input.par_chunks(input_stride))
        .zip(output_gradient.par_chunks(gradient_stride))
        .zip(scale.par_iter())
        .with_min_len(MIN_ROWS)
        .for_each(|(((target, source), gradient), scale)| {
            vectorised!({
                let (target, source, gradient) = (&mut target[..width], &source[..width], &gradient[..width]);
                const LANES: usize = 32;
                let mut sums = [T::ZERO; LANES];
                let whole = width - width % LANES;
                for start in (0..whole).step_by(LANES) {
                    let (s, g, w) = (&source[start..], &gradient[start..], &weight[start..]);
                    for i in 0..LANES {
                        sums[i] += s[i] * g[i] * w[i];
                    }
                }
                for i in whole..width {
                    sums[i - whole] += source[i] * gradient[i] * weight[i];
                }
                let mut sum = T::ZERO;
                for value in sums {
                    sum += value;
                }
                let along = sum * per_width * *scale * *scale * *scale;
                for i in 0..width {
                    target[i] += gradient[i] * weight[i] * *scale - source[i] * along;
                }
            });
        });
}

/// The gradient of [`rms_norm`] to its weight, added to `weight_gradient`. Each column is summed by one task, in order.
pub fn rms_norm_weight_gradient<T: Real>(
    (input, input_stride): (&[T], usize),
    scale: &[T],
    (output_gradient, gradient_stride): (&[T], usize),
    weight_gradient: &mut [T],
) {
    weight_gradient.par_chunks_mut(COLUMNS).enumerate().for_each(|(block, target)| {
        vectorised!({
            let width = target.len();
            for (row, scale) in scale.iter().enumerate() {
                let source = &input[row * input_stride + block * COLUMNS..][..width];
                let gradient = &output_gradient[row * gradient_stride + block * COLUMNS..][..width];
                for i in 0..width {
                    target[i] += source[i] * gradient[i] * *scale;
                }
            }
        });
    });
}

/// output = silu(gate) * up
pub fn silu_mul<T: Real>(gate: &[T], up: &[T], output: &mut [T]) {
    output.par_chunks_mut(BLOCK).zip(gate.par_chunks(BLOCK)).zip(up.par_chunks(BLOCK)).for_each(
        |((target, gate), up)| {
            vectorised!({
                for i in 0..target.len() {
                    target[i] = gate[i] / (T::ONE + (-gate[i]).exp()) * up[i];
                }
            });
        },
    );
}

/// Replaces `gate` and `up` by their gradients, given the gradient of [`silu_mul`]'s output.
pub fn silu_mul_backward<T: Real>(gate: &mut [T], up: &mut [T], output_gradient: &[T]) {
    gate.par_chunks_mut(BLOCK).zip(up.par_chunks_mut(BLOCK)).zip(output_gradient.par_chunks(BLOCK)).for_each(
        |((gate, up), gradient)| {
            vectorised!({
                for i in 0..gate.len() {
                    let sigmoid = T::ONE / (T::ONE + (-gate[i]).exp());
                    let silu = gate[i] * sigmoid;
                    gate[i] = gradient[i] * up[i] * (sigmoid + silu * (T::ONE - sigmoid));
                    up[i] = gradient[i] * silu;
                }
            });
        },
    );
}

/// target += values
pub fn add<T: Real>(target: &mut [T], values: &[T]) {
    target.par_chunks_mut(BLOCK).zip(values.par_chunks(BLOCK)).for_each(|(target, values)| {
        vectorised!({
            for (a, b) in target.iter_mut().zip(values) {
                *a += *b;
            }
        });
    });
}
