//! Rotary position embedding, in the half-split form of Llama and vLLM.

use serde_json::Value;

use super::Real;

/// A `rope_scaling` object that the trainer cannot follow.
#[derive(Debug, thiserror::Error)]
pub enum RopeError {
    #[error("rope_scaling type {0:?} is not supported by the trainer; supported: default, linear, llama3")]
    Unsupported(String),
    #[error("rope_scaling of type {kind} has no number {key:?}; copy the verifier's rope_scaling unchanged")]
    Missing { kind: String, key: &'static str },
}

/// Cosines and sines of every position in use; grows on demand.
#[derive(Clone, Debug)]
pub struct RopeTable<T> {
    frequencies: Vec<f64>,
    half: usize,
    positions: usize,
    cosines: Vec<T>,
    sines: Vec<T>,
}

impl<T: Real> RopeTable<T> {
    /// `head_dim` is D; `scaling` the verifier's `rope_scaling` object.
    pub fn new(head_dim: usize, theta: f64, scaling: Option<&Value>) -> Result<Self, RopeError> {
        let half = head_dim / 2;
        let mut frequencies: Vec<f64> =
            (0..half).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        if let Some(scaling) = scaling.filter(|value| !value.is_null()) {
            rescale(&mut frequencies, scaling)?;
        }
        Ok(Self { frequencies, half, positions: 0, cosines: Vec::new(), sines: Vec::new() })
    }

    /// Makes positions below `positions` usable.
    pub fn reserve(&mut self, positions: usize) {
        for position in self.positions..positions {
            for frequency in &self.frequencies {
                let (sine, cosine) = (position as f64 * frequency).sin_cos();
                self.cosines.push(T::from_f64(cosine));
                self.sines.push(T::from_f64(sine));
            }
        }
        self.positions = self.positions.max(positions);
    }

    /// target = the vector of D elements turned to `position`.
    #[inline(always)]
    pub fn turn(&self, target: &mut [T], source: &[T], position: usize) {
        let (cosines, sines) = self.row(position);
        for i in 0..self.half {
            let (low, high) = (source[i], source[i + self.half]);
            target[i] = low * cosines[i] - high * sines[i];
            target[i + self.half] = high * cosines[i] + low * sines[i];
        }
    }

    /// The gradient of [`RopeTable::turn`]: the turn back.
    #[inline(always)]
    pub fn turn_back(&self, target: &mut [T], source: &[T], position: usize) {
        let (cosines, sines) = self.row(position);
        for i in 0..self.half {
            let (low, high) = (source[i], source[i + self.half]);
            target[i] = low * cosines[i] + high * sines[i];
            target[i + self.half] = high * cosines[i] - low * sines[i];
        }
    }

    fn row(&self, position: usize) -> (&[T], &[T]) {
        let range = position * self.half..(position + 1) * self.half;
        (&self.cosines[range.clone()], &self.sines[range])
    }
}

fn rescale(frequencies: &mut [f64], scaling: &Value) -> Result<(), RopeError> {
    let kind =
        scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str).unwrap_or("default");
    let number = |key: &'static str| {
        let missing = RopeError::Missing { kind: kind.to_owned(), key };
        scaling.get(key).and_then(Value::as_f64).ok_or(missing)
    };
    match kind {
        "default" => Ok(()),
        "linear" => {
            let factor = number("factor")?;
            frequencies.iter_mut().for_each(|frequency| *frequency /= factor);
            Ok(())
        }
        "llama3" => {
            let factor = number("factor")?;
            let (low, high) = (number("low_freq_factor")?, number("high_freq_factor")?);
            let original = number("original_max_position_embeddings")?;
            for frequency in frequencies {
                let turns = original * *frequency / std::f64::consts::TAU;
                // Slow waves are stretched, fast ones kept, those between are blended.
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                *frequency = (1.0 - kept) * *frequency / factor + kept * *frequency;
            }
            Ok(())
        }
        other => Err(RopeError::Unsupported(other.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turning_back_undoes_a_turn_and_only_distances_matter() {
        let mut table = RopeTable::<f64>::new(8, 10_000.0, None).unwrap();
        table.reserve(40);
        let left: Vec<f64> = (0..8).map(|i| (i as f64).sin()).collect();
        let right: Vec<f64> = (0..8).map(|i| (i as f64).cos()).collect();
        let score = |i: usize, j: usize| {
            let (mut a, mut b) = ([0.0; 8], [0.0; 8]);
            table.turn(&mut a, &left, i);
            table.turn(&mut b, &right, j);
            a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>()
        };
        assert!((score(7, 3) - score(31, 27)).abs() < 1e-12);
        let (mut turned, mut back) = ([0.0; 8], [0.0; 8]);
        table.turn(&mut turned, &left, 17);
        table.turn_back(&mut back, &turned, 17);
        assert!(left.iter().zip(back).all(|(a, b)| (a - b).abs() < 1e-12));
    }

    #[test]
    fn llama3_scaling_stretches_slow_waves_alone() {
        let scaling = serde_json::json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let plain = RopeTable::<f64>::new(128, 500_000.0, None).unwrap();
        let scaled = RopeTable::<f64>::new(128, 500_000.0, Some(&scaling)).unwrap();
        assert_eq!(plain.frequencies[0], scaled.frequencies[0]);
        assert!((plain.frequencies[63] / scaled.frequencies[63] - 8.0).abs() < 1e-9);
        let unknown = serde_json::json!({"rope_type": "yarn", "factor": 4.0});
        assert!(RopeTable::<f64>::new(128, 1e4, Some(&unknown)).is_err());
    }
}
