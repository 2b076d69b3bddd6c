//! Measuring the training step on random data, and comparing the GPU's step with the CPU's.

use std::time::{Duration, Instant};

use half::bf16;

use crate::compute::cuda::{Device, Form, Lap};
use crate::compute::{product_abt, product_operations};
use crate::head::{HeadConfig, HeadTensors, Rope, normal};

use super::optimizer::{AdamW, AdamWOptions, clip_gradients};
use super::tensors::{named, named_mut, zeros};
use super::{CudaStep, DraftTarget, OwnedSample, Step, TrainError};

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The head, its draft vocabulary included.
    pub config: HeadConfig,
    /// Rows of a batch: tokens that the head sees.
    pub tokens: usize,
    /// Documents of equal length.
    pub documents: usize,
    /// Share of each document that is supervised: its end.
    pub supervised: f64,
    pub unroll: usize,
    pub train_lm_head: bool,
    /// Steps that are timed.
    pub steps: usize,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct BenchReport {
    pub device: String,
    /// Median of a step: forward, backward, clipping, update.
    pub milliseconds: f64,
    pub tokens_per_second: f64,
    /// Of all products of a step.
    pub step_operations: f64,
    /// Operations per second of a large product of random numbers, in the same run.
    pub peak: f64,
    pub memory: Option<GpuMemory>,
    pub first_loss: f64,
    pub last_loss: f64,
    pub gradient_norm: f64,
    /// Time of each operation of one step, the longest first.
    pub laps: Vec<Lap>,
}

/// Bytes of the GPU.
#[derive(Clone, Copy, Debug)]
pub struct GpuMemory {
    /// Of all buffers, the batch included.
    pub allocated: usize,
    /// By all programs.
    pub in_use: usize,
}

/// Relative difference of one quantity between GPU and CPU.
#[derive(Clone, Debug)]
pub struct Difference {
    pub case: String,
    pub name: String,
    /// Norm of the difference over the CPU's norm.
    pub error: f64,
    pub limit: f64,
}

/// The shapes of well-known verifiers' heads, by name.
pub fn config_by_name(name: &str) -> Option<HeadConfig> {
    let (hidden, inner, heads, key_heads, vocabulary) = match name {
        "8b" => (4096, 14_336, 32, 8, 128_256),
        "k2" => (7168, 18_432, 64, 64, 163_840),
        "smollm2" => (576, 1536, 9, 3, 49_152),
        _ => return None,
    };
    Some(HeadConfig {
        hidden_size: hidden,
        intermediate_size: inner,
        num_attention_heads: heads,
        num_key_value_heads: key_heads,
        head_dim: if hidden < 1024 { 64 } else { 128 },
        vocab_size: vocabulary,
        draft_vocab_size: 32_000,
        max_position_embeddings: 32_768,
        rms_norm_eps: 1e-5,
        rope: Rope { theta: 500_000.0, scaling: None },
        aux_layer_ids: [2, 16, 29],
        num_verifier_layers: 32,
        fc_norm: true,
        norm_output: true,
        norm_before_residual: false,
    })
}

/// Random data of a head; matrices as `deviation` says.
struct Data {
    weights: HeadTensors<f32>,
    head_rows: Vec<f32>,
    norm: Vec<f32>,
    embed: Vec<f32>,
    draft_ids: Vec<u32>,
}

impl Data {
    fn random(config: &HeadConfig, deviation: f64, norm_deviation: f64) -> Self {
        let h = config.hidden_size;
        let mut weights = zeros::<f32>(config);
        for (name, values) in named_mut(&mut weights) {
            let is_norm = name.contains("norm");
            let random = normal(1, &name, values.len(), if is_norm { norm_deviation } else { deviation });
            for (value, random) in values.iter_mut().zip(random) {
                *value = if is_norm { 1.0 + random } else { rounded(random) };
            }
        }
        let matrix = |name: &str, length: usize, deviation: f64| {
            let mut values = normal(2, name, length, deviation);
            values.iter_mut().for_each(|value| *value = rounded(*value));
            values
        };
        let ratio = config.vocab_size / config.draft_vocab_size;
        Self {
            weights,
            head_rows: matrix("head", config.draft_vocab_size * h, deviation),
            norm: vec![1.0; h],
            embed: matrix("embed", config.vocab_size * h, 0.02),
            draft_ids: (0..config.draft_vocab_size).map(|i| (i * ratio) as u32).collect(),
        }
    }

    fn target(&self, config: &HeadConfig) -> DraftTarget<'_> {
        DraftTarget {
            draft_ids: self.draft_ids.clone(),
            head_rows: self.head_rows.clone(),
            norm: self.norm.clone(),
            eps: config.rms_norm_eps,
            embed: &self.embed,
        }
    }
}

fn rounded(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

/// A document of `length` tokens.
fn document(config: &HeadConfig, seed: u64, length: usize, prompt_length: usize) -> OwnedSample {
    let uniform = normal(seed, "tokens", length, 1.0);
    let mut states = normal(seed, "states", (length - 1) * 4 * config.hidden_size, 1.0);
    states.iter_mut().for_each(|value| *value = rounded(*value));
    let vocabulary = config.vocab_size as f32;
    let token_ids = uniform.iter().map(|value| ((value.abs() * 7919.0) % vocabulary) as u32).collect();
    OwnedSample { token_ids, prompt_length, states }
}

/// Learning rate and largest gradient norm of the steps that are timed.
const RATE: f64 = 1e-4;
const CLIP: f64 = 1.0;

/// Two batches, to be used in turn.
fn batches_of(options: &BenchOptions) -> Vec<Vec<OwnedSample>> {
    let rows = options.tokens / options.documents.max(1);
    let chains = ((rows as f64 * options.supervised).round() as usize).clamp(1, rows.max(1));
    let sample = |number| document(&options.config, number as u64, rows + 2, rows + 1 - chains);
    (0..2)
        .map(|batch| (0..options.documents).map(|i| sample(batch * options.documents + i)).collect())
        .collect()
}

/// Times whole training steps on GPU `ordinal`.
pub fn measure_on_gpu(ordinal: usize, options: &BenchOptions) -> Result<BenchReport, TrainError> {
    let config = &options.config;
    let data = Data::random(config, 0.02, 0.0);
    let target = data.target(config);
    let unroll = (options.unroll, 1.0);
    let mut step = CudaStep::new(
        ordinal,
        config,
        unroll,
        &target,
        &data.weights,
        options.train_lm_head,
        AdamWOptions::default(),
    )?;
    drop(target);
    let mut batches = Vec::new();
    for samples in batches_of(options) {
        let documents: Vec<_> = samples.iter().map(OwnedSample::document).collect();
        batches.push(step.batch(&documents)?);
    }
    let mut first_loss = 0.0;
    for number in 0..4 {
        step.forward_backward(&batches[number % 2])?;
        step.clip(CLIP)?;
        step.update(RATE)?;
        if number == 0 {
            first_loss = step.report(&batches[0])?.loss;
        }
    }
    let before = step.device().product_operations();
    let mut times = Vec::with_capacity(options.steps);
    for number in 0..options.steps.max(1) {
        let start = step.device().event()?;
        step.forward_backward(&batches[number % 2])?;
        step.clip(CLIP)?;
        step.update(RATE)?;
        let end = step.device().event()?;
        times.push(f64::from(start.elapsed_ms(&end).map_err(crate::compute::cuda::CudaError::from)?));
    }
    let step_operations = (step.device().product_operations() - before) / times.len() as f64;
    times.sort_by(f64::total_cmp);
    let milliseconds = times[times.len() / 2];
    step.device().start_laps()?;
    step.forward_backward(&batches[0])?;
    step.clip(CLIP)?;
    step.update(RATE)?;
    let laps = step.device().finish_laps()?;
    let memory =
        GpuMemory { allocated: step.device().bytes_allocated(), in_use: step.device().bytes_in_use()? };
    Ok(BenchReport {
        device: step.device().name()?,
        milliseconds,
        tokens_per_second: options.tokens as f64 / milliseconds * 1e3,
        step_operations,
        peak: peak(step.device())?,
        memory: Some(memory),
        first_loss,
        last_loss: step.report(&batches[0])?.loss,
        gradient_norm: step.gradient_norm()?,
        laps,
    })
}

/// Times whole training steps on the CPU.
pub fn measure_on_cpu(options: &BenchOptions) -> Result<BenchReport, TrainError> {
    let config = &options.config;
    let mut data = Data::random(config, 0.02, 0.0);
    let mut weights = std::mem::take(&mut data.weights);
    let target = data.target(config);
    let mut step = Step::<f32>::new(config, options.unroll, 1.0, &target)?;
    step.set_train_lm_head(options.train_lm_head);
    let mut gradients = zeros(config);
    let mut optimizer = AdamW::new(config, AdamWOptions::default());
    let batches = batches_of(options);
    let (mut losses, mut times) = (Vec::new(), Vec::new());
    let (mut sums, mut gradient_norm, mut operations) = ([Duration::ZERO; 5], 0.0, 0);
    for number in 0..2 + options.steps.max(1) {
        let documents: Vec<_> = batches[number % 2].iter().map(OwnedSample::document).collect();
        let before = product_operations();
        let began = Instant::now();
        let report = step.forward_backward(&weights, &documents, &mut gradients)?;
        let stepped = Instant::now();
        gradient_norm = clip_gradients(&mut gradients, CLIP);
        let clipped = Instant::now();
        optimizer.update(&mut weights, &gradients, RATE, options.train_lm_head);
        losses.push(report.loss);
        // The first of each batch takes the memory.
        if number < 2 {
            continue;
        }
        times.push(began.elapsed().as_secs_f64() * 1e3);
        operations = product_operations() - before;
        let laps = step.laps();
        let parts = [laps.forward, laps.loss, laps.backward, clipped - stepped, clipped.elapsed()];
        for (sum, part) in sums.iter_mut().zip(parts) {
            *sum += part;
        }
    }
    let steps = times.len();
    times.sort_by(f64::total_cmp);
    let milliseconds = times[steps / 2];
    let names = ["forward", "loss", "backward", "clip", "update"];
    let laps = names.into_iter().zip(sums).map(|(name, sum)| Lap {
        name: name.to_owned(),
        calls: 1,
        milliseconds: sum.as_secs_f64() * 1e3 / steps as f64,
    });
    Ok(BenchReport {
        device: format!("CPU, {} threads", rayon::current_num_threads()),
        milliseconds,
        tokens_per_second: options.tokens as f64 / milliseconds * 1e3,
        step_operations: operations as f64,
        peak: cpu_peak(),
        memory: None,
        first_loss: losses[0],
        last_loss: losses[losses.len() - 1],
        gradient_norm,
        laps: laps.collect(),
    })
}

/// Operations per second of a product of 2048 x 2048 x 2048 in f32.
fn cpu_peak() -> f64 {
    const SIZE: usize = 2048;
    let random = normal(3, "peak", SIZE * SIZE, 1.0);
    let mut output = vec![0.0_f32; SIZE * SIZE];
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let began = Instant::now();
        product_abt(&mut output, &random, &random, [SIZE; 3], false);
        best = best.min(began.elapsed().as_secs_f64());
    }
    2.0 * (SIZE as f64).powi(3) / best
}

/// Operations per second of a product of 8192 x 8192 x 8192 in bf16.
fn peak(device: &Device) -> Result<f64, TrainError> {
    const SIZE: usize = 8192;
    const RUNS: usize = 10;
    let random: Vec<bf16> =
        normal(3, "peak", SIZE * SIZE, 1.0).iter().map(|value| bf16::from_f32(*value)).collect();
    let (left, right) = (device.upload(&random)?, device.upload(&random)?);
    let output = device.zeros::<bf16>(SIZE * SIZE)?;
    let run = || {
        device.product(
            Form::Abt,
            left.head(SIZE, SIZE),
            right.head(SIZE, SIZE),
            None,
            output.head(SIZE, SIZE),
        )
    };
    run()?;
    let start = device.event()?;
    for _ in 0..RUNS {
        run()?;
    }
    let end = device.event()?;
    let milliseconds = f64::from(start.elapsed_ms(&end).map_err(crate::compute::cuda::CudaError::from)?);
    Ok(2.0 * (SIZE as f64).powi(3) * RUNS as f64 / milliseconds * 1e3)
}

/// A small head and batch.
struct Case {
    name: &'static str,
    config: HeadConfig,
    /// Tokens and prompt tokens of each document.
    lengths: &'static [(usize, usize)],
    unroll: usize,
    train_lm_head: bool,
    /// Rows of a chunk of logits; None for all at once.
    loss_rows: Option<usize>,
}

/// Shapes and flags that differ in what the kernels do.
fn cases() -> Vec<Case> {
    const UNEVEN: &[(usize, usize)] = &[(150, 40), (3, 1), (75, 1), (301, 99), (66, 65)];
    const WHOLE: &[(usize, usize)] = &[(200, 1), (64, 1), (131, 1)];
    let base = HeadConfig {
        hidden_size: 256,
        intermediate_size: 512,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 64,
        vocab_size: 3000,
        draft_vocab_size: 1000,
        max_position_embeddings: 4096,
        rms_norm_eps: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: None },
        aux_layer_ids: [1, 2, 3],
        num_verifier_layers: 6,
        fc_norm: true,
        norm_output: true,
        norm_before_residual: false,
    };
    let old_flags = HeadConfig {
        hidden_size: 512,
        num_key_value_heads: 1,
        head_dim: 128,
        fc_norm: false,
        norm_output: false,
        norm_before_residual: true,
        ..base.clone()
    };
    let normed_residual = HeadConfig { norm_before_residual: true, ..base.clone() };
    let plain_feedback = HeadConfig { norm_output: false, ..base.clone() };
    let wide = HeadConfig { num_attention_heads: 2, num_key_value_heads: 2, head_dim: 256, ..base.clone() };
    let case = |name, config: &HeadConfig, lengths, unroll, train_lm_head, loss_rows| Case {
        name,
        config: config.clone(),
        lengths,
        unroll,
        train_lm_head,
        loss_rows,
    };
    vec![
        case("partly supervised, D 64", &base, UNEVEN, 3, true, None),
        case("all supervised, D 64, chunks", &base, WHOLE, 3, true, Some(96)),
        case("one step, D 64, chunks", &base, UNEVEN, 1, true, Some(96)),
        case("norm_before_residual alone", &normed_residual, UNEVEN, 3, true, None),
        case("no norm_output alone", &plain_feedback, WHOLE, 3, true, None),
        case("all supervised, D 128, frozen, EAGLE-3 flags", &old_flags, WHOLE, 4, false, None),
        case("partly supervised, D 128, EAGLE-3 flags", &old_flags, UNEVEN, 2, true, Some(64)),
        case("partly supervised, D 256", &wide, UNEVEN, 3, true, None),
    ]
}

/// Losses, gradients and two updates of the GPU's step against the CPU's, on shapes that differ in what the kernels do.
pub fn compare_with_cpu(ordinal: usize) -> Result<Vec<Difference>, TrainError> {
    let mut list = Vec::new();
    for case in cases() {
        compare(ordinal, &case, &mut list)?;
    }
    Ok(list)
}

fn compare(ordinal: usize, case: &Case, list: &mut Vec<Difference>) -> Result<(), TrainError> {
    /// Relative, of a gradient: bf16 has 8 bits, and a gradient goes through dozens of roundings.
    const NOISE: f64 = 2e-2;
    let Case { config, unroll, train_lm_head, .. } = case;
    let mut note = |name: &str, error: f64, limit: f64| {
        list.push(Difference { case: case.name.to_owned(), name: name.to_owned(), error, limit });
    };
    // Products keep the size of what they take: noise that grows through the layers would hide errors.
    let data = Data::random(config, 0.9 / (config.hidden_size as f64).sqrt(), 0.1);
    let target = data.target(config);
    let samples: Vec<OwnedSample> = case
        .lengths
        .iter()
        .enumerate()
        .map(|(i, (length, prompt))| document(config, i as u64, *length, *prompt))
        .collect();
    let documents: Vec<_> = samples.iter().map(OwnedSample::document).collect();
    let decay = 0.8;
    let mut reference = Step::<f32>::new(config, *unroll, decay, &target)?;
    reference.set_train_lm_head(*train_lm_head);
    let mut wanted = zeros(config);
    let wanted_report = reference.forward_backward(&data.weights, &documents, &mut wanted)?;

    let options = AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() };
    let unroll_options = (*unroll, decay);
    let mut step = CudaStep::new(
        ordinal,
        config,
        unroll_options,
        &target,
        &data.weights,
        *train_lm_head,
        options.clone(),
    )?;
    if let Some(rows) = case.loss_rows {
        step.set_loss_rows(rows);
    }
    let batch = step.batch(&documents)?;
    step.forward_backward(&batch)?;
    let report = step.report(&batch)?;
    for k in 0..*unroll {
        let (got, wanted) = (report.step_losses[k], wanted_report.step_losses[k]);
        note(&format!("loss of step {k}"), (got - wanted).abs() / wanted.max(1e-9), 1e-3);
    }
    note("supervised", if report.supervised == wanted_report.supervised { 0.0 } else { 1.0 }, 0.0);
    let gradients = step.gradients()?;
    for ((name, got), (_, wanted)) in named(&gradients).into_iter().zip(named(&wanted)) {
        note(&name, distance(got, wanted), NOISE);
    }

    // Clipping and updates, on the GPU's own gradients. The first update forgets the gradients' size, the second does not.
    let mut updated = data.weights.clone();
    let mut optimizer = AdamW::new(config, options);
    for (number, limit) in [0.5, 0.02].into_iter().enumerate() {
        step.forward_backward(&batch)?;
        let mut gradients = step.gradients()?;
        let norm = clip_gradients(&mut gradients, limit);
        optimizer.update(&mut updated, &gradients, 1e-3, *train_lm_head);
        step.clip(limit)?;
        step.update(1e-3)?;
        note("gradient norm", (step.gradient_norm()? - norm).abs() / norm, 1e-4);
        let after = step.weights()?;
        let mut worst = 0.0_f64;
        for (((name, got), (_, wanted)), (_, before)) in
            named(&after).into_iter().zip(named(&updated)).zip(named(&data.weights))
        {
            if name == "lm_head" && !train_lm_head {
                continue;
            }
            let moved: Vec<f32> = got.iter().zip(before).map(|(a, b)| a - b).collect();
            let should: Vec<f32> = wanted.iter().zip(before).map(|(a, b)| a - b).collect();
            worst = worst.max(distance(&moved, &should));
        }
        note(&format!("weights after update {}", number + 1), worst, 1e-3);
    }
    Ok(())
}

/// The norm of the difference over the norm of what is wanted; infinite where something is no number.
fn distance(got: &[f32], wanted: &[f32]) -> f64 {
    let (mut off, mut whole) = (0.0_f64, 0.0_f64);
    for (a, b) in got.iter().zip(wanted) {
        off += f64::from(a - b).powi(2);
        whole += f64::from(*b).powi(2);
    }
    match (off / whole).sqrt() {
        error if error.is_finite() => error,
        _ if off == 0.0 && got.len() == wanted.len() => 0.0,
        _ => f64::INFINITY,
    }
}
