//! What a registered head says of itself.

use serde::{Deserialize, Serialize};

use super::gate::HeldOutScore;
use crate::head::{HeadConfig, HeadDtype, HeadFormat, VerifierIdentity};

/// Raised when a reader of the last version would misread the file.
pub const MANIFEST_SCHEMA: u32 = 1;

/// `manifest.json` beside config.json and model.safetensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub schema: u32,
    pub id: String,
    /// RFC 3339, UTC.
    pub created_at: String,
    pub origin: Origin,
    /// The head that training started from.
    pub parent: Option<String>,
    pub verifier: VerifierIdentity,
    /// Shape, layer ids and flags, as in config.json; here for readers that know neither format.
    pub config: HeadConfig,
    pub format: HeadFormat,
    pub dtype: HeadDtype,
    /// sha256 of the draft vocabulary, hex.
    pub vocabulary_digest: String,
    /// sha256 of model.safetensors, hex: the head's name across machines.
    pub model_digest: String,
    pub training: Option<TrainingSummary>,
    pub score: Option<HeldOutScore>,
    /// sha256 (hex) of the model files that it was exported as: vLLM may run one of those.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exported: Vec<String>,
    /// draftsmith's version.
    pub made_by: String,
}

/// Where a head comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Origin {
    Fresh {
        seed: u64,
    },
    Trained,
    Imported {
        from: String,
        /// sha256 (hex) of the model.safetensors that it was read from, where there was one; ours differs, since it is
        /// written anew.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        digest: Option<String>,
    },
}

impl Manifest {
    /// sha256 (hex) of the model files that are this head: its own, the one that it was imported from, exported ones.
    pub fn digests(&self) -> impl Iterator<Item = &str> {
        let imported_from = match &self.origin {
            Origin::Imported { digest, .. } => digest.as_deref(),
            Origin::Fresh { .. } | Origin::Trained => None,
        };
        [self.model_digest.as_str()]
            .into_iter()
            .chain(imported_from)
            .chain(self.exported.iter().map(String::as_str))
    }

    /// Whether a model file with this sha256 (hex) is this head.
    pub fn is_of(&self, digest: &str) -> bool {
        self.digests().any(|own| own == digest)
    }
}

/// What a training run saw until it gave this head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingSummary {
    pub steps: u64,
    pub tokens_seen: u64,
    pub samples: u64,
    /// Of the last step.
    pub loss: f64,
    /// The run's directory under `data/runs/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// When the newest of its samples was captured, in milliseconds since the Unix epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest_sample: Option<i64>,
}
