//! Matrix products through cublasLt: bf16 in, sums in f32, bf16 or f32 out. The algorithm of each shape is the fastest of
//! the library's first suggestions, timed once on the first call.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use half::bf16;

use super::buffer::Matrix;
use super::device::{CudaError, Device};

/// Bytes of scratch that products may use.
pub(super) const WORKSPACE: usize = 64 << 20;
/// Suggestions that are timed.
const CANDIDATES: usize = 8;
/// Runs of each suggestion, after one to warm up.
const RUNS: usize = 3;

/// Which factor is transposed; names as in the CPU's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// [m, k] times [k, n]
    Ab,
    /// [m, k] times [n, k] transposed
    Abt,
    /// [k, m] transposed times [k, n]
    Atb,
}

/// What a product writes.
pub trait Output: Clone + Default {
    #[doc(hidden)]
    const TYPE: sys::cudaDataType;
    #[doc(hidden)]
    const IS_WIDE: bool;
}

impl Output for bf16 {
    const TYPE: sys::cudaDataType = sys::cudaDataType::CUDA_R_16BF;
    const IS_WIDE: bool = false;
}

impl Output for f32 {
    const TYPE: sys::cudaDataType = sys::cudaDataType::CUDA_R_32F;
    const IS_WIDE: bool = true;
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    form: Form,
    size: [usize; 3],
    strides: [usize; 4],
    wide: bool,
    adds: bool,
}

struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    left: sys::cublasLtMatrixLayout_t,
    right: sys::cublasLtMatrixLayout_t,
    added: sys::cublasLtMatrixLayout_t,
    output: sys::cublasLtMatrixLayout_t,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `Plan::new` and destroyed here alone. That a description cannot be destroyed leaks it, no more.
        unsafe {
            let _ = result::destroy_matmul_desc(self.description);
            for layout in [self.left, self.right, self.added, self.output] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    plans: RefCell<HashMap<Key, (Plan, sys::cublasLtMatmulAlgo_t)>>,
}

impl Drop for Products {
    fn drop(&mut self) {
        self.plans.borrow_mut().clear();
        // SAFETY: made by `Products::new` and destroyed here alone.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Products {
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        // SAFETY: scratch that no one reads before writing.
        let workspace = unsafe { stream.alloc::<u8>(WORKSPACE) }?;
        Ok(Self { handle: result::create_handle()?, workspace, plans: RefCell::default() })
    }
}

impl Plan {
    /// cublasLt is column-major: our row-major D = A B is its D^T = B^T A^T, so that our right factor is its left one.
    fn new(key: &Key, data_type: sys::cudaDataType) -> Result<Self, CublasError> {
        let [m, n, k] = key.size;
        let (left_transposed, right_transposed) = match key.form {
            Form::Ab => (false, false),
            Form::Abt => (true, false),
            Form::Atb => (false, true),
        };
        let layout = |kind, rows: usize, columns: usize, stride: usize| {
            result::create_matrix_layout(kind, rows as u64, columns as u64, stride as i64)
        };
        let input = sys::cudaDataType::CUDA_R_16BF;
        let (left_rows, left_columns) = if left_transposed { (k, n) } else { (n, k) };
        let (right_rows, right_columns) = if right_transposed { (m, k) } else { (k, m) };
        let plan = Self {
            description: result::create_matmul_desc(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType::CUDA_R_32F,
            )?,
            left: layout(input, left_rows, left_columns, key.strides[1])?,
            right: layout(input, right_rows, right_columns, key.strides[0])?,
            added: layout(data_type, n, m, key.strides[2])?,
            output: layout(data_type, n, m, key.strides[3])?,
        };
        for (attribute, transposed) in [
            (sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, left_transposed),
            (sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB, right_transposed),
        ] {
            // cublasOperation_t: 0 as it is, 1 transposed.
            let value = u32::from(transposed);
            // SAFETY: the description is live and the attribute is an enumeration of 32 bits.
            unsafe {
                result::set_matmul_desc_attribute(
                    plan.description,
                    attribute,
                    (&raw const value).cast(),
                    size_of_val(&value),
                )?;
            }
        }
        Ok(plan)
    }

    fn candidates(
        &self,
        handle: sys::cublasLtHandle_t,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let preference = result::create_matmul_pref()?;
        let mut results = Vec::<sys::cublasLtMatmulHeuristicResult_t>::with_capacity(CANDIDATES);
        let mut count = 0;
        let workspace = WORKSPACE;
        // SAFETY: all descriptions are live; the library writes at most CANDIDATES results and says how many.
        unsafe {
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of::<usize>(),
            )?;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.description,
                self.left,
                self.right,
                self.added,
                self.output,
                preference,
                CANDIDATES as i32,
                results.as_mut_ptr(),
                &mut count,
            );
            result::destroy_matmul_pref(preference)?;
            status.result()?;
            results.set_len(count as usize);
        }
        let success = sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS;
        let list: Vec<_> =
            results.iter().filter(|found| found.state == success).map(|found| found.algo).collect();
        if list.is_empty() {
            return Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
        }
        Ok(list)
    }
}

impl Device {
    /// output = left times right, plus `added` where there is one (it may be the output itself).
    pub fn product<T: Output>(
        &self,
        form: Form,
        left: Matrix<bf16>,
        right: Matrix<bf16>,
        added: Option<Matrix<T>>,
        output: Matrix<T>,
    ) -> Result<(), CudaError> {
        let (m, k) = if form == Form::Atb { (left.width, left.rows) } else { (left.rows, left.width) };
        let (n, inner) =
            if form == Form::Abt { (right.rows, right.width) } else { (right.width, right.rows) };
        assert!(
            k == inner && output.rows == m && output.width == n,
            "{form:?}: {} x {} and {} x {} to {} x {}",
            left.rows,
            left.width,
            right.rows,
            right.width,
            output.rows,
            output.width
        );
        if let Some(added) = added {
            assert!(
                added.rows == m && added.width == n,
                "added {} x {} to {m} x {n}",
                added.rows,
                added.width
            );
        }
        if m == 0 || n == 0 {
            return Ok(());
        }
        let strides =
            [left.stride, right.stride, added.map_or(output.stride, |added| added.stride), output.stride];
        let key = Key { form, size: [m, n, k], strides, wide: T::IS_WIDE, adds: added.is_some() };
        let mut plans = self.products.plans.borrow_mut();
        let (plan, algorithm) = match plans.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let plan = Plan::new(&key, T::TYPE)?;
                let algorithm = self.choose(&plan, left, right, output)?;
                entry.insert((plan, algorithm))
            }
        };
        self.multiply(plan, algorithm, left, right, added, output)?;
        self.count_operations(2.0 * m as f64 * n as f64 * k as f64);
        self.lap(|| format!("product {form:?} {m} x {n} x {k}"))
    }

    /// The fastest suggestion. Runs into scratch of its own, as the output may be wanted as it is.
    fn choose<T: Output>(
        &self,
        plan: &Plan,
        left: Matrix<bf16>,
        right: Matrix<bf16>,
        output: Matrix<T>,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CudaError> {
        let candidates = plan.candidates(self.products.handle)?;
        if let [only] = candidates[..] {
            return Ok(only);
        }
        // SAFETY: scratch that no one reads.
        let scratch = unsafe { self.stream().alloc::<u8>(output.rows * output.stride * size_of::<T>()) };
        let Ok(scratch) = scratch else { return Ok(candidates[0]) };
        let target = Matrix { address: scratch.device_ptr(self.stream()).0, ..output };
        let mut best = (f32::INFINITY, candidates[0]);
        for algorithm in candidates {
            let mut start = None;
            let mut works = true;
            for run in 0..=RUNS {
                if run == 1 {
                    start = Some(self.event()?);
                }
                works &= self.multiply(plan, &algorithm, left, right, None, target).is_ok();
            }
            let end = self.event()?;
            if let Some(start) = start.filter(|_| works) {
                let time = start.elapsed_ms(&end)?;
                if time < best.0 {
                    best = (time, algorithm);
                }
            }
        }
        Ok(best.1)
    }

    fn multiply<T: Output>(
        &self,
        plan: &Plan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        left: Matrix<bf16>,
        right: Matrix<bf16>,
        added: Option<Matrix<T>>,
        output: Matrix<T>,
    ) -> Result<(), CublasError> {
        let (alpha, beta) = (1.0_f32, if added.is_some() { 1.0_f32 } else { 0.0 });
        let added = added.unwrap_or(output);
        // SAFETY: the plan's layouts are those of the views, which lie inside live buffers; the factors are only read.
        unsafe {
            result::matmul(
                self.products.handle,
                plan.description,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                right.address as *const c_void,
                plan.left,
                left.address as *const c_void,
                plan.right,
                added.address as *const c_void,
                plan.added,
                output.address as *mut c_void,
                plan.output,
                algorithm,
                self.products.workspace.device_ptr(self.stream()).0 as *mut c_void,
                WORKSPACE,
                self.stream().cu_stream().cast(),
            )
        }
    }
}
