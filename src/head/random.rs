//! A seeded generator of normal numbers: xoshiro256++ behind Box-Muller. Our own, so that a seed means the same head in
//! every version of every dependency.

use std::f64::consts::TAU;

use rayon::prelude::*;

/// Elements per independent stream. Part of what a seed means: never change it.
const BLOCK: usize = 1 << 16;

struct Xoshiro {
    state: [u64; 4],
}

impl Xoshiro {
    fn new(seed: u64) -> Self {
        let mut counter = seed;
        let mut state = [0u64; 4];
        for word in &mut state {
            *word = split_mix(&mut counter);
        }
        Self { state }
    }

    fn next(&mut self) -> u64 {
        let state = &mut self.state;
        let result = state[0].wrapping_add(state[3]).rotate_left(23).wrapping_add(state[0]);
        let shifted = state[1] << 17;
        state[2] ^= state[0];
        state[3] ^= state[1];
        state[1] ^= state[2];
        state[0] ^= state[3];
        state[2] ^= shifted;
        state[3] = state[3].rotate_left(45);
        result
    }

    /// In (0, 1]: never zero, so that its logarithm is finite.
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

fn split_mix(counter: &mut u64) -> u64 {
    *counter = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *counter;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// `count` numbers from normal(0, deviation). `name` keeps the tensors of one seed apart, whatever their order.
pub(crate) fn normal(seed: u64, name: &str, count: usize, deviation: f64) -> Vec<f32> {
    // FNV-1a
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in name.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    let mut values = vec![0f32; count];
    values.par_chunks_mut(BLOCK).enumerate().for_each(|(block, part)| {
        let mut counter = seed ^ hash.rotate_left(32);
        let stream = split_mix(&mut counter).wrapping_add((block as u64).wrapping_mul(0xd134_2543_de82_ef95));
        let mut generator = Xoshiro::new(stream);
        for pair in part.chunks_mut(2) {
            let radius = (-2.0 * generator.unit().ln()).sqrt() * deviation;
            let angle = TAU * generator.unit();
            pair[0] = (radius * angle.cos()) as f32;
            if let Some(second) = pair.get_mut(1) {
                *second = (radius * angle.sin()) as f32;
            }
        }
    });
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_a_normal() {
        let values = normal(1, "fc.weight", 200_001, 0.02);
        let count = values.len() as f64;
        let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / count;
        let variance = values.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>() / count;
        let kurtosis = values.iter().map(|value| (f64::from(*value) - mean).powi(4)).sum::<f64>()
            / count
            / variance.powi(2);
        assert!(mean.abs() < 2e-4, "{mean}");
        assert!((variance.sqrt() - 0.02).abs() < 2e-4, "{}", variance.sqrt());
        assert!((kurtosis - 3.0).abs() < 0.1, "{kurtosis}");
    }

    #[test]
    fn seed_and_name_decide_everything() {
        assert_eq!(normal(7, "a", 100, 1.0), normal(7, "a", 100, 1.0));
        assert_ne!(normal(7, "a", 100, 1.0), normal(8, "a", 100, 1.0));
        assert_ne!(normal(7, "a", 100, 1.0), normal(7, "b", 100, 1.0));
        let long = normal(7, "a", BLOCK + 100, 1.0);
        assert_ne!(long[..100], long[BLOCK..]);
    }

    #[test]
    fn reference_values_of_the_generator() {
        // xoshiro256++ with state 1, 2, 3, 4: the published first outputs.
        let mut generator = Xoshiro { state: [1, 2, 3, 4] };
        assert_eq!(generator.next(), 41_943_041);
        assert_eq!(generator.next(), 58_720_359);
        assert_eq!(generator.next(), 3_588_806_011_781_223);
        // splitmix64 from 0: the published first output.
        assert_eq!(split_mix(&mut 0), 0xe220_a839_7b1d_cdaf);
    }
}
