//! Compiling the kernels for one head's shape, with NVRTC. It needs no GPU and no header.

#![allow(unsafe_code)]

use std::ffi::CString;

use cudarc::nvrtc::{result, sys};

use super::device::CudaError;

const SOURCES: [&str; 5] = [
    include_str!("kernels/common.cu"),
    include_str!("kernels/rows.cu"),
    include_str!("kernels/attention.cu"),
    include_str!("kernels/loss.cu"),
    include_str!("kernels/optimizer.cu"),
];

/// What the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// H.
    pub hidden: usize,
    /// I.
    pub inner: usize,
    pub heads: usize,
    pub key_heads: usize,
    /// D.
    pub head_dim: usize,
    /// Vd.
    pub vocabulary: usize,
}

impl Shape {
    /// Whether the kernels can do it.
    pub fn check(&self) -> Result<(), CudaError> {
        let fail = |reason: String| Err(CudaError::Shape(reason));
        for (name, value) in [
            ("hidden_size", self.hidden),
            ("intermediate_size", self.inner),
            ("draft_vocab_size", self.vocabulary),
        ] {
            if value == 0 || !value.is_multiple_of(8) {
                return fail(format!("{name} is {value}; the kernels need a multiple of 8"));
            }
        }
        if self.hidden > 16_384 {
            return fail(format!("hidden_size is {}; the kernels hold at most 16384", self.hidden));
        }
        if ![64, 128, 192, 256].contains(&self.head_dim) {
            return fail(format!("head_dim is {}; the kernels know 64, 128, 192 and 256", self.head_dim));
        }
        if self.key_heads == 0 || !self.heads.is_multiple_of(self.key_heads) {
            return fail(format!("{} key heads do not divide {} heads", self.key_heads, self.heads));
        }
        Ok(())
    }
}

/// Whether NVRTC can be opened here.
pub fn compiler_is_present() -> bool {
    // SAFETY: opens the library, whose initialisers are NVIDIA's own.
    unsafe { sys::is_culib_present() }
}

/// The kernels as machine code (CUBIN) for `target`, like "sm_90a".
pub fn compile(shape: &Shape, target: &str) -> Result<Vec<u8>, CudaError> {
    if !compiler_is_present() {
        return Err(CudaError::Missing("libnvrtc"));
    }
    let fail = |log: String| CudaError::Compile { target: target.to_owned(), log };
    let source = CString::new(SOURCES.join("\n")).map_err(|error| fail(error.to_string()))?;
    let mut options = vec![format!("--gpu-architecture={target}"), "--std=c++17".to_owned()];
    let sizes = [
        ("HIDDEN", shape.hidden),
        ("INNER", shape.inner),
        ("HEADS", shape.heads),
        ("KEY_HEADS", shape.key_heads),
        ("HEAD_DIM", shape.head_dim),
        ("VOCAB", shape.vocabulary),
    ];
    options.extend(sizes.iter().map(|(name, value)| format!("-D{name}={value}")));
    let program = result::create_program(&source, None).map_err(|error| fail(format!("{error:?}")))?;
    // SAFETY: the program was made above and is destroyed below, once; the image has the size that NVRTC gave.
    unsafe {
        let outcome = match result::compile_program(program, &options) {
            Ok(()) => image(program).map_err(|error| fail(format!("{error:?}"))),
            Err(error) => Err(fail(log(program).unwrap_or_else(|_| format!("{error:?}")))),
        };
        result::destroy_program(program).map_err(|error| fail(format!("{error:?}")))?;
        outcome
    }
}

/// # Safety
/// `program` is live and compiled.
unsafe fn image(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut size = 0;
    // SAFETY: as the caller promises; the buffer has the size that NVRTC asks for.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &mut size).result()?;
        let mut image = vec![0_u8; size];
        sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()).result()?;
        Ok(image)
    }
}

/// # Safety
/// `program` is live.
unsafe fn log(program: sys::nvrtcProgram) -> Result<String, result::NvrtcError> {
    // SAFETY: as the caller promises.
    let text = unsafe { result::get_program_log(program) }?;
    let bytes: Vec<u8> = text.iter().map(|letter| *letter as u8).take_while(|byte| *byte != 0).collect();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
