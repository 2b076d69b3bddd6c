//! Orders that are the same for ever for the same seed and pass.

/// The numbers 0..`length` in the order of `pass`. Depends on nothing else, so that a resumed run goes on in the same
/// order with no state but the pass and a cursor.
pub fn shuffled(length: usize, seed: u64, pass: u64) -> Vec<usize> {
    let mut state = seed ^ pass.wrapping_mul(0xD1B5_4A32_D192_ED03);
    let mut order: Vec<usize> = (0..length).collect();
    for i in (1..length).rev() {
        let other = (u128::from(next(&mut state)) * (i as u128 + 1)) >> 64;
        order.swap(i, other as usize);
    }
    order
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::shuffled;

    #[test]
    fn every_number_once_and_passes_differ() {
        let first = shuffled(100, 7, 0);
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_eq!(first, shuffled(100, 7, 0));
        assert_ne!(first, shuffled(100, 7, 1));
        assert_ne!(first, shuffled(100, 8, 0));
    }
}
