//! One decoder layer: its weights and what it adds to the residual stream.

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::Linear;
use candle_nn::ops::{rms_norm, softmax_last_dim};
use candle_nn::rotary_emb::rope;

use super::settings::{Architecture, Settings};
use super::{PrefillError, Weights};

/// Rows whose attention is computed at once. All scores of a long prompt would not fit into memory, and half of them,
/// those of later keys, would be thrown away.
const BLOCK_ROWS: usize = 128;

/// What depends on the positions alone, shared by all layers of a prefill.
pub(super) struct Positions {
    /// [T, D / 2]
    cosines: Tensor,
    sines: Tensor,
    /// Of each block [rows, keys up to the block's last row]: minus infinity where a key comes after the row.
    masks: Vec<Tensor>,
}

impl Positions {
    pub fn new(settings: &Settings, rows: usize) -> Result<Self> {
        let mut table = settings.rope.clone();
        table.reserve(rows);
        let (cosines, sines) = table.tables();
        let shape = (rows, settings.shape.head_dim / 2);
        let mut masks = Vec::new();
        for start in (0..rows).step_by(BLOCK_ROWS) {
            let end = rows.min(start + BLOCK_ROWS);
            let mut mask = vec![0.0f32; (end - start) * end];
            for (row, keys) in mask.chunks_exact_mut(end).enumerate() {
                keys[start + row + 1..].fill(f32::NEG_INFINITY);
            }
            masks.push(Tensor::from_vec(mask, (end - start, end), &Device::Cpu)?);
        }
        Ok(Self {
            cosines: Tensor::from_slice(cosines, shape, &Device::Cpu)?,
            sines: Tensor::from_slice(sines, shape, &Device::Cpu)?,
            masks,
        })
    }
}

#[derive(Debug)]
pub(super) struct Layer {
    input_norm: Tensor,
    query: Projection,
    key: Projection,
    value: Linear,
    output: Linear,
    mlp_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// To the heads of queries or keys.
#[derive(Debug)]
struct Projection {
    linear: Linear,
    /// [D], over each head.
    norm: Option<Tensor>,
}

impl Layer {
    pub fn read(
        weights: &mut Weights,
        settings: &Settings,
        index: usize,
    ) -> std::result::Result<Self, PrefillError> {
        let shape = &settings.shape;
        let (hidden, head_dim, mlp) = (shape.hidden_size, shape.head_dim, shape.intermediate_size);
        let query_width = shape.num_attention_heads * head_dim;
        let key_width = shape.num_key_value_heads * head_dim;
        let attention_bias = settings.architecture == Architecture::Qwen2;
        let head_norms = settings.architecture == Architecture::Qwen3;
        let mut linear = |name: &str, rows: usize, columns: usize, biased: bool| {
            let prefix = format!("model.layers.{index}.{name}");
            let weight = weights.read(&format!("{prefix}.weight"), &[rows, columns])?;
            let bias = if biased { Some(weights.read(&format!("{prefix}.bias"), &[rows])?) } else { None };
            Ok::<Linear, PrefillError>(Linear::new(weight, bias))
        };
        let query = linear("self_attn.q_proj", query_width, hidden, attention_bias)?;
        let key = linear("self_attn.k_proj", key_width, hidden, attention_bias)?;
        let value = linear("self_attn.v_proj", key_width, hidden, attention_bias)?;
        let output = linear("self_attn.o_proj", hidden, query_width, false)?;
        let gate = linear("mlp.gate_proj", mlp, hidden, false)?;
        let up = linear("mlp.up_proj", mlp, hidden, false)?;
        let down = linear("mlp.down_proj", hidden, mlp, false)?;
        let mut norm =
            |name: &str, width: usize| weights.read(&format!("model.layers.{index}.{name}.weight"), &[width]);
        let query_norm = if head_norms { Some(norm("self_attn.q_norm", head_dim)?) } else { None };
        let key_norm = if head_norms { Some(norm("self_attn.k_norm", head_dim)?) } else { None };
        Ok(Self {
            input_norm: norm("input_layernorm", hidden)?,
            query: Projection { linear: query, norm: query_norm },
            key: Projection { linear: key, norm: key_norm },
            value,
            output,
            mlp_norm: norm("post_attention_layernorm", hidden)?,
            gate,
            up,
            down,
        })
    }

    /// [T, H] to [T, H].
    pub fn forward(&self, residual: &Tensor, positions: &Positions, settings: &Settings) -> Result<Tensor> {
        let eps = settings.shape.rms_norm_eps as f32;
        let attention_input = rms_norm(residual, &self.input_norm, eps)?;
        let attended = (residual + self.attend(&attention_input, positions, settings)?)?;
        let mlp_input = rms_norm(&attended, &self.mlp_norm, eps)?;
        let gated = (self.gate.forward(&mlp_input)?.silu()? * self.up.forward(&mlp_input)?)?;
        attended + self.down.forward(&gated)?
    }

    fn attend(&self, input: &Tensor, positions: &Positions, settings: &Settings) -> Result<Tensor> {
        let shape = &settings.shape;
        let (heads, key_heads, head_dim) =
            (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim);
        let group = heads / key_heads;
        let rows = input.dim(0)?;
        let eps = shape.rms_norm_eps as f32;
        let turned = self.query.turned_heads(input, heads, positions, eps)?;
        let queries =
            (turned * (1.0 / (head_dim as f64).sqrt()))?.reshape((key_heads, group, rows, head_dim))?;
        let keys = self.key.turned_heads(input, key_heads, positions, eps)?;
        let values = self.value.forward(input)?.reshape((rows, key_heads, head_dim))?;
        let values_by_head = values.transpose(0, 1)?.contiguous()?;
        let mut blocks = Vec::with_capacity(positions.masks.len());
        for mask in &positions.masks {
            // Each key serves a group of query heads: their rows stand below each other, and no key is copied.
            let (count, end) = mask.dims2()?;
            let block =
                queries.narrow(2, end - count, count)?.reshape((key_heads, group * count, head_dim))?;
            let scores = block.matmul(&keys.narrow(1, 0, end)?.transpose(1, 2)?)?;
            let masked = scores.reshape((heads, count, end))?.broadcast_add(mask)?;
            let weights = softmax_last_dim(&masked)?.reshape((key_heads, group * count, end))?;
            let mixed = weights.matmul(&values_by_head.narrow(1, 0, end)?)?;
            let by_row = mixed.reshape((heads, count, head_dim))?.transpose(0, 1)?;
            blocks.push(by_row.reshape((count, heads * head_dim))?);
        }
        self.output.forward(&Tensor::cat(&blocks, 0)?)
    }
}

impl Projection {
    /// [T, H] to [heads, T, D], turned to their positions.
    fn turned_heads(&self, input: &Tensor, heads: usize, positions: &Positions, eps: f32) -> Result<Tensor> {
        let projected = self.linear.forward(input)?;
        let (rows, width) = projected.dims2()?;
        let mut by_row = projected.reshape((rows, heads, width / heads))?;
        if let Some(norm) = &self.norm {
            by_row = rms_norm(&by_row, norm, eps)?;
        }
        let by_head = by_row.transpose(0, 1)?.contiguous()?;
        rope(&by_head.unsqueeze(0)?, &positions.cosines, &positions.sines)?.squeeze(0)
    }
}
