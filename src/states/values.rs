//! Stored values as f32, at the speed of memory.

use super::{StateDtype, fp8};
use crate::compute::vectorised;

/// Decodes rows of `hidden` values a layer into as many floats.
pub(crate) fn decode(dtype: StateDtype, stored: &[u8], hidden: usize, decoded: &mut [f32]) {
    match dtype {
        StateDtype::F32 => {
            for (value, bytes) in decoded.iter_mut().zip(stored.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        StateDtype::Bf16 => {
            // The upper half of an f32.
            for (value, bytes) in decoded.iter_mut().zip(stored.as_chunks::<2>().0) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
            }
        }
        StateDtype::Fp8 => fp8::decode_f32(stored, hidden, decoded),
    }
}

/// Whether no value that vLLM gave is infinite or no number.
pub(crate) fn all_finite(dtype: StateDtype, stored: &[u8]) -> bool {
    match dtype {
        StateDtype::F32 => stored.chunks(CHUNK).all(|chunk| vectorised!(f32_finite(chunk))),
        StateDtype::Bf16 => stored.chunks(CHUNK).all(|chunk| vectorised!(bf16_finite(chunk))),
        // Made here, of finite values.
        StateDtype::Fp8 => true,
    }
}

/// Bytes that are looked at before it is asked whether to go on, so that the loop over them has no way out.
const CHUNK: usize = 1 << 14;

#[inline(always)]
fn f32_finite(chunk: &[u8]) -> bool {
    let mut not_finite = false;
    for bytes in chunk.as_chunks::<4>().0 {
        not_finite |= u32::from_le_bytes(*bytes) & 0x7f80_0000 == 0x7f80_0000;
    }
    !not_finite
}

#[inline(always)]
fn bf16_finite(chunk: &[u8]) -> bool {
    let mut not_finite = false;
    for bytes in chunk.as_chunks::<2>().0 {
        not_finite |= u16::from_le_bytes(*bytes) & 0x7f80 == 0x7f80;
    }
    !not_finite
}
