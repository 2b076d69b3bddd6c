//! Held-out scoring as the engine drafts.
//!
//! The engine's draft embeds its own tokens; a prefix that is accepted equals the real tokens, so a chain's step k decides
//! something only where steps before it were right, and there both embed the same. So every chain is computed once, teacher
//! forced, and the walk of the engine is done over the results.

use super::{Drafter, SampleSource, TrainError};

/// How well a head drafts.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Score {
    pub documents: u64,
    /// Times that the engine would have drafted.
    pub drafts: u64,
    /// [K] drafts whose first k + 1 tokens were all accepted.
    pub accepted: Vec<u64>,
    /// [K] the same as shares of `drafts`.
    pub accepted_per_position: Vec<f64>,
    /// Mean tokens that a draft yields, the verifier's own included: 1 + accepted.
    pub acceptance_length: f64,
    /// Weighted KL divergence as in training, over all chains, in nats.
    pub loss: f64,
}

impl Score {
    fn walk(&mut self, hits: &[bool], steps: usize) {
        let chains = hits.len() / steps;
        let mut chain = 0;
        while chain < chains {
            let accepted = hits[chain * steps..(chain + 1) * steps].iter().take_while(|hit| **hit).count();
            self.drafts += 1;
            for count in &mut self.accepted[..accepted] {
                *count += 1;
            }
            chain += 1 + accepted;
        }
    }
}

/// Scores all samples that a source still has, drafting S tokens in a row; `batch` documents go at a time.
pub fn evaluate(
    head: &mut dyn Drafter,
    source: &dyn SampleSource,
    batch: usize,
) -> Result<Score, TrainError> {
    let steps = head.unroll();
    let mut score = Score { accepted: vec![0; steps], ..Score::default() };
    let mut sums = vec![0.0_f64; steps];
    let mut supervised = vec![0_u64; steps];
    let mut start = 0;
    while start < source.len() {
        let end = source.len().min(start + batch.max(1));
        let mut samples = Vec::with_capacity(end - start);
        for index in start..end {
            samples.extend(source.load(index).map_err(|source| TrainError::Sample { index, source })?);
        }
        let documents: Vec<_> = samples.iter().map(|sample| sample.document()).collect();
        let (report, hits) = head.draft(&documents)?;
        for hits in hits {
            score.walk(&hits, steps);
        }
        for k in 0..steps {
            sums[k] += report.step_losses[k] * report.supervised[k] as f64;
            supervised[k] += report.supervised[k];
        }
        score.documents += documents.len() as u64;
        start = end;
    }
    for k in 0..steps {
        score.loss += head.decay().powi(k as i32) * sums[k] / supervised[k].max(1) as f64;
    }
    let drafts = score.drafts.max(1) as f64;
    score.accepted_per_position = score.accepted.iter().map(|count| *count as f64 / drafts).collect();
    score.acceptance_length =
        if score.drafts == 0 { 0.0 } else { 1.0 + score.accepted_per_position.iter().sum::<f64>() };
    Ok(score)
}

#[cfg(test)]
mod tests {
    use super::Score;

    #[test]
    fn walk_jumps_over_what_was_accepted() {
        let mut score = Score { accepted: vec![0; 2], ..Score::default() };
        // Chain 0 gets both right and skips chains 1 and 2; chain 3 is wrong at once though right later; chain 4 ends.
        let hits = [true, true, false, false, false, false, false, true, true, false];
        score.walk(&hits, 2);
        assert_eq!(score.drafts, 3);
        assert_eq!(score.accepted, [2, 1]);
    }
}
