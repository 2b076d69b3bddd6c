//! Reading and writing a head's directory: config.json and model.safetensors.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::View;
use serde_json::Value;

use super::config_file::{self, HeadFormat, KeptFields, VerifierReference};
use super::error::HeadError;
use super::fields::read_object;
use super::tensor_file::TensorSource;
use super::verifier::VerifierShape;
use super::vocabulary::check_draft_ids;
use super::{HeadConfig, HeadTensors, VerifierTensors};

/// A head in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    pub config: HeadConfig,
    pub tensors: HeadTensors<f32>,
    /// [Vd], ascending: the verifier's token for each draft id.
    pub draft_ids: Vec<u32>,
    /// The format that it was read in; fresh heads are flat.
    pub format: HeadFormat,
    /// [V, H], only where the checkpoint carries an embedding of its own. Training uses the verifier's: see
    /// [`Head::share_embedding`].
    pub embed_tokens: Option<Vec<f32>>,
    /// Fields of its config.json that we do not understand.
    pub kept: KeptFields,
}

/// The dtype of the weights in a file. Training keeps f32; vLLM casts on loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadDtype {
    Bf16,
    F32,
}

/// How to write a head.
#[derive(Clone, Debug, PartialEq)]
pub struct WriteOptions {
    pub format: HeadFormat,
    pub dtype: HeadDtype,
    /// Needed for the speculators format, unless the head was read from it: then it keeps the verifier it names.
    pub verifier: Option<VerifierReference>,
    /// Names the last layer as a fourth id, so that vLLM hands out the state for the training target. Only for a vLLM
    /// that runs our plugin: a stock one dies at its first request (it splits four states into three).
    pub target_layer: bool,
}

impl HeadDtype {
    /// As config.json names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
        }
    }
}

impl HeadConfig {
    /// Names and shapes of the trained tensors, in the order of [`HeadTensors::in_order`], as `format` names them.
    pub fn tensor_shapes(&self, format: HeadFormat) -> Vec<(String, Vec<usize>)> {
        let layer = match format {
            HeadFormat::Flat => "midlayer",
            HeadFormat::Speculators => "layers.0",
        };
        let hidden = self.hidden_size;
        let queries = self.num_attention_heads * self.head_dim;
        let keys = self.num_key_value_heads * self.head_dim;
        let mut shapes = vec![("fc.weight".to_owned(), vec![hidden, 3 * hidden])];
        if self.fc_norm {
            for index in 0..3 {
                shapes.push((format!("fc_norm.{index}.weight"), vec![hidden]));
            }
        }
        for (name, shape) in [
            ("input_layernorm", vec![hidden]),
            ("hidden_norm", vec![hidden]),
            ("self_attn.q_proj", vec![queries, 2 * hidden]),
            ("self_attn.k_proj", vec![keys, 2 * hidden]),
            ("self_attn.v_proj", vec![keys, 2 * hidden]),
            ("self_attn.o_proj", vec![hidden, queries]),
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![self.intermediate_size, hidden]),
            ("mlp.up_proj", vec![self.intermediate_size, hidden]),
            ("mlp.down_proj", vec![hidden, self.intermediate_size]),
        ] {
            shapes.push((format!("{layer}.{name}.weight"), shape));
        }
        shapes.push(("norm.weight".to_owned(), vec![hidden]));
        shapes.push(("lm_head.weight".to_owned(), vec![self.draft_vocab_size, hidden]));
        shapes
    }
}

impl<T> HeadTensors<T> {
    /// Every tensor, in the order of [`HeadConfig::tensor_shapes`].
    pub fn in_order(&self) -> Vec<&Vec<T>> {
        let mut all = vec![&self.fc];
        all.extend(&self.fc_norm);
        all.extend([
            &self.input_layernorm,
            &self.hidden_norm,
            &self.q_proj,
            &self.k_proj,
            &self.v_proj,
            &self.o_proj,
            &self.post_attention_layernorm,
            &self.gate_proj,
            &self.up_proj,
            &self.down_proj,
            &self.norm,
            &self.lm_head,
        ]);
        all
    }

    /// The same, to change.
    pub fn in_order_mut(&mut self) -> Vec<&mut Vec<T>> {
        let mut all = vec![&mut self.fc];
        all.extend(&mut self.fc_norm);
        all.extend([
            &mut self.input_layernorm,
            &mut self.hidden_norm,
            &mut self.q_proj,
            &mut self.k_proj,
            &mut self.v_proj,
            &mut self.o_proj,
            &mut self.post_attention_layernorm,
            &mut self.gate_proj,
            &mut self.up_proj,
            &mut self.down_proj,
            &mut self.norm,
            &mut self.lm_head,
        ]);
        all
    }
}

impl Head {
    /// Reads a head's directory in either format, and checks every field and tensor.
    ///
    /// `verifier` is needed for heads that name three layers only (most from elsewhere); given, it is checked too.
    pub fn read(directory: &Path, verifier: Option<&VerifierShape>) -> Result<Self, HeadError> {
        let config_path = directory.join("config.json");
        let object = read_object(&config_path)?;
        let (config, format, kept) = config_file::parse(&config_path, &object, verifier)?;
        let mut source = TensorSource::open(directory)?;
        check_names(&mut source, &config)?;
        let draft_ids = read_draft_ids(&mut source, &config)?;
        let mut tensors = HeadTensors::default();
        if config.fc_norm {
            tensors.fc_norm = vec![Vec::new(); 3];
        }
        for ((name, shape), tensor) in config.tensor_shapes(format).iter().zip(tensors.in_order_mut()) {
            *tensor = source.read_f32(&present_name(&source, name), shape, false)?;
        }
        let embedding = [config.vocab_size, config.hidden_size];
        let embed_tokens = match source.contains("embed_tokens.weight") {
            true => Some(source.read_f32("embed_tokens.weight", &embedding, false)?),
            false => None,
        };
        Ok(Self { config, tensors, draft_ids, format, embed_tokens, kept })
    }

    /// Writes config.json and model.safetensors into a directory, made if need be. Each file appears whole; the config
    /// comes last.
    pub fn write(&self, directory: &Path, options: &WriteOptions) -> Result<(), HeadError> {
        let config_path = directory.join("config.json");
        let object = config_file::render(&config_path, &self.config, &self.kept, options)?;
        self.check()?;
        fs::create_dir_all(directory).map_err(HeadError::io(directory))?;
        let path = directory.join("model.safetensors");
        let partial = directory.join(".model.safetensors.partial");
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::serialize_to_file(self.views(options), Some(metadata), &partial)
            .map_err(|error| HeadError::Safetensors { path: path.clone(), problem: error.to_string() })?;
        File::open(&partial).and_then(|file| file.sync_all()).map_err(HeadError::io(&partial))?;
        fs::rename(&partial, &path).map_err(HeadError::io(&path))?;
        let mut text = serde_json::to_vec_pretty(&Value::Object(object))
            .map_err(|source| HeadError::Json { path: config_path.clone(), source })?;
        text.push(b'\n');
        let partial_config = directory.join(".config.json.partial");
        write_synced(&partial_config, &text).map_err(HeadError::io(&partial_config))?;
        fs::rename(&partial_config, &config_path).map_err(HeadError::io(&config_path))?;
        File::open(directory).and_then(|file| file.sync_all()).map_err(HeadError::io(directory))
    }

    /// Drops the head's own embedding if it equals the verifier's to bf16 precision; refuses the head otherwise.
    pub fn share_embedding(&mut self, directory: &Path, verifier: &VerifierTensors) -> Result<(), HeadError> {
        let Some(own) = &self.embed_tokens else { return Ok(()) };
        for (index, (found, expected)) in own.iter().zip(&verifier.embed_tokens).enumerate() {
            if bf16::from_f32(*found) != bf16::from_f32(*expected) {
                let path = directory.join("model.safetensors");
                return Err(HeadError::OtherEmbedding { path, index, found: *found, expected: *expected });
            }
        }
        self.embed_tokens = None;
        Ok(())
    }

    /// Checks that tensors and vocabulary in memory fit the config.
    pub fn check(&self) -> Result<(), HeadError> {
        let shapes = self.config.tensor_shapes(self.format);
        let tensors = self.tensors.in_order();
        if shapes.len() != tensors.len() {
            return Err(HeadError::BadLength {
                name: "fc_norm".into(),
                found: self.tensors.fc_norm.len(),
                expected: if self.config.fc_norm { 3 } else { 0 },
                shape: vec![self.config.hidden_size],
            });
        }
        for ((name, shape), tensor) in shapes.into_iter().zip(tensors) {
            check_length(name, shape, tensor.len())?;
        }
        if let Some(own) = &self.embed_tokens {
            let shape = vec![self.config.vocab_size, self.config.hidden_size];
            check_length("embed_tokens.weight".into(), shape, own.len())?;
        }
        check_length("d2t".into(), vec![self.config.draft_vocab_size], self.draft_ids.len())?;
        check_draft_ids(&self.draft_ids, self.config.vocab_size)
    }

    fn views(&self, options: &WriteOptions) -> Vec<(String, FileTensor<'_>)> {
        let mut views = Vec::new();
        for ((name, shape), values) in
            self.config.tensor_shapes(options.format).into_iter().zip(self.tensors.in_order())
        {
            views.push((name, FileTensor::weights(shape, values, options.dtype)));
        }
        if let Some(own) = &self.embed_tokens {
            let shape = vec![self.config.vocab_size, self.config.hidden_size];
            views.push(("embed_tokens.weight".into(), FileTensor::weights(shape, own, options.dtype)));
        }
        // vLLM has no map, and refuses one, where the draft vocabulary is the verifier's.
        if self.config.draft_vocab_size < self.config.vocab_size {
            let mut offsets = Vec::with_capacity(self.draft_ids.len() * 8);
            let mut in_draft = vec![0u8; self.config.vocab_size];
            for (index, id) in self.draft_ids.iter().enumerate() {
                offsets.extend((i64::from(*id) - index as i64).to_le_bytes());
                in_draft[*id as usize] = 1;
            }
            views.push(("d2t".into(), FileTensor::bytes(vec![self.draft_ids.len()], Dtype::I64, offsets)));
            views.push(("t2d".into(), FileTensor::bytes(vec![in_draft.len()], Dtype::BOOL, in_draft)));
        }
        views
    }
}

fn write_synced(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn check_length(name: String, shape: Vec<usize>, found: usize) -> Result<(), HeadError> {
    let expected = shape.iter().product();
    if found == expected {
        return Ok(());
    }
    Err(HeadError::BadLength { name, found, expected, shape })
}

/// The name under which a tensor stands in the file: vLLM takes either layer name in either format, so we do.
fn present_name(source: &TensorSource, name: &str) -> String {
    if source.contains(name) {
        return name.to_owned();
    }
    let other = if let Some(rest) = name.strip_prefix("midlayer.") {
        format!("layers.0.{rest}")
    } else if let Some(rest) = name.strip_prefix("layers.0.") {
        format!("midlayer.{rest}")
    } else {
        return name.to_owned();
    };
    if source.contains(&other) { other } else { name.to_owned() }
}

/// Every tensor must be known: one that is skipped silently is a head that drafts nonsense.
fn check_names(source: &mut TensorSource, config: &HeadConfig) -> Result<(), HeadError> {
    let mut known: Vec<String> = vec!["embed_tokens.weight".into(), "d2t".into(), "t2d".into()];
    for (name, shape) in config.tensor_shapes(HeadFormat::Flat) {
        let present = present_name(source, &name);
        if !source.contains(&present) {
            return Err(HeadError::MissingTensor {
                path: source.path_of(&present),
                name: present,
                expected: shape,
            });
        }
        known.push(present);
    }
    let names: Vec<String> = source.names().map(str::to_owned).collect();
    for name in names {
        if !known.contains(&name) {
            let found = source.shape(&name)?;
            return Err(HeadError::UnknownTensor { path: source.path_of(&name), name, found });
        }
    }
    Ok(())
}

fn read_draft_ids(source: &mut TensorSource, config: &HeadConfig) -> Result<Vec<u32>, HeadError> {
    let size = config.draft_vocab_size;
    if !source.contains("d2t") {
        if size == config.vocab_size {
            return Ok((0..size as u32).collect());
        }
        // vLLM would map the draft ids to the first Vd tokens and accept next to nothing.
        return Err(HeadError::MissingTensor {
            path: source.path_of("d2t"),
            name: "d2t".into(),
            expected: vec![size],
        });
    }
    let offsets = source.read_i64("d2t", &[size])?;
    let mut draft_ids = Vec::with_capacity(size);
    for (index, offset) in offsets.into_iter().enumerate() {
        let id = offset.checked_add(index as i64).and_then(|id| u32::try_from(id).ok());
        let Some(id) = id else {
            let problem =
                format!("d2t[{index}] = {offset} leads to no token; expected offsets (token - {index})");
            return Err(HeadError::Vocabulary { problem });
        };
        draft_ids.push(id);
    }
    check_draft_ids(&draft_ids, config.vocab_size)?;
    if source.contains("t2d") {
        let in_draft = source.read_bool("t2d", &[config.vocab_size])?;
        let named: Vec<u32> = (0..config.vocab_size as u32).filter(|id| in_draft[*id as usize]).collect();
        if named != draft_ids {
            let problem = format!(
                "t2d marks {} tokens, d2t leads to {} and not to the same ones; the checkpoint's two maps disagree",
                named.len(),
                draft_ids.len()
            );
            return Err(HeadError::Vocabulary { problem });
        }
    }
    Ok(draft_ids)
}

/// A tensor on its way into a file; converted when its turn comes, so that only one is in memory twice.
struct FileTensor<'a> {
    shape: Vec<usize>,
    dtype: Dtype,
    content: Content<'a>,
}

enum Content<'a> {
    Weights(&'a [f32]),
    Bytes(Vec<u8>),
}

impl<'a> FileTensor<'a> {
    fn weights(shape: Vec<usize>, values: &'a [f32], dtype: HeadDtype) -> Self {
        let stored = match dtype {
            HeadDtype::Bf16 => Dtype::BF16,
            HeadDtype::F32 => Dtype::F32,
        };
        Self { shape, dtype: stored, content: Content::Weights(values) }
    }

    fn bytes(shape: Vec<usize>, dtype: Dtype, bytes: Vec<u8>) -> Self {
        Self { shape, dtype, content: Content::Bytes(bytes) }
    }
}

impl View for FileTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = match &self.content {
            Content::Bytes(bytes) => return Cow::Borrowed(bytes),
            Content::Weights(values) => values,
        };
        let mut bytes = Vec::with_capacity(self.data_len());
        if self.dtype == Dtype::BF16 {
            for value in *values {
                bytes.extend(bf16::from_f32(*value).to_le_bytes());
            }
        } else {
            for value in *values {
                bytes.extend(value.to_le_bytes());
            }
        }
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}
