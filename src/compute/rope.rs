//! Rotary position embedding, in the half-split form of Llama and vLLM.
//!
//! The scalings follow transformers' `modeling_rope_utils.py`, with which vLLM's `rotary_embedding` agrees; YaRN is
//! https://arxiv.org/abs/2309.00071. tests/fixtures/rope.json holds what transformers gives.

use serde_json::Value;

use super::Real;

/// A `rope_scaling` object that the trainer cannot follow.
#[derive(Debug, thiserror::Error)]
pub enum RopeError {
    #[error(
        "rope_scaling type {0:?} is not supported by the trainer; supported: default, linear, llama3, yarn"
    )]
    Unsupported(String),
    #[error("rope_scaling of type {kind} has no number {key:?}; copy the verifier's rope_scaling unchanged")]
    Missing { kind: String, key: &'static str },
}

/// Cosines and sines of every position in use; grows on demand.
#[derive(Clone, Debug)]
pub struct RopeTable<T> {
    frequencies: Vec<f64>,
    /// YaRN's: both vectors of a product are longer by it, so that attention is sharper. Otherwise 1.
    attention_factor: f64,
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
        let attention_factor = match scaling.filter(|value| !value.is_null()) {
            Some(scaling) => rescale(&mut frequencies, theta, scaling)?,
            None => 1.0,
        };
        Ok(Self { frequencies, attention_factor, half, positions: 0, cosines: Vec::new(), sines: Vec::new() })
    }

    /// Makes positions below `positions` usable.
    pub fn reserve(&mut self, positions: usize) {
        for position in self.positions..positions {
            for frequency in &self.frequencies {
                let (sine, cosine) = (position as f64 * frequency).sin_cos();
                self.cosines.push(T::from_f64(cosine * self.attention_factor));
                self.sines.push(T::from_f64(sine * self.attention_factor));
            }
        }
        self.positions = self.positions.max(positions);
    }

    /// Cosines and sines of the positions in use, [positions, D / 2] each.
    pub fn tables(&self) -> (&[T], &[T]) {
        (&self.cosines, &self.sines)
    }

    /// target = the vector of D elements turned to `position`, and stretched by the attention factor.
    #[inline(always)]
    pub fn turn(&self, target: &mut [T], source: &[T], position: usize) {
        let (cosines, sines) = self.row(position);
        for i in 0..self.half {
            let (low, high) = (source[i], source[i + self.half]);
            target[i] = low * cosines[i] - high * sines[i];
            target[i + self.half] = high * cosines[i] + low * sines[i];
        }
    }

    /// The gradient of [`RopeTable::turn`]: the turn back, with the same stretch.
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

/// Scales the frequencies of plain RoPE; returns the attention factor.
fn rescale(frequencies: &mut [f64], theta: f64, scaling: &Value) -> Result<f64, RopeError> {
    let kind =
        scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str).unwrap_or("default");
    let optional = |key: &str| scaling.get(key).and_then(Value::as_f64);
    let number =
        |key: &'static str| optional(key).ok_or_else(|| RopeError::Missing { kind: kind.to_owned(), key });
    match kind {
        "default" => Ok(1.0),
        "linear" => {
            let factor = number("factor")?;
            frequencies.iter_mut().for_each(|frequency| *frequency /= factor);
            Ok(1.0)
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
            Ok(1.0)
        }
        "yarn" => {
            let factor = number("factor")?;
            let original = number("original_max_position_embeddings")?;
            let given = |key, default| optional(key).filter(|value| *value != 0.0).unwrap_or(default);
            let (fast, slow) = (given("beta_fast", 32.0), given("beta_slow", 1.0));
            let dimensions = 2.0 * frequencies.len() as f64;
            // The element whose wave turns so often over the original context.
            let element = |turns: f64| {
                dimensions * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
            };
            let (mut low, mut high) = (element(fast), element(slow));
            if scaling.get("truncate").and_then(Value::as_bool).unwrap_or(true) {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(dimensions - 1.0));
            if low == high {
                high += 0.001;
            }
            for (index, frequency) in frequencies.iter_mut().enumerate() {
                // As above: fast waves are kept, slow ones stretched.
                let stretched = ((index as f64 - low) / (high - low)).clamp(0.0, 1.0);
                *frequency = stretched * *frequency / factor + (1.0 - stretched) * *frequency;
            }
            let scale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
            let (own, all) = (given("mscale", 0.0), given("mscale_all_dim", 0.0));
            let inferred = if own != 0.0 && all != 0.0 { scale(own) / scale(all) } else { scale(1.0) };
            Ok(optional("attention_factor").unwrap_or(inferred))
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
    fn frequencies_and_factors_are_those_of_transformers() {
        let text = include_str!("../../tests/fixtures/rope.json");
        let fixture: Value = serde_json::from_str(text).unwrap();
        let cases = fixture["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 11);
        for case in cases {
            let head_dim = case["head_dim"].as_u64().unwrap() as usize;
            let theta = case["theta"].as_f64().unwrap();
            let table = RopeTable::<f64>::new(head_dim, theta, Some(&case["scaling"])).unwrap();
            let wanted = case["inv_freq"].as_array().unwrap();
            assert_eq!(table.frequencies.len(), wanted.len());
            for (found, wanted) in table.frequencies.iter().zip(wanted) {
                let wanted = wanted.as_f64().unwrap();
                // The fixture was computed in float32.
                assert!((found / wanted - 1.0).abs() < 2e-6, "{found} is not {wanted}: {}", case["scaling"]);
            }
            let wanted = case["attention_factor"].as_f64().unwrap();
            assert!((table.attention_factor - wanted).abs() < 1e-12, "{}", case["scaling"]);
        }
    }

    #[test]
    fn the_attention_factor_stretches_both_ways() {
        let scaling = serde_json::json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5,
            "original_max_position_embeddings": 64});
        let mut table = RopeTable::<f64>::new(4, 10_000.0, Some(&scaling)).unwrap();
        table.reserve(6);
        let (source, weight) = ([1.0, -2.0, 0.5, 3.0], [0.3, 0.7, -1.1, 0.2]);
        let (mut turned, mut back) = ([0.0; 4], [0.0; 4]);
        table.turn(&mut turned, &source, 5);
        table.turn_back(&mut back, &weight, 5);
        // The gradient of `weight · turn(source)` is `turn_back(weight)`, as a linear map's is its transpose.
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        assert!((dot(&weight, &turned) - dot(&back, &source)).abs() < 1e-12);
        assert!((dot(&turned, &turned) / dot(&source, &source) - 1.5 * 1.5).abs() < 1e-12);
    }

    #[test]
    fn what_the_trainer_cannot_follow_is_refused() {
        let new = |scaling: Value| RopeTable::<f64>::new(128, 1e4, Some(&scaling)).unwrap_err().to_string();
        let unknown = new(serde_json::json!({"rope_type": "longrope", "factor": 4.0}));
        assert!(unknown.contains("longrope") && unknown.contains("yarn"), "{unknown}");
        let missing = new(serde_json::json!({"type": "yarn", "factor": 4.0}));
        assert!(missing.contains("original_max_position_embeddings"), "{missing}");
    }
}
