//! The incremental loop on a GPU, against the CPU's. Without a GPU the test says so and passes.
// Helpers of tests are not seen as tests by the lint.
#![allow(clippy::unwrap_used)]

use draftsmith::compute::cuda::is_present;
use draftsmith::config::TrainDevice;
use draftsmith::head::{HeadConfig, HeadTensors, Rope};
use draftsmith::train::{
    AdamW, AdamWOptions, Checkpoint, Control, CudaStep, DraftOptions, DraftTarget, Drafter, Observer,
    OwnedSample, Score, TrainEvent, TrainOptions, evaluate, named_mut, open_drafter, train, zeros,
};

fn config() -> HeadConfig {
    HeadConfig {
        hidden_size: 256,
        intermediate_size: 512,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 64,
        vocab_size: 1024,
        draft_vocab_size: 512,
        max_position_embeddings: 4096,
        rms_norm_eps: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: None },
        aux_layer_ids: [1, 2, 3],
        num_verifier_layers: 6,
        fc_norm: true,
        norm_output: true,
        norm_before_residual: false,
    }
}

/// Numbers in -deviation..deviation by SplitMix64: the same for the same seed.
fn noise(seed: u64, count: usize, deviation: f32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    (0..count).map(|_| deviation * ((next() >> 40) as f32 / (1 << 23) as f32 - 1.0)).collect()
}

fn random_weights(config: &HeadConfig) -> HeadTensors<f32> {
    let mut weights = zeros::<f32>(config);
    for (number, (name, values)) in named_mut(&mut weights).into_iter().enumerate() {
        if name.contains("norm") {
            values.fill(1.0);
        } else {
            *values = noise(number as u64, values.len(), 0.08);
        }
    }
    weights
}

/// Answers that go round a short cycle of tokens; the last state says which token comes next.
fn samples(config: &HeadConfig, embed: &[f32]) -> Vec<OwnedSample> {
    let h = config.hidden_size;
    let sample = |number: usize| {
        let length = 40 + 17 * number;
        let token_ids: Vec<u32> = (0..length).map(|index| 2 * ((number + index) % 7) as u32).collect();
        let mut states = noise(100 + number as u64, (length - 1) * 4 * h, 1.7);
        for (row, next) in token_ids[1..].iter().enumerate() {
            let says = &embed[*next as usize * h..][..h];
            states[(row * 4 + 3) * h..][..h].copy_from_slice(says);
        }
        OwnedSample { token_ids, prompt_length: 1 + 5 * number, states }
    };
    (0..6).map(sample).collect()
}

#[derive(Default)]
struct Watch {
    losses: Vec<f64>,
    stop_at: u64,
    scores: Vec<Score>,
    samples: Vec<OwnedSample>,
}

impl Observer for Watch {
    fn step(&mut self, event: &TrainEvent) -> Control {
        self.losses.push(event.report.loss);
        if event.progress.step == self.stop_at { Control::Stop } else { Control::Continue }
    }

    fn evaluate(&mut self, head: &mut dyn Drafter, _: &TrainEvent) -> Control {
        self.scores.push(evaluate(head, &self.samples, 2).unwrap());
        Control::Continue
    }
}

fn assert_close(got: &[f64], wanted: &[f64], limit: f64) {
    assert_eq!(got.len(), wanted.len());
    for (step, (a, b)) in got.iter().zip(wanted).enumerate() {
        assert!((a - b).abs() <= limit * b.abs().max(0.05), "number {step}: {a} for {b}");
    }
}

#[test]
fn a_run_on_the_gpu_follows_the_cpus_and_resumes() {
    let config = config();
    let embed = noise(99, config.vocab_size * config.hidden_size, 1.7);
    let draft_ids: Vec<u32> = (0..config.draft_vocab_size as u32).map(|id| 2 * id).collect();
    let h = config.hidden_size;
    let head_rows: Vec<f32> =
        draft_ids.iter().flat_map(|id| embed[*id as usize * h..][..h].iter().map(|x| 0.1 * x)).collect();
    let target = DraftTarget { draft_ids, head_rows, norm: vec![1.0; h], eps: 1e-5, embed: &embed };
    let samples = samples(&config, &embed);
    let weights = random_weights(&config);
    let options = TrainOptions {
        steps: 40,
        warmup: 3,
        evaluate_every: 20,
        learning_rate: 2e-3,
        device: TrainDevice::Cuda,
        ..TrainOptions::default()
    };
    if !is_present() {
        let refused = train(&options, &config, weights, &target, &samples, &mut ()).unwrap_err();
        let message = refused.to_string();
        assert!(message.starts_with("train.device = \"cuda\": "), "{message}");
        eprintln!("skipped but for its error: no GPU here ({message})");
        return;
    }

    let watch = || Watch { samples: samples.clone(), ..Watch::default() };
    let on_cpu = TrainOptions { device: TrainDevice::Cpu, ..options.clone() };
    let mut cpu = watch();
    let wanted = train(&on_cpu, &config, weights.clone(), &target, &samples, &mut cpu).unwrap();
    let mut whole = watch();
    let outcome = train(&options, &config, weights.clone(), &target, &samples, &mut whole).unwrap();
    assert_eq!(outcome.progress, wanted.progress);
    assert!(cpu.losses[39] < 0.5 * cpu.losses[0], "{:?}", cpu.losses);
    assert_close(&whole.losses, &cpu.losses, 0.05);
    for (got, wanted) in whole.scores.iter().zip(&cpu.scores) {
        assert_close(&got.accepted_per_position, &wanted.accepted_per_position, 0.05);
    }

    // One head scored on both.
    let draft = DraftOptions { config: &config, unroll: 3, decay: 0.8 };
    let score = |device| {
        let mut head = open_drafter(device, draft, &outcome.weights, &target).unwrap();
        evaluate(&mut *head, &samples, 4).unwrap()
    };
    let (on_gpu, on_cpu) = (score(TrainDevice::Auto), score(TrainDevice::Cpu));
    assert_eq!(on_gpu.documents, on_cpu.documents);
    assert_close(&[on_gpu.loss, on_gpu.acceptance_length], &[on_cpu.loss, on_cpu.acceptance_length], 0.02);

    // Interrupted and resumed, with the output head trained and frozen.
    for train_lm_head in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run");
        let kept = TrainOptions {
            train_lm_head,
            checkpoint_directory: Some(path.clone()),
            resume: true,
            ..options.clone()
        };
        let mut first = Watch { stop_at: 23, ..watch() };
        let stopped = train(&kept, &config, weights.clone(), &target, &samples, &mut first).unwrap();
        let saved = Checkpoint::load(&path, &config).unwrap().unwrap();
        assert_eq!((saved.progress.step, saved.optimizer.updates), (23, 23));
        assert_eq!(saved.weights, stopped.weights);
        assert_eq!(saved.weights.lm_head == weights.lm_head, !train_lm_head);
        // What is saved goes to the GPU and comes back to the bit.
        let unroll = (kept.unroll, kept.decay);
        let options = AdamWOptions::default();
        let mut step =
            CudaStep::new(0, &config, unroll, &target, &saved.weights, train_lm_head, options.clone())
                .unwrap();
        step.set_optimizer(&saved.optimizer).unwrap();
        let mut back = saved.weights.clone();
        for (_, values) in named_mut(&mut back) {
            if train_lm_head || values.len() != saved.weights.lm_head.len() {
                values.fill(0.0);
            }
        }
        let mut optimizer = AdamW::new(&config, options);
        step.save(&mut back, &mut optimizer).unwrap();
        assert_eq!(back, saved.weights);
        assert_eq!(optimizer, saved.optimizer);
        drop(step);

        let mut second = watch();
        let resumed = train(&kept, &config, weights.clone(), &target, &samples, &mut second).unwrap();
        assert_eq!(resumed.progress, outcome.progress);
        if train_lm_head {
            assert_close(&[first.losses, second.losses].concat(), &whole.losses, 0.02);
        }
    }

    // A loss that is no number ends the run.
    let mut broken = samples.clone();
    broken[0].states[3] = f32::NAN;
    let failed = train(&options, &config, weights, &target, &broken, &mut ()).unwrap_err().to_string();
    assert!(failed.contains("NaN at step"), "{failed}");
}
