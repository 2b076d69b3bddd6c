//! The few operations that the training step needs, on the CPU; [`cuda`] has those of a GPU.
//!
//! Matrix products go through `gemm`, element-wise work is parallel by rows through rayon and dispatched at run time to
//! the widest vector unit. Nothing here allocates: callers own every buffer and keep it from step to step, since fresh
//! pages cost more than the arithmetic. Every result is the same from run to run on one machine, whatever the threads do:
//! no sum is split by who is idle.
//!
//! All matrices are row-major. Lengths that do not fit are a bug of the caller and panic with the sizes, as slice
//! indexing does.

pub mod cuda;
mod lanes;
mod product;
mod real;
mod rope;
mod rows;

pub(crate) use lanes::vectorised;
pub use lanes::{add_scaled, dot, exp_in_place, max};
pub use product::{Threads, View, product, product_ab, product_abt, product_atb, product_operations};
pub use real::Real;
pub use rope::{RopeError, RopeTable};
pub use rows::{add, rms_norm, rms_norm_backward, rms_norm_weight_gradient, silu_mul, silu_mul_backward};
