//! The gate: a candidate is promoted only if it beat the live head on the same held-out traffic.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How a head did on held-out traffic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeldOutScore {
    /// Names the held-out set; scores on different sets are never compared.
    pub set_digest: String,
    /// Drafts that were scored.
    pub drafts: u64,
    /// For each draft position, the fraction of drafts that were accepted up to it. Never rises.
    pub accepted_per_position: Vec<f64>,
    /// Tokens per step of the verifier: 1 + the sum of the above.
    pub acceptance_length: f64,
    /// Per conversation, where it was kept: lets the gate tell a gain from noise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conversations: Vec<ConversationScore>,
}

/// One conversation's part of a score.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConversationScore {
    pub conversation_id: String,
    pub drafts: u64,
    /// Draft tokens accepted, all positions together; expectations, so not whole.
    pub accepted: f64,
}

impl HeldOutScore {
    pub fn new(set_digest: impl Into<String>, drafts: u64, accepted_per_position: Vec<f64>) -> Self {
        let acceptance_length = 1.0 + accepted_per_position.iter().sum::<f64>();
        Self {
            set_digest: set_digest.into(),
            drafts,
            accepted_per_position,
            acceptance_length,
            conversations: vec![],
        }
    }

    fn check(&self, whose: &'static str) -> Result<(), GateError> {
        let bad = |problem: String| Err(GateError::BadScore { whose, problem });
        if self.drafts == 0 || self.accepted_per_position.is_empty() {
            return bad("it scored no drafts; record more held-out traffic".into());
        }
        if let Some(rate) = self.accepted_per_position.iter().find(|rate| !(0.0..=1.0).contains(*rate)) {
            return bad(format!("an acceptance of {rate}; expected 0 to 1"));
        }
        let length = 1.0 + self.accepted_per_position.iter().sum::<f64>();
        let difference = (length - self.acceptance_length).abs();
        if difference.is_nan() || difference > 1e-6 {
            return bad(format!("acceptance_length {}, its positions give {length}", self.acceptance_length));
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The candidate goes live.
    Promote,
    /// The live head stays.
    Keep,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    pub verdict: Verdict,
    /// For people, with the numbers.
    pub reason: String,
    /// Candidate minus live, or minus 1 without a live head; tokens per step.
    pub gain: f64,
    /// Standard error of the gain over conversations, where both scores kept them.
    pub gain_error: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GateError {
    #[error(
        "the live head was scored on held-out set {live}, the candidate on {candidate}; score both on the same set"
    )]
    OtherSet { live: String, candidate: String },
    #[error("the live head was scored to {live} positions, the candidate to {candidate}; score both alike")]
    OtherDepth { live: usize, candidate: usize },
    #[error("the {whose} head's score cannot be used: {problem}")]
    BadScore { whose: &'static str, problem: String },
    #[error("min_gain is {found}; expected a number of 0 or more (tokens per step)")]
    BadMinimum { found: f64 },
}

/// How many standard errors a gain must be above zero, where they are known.
const SURE: f64 = 2.0;

/// Decides between the live head and a candidate, both scored on the same held-out set.
///
/// `min_gain` is in acceptance length (tokens per step). Where both scores kept their conversations, the gain must also
/// stand out of the noise over them. Without a live head, a candidate must beat no drafting at all: one token per step.
pub fn decide(
    live: Option<&HeldOutScore>,
    candidate: &HeldOutScore,
    min_gain: f64,
) -> Result<Decision, GateError> {
    if !(min_gain.is_finite() && min_gain >= 0.0) {
        return Err(GateError::BadMinimum { found: min_gain });
    }
    candidate.check("candidate")?;
    let new = candidate.acceptance_length;
    let Some(live) = live else {
        return Ok(judge(1.0, "without a head", new, min_gain, None));
    };
    live.check("live")?;
    if live.set_digest != candidate.set_digest {
        let (live, candidate) = (live.set_digest.clone(), candidate.set_digest.clone());
        return Err(GateError::OtherSet { live, candidate });
    }
    let depths = (live.accepted_per_position.len(), candidate.accepted_per_position.len());
    if depths.0 != depths.1 {
        return Err(GateError::OtherDepth { live: depths.0, candidate: depths.1 });
    }
    let old = live.acceptance_length;
    Ok(judge(old, "live", new, min_gain, paired_error(live, candidate)))
}

fn judge(old: f64, whose: &str, new: f64, min_gain: f64, gain_error: Option<f64>) -> Decision {
    let gain = new - old;
    let numbers = format!("acceptance length {old:.3} {whose}, {new:.3} candidate, gain {gain:+.3}");
    let (verdict, reason) = if gain <= 0.0 || gain < min_gain {
        (Verdict::Keep, format!("{numbers}; asked for {min_gain:.3} and above 0"))
    } else if let Some(error) = gain_error.filter(|error| gain < SURE * error) {
        (Verdict::Keep, format!("{numbers}; within the noise (standard error {error:.3} over conversations)"))
    } else {
        (Verdict::Promote, format!("{numbers}; asked for {min_gain:.3}"))
    };
    Decision { verdict, reason, gain, gain_error }
}

/// Standard error of the gain, a ratio estimate over conversations paired by id. Pairing removes what both heads find
/// hard in the same conversation. None where conversations were not kept, or fewer than two pair up.
fn paired_error(live: &HeldOutScore, candidate: &HeldOutScore) -> Option<f64> {
    let by_id: BTreeMap<&str, &ConversationScore> =
        live.conversations.iter().map(|score| (score.conversation_id.as_str(), score)).collect();
    let mut pairs = Vec::new();
    for new in &candidate.conversations {
        let Some(old) = by_id.get(new.conversation_id.as_str()) else { continue };
        if old.drafts > 0 && new.drafts > 0 {
            pairs.push((*old, new));
        }
    }
    if pairs.len() < 2 {
        return None;
    }
    let count = pairs.len() as f64;
    let total =
        |pick: fn(&(&ConversationScore, &ConversationScore)) -> f64| pairs.iter().map(pick).sum::<f64>();
    let old_drafts = total(|pair| pair.0.drafts as f64);
    let new_drafts = total(|pair| pair.1.drafts as f64);
    let old_rate = total(|pair| pair.0.accepted) / old_drafts;
    let new_rate = total(|pair| pair.1.accepted) / new_drafts;
    let mut squares = 0.0;
    for (old, new) in &pairs {
        // How much this conversation pulls the gain away from its mean (linearised ratios).
        let old_pull = (old.accepted - old_rate * old.drafts as f64) / old_drafts;
        let new_pull = (new.accepted - new_rate * new.drafts as f64) / new_drafts;
        squares += (new_pull - old_pull).powi(2);
    }
    Some((squares * count / (count - 1.0)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(rates: &[f64]) -> HeldOutScore {
        HeldOutScore::new("set", 100, rates.to_vec())
    }

    fn with_conversations(rate: f64, wobble: f64, sign: f64) -> HeldOutScore {
        let mut whole = score(&[rate]);
        for index in 0..10 {
            let shift = if index % 2 == 0 { wobble } else { -wobble };
            let accepted = 10.0 * (rate + sign * shift);
            whole.conversations.push(ConversationScore {
                conversation_id: format!("{index}"),
                drafts: 10,
                accepted,
            });
        }
        whole
    }

    #[test]
    fn better_head_is_promoted_and_equal_or_worse_is_not() {
        let live = score(&[0.5, 0.25]);
        let better = decide(Some(&live), &score(&[0.6, 0.35]), 0.1).unwrap();
        assert_eq!(better.verdict, Verdict::Promote);
        assert!((better.gain - 0.2).abs() < 1e-9);
        assert!(better.reason.contains("1.750 live, 1.950 candidate"), "{}", better.reason);
        assert_eq!(decide(Some(&live), &score(&[0.55, 0.25]), 0.1).unwrap().verdict, Verdict::Keep);
        assert_eq!(decide(Some(&live), &live, 0.0).unwrap().verdict, Verdict::Keep);
        assert_eq!(decide(Some(&live), &score(&[0.1, 0.0]), 0.0).unwrap().verdict, Verdict::Keep);
    }

    #[test]
    fn first_head_must_beat_no_drafting() {
        assert_eq!(decide(None, &score(&[0.0, 0.0]), 0.0).unwrap().verdict, Verdict::Keep);
        let little = decide(None, &score(&[0.05, 0.0]), 0.1).unwrap();
        assert_eq!(little.verdict, Verdict::Keep);
        assert!(little.reason.contains("1.000 without a head, 1.050 candidate"), "{}", little.reason);
        assert_eq!(decide(None, &score(&[0.2, 0.0]), 0.1).unwrap().verdict, Verdict::Promote);
        let empty = HeldOutScore::new("set", 0, vec![0.5]);
        assert!(decide(None, &empty, 0.1).unwrap_err().to_string().contains("no drafts"));
    }

    #[test]
    fn scores_that_cannot_be_compared_are_refused() {
        let live = score(&[0.5]);
        let other = HeldOutScore::new("other set", 100, vec![0.9]);
        let refusal = decide(Some(&live), &other, 0.0).unwrap_err().to_string();
        assert!(refusal.contains("set set") && refusal.contains("other set"), "{refusal}");
        let deeper = decide(Some(&live), &score(&[0.9, 0.8]), 0.0).unwrap_err();
        assert_eq!(deeper, GateError::OtherDepth { live: 1, candidate: 2 });
        assert!(decide(Some(&live), &score(&[f64::NAN]), 0.0).is_err());
        assert!(decide(Some(&live), &score(&[0.9]), f64::NAN).is_err());
        let mut forged = score(&[0.6]);
        forged.acceptance_length = 3.0;
        assert!(decide(Some(&live), &forged, 0.0).unwrap_err().to_string().contains("positions give 1.6"));
    }

    #[test]
    fn gain_within_the_noise_is_kept_and_pairing_removes_shared_noise() {
        let live = with_conversations(0.5, 0.3, 1.0);
        let opposite = decide(Some(&live), &with_conversations(0.6, 0.3, -1.0), 0.0).unwrap();
        assert_eq!(opposite.verdict, Verdict::Keep);
        // Each conversation differs by 0.6 either way: error 0.6 / sqrt(9) = 0.2.
        assert!((opposite.gain_error.unwrap() - 0.2).abs() < 1e-9, "{opposite:?}");
        let alike = decide(Some(&live), &with_conversations(0.6, 0.3, 1.0), 0.0).unwrap();
        assert_eq!(alike.verdict, Verdict::Promote);
        assert!(alike.gain_error.unwrap() < 1e-9);
    }
}
