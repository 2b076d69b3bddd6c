//! A candidate against the live head, on the same held-out set.

use serde::Serialize;

use super::{StateLayout, Verifier, held_out_samples, score};
use crate::config::Config;
use crate::promote::{Decision, HeldOutScore, Registry, decide};

/// Both figures, and what the gate says.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// None where no head is live.
    pub live: Option<Scored>,
    pub candidate: Scored,
    pub decision: Decision,
}

/// A head and its score.
#[derive(Clone, Debug, Serialize)]
pub struct Scored {
    pub head: String,
    pub score: HeldOutScore,
}

/// Compares a registered candidate with the live head, registered too. Scores that are missing, or of different sets, are
/// made anew on the held-out set of now, and kept in the manifests.
pub fn compare(
    config: &Config,
    registry: &Registry,
    candidate: &str,
    live: Option<&str>,
) -> anyhow::Result<Comparison> {
    let mut ids = vec![candidate];
    ids.extend(live);
    let mut scores = Vec::new();
    for id in &ids {
        scores.extend(registry.show(id)?.score);
    }
    let set = |score: &HeldOutScore| (score.set_digest.clone(), score.accepted_per_position.len());
    let comparable = scores.len() == ids.len() && scores.iter().all(|score| set(score) == set(&scores[0]));
    if !comparable {
        scores = score_now(config, registry, &ids)?;
    }
    let candidate = Scored { head: candidate.to_owned(), score: scores.remove(0) };
    let live = live.map(|head| Scored { head: head.to_owned(), score: scores.remove(0) });
    let decision = decide(live.as_ref().map(|live| &live.score), &candidate.score, config.gate.min_gain)?;
    Ok(Comparison { live, candidate, decision })
}

fn score_now(config: &Config, registry: &Registry, ids: &[&str]) -> anyhow::Result<Vec<HeldOutScore>> {
    let verifier = Verifier::read(config)?;
    let mut scores = Vec::new();
    for id in ids {
        let (head, _) = registry.load(id)?;
        let held_out = held_out_samples(config, &StateLayout::of(&head.config))?;
        let (_, summary) = score(config, &verifier, &held_out, &head)?;
        registry.set_score(id, summary.clone())?;
        scores.push(summary);
    }
    Ok(scores)
}
