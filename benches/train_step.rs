//! Tokens per second of training on the shape of SmolLM2-135M: `cargo bench --bench train_step`.

use std::time::Instant;

use draftsmith::head::{HeadConfig, Rope};
use draftsmith::train::{
    Control, DraftTarget, Observer, OwnedSample, TrainError, TrainEvent, TrainOptions, named_mut, train,
    zeros,
};

const STEPS: u64 = 12;
/// Tokens and prompt length of each document of a batch.
const DOCUMENTS: [(usize, usize); 4] = [(120, 30), (160, 70), (200, 110), (250, 160)];

/// Xorshift, mapped to -1..1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    fn floats(&mut self, count: usize, size: f32) -> Vec<f32> {
        (0..count).map(|_| size * self.next()).collect()
    }
}

struct Clock(Instant);

impl Observer for Clock {
    fn step(&mut self, event: &TrainEvent) -> Control {
        let milliseconds = self.0.elapsed().as_secs_f64() * 1e3;
        println!("step {}: {milliseconds:.0} ms, loss {:.3}", event.progress.step, event.report.loss);
        self.0 = Instant::now();
        Control::Continue
    }
}

fn main() -> Result<(), TrainError> {
    let config = HeadConfig {
        hidden_size: 576,
        intermediate_size: 1536,
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: 64,
        vocab_size: 49_152,
        draft_vocab_size: 8192,
        max_position_embeddings: 8192,
        rms_norm_eps: 1e-5,
        rope: Rope { theta: 100_000.0, scaling: None },
        aux_layer_ids: [2, 15, 27],
        num_verifier_layers: 30,
        fc_norm: true,
        norm_output: true,
        norm_before_residual: false,
    };
    let mut random = Random(88_172_645_463_325_252);
    let embed = vec![0.01; config.vocab_size * config.hidden_size];
    let target = DraftTarget {
        draft_ids: (0..config.draft_vocab_size as u32).collect(),
        head_rows: random.floats(config.draft_vocab_size * config.hidden_size, 0.04),
        norm: vec![1.0; config.hidden_size],
        eps: 1e-5,
        embed: &embed,
    };
    let mut samples = Vec::new();
    for (tokens, prompt_length) in DOCUMENTS {
        samples.push(OwnedSample {
            token_ids: (0..tokens as u32).map(|index| index * 131 % config.vocab_size as u32).collect(),
            prompt_length,
            states: random.floats((tokens - 1) * 4 * config.hidden_size, 2.0),
        });
    }
    let mut weights = zeros::<f32>(&config);
    for (name, values) in named_mut(&mut weights) {
        let mean = if name.contains("norm") { 1.0 } else { 0.0 };
        values.iter_mut().for_each(|value| *value = mean + 0.04 * random.next());
    }
    let options = TrainOptions { steps: STEPS, ..TrainOptions::default() };
    let start = Instant::now();
    let outcome = train(&options, &config, weights, &target, &samples, &mut Clock(start))?;
    println!("{:.0} tokens/s", outcome.progress.tokens as f64 / start.elapsed().as_secs_f64());
    Ok(())
}
