//! Stored values as f32, at the speed of memory.

use super::{StateDtype, fp8};

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
        StateDtype::F32 => {
            stored.as_chunks::<4>().0.iter().all(|value| f32::from_le_bytes(*value).is_finite())
        }
        StateDtype::Bf16 => {
            stored.as_chunks::<2>().0.iter().all(|value| half::bf16::from_le_bytes(*value).is_finite())
        }
        // Made here, of finite values.
        StateDtype::Fp8 => true,
    }
}
