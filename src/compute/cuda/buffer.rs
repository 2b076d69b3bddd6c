//! Device memory and views of it.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr, result};

use super::device::{CudaError, Device};

/// Device memory of `len` elements.
pub struct Buffer<T> {
    slice: CudaSlice<T>,
    address: u64,
    /// The device's count of bytes.
    allocated: Arc<AtomicUsize>,
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        self.allocated.fetch_sub(self.slice.num_bytes(), Ordering::Relaxed);
    }
}

/// A row-major matrix in device memory.
pub struct Matrix<'a, T> {
    pub(super) address: u64,
    pub rows: usize,
    pub width: usize,
    /// Elements from row to row.
    pub stride: usize,
    pub(super) buffer: PhantomData<&'a T>,
}

impl<T> Clone for Matrix<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Matrix<'_, T> {}

impl<T> Matrix<'_, T> {
    /// Rows `start..start + rows`.
    pub fn rows_from(self, start: usize, rows: usize) -> Self {
        assert!(start + rows <= self.rows, "rows {start}..{} of {}", start + rows, self.rows);
        let address = self.address + (start * self.stride * size_of::<T>()) as u64;
        Self { address, rows, ..self }
    }

    /// Columns `start..start + width`.
    pub fn columns_from(self, start: usize, width: usize) -> Self {
        assert!(start + width <= self.width, "columns {start}..{} of {}", start + width, self.width);
        Self { address: self.address + (start * size_of::<T>()) as u64, width, ..self }
    }
}

impl<T: DeviceRepr> Buffer<T> {
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    pub fn is_empty(&self) -> bool {
        self.slice.len() == 0
    }

    /// [rows, width] from element `start` on, without gaps.
    pub fn matrix(&self, start: usize, rows: usize, width: usize) -> Matrix<'_, T> {
        assert!(
            start + rows * width <= self.len(),
            "{rows} x {width} from {start} in a buffer of {}",
            self.len()
        );
        let address = self.address + (start * size_of::<T>()) as u64;
        Matrix { address, rows, width, stride: width, buffer: PhantomData }
    }

    /// [rows, width] from the start.
    pub fn head(&self, rows: usize, width: usize) -> Matrix<'_, T> {
        self.matrix(0, rows, width)
    }
}

impl Device {
    /// A buffer of zeros.
    pub fn zeros<T: DeviceRepr>(&self, length: usize) -> Result<Buffer<T>, CudaError> {
        let buffer = self.allocate(length)?;
        self.clear(buffer.head(1, length))?;
        Ok(buffer)
    }

    /// A buffer with these values.
    pub fn upload<T: DeviceRepr>(&self, values: &[T]) -> Result<Buffer<T>, CudaError> {
        let buffer = self.allocate(values.len())?;
        self.copy_in(values, buffer.head(1, values.len()))?;
        Ok(buffer)
    }

    fn allocate<T: DeviceRepr>(&self, length: usize) -> Result<Buffer<T>, CudaError> {
        let length = length.max(1);
        // SAFETY: no element is read before it is written: the callers clear or fill the buffer.
        let slice = unsafe { self.stream().alloc::<T>(length) }
            .map_err(|source| CudaError::Memory { bytes: length * size_of::<T>(), source })?;
        let address = slice.device_ptr(self.stream()).0;
        let allocated = Arc::clone(self.allocated());
        allocated.fetch_add(slice.num_bytes(), Ordering::Relaxed);
        Ok(Buffer { slice, address, allocated })
    }

    /// Sets a matrix without gaps to zeros.
    pub fn clear<T>(&self, matrix: Matrix<T>) -> Result<(), CudaError> {
        assert_eq!(matrix.stride, matrix.width, "only a matrix without gaps can be cleared");
        let bytes = matrix.rows * matrix.width * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the view lies inside a live buffer.
        unsafe { result::memset_d8_async(matrix.address, 0, bytes, self.stream().cu_stream()) }?;
        Ok(())
    }

    /// Copies values to a matrix without gaps.
    pub fn copy_in<T>(&self, values: &[T], matrix: Matrix<T>) -> Result<(), CudaError> {
        assert_eq!(matrix.stride, matrix.width, "only a matrix without gaps can be filled");
        assert_eq!(values.len(), matrix.rows * matrix.width, "values for {} rows", matrix.rows);
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: the view lies inside a live buffer and is as long as the values. Memory that is not pinned is staged by
        // the driver before the call returns.
        unsafe { result::memcpy_htod_async(matrix.address, values, self.stream().cu_stream()) }?;
        Ok(())
    }

    /// Waits, then copies a matrix without gaps to the host.
    pub fn copy_out<T: Clone + Default>(&self, matrix: Matrix<T>) -> Result<Vec<T>, CudaError> {
        assert_eq!(matrix.stride, matrix.width, "only a matrix without gaps can be read");
        let mut values = vec![T::default(); matrix.rows * matrix.width];
        if values.is_empty() {
            return Ok(values);
        }
        // SAFETY: the view lies inside a live buffer and is as long as the values, which outlive the copy: it is waited for.
        unsafe { result::memcpy_dtoh_async(&mut values, matrix.address, self.stream().cu_stream()) }?;
        self.synchronize()?;
        Ok(values)
    }
}
