//! The pointer to the live head: `heads/live.json`.

use serde::{Deserialize, Serialize};

/// How many earlier heads are remembered.
const REMEMBERED: usize = 16;

/// Which head is live, and which were before it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LivePointer {
    pub id: String,
    /// sha256 of its model.safetensors.
    pub digest: String,
    /// RFC 3339, UTC.
    pub promoted_at: String,
    /// Why it went live, for people: the gate's figures, or that the gate was passed by.
    #[serde(default)]
    pub grounds: String,
    /// The last good heads, newest first.
    pub previous: Vec<PastHead>,
    /// The head that a roll-back took out, if the last change was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolled_back: Option<PastHead>,
}

/// A head that was live once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PastHead {
    pub id: String,
    pub digest: String,
    pub promoted_at: String,
    #[serde(default)]
    pub grounds: String,
}

impl LivePointer {
    /// The pointer after `new` was promoted over `old`.
    pub(crate) fn promoted(old: Option<Self>, new: PastHead) -> Self {
        let mut previous = Vec::new();
        if let Some(pointer) = old {
            let was_live = pointer.as_past();
            previous = pointer.previous;
            previous.insert(0, was_live);
        }
        // Promoting a head again must not make it its own fallback.
        previous.retain(|past| past.id != new.id);
        previous.truncate(REMEMBERED);
        Self {
            id: new.id,
            digest: new.digest,
            promoted_at: new.promoted_at,
            grounds: new.grounds,
            previous,
            rolled_back: None,
        }
    }

    /// The pointer after a roll-back, or none where no earlier head is known. The head taken out is not a fallback.
    pub(crate) fn rolled_back(mut self, now: String) -> Option<Self> {
        if self.previous.is_empty() {
            return None;
        }
        let back = self.previous.remove(0);
        let taken_out = self.as_past();
        Some(Self {
            id: back.id,
            digest: back.digest,
            promoted_at: now,
            grounds: format!("rolled back from {}", taken_out.id),
            previous: self.previous,
            rolled_back: Some(taken_out),
        })
    }

    fn as_past(&self) -> PastHead {
        PastHead {
            id: self.id.clone(),
            digest: self.digest.clone(),
            promoted_at: self.promoted_at.clone(),
            grounds: self.grounds.clone(),
        }
    }
}
