//! Loops over one slice, written so that the compiler can vectorise them.

use super::Real;

/// Partial sums of a reduction. Floating-point sums may not be reordered by the compiler, so the order is ours.
const LANES: usize = 32;

/// Runs the loops inside an expression with the widest vector unit of this machine.
///
/// A macro, since the closure must be inlined by force: the compiler does not do so by itself with a large one, and one
/// that is called is compiled for the smallest vector unit of all.
macro_rules! vectorised {
    ($work:expr) => {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || $work,
        )
    };
}
pub(crate) use vectorised;

/// Sum of products. Both of one length.
#[inline(always)]
pub fn dot<T: Real>(left: &[T], right: &[T]) -> T {
    let mut sums = [T::ZERO; LANES];
    let left_chunks = left.chunks_exact(LANES);
    let right_chunks = right.chunks_exact(LANES);
    let mut rest = T::ZERO;
    for (a, b) in left_chunks.remainder().iter().zip(right_chunks.remainder()) {
        rest += *a * *b;
    }
    for (a, b) in left_chunks.zip(right_chunks) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    fold(sums) + rest
}

/// The largest value; `T::LOWEST` for none.
#[inline(always)]
pub fn max<T: Real>(values: &[T]) -> T {
    let mut tops = [T::LOWEST; LANES];
    let chunks = values.chunks_exact(LANES);
    let mut top = T::LOWEST;
    for value in chunks.remainder() {
        top = top.largest(*value);
    }
    for chunk in chunks {
        for i in 0..LANES {
            tops[i] = tops[i].largest(chunk[i]);
        }
    }
    for value in tops {
        top = top.largest(value);
    }
    top
}

/// values := exp(scale * values - shift); returns their sum.
#[inline(always)]
pub fn exp_in_place<T: Real>(values: &mut [T], scale: T, shift: T) -> T {
    let mut sums = [T::ZERO; LANES];
    let mut rest = T::ZERO;
    let mut chunks = values.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for i in 0..LANES {
            let power = (chunk[i] * scale - shift).exp();
            chunk[i] = power;
            sums[i] += power;
        }
    }
    for value in chunks.into_remainder() {
        let power = (*value * scale - shift).exp();
        *value = power;
        rest += power;
    }
    fold(sums) + rest
}

/// target += factor * values
#[inline(always)]
pub fn add_scaled<T: Real>(target: &mut [T], factor: T, values: &[T]) {
    for (a, b) in target.iter_mut().zip(values) {
        *a += factor * *b;
    }
}

#[inline(always)]
fn fold<T: Real>(mut sums: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            let other = sums[i + width];
            sums[i] += other;
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_agree_with_plain_loops_at_every_length() {
        for length in [0, 1, 31, 32, 33, 100] {
            let left: Vec<f64> = (0..length).map(|i| (i as f64 * 0.37).sin()).collect();
            let right: Vec<f64> = (0..length).map(|i| (i as f64 * 0.11).cos()).collect();
            let wanted: f64 = left.iter().zip(&right).map(|(a, b)| a * b).sum();
            assert!((vectorised!(dot(&left, &right)) - wanted).abs() < 1e-12);
            let top = left.iter().copied().fold(f64::MIN, f64::max);
            assert_eq!(vectorised!(max(&left)), top);
            let mut powers = left.clone();
            let sum = vectorised!(exp_in_place(&mut powers, 2.0, 0.5));
            let wanted_sum: f64 = left.iter().map(|x| (2.0 * x - 0.5).exp()).sum();
            assert!((sum - wanted_sum).abs() < 1e-10);
        }
    }
}
