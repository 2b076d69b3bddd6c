//! The training step against three judges: finite differences, candle's autograd and Speculators.
// Helpers of tests are not seen as tests by the lint.
#![allow(clippy::unwrap_used)]

mod common {
    pub mod environment;
    pub mod python;
}

use candle_core::{D, DType, Device, Tensor, Var};
use draftsmith::config::TrainDevice;
use draftsmith::head::{HeadConfig, HeadTensors, Rope};
use draftsmith::train::{
    BatchSize, Control, DraftOptions, DraftTarget, Drafter, Observer, OwnedSample, Step, StepReport,
    TrainEvent, TrainOptions, evaluate, named, named_mut, open_drafter, train, zeros,
};

struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// About normal, deviation 1.
    fn normal(&mut self) -> f64 {
        let sum: f64 = (0..12).map(|_| (self.bits() >> 11) as f64 / (1_u64 << 53) as f64).sum();
        sum - 6.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.bits() >> 33) as usize % limit
    }

    fn floats(&mut self, length: usize, deviation: f64) -> Vec<f32> {
        (0..length).map(|_| (self.normal() * deviation) as f32).collect()
    }
}

fn tiny(fc_norm: bool, norm_output: bool, norm_before_residual: bool) -> HeadConfig {
    HeadConfig {
        hidden_size: 8,
        intermediate_size: 12,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 4,
        vocab_size: 23,
        draft_vocab_size: 11,
        max_position_embeddings: 64,
        rms_norm_eps: 1e-5,
        rope: Rope { theta: 100.0, scaling: None },
        aux_layer_ids: [1, 2, 3],
        num_verifier_layers: 4,
        fc_norm,
        norm_output,
        norm_before_residual,
    }
}

fn weights_of(config: &HeadConfig, random: &mut Random) -> HeadTensors<f64> {
    let mut weights = zeros::<f64>(config);
    for (name, values) in named_mut(&mut weights) {
        let (mean, deviation) = if name.contains("norm") { (1.0, 0.2) } else { (0.0, 0.4) };
        values.iter_mut().for_each(|value| *value = mean + deviation * random.normal());
    }
    weights
}

fn single(weights: &HeadTensors<f64>, config: &HeadConfig) -> HeadTensors<f32> {
    let mut result = zeros::<f32>(config);
    for ((_, into), (_, from)) in named_mut(&mut result).into_iter().zip(named(weights)) {
        into.iter_mut().zip(from).for_each(|(a, b)| *a = *b as f32);
    }
    result
}

fn target_of<'a>(config: &HeadConfig, embed: &'a [f32], random: &mut Random) -> DraftTarget<'a> {
    let mut ids: Vec<u32> = (0..config.vocab_size as u32).collect();
    while ids.len() > config.draft_vocab_size {
        let drop = random.below(ids.len());
        ids.remove(drop);
    }
    DraftTarget {
        draft_ids: ids,
        head_rows: random.floats(config.draft_vocab_size * config.hidden_size, 0.5),
        norm: random.floats(config.hidden_size, 0.2).iter().map(|value| value + 1.0).collect(),
        eps: 1e-5,
        embed,
    }
}

/// Documents of the given (tokens, prompt length).
fn samples_of(config: &HeadConfig, sizes: &[(usize, usize)], random: &mut Random) -> Vec<OwnedSample> {
    let make = |(length, prompt_length): &(usize, usize)| OwnedSample {
        token_ids: (0..*length).map(|_| random.below(config.vocab_size) as u32).collect(),
        prompt_length: *prompt_length,
        states: random.floats((length - 1) * 4 * config.hidden_size, 1.0),
    };
    sizes.iter().map(make).collect()
}

const SIZES: [(usize, usize); 4] = [(11, 4), (9, 1), (5, 4), (7, 5)];

fn flags() -> Vec<(bool, bool, bool)> {
    (0..8).map(|bits| (bits & 1 > 0, bits & 2 > 0, bits & 4 > 0)).collect()
}

#[test]
fn gradients_agree_with_finite_differences() {
    for (fc_norm, norm_output, norm_before_residual) in flags() {
        let config = tiny(fc_norm, norm_output, norm_before_residual);
        let mut random = Random(88_172_645_463_325_252);
        let embed = random.floats(config.vocab_size * config.hidden_size, 1.0);
        let target = target_of(&config, &embed, &mut random);
        let samples = samples_of(&config, &SIZES, &mut random);
        let documents: Vec<_> = samples.iter().map(OwnedSample::document).collect();
        let mut weights = weights_of(&config, &mut random);
        let mut step = Step::<f64>::new(&config, 3, 0.8, &target).unwrap();
        let mut gradients = zeros(&config);
        let report = step.forward_backward(&weights, &documents, &mut gradients).unwrap();
        assert_eq!(report.supervised, [6 + 7 + 1, 5 + 6, 4 + 5]);
        assert_eq!(report, step.forward(&weights, &documents).unwrap());

        let lists: Vec<(String, Vec<f64>)> =
            named(&gradients).into_iter().map(|(name, values)| (name, values.to_vec())).collect();
        for (tensor, (name, wanted)) in lists.iter().enumerate() {
            assert!(wanted.iter().any(|value| value.abs() > 1e-6), "{name} has no gradient");
            // A random direction tests every element of the tensor at once, against all of its gradient.
            for _ in 0..3 {
                let direction: Vec<f64> = wanted.iter().map(|_| random.normal()).collect();
                let mut shifted = |amount: f64| {
                    let values = &mut named_mut(&mut weights)[tensor].1.clone();
                    let before = values.clone();
                    values.iter_mut().zip(&direction).for_each(|(value, along)| *value += amount * along);
                    *named_mut(&mut weights)[tensor].1 = values.clone();
                    let loss = step.forward(&weights, &documents).unwrap().loss;
                    *named_mut(&mut weights)[tensor].1 = before;
                    loss
                };
                let unit = 1e-4;
                // Fourth order: the error is far below the rounding of the loss.
                let slope = (8.0 * (shifted(unit) - shifted(-unit))
                    - (shifted(2.0 * unit) - shifted(-2.0 * unit)))
                    / (12.0 * unit);
                let analytic: f64 = wanted.iter().zip(&direction).map(|(a, b)| a * b).sum();
                let size = wanted.iter().map(|value| value * value).sum::<f64>().sqrt();
                let error = (slope - analytic).abs() / size.max(1e-6);
                assert!(error < 1e-6, "{name} {config:?}: {slope} against {analytic}, relative {error:e}");
            }
        }
    }
}

/// The head in candle operations that have a backward, one document and one chain set at a time, dense masks.
struct Oracle<'a> {
    config: &'a HeadConfig,
    vars: Vec<(String, Var)>,
    target: &'a DraftTarget<'a>,
}

impl Oracle<'_> {
    fn var(&self, name: &str) -> &Tensor {
        self.vars.iter().find(|(own, _)| own == name).unwrap().1.as_tensor()
    }

    fn linear(&self, x: &Tensor, name: &str) -> Tensor {
        x.matmul(&self.var(name).t().unwrap()).unwrap()
    }

    fn norm(&self, x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
        let mean = x.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
        x.broadcast_div(&(mean + eps).unwrap().sqrt().unwrap()).unwrap().broadcast_mul(weight).unwrap()
    }

    fn named_norm(&self, x: &Tensor, name: &str) -> Tensor {
        self.norm(x, self.var(name), self.config.rms_norm_eps)
    }

    /// [n, heads * D] to [heads, n, D], turned to positions row + offset.
    fn heads(&self, x: &Tensor, heads: usize, turn: Option<usize>) -> Tensor {
        let (n, size) = (x.dim(0).unwrap(), self.config.head_dim);
        let x = x.reshape((n, heads, size)).unwrap().transpose(0, 1).unwrap().contiguous().unwrap();
        let Some(offset) = turn else { return x };
        let half = size / 2;
        let angles: Vec<f64> = (0..n)
            .flat_map(|row| {
                (0..half).map(move |i| (row + offset) as f64 * 100.0_f64.powf(-2.0 * i as f64 / size as f64))
            })
            .collect();
        let angles = Tensor::from_vec(angles, (1, n, half), &Device::Cpu).unwrap();
        let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
        let (low, high) = (x.narrow(2, 0, half).unwrap(), x.narrow(2, half, half).unwrap());
        let times = |a: &Tensor, b: &Tensor| a.broadcast_mul(b).unwrap();
        let first = (times(&low, &cos) - times(&high, &sin)).unwrap();
        let second = (times(&high, &cos) + times(&low, &sin)).unwrap();
        Tensor::cat(&[first, second], 2).unwrap()
    }

    fn repeated(&self, x: &Tensor) -> Tensor {
        let group = self.config.num_attention_heads / self.config.num_key_value_heads;
        let pieces: Vec<Tensor> =
            (0..self.config.num_attention_heads).map(|h| x.narrow(0, h / group, 1).unwrap()).collect();
        Tensor::cat(&pieces, 0).unwrap()
    }

    /// Sum of the KL divergence over supervised rows of each step.
    fn sums(&self, sample: &OwnedSample, steps: usize) -> Vec<Tensor> {
        let config = self.config;
        let (h, size) = (config.hidden_size, config.head_dim);
        let length = sample.token_ids.len();
        let n = length - 1;
        let double = |values: Vec<f32>, shape: (usize, usize)| {
            Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap()
        };
        let states = double(sample.states.clone(), (n, 4 * h));
        let embedding = double(self.target.embed.to_vec(), (config.vocab_size, h));
        let head = double(self.target.head_rows.clone(), (config.draft_vocab_size, h));
        let norm = double(self.target.norm.clone(), (1, h)).squeeze(0).unwrap();
        let last = self.norm(&states.narrow(1, 3 * h, h).unwrap(), &norm, self.target.eps);
        let wanted = candle_nn::ops::log_softmax(&last.matmul(&head.t().unwrap()).unwrap(), 1).unwrap();
        let mut parts: Vec<Tensor> = (0..3).map(|i| states.narrow(1, i * h, h).unwrap()).collect();
        if config.fc_norm {
            parts = parts
                .iter()
                .enumerate()
                .map(|(i, part)| self.named_norm(part, &format!("fc_norm.{i}")))
                .collect();
        }
        let mut hidden = self.linear(&Tensor::cat(&parts, 1).unwrap(), "fc");
        let (mut keys, mut values, mut sums) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..steps {
            let ids: Vec<u32> = (0..n).map(|p| sample.token_ids[(p + 1 + step).min(length - 1)]).collect();
            let ids = Tensor::from_vec(ids, n, &Device::Cpu).unwrap();
            let embedded = embedding.index_select(&ids, 0).unwrap();
            let normed = self.named_norm(&hidden, "layers.0.hidden_norm");
            let joined = [self.named_norm(&embedded, "layers.0.input_layernorm"), normed.clone()];
            let joined = Tensor::cat(&joined, 1).unwrap();
            let project = |name: &str| self.linear(&joined, &format!("layers.0.self_attn.{name}"));
            let query = self.heads(&project("q_proj"), config.num_attention_heads, Some(step));
            keys.push(self.repeated(&self.heads(&project("k_proj"), config.num_key_value_heads, Some(step))));
            values.push(self.repeated(&self.heads(&project("v_proj"), config.num_key_value_heads, None)));
            let all_keys = Tensor::cat(&keys, 1).unwrap();
            let all_values = Tensor::cat(&values, 1).unwrap();
            let scores = query.matmul(&all_keys.transpose(1, 2).unwrap().contiguous().unwrap()).unwrap();
            let scores = (scores / (size as f64).sqrt()).unwrap();
            let mask: Vec<f64> = (0..n)
                .flat_map(|p| {
                    (0..(step + 1) * n).map(move |j| {
                        let visible = if j < n { j <= p } else { j % n == p };
                        if visible { 0.0 } else { -1e30 }
                    })
                })
                .collect();
            let mask = Tensor::from_vec(mask, (1, n, (step + 1) * n), &Device::Cpu).unwrap();
            let probabilities =
                candle_nn::ops::softmax(&scores.broadcast_add(&mask).unwrap(), D::Minus1).unwrap();
            let attended =
                probabilities.matmul(&all_values).unwrap().transpose(0, 1).unwrap().contiguous().unwrap();
            let attended = attended.reshape((n, config.num_attention_heads * size)).unwrap();
            let residual = if config.norm_before_residual { &normed } else { &hidden };
            let middle = (residual + self.linear(&attended, "layers.0.self_attn.o_proj")).unwrap();
            let y = self.named_norm(&middle, "layers.0.post_attention_layernorm");
            let gate = self.linear(&y, "layers.0.mlp.gate_proj").silu().unwrap();
            let wide = (gate * self.linear(&y, "layers.0.mlp.up_proj")).unwrap();
            let plain = (middle + self.linear(&wide, "layers.0.mlp.down_proj")).unwrap();
            let output = self.named_norm(&plain, "norm");
            let drafted = candle_nn::ops::log_softmax(&self.linear(&output, "lm_head"), 1).unwrap();
            hidden = if config.norm_output { output } else { plain };
            // Rows p with p >= prompt_length - 1 and a token p + 2 + step.
            let first = sample.prompt_length - 1;
            let count = (length - 2).saturating_sub(step + first);
            if count > 0 {
                let p = wanted.narrow(0, first + 1 + step, count).unwrap();
                let q = drafted.narrow(0, first, count).unwrap();
                sums.push((p.exp().unwrap() * (&p - q).unwrap()).unwrap().sum_all().unwrap());
            } else {
                sums.push(Tensor::zeros((), DType::F64, &Device::Cpu).unwrap());
            }
        }
        sums
    }
}

#[test]
fn loss_and_gradients_agree_with_candle() {
    for (fc_norm, norm_output, norm_before_residual) in flags() {
        let config = tiny(fc_norm, norm_output, norm_before_residual);
        let mut random = Random(3_141_592_653_589_793);
        let embed = random.floats(config.vocab_size * config.hidden_size, 1.0);
        let target = target_of(&config, &embed, &mut random);
        let samples = samples_of(&config, &SIZES, &mut random);
        let documents: Vec<_> = samples.iter().map(OwnedSample::document).collect();
        let weights = weights_of(&config, &mut random);
        let mut gradients = zeros(&config);
        let mut step = Step::<f64>::new(&config, 3, 0.8, &target).unwrap();
        let report = step.forward_backward(&weights, &documents, &mut gradients).unwrap();

        let vars = named(&weights)
            .into_iter()
            .map(|(name, values)| {
                let columns = match name.as_str() {
                    "fc" => 3 * config.hidden_size,
                    "layers.0.self_attn.q_proj"
                    | "layers.0.self_attn.k_proj"
                    | "layers.0.self_attn.v_proj" => 2 * config.hidden_size,
                    "layers.0.self_attn.o_proj" => config.num_attention_heads * config.head_dim,
                    "layers.0.mlp.down_proj" => config.intermediate_size,
                    _ => config.hidden_size,
                };
                let tensor =
                    Tensor::from_vec(values.to_vec(), (values.len() / columns, columns), &Device::Cpu)
                        .unwrap();
                let tensor = if name.contains("norm") { tensor.squeeze(0).unwrap() } else { tensor };
                (name, Var::from_tensor(&tensor).unwrap())
            })
            .collect();
        let oracle = Oracle { config: &config, vars, target: &target };
        let mut loss = Tensor::zeros((), DType::F64, &Device::Cpu).unwrap();
        for k in 0..3 {
            for sample in &samples {
                let weight = 0.8_f64.powi(k as i32) / report.supervised[k] as f64;
                loss = (loss + (oracle.sums(sample, 3)[k].clone() * weight).unwrap()).unwrap();
            }
        }
        let wanted_loss = loss.to_scalar::<f64>().unwrap();
        assert!((report.loss - wanted_loss).abs() < 1e-10, "{} against {wanted_loss}", report.loss);
        let store = loss.backward().unwrap();
        for ((name, got), (_, var)) in named(&gradients).into_iter().zip(&oracle.vars) {
            let wanted = store
                .get(var)
                .expect("candle has a gradient")
                .flatten_all()
                .unwrap()
                .to_vec1::<f64>()
                .unwrap();
            let size = wanted.iter().map(|value| value * value).sum::<f64>().sqrt();
            let error = got.iter().zip(&wanted).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt() / size;
            assert!(error < 1e-9, "{name} {config:?}: relative {error:e}");
        }
    }
}

#[test]
fn single_precision_frozen_head_and_batch_split() {
    let config = tiny(true, true, false);
    let mut random = Random(99);
    let embed = random.floats(config.vocab_size * config.hidden_size, 1.0);
    let target = target_of(&config, &embed, &mut random);
    let samples = samples_of(&config, &SIZES, &mut random);
    let documents: Vec<_> = samples.iter().map(OwnedSample::document).collect();
    let weights = weights_of(&config, &mut random);
    let mut exact = zeros(&config);
    let mut step = Step::<f64>::new(&config, 3, 0.8, &target).unwrap();
    let wanted = step.forward_backward(&weights, &documents, &mut exact).unwrap();

    let singles = single(&weights, &config);
    let mut rounded = zeros(&config);
    let mut single_step = Step::<f32>::new(&config, 3, 0.8, &target).unwrap();
    let report = single_step.forward_backward(&singles, &documents, &mut rounded).unwrap();
    assert!((report.loss - wanted.loss).abs() < 1e-5);
    for ((name, a), (_, b)) in named(&rounded).into_iter().zip(named(&exact)) {
        let size = b.iter().map(|value| value * value).sum::<f64>().sqrt();
        let error = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>().sqrt() / size;
        assert!(error < 1e-4, "{name}: {error:e}");
    }

    single_step.set_train_lm_head(false);
    let mut frozen = zeros(&config);
    single_step.forward_backward(&singles, &documents, &mut frozen).unwrap();
    assert!(frozen.lm_head.iter().all(|value| *value == 0.0));
    assert_eq!(frozen.fc, rounded.fc);

    // Packing changes nothing: the sums over documents are those of the documents alone.
    let mut sums = [0.0; 3];
    for document in &documents {
        let alone = step.forward(&weights, &[*document]).unwrap();
        (0..3).for_each(|k| sums[k] += alone.step_losses[k] * alone.supervised[k] as f64);
    }
    for (k, sum) in sums.iter().enumerate() {
        assert!((sum / wanted.supervised[k] as f64 - wanted.step_losses[k]).abs() < 1e-12);
    }
}

#[derive(Default)]
struct Losses {
    seen: Vec<u64>,
    evaluations: Vec<u64>,
    stop_at: u64,
}

impl Observer for Losses {
    fn step(&mut self, event: &TrainEvent) -> Control {
        self.seen.push(event.report.loss.to_bits());
        if event.progress.step == self.stop_at { Control::Stop } else { Control::Continue }
    }

    fn evaluate(&mut self, _: &mut dyn Drafter, event: &TrainEvent) -> Control {
        self.evaluations.push(event.progress.step);
        Control::Continue
    }
}

#[test]
fn resumed_run_is_the_same_to_the_bit_and_learns() {
    let config = tiny(true, true, false);
    let mut random = Random(7);
    let embed = random.floats(config.vocab_size * config.hidden_size, 1.0);
    let target = target_of(&config, &embed, &mut random);
    let sizes: Vec<(usize, usize)> = (0..7).map(|i| (9 + i, 3)).collect();
    let samples = samples_of(&config, &sizes, &mut random);
    let weights = single(&weights_of(&config, &mut random), &config);
    let directory = tempfile::tempdir().unwrap();
    let options = TrainOptions {
        steps: 60,
        learning_rate: 1e-2,
        warmup: 3,
        evaluate_every: 25,
        batch: BatchSize::Tokens(20),
        ..TrainOptions::default()
    };
    let mut whole = Losses::default();
    let outcome = train(&options, &config, weights.clone(), &target, &samples, &mut whole).unwrap();
    assert!(!outcome.stopped && outcome.progress.pass > 1);
    assert_eq!(whole.evaluations, [25, 50, 60]);
    let mean = |part: &[u64]| part.iter().map(|bits| f64::from_bits(*bits)).sum::<f64>() / part.len() as f64;
    let (early, late) = (mean(&whole.seen[..10]), mean(&whole.seen[50..]));
    assert!(late < 0.8 * early, "mean loss went from {early} to {late}");

    let kept = TrainOptions {
        checkpoint_directory: Some(directory.path().join("run")),
        checkpoint_every: 10,
        resume: true,
        ..options.clone()
    };
    let mut first = Losses { stop_at: 23, ..Losses::default() };
    assert!(train(&kept, &config, weights.clone(), &target, &samples, &mut first).unwrap().stopped);
    let mut second = Losses::default();
    let resumed = train(&kept, &config, weights, &target, &samples, &mut second).unwrap();
    assert_eq!([first.seen, second.seen].concat(), whole.seen);
    assert_eq!(resumed.weights, outcome.weights);
    assert_eq!(resumed.progress, outcome.progress);
    assert_eq!(std::fs::read_dir(directory.path().join("run")).unwrap().count(), 2, "old states are removed");

    // A head of another configuration is refused.
    let other = HeadConfig { norm_output: false, ..config.clone() };
    let refused = train(&kept, &other, zeros(&other), &target, &samples, &mut ());
    assert!(refused.unwrap_err().to_string().contains("another configuration"));

    // The score is what drafting token by token gives, on samples where most tokens are the head's own choice.
    let mut step = Step::<f32>::new(&config, 3, 0.8, &target).unwrap();
    let mut likely = samples.clone();
    for sample in &mut likely {
        for index in (sample.prompt_length + 1..sample.token_ids.len()).filter(|index| index % 4 != 3) {
            let chain = index - 1 - sample.prompt_length;
            let found = target.draft_ids.iter().find(|id| {
                sample.token_ids[index] = **id;
                step.forward(&outcome.weights, &[sample.document()]).unwrap();
                step.hits(1)[0][chain * 3]
            });
            assert!(found.is_some(), "some token is always the best");
        }
    }
    let draft = DraftOptions { config: &config, unroll: 3, decay: 0.8 };
    let mut head = open_drafter(TrainDevice::Cpu, draft, &outcome.weights, &target).unwrap();
    let after = evaluate(&mut *head, &likely, 2).unwrap();
    let (drafts, accepted) = drafted_like_the_engine(&mut step, &outcome.weights, &likely, &target.draft_ids);
    assert_eq!((after.drafts, &after.accepted), (drafts, &accepted));
    assert!(accepted[0] > drafts / 4 && accepted[0] < drafts, "{after:?} would pass with a wrong walk");
}

/// Drafts token by token, each embedding the draft before it, and counts what the real tokens accept.
fn drafted_like_the_engine(
    step: &mut Step<f32>,
    weights: &HeadTensors<f32>,
    samples: &[OwnedSample],
    draft_ids: &[u32],
) -> (u64, Vec<u64>) {
    let (mut drafts, mut accepted) = (0, vec![0; step.steps()]);
    for sample in samples {
        let tokens = &sample.token_ids;
        let mut row = sample.prompt_length - 1;
        while row + 2 < tokens.len() {
            let mut drafted = sample.clone();
            let chain = row + 1 - sample.prompt_length;
            let mut right = 0;
            for k in 0..step.steps().min(tokens.len() - row - 2) {
                // The token that the step calls a hit is the one that the head drafts.
                let found = draft_ids.iter().find(|id| {
                    drafted.token_ids[row + 2 + k] = **id;
                    step.forward(weights, &[drafted.document()]).unwrap();
                    step.hits(1)[0][chain * step.steps() + k]
                });
                assert!(found.is_some(), "some token is always the best");
                if right == k && drafted.token_ids[row + 2 + k] == tokens[row + 2 + k] {
                    accepted[k] += 1;
                    right += 1;
                }
            }
            drafts += 1;
            row += 1 + right;
        }
    }
    (drafts, accepted)
}

#[test]
fn documents_that_do_not_fit_are_refused_by_name() {
    let config = tiny(true, true, false);
    let mut random = Random(5);
    let embed = random.floats(config.vocab_size * config.hidden_size, 1.0);
    let target = target_of(&config, &embed, &mut random);
    let mut samples = samples_of(&config, &[(6, 2), (6, 2)], &mut random);
    samples[1].states.pop();
    let weights = weights_of(&config, &mut random);
    let mut step = Step::<f64>::new(&config, 2, 1.0, &target).unwrap();
    let documents: Vec<_> = samples.iter().map(OwnedSample::document).collect();
    let message = step.forward(&weights, &documents).unwrap_err().to_string();
    assert!(message.contains("document 1") && message.contains("159 state values"), "{message}");
    samples[1].states.push(0.0);
    samples[1].token_ids[3] = 23;
    let documents: Vec<_> = samples.iter().map(OwnedSample::document).collect();
    let message = step.forward(&weights, &documents).unwrap_err().to_string();
    assert!(message.contains("token 23 is outside"), "{message}");
    assert_eq!(
        step.forward(&weights, &[]).unwrap(),
        StepReport {
            step_losses: vec![0.0; 2],
            supervised: vec![0; 2],
            correct: vec![0; 2],
            ..StepReport::default()
        }
    );
}

#[test]
#[ignore = "real Speculators: half a minute, once installed"]
fn losses_agree_with_speculators() {
    for norms in [true, false] {
        let config =
            HeadConfig { num_attention_heads: 2, num_key_value_heads: 1, ..tiny(norms, norms, !norms) };
        let mut random = Random(2_718_281_828);
        let embed = random.floats(config.vocab_size * config.hidden_size, 1.0);
        let target = target_of(&config, &embed, &mut random);
        let samples = samples_of(&config, &[(17, 5)], &mut random);
        let weights = single(&weights_of(&config, &mut random), &config);
        let document = samples[0].document();
        let report =
            Step::<f32>::new(&config, 3, 1.0, &target).unwrap().forward(&weights, &[document]).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let input = serde_json::json!({
            "config": config, "weights": named(&weights).into_iter().collect::<std::collections::BTreeMap<_, _>>(),
            "draft_ids": target.draft_ids, "verifier_head": target.head_rows, "verifier_norm": target.norm,
            "embed": embed, "token_ids": document.token_ids, "prompt_length": document.prompt_length,
            "states": document.states, "steps": 3,
        });
        let path = directory.path().join("case.json");
        std::fs::write(&path, input.to_string()).unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/speculators_parity.py");
        let output = common::python::python_with("speculators").arg(script).arg(&path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let wanted: Vec<f64> = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!(report.step_losses.len(), wanted.len());
        for (got, wanted) in report.step_losses.iter().zip(&wanted) {
            assert!((got - wanted).abs() < 1e-4 * wanted, "{:?} against {wanted:?}", report.step_losses);
        }
    }
}
