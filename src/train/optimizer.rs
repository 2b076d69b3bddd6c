//! AdamW in f32, gradient clipping and learning-rate schedules.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::compute::vectorised;
use crate::head::{HeadConfig, HeadTensors};

use super::tensors::{named, named_mut, zeros};

/// Elements of one task.
const BLOCK: usize = 1 << 16;

/// Constants of [`AdamW`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWOptions {
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    /// Decoupled; on matrices alone, never on norms.
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0 }
    }
}

/// The optimizer with its moments.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    pub options: AdamWOptions,
    /// Updates made so far.
    pub updates: u64,
    pub first: HeadTensors<f32>,
    pub second: HeadTensors<f32>,
}

impl AdamW {
    pub fn new(config: &HeadConfig, options: AdamWOptions) -> Self {
        Self { options, updates: 0, first: zeros(config), second: zeros(config) }
    }

    /// One update. A frozen `lm_head` is left alone, weight decay included.
    pub fn update(
        &mut self,
        weights: &mut HeadTensors<f32>,
        gradients: &HeadTensors<f32>,
        learning_rate: f64,
        train_lm_head: bool,
    ) {
        self.updates += 1;
        let power = i32::try_from(self.updates).unwrap_or(i32::MAX);
        let correction1 = 1.0 - self.options.beta1.powi(power);
        let correction2 = 1.0 - self.options.beta2.powi(power);
        let (beta1, beta2) = (self.options.beta1 as f32, self.options.beta2 as f32);
        let epsilon = self.options.epsilon as f32;
        let rate = (learning_rate / correction1) as f32;
        let second_scale = (1.0 / correction2) as f32;
        let moments = named_mut(&mut self.first).into_iter().zip(named_mut(&mut self.second));
        for (((name, weight), (_, gradient)), ((_, first), (_, second))) in
            named_mut(weights).into_iter().zip(named(gradients)).zip(moments)
        {
            if name == "lm_head" && !train_lm_head {
                continue;
            }
            let decay = if name.contains("norm") { 0.0 } else { self.options.weight_decay };
            let keep = (1.0 - learning_rate * decay) as f32;
            weight
                .par_chunks_mut(BLOCK)
                .zip(gradient.par_chunks(BLOCK))
                .zip(first.par_chunks_mut(BLOCK))
                .zip(second.par_chunks_mut(BLOCK))
                .for_each(|(((weight, gradient), first), second)| {
                    vectorised!({
                        let length = weight.len();
                        let (gradient, first, second) =
                            (&gradient[..length], &mut first[..length], &mut second[..length]);
                        for i in 0..length {
                            let slope = gradient[i];
                            let mean = beta1 * first[i] + (1.0 - beta1) * slope;
                            let square = beta2 * second[i] + (1.0 - beta2) * slope * slope;
                            first[i] = mean;
                            second[i] = square;
                            weight[i] =
                                weight[i] * keep - rate * mean / ((square * second_scale).sqrt() + epsilon);
                        }
                    });
                });
        }
    }
}

/// Scales all gradients down so that their joint norm is at most `limit`; returns the norm before.
pub fn clip_gradients(gradients: &mut HeadTensors<f32>, limit: f64) -> f64 {
    let mut sum = 0.0_f64;
    for (_, values) in named(gradients) {
        // Partial sums of fixed blocks, added in order: the same to the bit whatever the threads do.
        let parts: Vec<f64> = values
            .par_chunks(BLOCK)
            .map(|block| {
                block.chunks(1024).map(|part| f64::from(vectorised!(crate::compute::dot(part, part)))).sum()
            })
            .collect();
        sum += parts.iter().sum::<f64>();
    }
    let norm = sum.sqrt();
    if norm > limit {
        let factor = (limit / norm) as f32;
        for (_, values) in named_mut(gradients) {
            values
                .par_chunks_mut(BLOCK)
                .for_each(|block| block.iter_mut().for_each(|value| *value *= factor));
        }
    }
    norm
}

/// How the learning rate goes over a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Warm-up, then level: for runs without an end.
    Constant,
    /// Warm-up, then half a cosine down to 0 at the last step.
    Cosine,
}

impl Schedule {
    /// The factor on the learning rate at step `step` (from 1) of `steps`.
    pub fn factor(self, step: u64, warmup: u64, steps: u64) -> f64 {
        let warm = if warmup == 0 { 1.0 } else { (step as f64 / warmup as f64).min(1.0) };
        match self {
            Schedule::Constant => warm,
            Schedule::Cosine => {
                let done = (step as f64 / steps.max(1) as f64).min(1.0);
                warm * 0.5 * (1.0 + (std::f64::consts::PI * done).cos())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(value: f32) -> HeadTensors<f32> {
        HeadTensors { fc: vec![value], norm: vec![value], lm_head: vec![value], ..HeadTensors::default() }
    }

    #[test]
    fn two_updates_agree_with_adamw_by_hand() {
        let options = AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() };
        let mut optimizer = AdamW { options, updates: 0, first: one(0.0), second: one(0.0) };
        let mut weights = one(1.0);
        optimizer.update(&mut weights, &one(0.5), 0.01, false);
        optimizer.update(&mut weights, &one(-0.25), 0.01, false);
        let (mut wanted, mut wanted_norm, mut m, mut v) = (1.0_f64, 1.0_f64, 0.0, 0.0);
        for (t, g) in [(1, 0.5_f64), (2, -0.25)] {
            m = 0.9 * m + 0.1 * g;
            v = 0.95 * v + 0.05 * g * g;
            let step = 0.01 * (m / (1.0 - 0.9_f64.powi(t))) / ((v / (1.0 - 0.95_f64.powi(t))).sqrt() + 1e-8);
            wanted = wanted * (1.0 - 0.001) - step;
            wanted_norm -= step;
        }
        assert!((f64::from(weights.fc[0]) - wanted).abs() < 1e-6);
        assert!((f64::from(weights.norm[0]) - wanted_norm).abs() < 1e-6, "norms do not decay");
        assert_eq!(weights.lm_head[0], 1.0, "a frozen lm_head stays");
    }

    #[test]
    fn clipping_keeps_the_direction() {
        let mut gradients = HeadTensors { fc: vec![3.0_f32, 0.0], norm: vec![4.0], ..HeadTensors::default() };
        assert!((clip_gradients(&mut gradients, 1.0) - 5.0).abs() < 1e-12);
        assert!((gradients.fc[0] - 0.6).abs() < 1e-6 && (gradients.norm[0] - 0.8).abs() < 1e-6);
        assert!((clip_gradients(&mut gradients, 2.0) - 1.0).abs() < 1e-6);
        assert!((gradients.fc[0] - 0.6).abs() < 1e-6, "below the limit nothing changes");
    }

    #[test]
    fn schedules_warm_up_and_cosine_ends_at_zero() {
        assert_eq!(Schedule::Constant.factor(5, 10, 100), 0.5);
        assert_eq!(Schedule::Constant.factor(100, 10, 100), 1.0);
        assert!((Schedule::Cosine.factor(50, 10, 100) - 0.5).abs() < 1e-12);
        assert!(Schedule::Cosine.factor(100, 10, 100) < 1e-12);
    }
}
