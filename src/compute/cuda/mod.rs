//! The operations of the training step on an NVIDIA GPU.
//!
//! The driver, NVRTC and cublasLt are opened at run time: the program builds and starts where none of them is. Kernels are
//! CUDA C++ text in `kernels/`, compiled for one head's shape when a device is opened. Products read bf16 and sum in f32.
//!
//! Everything goes to one stream in the order of the calls, and returns before it is done; [`Device::synchronize`] and
//! copies to the host wait. Views borrow their buffer, which is freed in stream order: a freed buffer is never in use.
//! Several views of one buffer may be handed to one operation, as the device's memory is no Rust memory; what an operation
//! allows is written at it. Shapes that do not fit are a bug of the caller and panic with the sizes.

mod buffer;
mod compile;
mod device;
mod kernels;
mod product;

pub use buffer::{Buffer, Matrix};
pub use compile::{Shape, compile, compiler_is_present};
pub use device::{CudaError, Device, Lap, check, is_present};
pub use kernels::{Attention, KeyTile, QueryTile, Update};
pub use product::Form;
