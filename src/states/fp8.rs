//! Hidden states at half the size of bf16: eight bits for each value, and the massive activations beside them.
//!
//! ```text
//! vector = scale:f32 outlier_index:u16 [K] outlier_value:bf16 [K] code:e4m3 [H]
//! K      = min(OUTLIERS, H)
//! ```
//!
//! All numbers are little-endian. A vector is one row of one layer; all vectors of one H have the same length, so rows
//! can be sliced.
//!
//! A few channels of a residual stream can be thousands of times larger than the others. They make up most of the norm,
//! and one scale for all values would push the others among the subnormal codes. So the largest magnitudes are kept as
//! bf16, their codes are zero, and the scale fits the rest. A slot with the value zero is unused.
//!
//! The scale is the smallest power of two that brings the rest within the codes. So scaling is exact both ways, and
//! each value is rounded once: to the nearest code (OCP E4M3FN: bias 7, no infinities, up to 448), ties to even.

use half::bf16;

use super::StateDtype;
use crate::compute::vectorised;

/// Values of a vector that are kept as bf16. Measured on states of SmolLM2-135M: the first two cut the error by 23 to
/// 73%, two more by 7 to 10%, about what their bytes are worth; four more by 4 to 8%, for twice as many bytes.
const OUTLIERS: usize = 4;
/// What an outlier's index can tell apart.
const MAX_HIDDEN: usize = 1 << 16;

const SCALE_BYTES: usize = 4;
const INDEX_BYTES: usize = 2;
const VALUE_BYTES: usize = 2;

/// Values that share one known maximum, so that the next largest is found without reading the whole vector again.
const BLOCK: usize = 64;

const F32_BIAS: u32 = 127;
const F32_MANTISSA_BITS: u32 = 23;
const CODE_BIAS: u32 = 7;
const CODE_MANTISSA_BITS: u32 = 3;
/// Bits of an f32's mantissa that a code has no place for.
const DROPPED_BITS: u32 = F32_MANTISSA_BITS - CODE_MANTISSA_BITS;
const BIAS_DIFFERENCE: u32 = F32_BIAS - CODE_BIAS;
/// The smallest code that is not subnormal, and its value: 2^-6.
const SMALLEST_NORMAL_CODE: u32 = 1 << CODE_MANTISSA_BITS;
const SMALLEST_NORMAL: f32 = power_of_two(F32_BIAS - 6);
/// 2^14: here the steps of an f32 are those of the subnormal codes, 2^-9.
const SUBNORMAL_STEPS: f32 = power_of_two(F32_BIAS + 14);
/// Not a number; never written.
const NAN_CODE: u32 = 0x7f;
/// The largest code is 1.75 * 2^8.
const LARGEST_EXPONENT: u32 = 8;
/// Added to an f32, carries into its exponent where the mantissa is above 1.75.
const ABOVE_LARGEST: u32 = (1 << (F32_MANTISSA_BITS - 2)) - 1;
/// 2^-117: below it, a subnormal code would become a subnormal f32, which x86 multiplies many times slower.
const SMALLEST_SCALE_EXPONENT: u32 = F32_BIAS - 117;
/// 240 * 2^120, what larger values are taken for: rounded, they could become infinite.
const LARGEST: f32 = 240.0 * power_of_two(F32_BIAS + 120);

/// Bytes of an encoded vector; None for no values, or more than an index of sixteen bits can tell apart.
pub(crate) fn vector_bytes(hidden: usize) -> Option<usize> {
    if hidden == 0 || hidden > MAX_HIDDEN {
        return None;
    }
    Some(SCALE_BYTES + outliers(hidden) * (INDEX_BYTES + VALUE_BYTES) + hidden)
}

/// Appends the vectors of `states`, whose values must be finite and f32 or bf16; none for a hidden size that
/// [`vector_bytes`] refuses.
pub(crate) fn encode(dtype: StateDtype, states: &[u8], hidden: usize, encoded: &mut Vec<u8>) {
    let Some(target_bytes) = vector_bytes(hidden) else { return };
    let Some(source_bytes) = dtype.vector_bytes(hidden) else { return };
    let start = encoded.len();
    encoded.resize(start + states.len() / source_bytes * target_bytes, 0);
    let mut values = vec![0.0; hidden];
    let mut block_maxima = vec![0.0; hidden.div_ceil(BLOCK)];
    vectorised!({
        let targets = encoded[start..].chunks_exact_mut(target_bytes);
        for (source, target) in states.chunks_exact(source_bytes).zip(targets) {
            match dtype {
                StateDtype::F32 => {
                    for (value, bytes) in values.iter_mut().zip(source.as_chunks::<4>().0) {
                        *value = f32::from_le_bytes(*bytes).clamp(-LARGEST, LARGEST);
                    }
                }
                StateDtype::Bf16 => {
                    for (value, bytes) in values.iter_mut().zip(source.as_chunks::<2>().0) {
                        let bits = u32::from(u16::from_le_bytes(*bytes)) << 16;
                        *value = f32::from_bits(bits).clamp(-LARGEST, LARGEST);
                    }
                }
                StateDtype::Fp8 => return,
            }
            encode_vector(&mut values, &mut block_maxima, target);
        }
    });
}

/// Writes as many vectors as both slices hold; none for a hidden size that [`vector_bytes`] refuses.
pub(crate) fn decode_f32(encoded: &[u8], hidden: usize, decoded: &mut [f32]) {
    let Some(source_bytes) = vector_bytes(hidden) else { return };
    vectorised!({
        for (source, target) in encoded.chunks_exact(source_bytes).zip(decoded.chunks_exact_mut(hidden)) {
            decode_vector(source, target);
        }
    });
}

fn outliers(hidden: usize) -> usize {
    OUTLIERS.min(hidden)
}

/// `target` holds zeros. Afterwards `values` has zeros in place of its outliers; `block_maxima` is scratch.
#[inline(always)]
fn encode_vector(values: &mut [f32], block_maxima: &mut [f32], target: &mut [u8]) {
    let count = outliers(values.len());
    let Some((scale_bytes, body)) = target.split_first_chunk_mut::<SCALE_BYTES>() else { return };
    let (index_bytes, values_and_codes) = body.split_at_mut(count * INDEX_BYTES);
    let (value_bytes, codes) = values_and_codes.split_at_mut(count * VALUE_BYTES);
    let outlier_indices = index_bytes.as_chunks_mut::<INDEX_BYTES>().0;
    let outlier_values = value_bytes.as_chunks_mut::<VALUE_BYTES>().0;
    for (maximum, block) in block_maxima.iter_mut().zip(values.chunks(BLOCK)) {
        *maximum = largest_magnitude(block);
    }
    for (outlier_index, outlier_value) in outlier_indices.iter_mut().zip(outlier_values) {
        let index = index_of_largest(values, block_maxima);
        if values[index] == 0.0 {
            break;
        }
        *outlier_index = (index as u16).to_le_bytes();
        *outlier_value = bf16::from_f32(values[index]).to_le_bytes();
        values[index] = 0.0;
        let block = index / BLOCK;
        block_maxima[block] = largest_magnitude(block_of(values, block));
    }
    let exponent = scale_exponent(largest_magnitude(block_maxima));
    *scale_bytes = power_of_two(exponent).to_le_bytes();
    let inverse_scale = power_of_two(2 * F32_BIAS - exponent);
    for (code, value) in codes.iter_mut().zip(values.iter()) {
        *code = nearest_code(*value * inverse_scale);
    }
}

#[inline(always)]
fn decode_vector(source: &[u8], target: &mut [f32]) {
    let count = outliers(target.len());
    let Some((scale_bytes, body)) = source.split_first_chunk::<SCALE_BYTES>() else { return };
    let (index_bytes, values_and_codes) = body.split_at(count * INDEX_BYTES);
    let (value_bytes, codes) = values_and_codes.split_at(count * VALUE_BYTES);
    let outlier_indices = index_bytes.as_chunks::<INDEX_BYTES>().0;
    let outlier_values = value_bytes.as_chunks::<VALUE_BYTES>().0;
    let scale = f32::from_le_bytes(*scale_bytes);
    for (value, code) in target.iter_mut().zip(codes) {
        *value = code_value(*code) * scale;
    }
    for (outlier_index, outlier_value) in outlier_indices.iter().zip(outlier_values) {
        let outlier = bf16::from_le_bytes(*outlier_value).to_f32();
        if outlier == 0.0 {
            continue;
        }
        let index = usize::from(u16::from_le_bytes(*outlier_index));
        if let Some(value) = target.get_mut(index) {
            *value = outlier;
        }
    }
}

/// The code nearest to a value of magnitude 448 at most.
#[inline(always)]
fn nearest_code(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24) & 0x80;
    let magnitude = value.abs();
    let bits = magnitude.to_bits();
    let odd = (bits >> DROPPED_BITS) & 1;
    let rounded = (bits + (1 << (DROPPED_BITS - 1)) - 1 + odd) >> DROPPED_BITS;
    let normal = rounded.wrapping_sub(BIAS_DIFFERENCE << CODE_MANTISSA_BITS);
    // The addition rounds to steps of 2^-9 and leaves their number in the low bits. Eight are the smallest normal code.
    let subnormal = (magnitude + SUBNORMAL_STEPS).to_bits().wrapping_sub(SUBNORMAL_STEPS.to_bits());
    let code = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    (code | sign) as u8
}

#[inline(always)]
fn code_value(code: u8) -> f32 {
    let sign = u32::from(code & 0x80) << 24;
    let magnitude = u32::from(code & 0x7f);
    let normal = (magnitude << DROPPED_BITS) + (BIAS_DIFFERENCE << F32_MANTISSA_BITS);
    // Given the exponent of the smallest normal, then its leading one taken off: exact, without a subnormal f32.
    let subnormal = f32::from_bits((magnitude << DROPPED_BITS) | SMALLEST_NORMAL.to_bits()) - SMALLEST_NORMAL;
    let number = if magnitude < SMALLEST_NORMAL_CODE { subnormal.to_bits() } else { normal };
    let bits = if magnitude == NAN_CODE { f32::NAN.to_bits() } else { number };
    f32::from_bits(bits | sign)
}

/// The biased exponent of the smallest power of two that brings `magnitude` down to 448 at most.
#[inline(always)]
fn scale_exponent(magnitude: f32) -> u32 {
    let exponent = (magnitude.to_bits() + ABOVE_LARGEST) >> F32_MANTISSA_BITS;
    exponent.saturating_sub(LARGEST_EXPONENT).max(SMALLEST_SCALE_EXPONENT)
}

#[inline(always)]
const fn power_of_two(biased_exponent: u32) -> f32 {
    f32::from_bits(biased_exponent << F32_MANTISSA_BITS)
}

/// The first of the largest magnitude.
#[inline(always)]
fn index_of_largest(values: &[f32], block_maxima: &[f32]) -> usize {
    let mut block = 0;
    for (candidate, maximum) in block_maxima.iter().enumerate() {
        if *maximum > block_maxima[block] {
            block = candidate;
        }
    }
    let mut index = block * BLOCK;
    for value in block_of(values, block) {
        if value.abs().to_bits() == block_maxima[block].to_bits() {
            break;
        }
        index += 1;
    }
    index
}

#[inline(always)]
fn block_of(values: &[f32], block: usize) -> &[f32] {
    let end = values.len().min((block + 1) * BLOCK);
    &values[block * BLOCK..end]
}

/// Compared as integers, which order as the magnitudes do and whose maximum the compiler may take in any order.
#[inline(always)]
fn largest_magnitude(values: &[f32]) -> f32 {
    let mut largest = 0;
    for value in values {
        largest = largest.max(value.abs().to_bits());
    }
    f32::from_bits(largest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// By the definition of the format, in f64.
    fn value_by_definition(code: u8) -> f64 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from((code >> 3) & 0xf);
        let mantissa = f64::from(code & 7) / 8.0;
        match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => sign * mantissa * 2f64.powi(-6),
            _ => sign * (1.0 + mantissa) * 2f64.powi(exponent - 7),
        }
    }

    /// Tries all codes; of two at the same distance, the even one.
    fn code_by_search(value: f32) -> u8 {
        let magnitude = f64::from(value.abs());
        let mut best = 0u8;
        for code in 1..0x7f {
            let distance = (value_by_definition(code) - magnitude).abs();
            let best_distance = (value_by_definition(best) - magnitude).abs();
            if distance < best_distance || distance == best_distance && code % 2 == 0 {
                best = code;
            }
        }
        if value.is_sign_negative() { best | 0x80 } else { best }
    }

    fn f32_bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn bf16_bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect()
    }

    fn encoded_f32(values: &[f32], hidden: usize) -> Vec<u8> {
        let mut encoded = Vec::new();
        encode(StateDtype::F32, &f32_bytes(values), hidden, &mut encoded);
        encoded
    }

    fn decoded(encoded: &[u8], hidden: usize) -> Vec<f32> {
        let vectors = encoded.len() / vector_bytes(hidden).unwrap();
        let mut values = vec![f32::NAN; vectors * hidden];
        decode_f32(encoded, hidden, &mut values);
        values
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn every_code_has_the_value_of_the_definition_and_is_its_nearest_code() {
        for code in 0..=u8::MAX {
            let value = code_value(code);
            let wanted = value_by_definition(code);
            if wanted.is_nan() {
                assert!(value.is_nan(), "{code:#x}");
                continue;
            }
            assert_eq!(f64::from(value).to_bits(), wanted.to_bits(), "{code:#x}");
            assert_eq!(nearest_code(value), code);
        }
    }

    #[test]
    fn between_two_codes_ties_go_to_the_even_one() {
        for code in 0..0x7e_u8 {
            let middle = (code_value(code) + code_value(code + 1)) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(nearest_code(middle), even, "{middle}");
            assert_eq!(nearest_code(-middle), even | 0x80, "{middle}");
            assert_eq!(nearest_code(middle.next_down()), code, "{middle}");
            assert_eq!(nearest_code(middle.next_up()), code + 1, "{middle}");
        }
    }

    #[test]
    fn massive_activations_survive_and_do_not_crush_the_others() {
        for dtype in [StateDtype::F32, StateDtype::Bf16] {
            let hidden = 4096;
            let mut values: Vec<f32> =
                (0..hidden).map(|i| (0.5 + i as f32 / 4096.0) * [1.0, -1.0][i % 2]).collect();
            let massive = [(0, 30_001.0), (1415, -29_999.0), (2533, 24_894.2), (4095, -3e4)];
            for (channel, value) in massive {
                values[channel] = value;
            }
            let states = if dtype == StateDtype::F32 { f32_bytes(&values) } else { bf16_bytes(&values) };
            let mut encoded = Vec::new();
            encode(dtype, &states, hidden, &mut encoded);
            let found = decoded(&encoded, hidden);
            for (channel, value) in massive {
                assert_eq!(found[channel], bf16::from_f32(value).to_f32());
                values[channel] = found[channel];
            }
            if dtype == StateDtype::Bf16 {
                values = values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
            }
            for (result, value) in found.iter().zip(&values) {
                assert!((result - value).abs() <= value.abs() / 16.0, "{result} for {value}");
            }
        }
    }

    #[test]
    fn zeros_keep_their_signs() {
        for hidden in [1, 3, 4, 5, 64, 65, 200] {
            let values: Vec<f32> = (0..hidden).map(|i| [0.0, -0.0, -0.0][i % 3]).collect();
            assert_eq!(bits(&decoded(&encoded_f32(&values, hidden), hidden)), bits(&values));
        }
    }

    #[test]
    fn vectors_shorter_than_the_outliers_are_kept_as_bf16() {
        for hidden in 1..=OUTLIERS {
            let values: Vec<f32> = (0..2 * hidden).map(|i| 1.5f32.powi(i as i32) - 20.0).collect();
            let encoded = encoded_f32(&values, hidden);
            assert_eq!(encoded.len(), 2 * vector_bytes(hidden).unwrap());
            let wanted: Vec<f32> = values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
            assert_eq!(decoded(&encoded, hidden), wanted);
        }
    }

    #[test]
    fn the_largest_and_the_smallest_hidden_sizes() {
        assert_eq!(vector_bytes(0), None);
        assert_eq!(vector_bytes(1), Some(9));
        assert_eq!(vector_bytes(4096), Some(4 + 4 * OUTLIERS + 4096));
        assert_eq!(vector_bytes(65537), None);
        assert_eq!(vector_bytes(usize::MAX), None);
        let mut values = vec![0.25; 65536];
        values[65535] = 1e5;
        let found = decoded(&encoded_f32(&values, 65536), 65536);
        assert_eq!(found[65535], bf16::from_f32(1e5).to_f32());
        assert_eq!(found[..65535], values[..65535]);
        for refused in [0, 65537] {
            assert!(encoded_f32(&values, refused).is_empty());
            let mut untouched = [1.0; 2];
            decode_f32(&[0; 100], refused, &mut untouched);
            assert_eq!(untouched, [1.0; 2]);
        }
    }

    #[test]
    fn what_was_finite_stays_so() {
        for value in [f32::MAX, f32::MIN, bf16::MAX.to_f32(), LARGEST, LARGEST.next_down()] {
            let found = decoded(&encoded_f32(&[value; 32], 32), 32);
            assert_eq!(found, [LARGEST.copysign(value); 32]);
        }
    }

    #[test]
    fn rows_can_be_sliced_and_appended() {
        let hidden = 70;
        let values: Vec<f32> = (0..3 * hidden).map(|i| (i as f32 * 0.7).tan()).collect();
        let whole = encoded_f32(&values, hidden);
        let size = vector_bytes(hidden).unwrap();
        assert_eq!(decoded(&whole[size..2 * size], hidden), decoded(&whole, hidden)[hidden..2 * hidden]);
        let mut appended = Vec::new();
        for vector in values.chunks(hidden) {
            encode(StateDtype::F32, &f32_bytes(vector), hidden, &mut appended);
        }
        assert_eq!(appended, whole);
    }

    proptest! {
        #[test]
        fn a_value_gets_the_code_that_a_search_finds(
            exponent in 0u32..=136, mantissa in 0u32..1 << 23, negative in any::<bool>(),
        ) {
            let magnitude = f32::from_bits(exponent << 23 | mantissa).min(448.0);
            let value = if negative { -magnitude } else { magnitude };
            prop_assert_eq!(nearest_code(value), code_by_search(value));
        }

        /// Of any finite vector: the largest are kept as bf16; of the others, normal ones are off by a sixteenth at
        /// most, subnormal ones by half a step.
        #[test]
        fn a_vector_comes_back(
            values in proptest::collection::vec(
                prop_oneof![
                    -2f32..2.0,
                    proptest::num::f32::NORMAL | proptest::num::f32::SUBNORMAL | proptest::num::f32::ZERO,
                ],
                1..200,
            ),
        ) {
            let hidden = values.len();
            let encoded = encoded_f32(&values, hidden);
            prop_assert_eq!(encoded.len(), vector_bytes(hidden).unwrap());
            let found = decoded(&encoded, hidden);
            let scale = f64::from(f32::from_le_bytes(*encoded.first_chunk().unwrap()));
            let mut order: Vec<usize> = (0..hidden).collect();
            order.sort_by(|a, b| values[*b].abs().total_cmp(&values[*a].abs()));
            for (rank, index) in order.into_iter().enumerate() {
                let (result, value) = (found[index], values[index]);
                if rank < OUTLIERS {
                    prop_assert_eq!(result, bf16::from_f32(value.clamp(-LARGEST, LARGEST)).to_f32());
                    continue;
                }
                let error = (f64::from(result) - f64::from(value)).abs();
                let bound = (f64::from(value).abs() / 16.0).max(scale / 1024.0);
                prop_assert!(error <= bound, "{} for {}", result, value);
                prop_assert!(result == 0.0 || result.is_normal());
                prop_assert_eq!(result.is_sign_negative(), value.is_sign_negative());
            }
        }

        #[test]
        fn bf16_and_f32_of_the_same_values_are_encoded_alike(
            values in proptest::collection::vec(-1e5f32..1e5, 1..200),
        ) {
            let rounded: Vec<f32> = values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
            let mut encoded = Vec::new();
            encode(StateDtype::Bf16, &bf16_bytes(&values), values.len(), &mut encoded);
            prop_assert_eq!(encoded, encoded_f32(&rounded, values.len()));
        }

        /// Checksums find damage; what they miss must not end the process.
        #[test]
        fn nothing_panics_on_damage(
            bytes in proptest::collection::vec(any::<u8>(), 0..400), hidden in 0usize..80,
        ) {
            let mut values = vec![0.0; 160];
            decode_f32(&bytes, hidden, &mut values);
            let mut encoded = Vec::new();
            encode(StateDtype::F32, &bytes, hidden, &mut encoded);
            encode(StateDtype::Bf16, &bytes, hidden, &mut encoded);
        }
    }
}
