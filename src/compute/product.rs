//! Matrix products.
//!
//! The only unsafe code of the trainer: `gemm` takes raw pointers. Each call is preceded by checks that every element
//! that the strides can reach lies inside its slice.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use gemm::Parallelism;

use super::Real;

/// A matrix inside a slice, possibly strided or transposed.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    data: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> View<'a, T> {
    /// A dense row-major matrix at the start of `data`.
    pub fn new(data: &'a [T], rows: usize, columns: usize) -> Self {
        Self { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// The same elements with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    fn check(&self, name: &str) {
        let reach = (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride;
        assert!(
            reach < self.data.len(),
            "{name} [{}, {}] needs {} elements, its slice has {}",
            self.rows,
            self.columns,
            reach + 1,
            self.data.len()
        );
    }
}

/// How many threads a product may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threads {
    /// The caller is one of many parallel tasks.
    One,
    /// All of rayon's.
    All,
}

static OPERATIONS: AtomicU64 = AtomicU64::new(0);

/// Floating-point operations of all products of this process so far.
pub fn product_operations() -> u64 {
    OPERATIONS.load(Ordering::Relaxed)
}

/// target = left · right, or += with `accumulate`. `target` is row-major with `target_stride` elements a row.
pub fn product<T: Real>(
    target: &mut [T],
    target_stride: usize,
    left: View<T>,
    right: View<T>,
    accumulate: bool,
    threads: Threads,
) {
    let (m, n, k) = (left.rows, right.columns, left.columns);
    assert_eq!(k, right.rows, "inner sizes of a product differ");
    if m == 0 || n == 0 {
        return;
    }
    assert!(n <= target_stride || m == 1, "rows of the target overlap: {n} columns, stride {target_stride}");
    let reach = (m - 1) * target_stride + n - 1;
    assert!(reach < target.len(), "target [{m}, {n}] needs {} elements, has {}", reach + 1, target.len());
    if k == 0 {
        if !accumulate {
            for row in 0..m {
                target[row * target_stride..row * target_stride + n].fill(T::ZERO);
            }
        }
        return;
    }
    left.check("left side");
    right.check("right side");
    OPERATIONS.fetch_add(2 * (m * n * k) as u64, Ordering::Relaxed);
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::All => Parallelism::Rayon(0),
    };
    // SAFETY: each of the three matrices reaches at most the last element of its slice (checked just above), the target
    // is borrowed mutably so it overlaps neither operand, its rows do not overlap each other, and T is f32 or f64, which
    // gemm supports. Slices are at most isize::MAX bytes, so strides fit isize.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            target.as_mut_ptr(),
            1,
            target_stride as isize,
            accumulate,
            left.data.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.data.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// target [m, n] = a [m, k] · b [n, k]ᵀ: activations by a weight as it is stored.
pub fn product_abt<T: Real>(target: &mut [T], a: &[T], b: &[T], [m, n, k]: [usize; 3], accumulate: bool) {
    product(target, n, View::new(a, m, k), View::new(b, n, k).transposed(), accumulate, Threads::All);
}

/// target [m, n] = a [m, k] · b [k, n]: gradients back through a weight.
pub fn product_ab<T: Real>(target: &mut [T], a: &[T], b: &[T], [m, n, k]: [usize; 3], accumulate: bool) {
    product(target, n, View::new(a, m, k), View::new(b, k, n), accumulate, Threads::All);
}

/// target [m, n] = a [k, m]ᵀ · b [k, n]: the gradient of a weight.
pub fn product_atb<T: Real>(target: &mut [T], a: &[T], b: &[T], [m, n, k]: [usize; 3], accumulate: bool) {
    product(target, n, View::new(a, k, m).transposed(), View::new(b, k, n), accumulate, Threads::All);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(length: usize, seed: f64) -> Vec<f64> {
        (0..length).map(|i| (i as f64 * 0.731 + seed).sin()).collect()
    }

    #[test]
    fn every_orientation_agrees_with_plain_loops() {
        let (m, n, k) = (7, 5, 6);
        let (a, b, start) = (filled(m * k, 0.0), filled(n * k, 1.0), filled(m * n, 2.0));
        for accumulate in [false, true] {
            let mut abt = start.clone();
            let mut ab = start.clone();
            let mut atb = start.clone();
            product_abt(&mut abt, &a, &b, [m, n, k], accumulate);
            product_ab(&mut ab, &a, &b, [m, n, k], accumulate);
            product_atb(&mut atb, &a, &b, [m, n, k], accumulate);
            for i in 0..m {
                for j in 0..n {
                    let from = if accumulate { start[i * n + j] } else { 0.0 };
                    let sum = |term: &dyn Fn(usize) -> f64| from + (0..k).map(term).sum::<f64>();
                    assert!((abt[i * n + j] - sum(&|l| a[i * k + l] * b[j * k + l])).abs() < 1e-12);
                    assert!((ab[i * n + j] - sum(&|l| a[i * k + l] * b[l * n + j])).abs() < 1e-12);
                    assert!((atb[i * n + j] - sum(&|l| a[l * m + i] * b[l * n + j])).abs() < 1e-12);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "right side [4, 3] needs 12 elements, its slice has 11")]
    fn short_slices_are_refused() {
        let mut target = [0.0_f32; 6];
        product_ab(&mut target, &[0.0; 8], &[0.0; 11], [2, 3, 4], false);
    }
}
