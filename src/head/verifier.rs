//! The verifier's directory: its shape, the three tensors that a head takes from it, and what names it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::error::HeadError;
use super::fields::{Fields, read_object};
use super::rope::read_rope;
use super::tensor_file::TensorSource;
use super::{Rope, VerifierTensors};

/// What a head needs to know of the model that it drafts for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VerifierShape {
    /// Of the outer config: what vLLM loads.
    pub architectures: Vec<String>,
    /// Of the language model.
    pub model_type: String,
    /// H.
    pub hidden_size: usize,
    /// The dense MLP's width, or 3H where every layer is a mixture of experts.
    pub intermediate_size: usize,
    pub num_attention_heads: usize,
    /// Equal to the heads where the verifier uses latent attention (MLA): a head is llama-shaped.
    pub num_key_value_heads: usize,
    /// D.
    pub head_dim: usize,
    /// V.
    pub vocab_size: usize,
    /// N.
    pub num_hidden_layers: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    pub rope: Rope,
    pub tie_word_embeddings: bool,
    /// Ends of sequence; a draft vocabulary always holds them.
    pub eos_token_ids: Vec<u32>,
}

/// Names a verifier in manifests and checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VerifierIdentity {
    /// What was given to vLLM: a path or a name on a hub.
    pub name: String,
    pub architectures: Vec<String>,
    /// sha256 of its config.json, hex.
    pub config_digest: String,
    /// sha256 of its tokenizer's file, hex; none where the directory holds no known one.
    pub tokenizer_digest: Option<String>,
}

/// Fields that change the meaning of the embedding, the final norm or the logits: a head trained on the plain tensors
/// would learn a wrong target, silently. With the value that means "no change".
const CHANGES_LOGITS: [(&str, f64); 7] = [
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("embedding_multiplier", 1.0),
    ("scale_emb", 1.0),
    ("lm_head_multiplier", 1.0),
    ("output_multiplier_scale", 1.0),
];

/// Prefixes of the language model's tensors, the plain one first.
const MODEL_PREFIXES: [&str; 6] = [
    "model.",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "language_model.",
    "",
];

const HEAD_NAMES: [&str; 4] = [
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "model.lm_head.weight",
];

const TOKENIZER_FILES: [&str; 4] = ["tokenizer.json", "tiktoken.model", "tokenizer.model", "vocab.json"];

impl VerifierShape {
    /// Reads `config.json` of the verifier's directory.
    pub fn read(directory: &Path) -> Result<Self, HeadError> {
        let path = directory.join("config.json");
        let object = read_object(&path)?;
        let outer = Fields { path: &path, prefix: "", object: &object };
        let mut inner = outer;
        for (name, prefix) in [("text_config", "text_config."), ("llm_config", "llm_config.")] {
            if let Some(nested) = outer.optional_object(name)? {
                inner = Fields { path: &path, prefix, object: nested };
                break;
            }
        }
        Self::from_fields(outer, inner)
    }

    fn from_fields(outer: Fields<'_>, inner: Fields<'_>) -> Result<Self, HeadError> {
        let model_type = inner.optional_text("model_type")?.unwrap_or_default().to_owned();
        if model_type.contains("gemma") {
            let reason = "it scales its embeddings and adds one to its norms; heads for it would train on a wrong target";
            return Err(inner.unsupported("model_type", model_type, reason));
        }
        for (field, neutral) in CHANGES_LOGITS {
            if let Some(value) = inner.optional_number(field)?
                && value != neutral
            {
                return Err(inner.unsupported(
                    field,
                    value,
                    "the training target ignores it and would be wrong",
                ));
            }
        }
        let hidden_size = inner.size("hidden_size")?;
        let num_attention_heads = inner.size("num_attention_heads")?;
        let latent = inner.optional_size("kv_lora_rank")?.is_some();
        let (num_key_value_heads, head_dim) = if latent {
            (num_attention_heads, inner.optional_size("v_head_dim")?.unwrap_or(128))
        } else {
            let head_dim = match inner.optional_size("head_dim")? {
                Some(head_dim) => head_dim,
                None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
                None => {
                    let expected = format!(
                        "a whole number: {hidden_size} does not divide by {num_attention_heads} heads"
                    );
                    return Err(inner.missing("head_dim", expected));
                }
            };
            (inner.optional_size("num_key_value_heads")?.unwrap_or(num_attention_heads), head_dim)
        };
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            let expected = format!("a divisor of num_attention_heads ({num_attention_heads})");
            return Err(HeadError::bad_field(
                inner.path,
                &inner.name("num_key_value_heads"),
                num_key_value_heads,
                expected,
            ));
        }
        let Some(rms_norm_eps) = inner.optional_number("rms_norm_eps")? else {
            return Err(
                inner.missing("rms_norm_eps", "a number; only verifiers with a final RMSNorm are supported")
            );
        };
        let mut rope = read_rope(inner)?;
        if inner.value("rope_theta").is_none() && inner.value("rope_parameters").is_none() {
            rope = read_rope(outer)?;
        }
        let tied = match inner.value("tie_word_embeddings") {
            Some(_) => inner.flag("tie_word_embeddings", false)?,
            None => outer.flag("tie_word_embeddings", false)?,
        };
        let mut architectures = outer.texts("architectures")?;
        if architectures.is_empty() {
            architectures = inner.texts("architectures")?;
        }
        Ok(Self {
            architectures,
            model_type,
            hidden_size,
            intermediate_size: inner.optional_size("intermediate_size")?.unwrap_or(3 * hidden_size),
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: inner.size("vocab_size")?,
            num_hidden_layers: inner.size("num_hidden_layers")?,
            max_position_embeddings: inner.size("max_position_embeddings")?,
            rms_norm_eps,
            rope,
            tie_word_embeddings: tied,
            eos_token_ids: eos_token_ids(inner)?.or(eos_token_ids(outer)?).unwrap_or_default(),
        })
    }

    /// The layers that vLLM takes when a head names none: near the start, the middle, near the end. Shallow verifiers
    /// get the widest three. None below three layers.
    pub fn default_aux_layer_ids(&self) -> Option<[usize; 3]> {
        let layers = self.num_hidden_layers;
        if layers >= 7 {
            return Some([2, layers / 2, layers - 3]);
        }
        match layers {
            0..=2 => None,
            3 => Some([0, 1, 2]),
            _ => Some([1, layers / 2, layers - 1]),
        }
    }
}

fn eos_token_ids(fields: Fields<'_>) -> Result<Option<Vec<u32>>, HeadError> {
    let Some(value) = fields.value("eos_token_id") else { return Ok(None) };
    let items = match value {
        Value::Array(items) => items.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut ids = Vec::with_capacity(items.len());
    for item in items {
        match item.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => ids.push(id),
            None => return Err(fields.bad("eos_token_id", value, "a token id or a list of them")),
        }
    }
    Ok(Some(ids))
}

impl VerifierTensors {
    /// Reads embedding, final norm and output head, single file or sharded, bf16, f16 or f32. Only those are read.
    pub fn read(directory: &Path, shape: &VerifierShape) -> Result<Self, HeadError> {
        let mut source = TensorSource::open(directory)?;
        let matrix = [shape.vocab_size, shape.hidden_size];
        let prefix = MODEL_PREFIXES
            .into_iter()
            .find(|prefix| source.contains(&format!("{prefix}embed_tokens.weight")))
            .ok_or_else(|| HeadError::MissingTensor {
                path: source.path_of(""),
                name: "model.embed_tokens.weight".into(),
                expected: matrix.into(),
            })?;
        let embed_tokens = source.read_f32(&format!("{prefix}embed_tokens.weight"), &matrix, true)?;
        let norm = source.read_f32(&format!("{prefix}norm.weight"), &[shape.hidden_size], true)?;
        let lm_head = if shape.tie_word_embeddings {
            embed_tokens.clone()
        } else {
            let name = HEAD_NAMES.into_iter().find(|name| source.contains(name)).unwrap_or("lm_head.weight");
            source.read_f32(name, &matrix, true)?
        };
        Ok(Self { embed_tokens, norm, lm_head, rms_norm_eps: shape.rms_norm_eps })
    }
}

impl VerifierIdentity {
    /// Names the verifier in `directory`; `name` is what vLLM was given.
    pub fn read(directory: &Path, name: &str, shape: &VerifierShape) -> Result<Self, HeadError> {
        let mut tokenizer_digest = None;
        for file in TOKENIZER_FILES {
            let path = directory.join(file);
            if path.is_file() {
                tokenizer_digest = Some(file_digest(&path).map_err(HeadError::io(&path))?);
                break;
            }
        }
        let config = directory.join("config.json");
        Ok(Self {
            name: name.to_owned(),
            architectures: shape.architectures.clone(),
            config_digest: file_digest(&config).map_err(HeadError::io(&config))?,
            tokenizer_digest,
        })
    }
}

/// sha256 of a file, hex.
pub fn file_digest(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(format!("{:x}", hash.finalize()));
        }
        hash.update(&buffer[..count]);
    }
}
