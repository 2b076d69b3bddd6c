//! Reading vLLM's Prometheus text.

/// What speculative decoding has done since the server started, summed over its engines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpecCounters {
    /// Times that the head drafted.
    pub drafts: f64,
    /// Tokens that it drafted.
    pub draft_tokens: f64,
    /// Of these, tokens that the verifier accepted.
    pub accepted_tokens: f64,
    /// Accepted tokens by their place in the draft, the first place first.
    pub accepted_per_position: Vec<f64>,
}

impl SpecCounters {
    /// Mean tokens for each step of the verifier, 1 + accepted / drafts; none where nothing was drafted.
    pub fn acceptance_length(&self) -> Option<f64> {
        if self.drafts <= 0.0 {
            return None;
        }
        Some(1.0 + self.accepted_tokens / self.drafts)
    }

    /// What happened after `earlier`. None where a counter went back: the server restarted in between.
    pub fn since(&self, earlier: &SpecCounters) -> Option<SpecCounters> {
        if self.accepted_per_position.len() < earlier.accepted_per_position.len() {
            return None;
        }
        let mut accepted_per_position = self.accepted_per_position.clone();
        for (later, before) in accepted_per_position.iter_mut().zip(&earlier.accepted_per_position) {
            *later -= before;
        }
        let difference = SpecCounters {
            drafts: self.drafts - earlier.drafts,
            draft_tokens: self.draft_tokens - earlier.draft_tokens,
            accepted_tokens: self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_position,
        };
        let totals = [difference.drafts, difference.draft_tokens, difference.accepted_tokens];
        let went_back = totals.iter().chain(&difference.accepted_per_position).any(|count| *count < 0.0);
        (!went_back).then_some(difference)
    }
}

/// The part of /metrics that draftsmith reads, summed over the server's engines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// None where the server does not speculate.
    pub spec: Option<SpecCounters>,
    /// Tokens generated since the server started.
    pub generation_tokens: f64,
    /// Requests in the running batch now.
    pub requests_running: f64,
}

impl Metrics {
    /// Reads the Prometheus text format. Lines of other metrics, and lines that cannot be read, are passed over.
    pub fn parse(text: &str) -> Metrics {
        let mut metrics = Metrics::default();
        let mut spec = SpecCounters::default();
        let mut speculates = false;
        for line in text.lines() {
            let Some((name, labels, value)) = sample(line) else { continue };
            match name {
                "vllm:generation_tokens_total" => metrics.generation_tokens += value,
                "vllm:num_requests_running" => metrics.requests_running += value,
                "vllm:spec_decode_num_drafts_total" => {
                    speculates = true;
                    spec.drafts += value;
                }
                "vllm:spec_decode_num_draft_tokens_total" => spec.draft_tokens += value,
                "vllm:spec_decode_num_accepted_tokens_total" => spec.accepted_tokens += value,
                "vllm:spec_decode_num_accepted_tokens_per_pos_total" => {
                    let Some(position) = position(labels) else { continue };
                    if spec.accepted_per_position.len() <= position {
                        spec.accepted_per_position.resize(position + 1, 0.0);
                    }
                    spec.accepted_per_position[position] += value;
                }
                _ => {}
            }
        }
        metrics.spec = speculates.then_some(spec);
        metrics
    }
}

/// Name, label text (without braces), value.
fn sample(line: &str) -> Option<(&str, &str, f64)> {
    if line.starts_with('#') {
        return None;
    }
    let Some((name, rest)) = line.split_once('{') else {
        let mut words = line.split_ascii_whitespace();
        return Some((words.next()?, "", words.next()?.parse().ok()?));
    };
    // a label's value may hold a brace; the number after the last one cannot
    let (labels, number) = rest.rsplit_once('}')?;
    Some((name, labels, number.split_ascii_whitespace().next()?.parse().ok()?))
}

/// The label `position`. More than a thousand is no draft length, and would only cost memory.
fn position(labels: &str) -> Option<usize> {
    let start = if let Some(rest) = labels.strip_prefix("position=\"") {
        rest
    } else {
        labels.split_once(",position=\"")?.1
    };
    let number: usize = start.split('"').next()?.parse().ok()?;
    (number < 1000).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCRAPE: &str = include_str!("../../tests/fixtures/metrics_eagle3.txt");
    const LATER: &str = include_str!("../../tests/fixtures/metrics_eagle3_after_swaps.txt");

    #[test]
    fn reads_a_real_scrape() {
        let metrics = Metrics::parse(SCRAPE);
        let spec = metrics.spec.unwrap();
        assert_eq!((spec.drafts, spec.draft_tokens, spec.accepted_tokens), (58.0, 174.0, 0.0));
        assert_eq!(spec.accepted_per_position, [0.0; 3]);
        assert_eq!(spec.acceptance_length(), Some(1.0));
        assert_eq!((metrics.generation_tokens, metrics.requests_running), (60.0, 0.0));
    }

    #[test]
    fn accepted_tokens_are_the_sum_of_their_positions() {
        let spec = Metrics::parse(LATER).spec.unwrap();
        assert!(spec.accepted_tokens > 0.0);
        assert_eq!(spec.accepted_per_position.iter().sum::<f64>(), spec.accepted_tokens);
        assert_eq!(spec.draft_tokens, 3.0 * spec.drafts);
        assert_eq!(spec.since(&spec).unwrap().acceptance_length(), None);
        let before = SpecCounters { drafts: spec.drafts - 10.0, ..spec.clone() };
        assert_eq!(spec.since(&before).unwrap().drafts, 10.0);
        assert_eq!(before.since(&spec), None, "the counters went back");
    }

    #[test]
    fn sums_engines_and_bears_odd_labels() {
        let text = "vllm:spec_decode_num_drafts_total{engine=\"0\",model_name=\"a}b,c\"} 2.0\n\
                    vllm:spec_decode_num_drafts_total{engine=\"1\",model_name=\"a}b,c\"} 3.0\n\
                    vllm:spec_decode_num_accepted_tokens_total{engine=\"1\"} 5\n\
                    vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"1\"} 4\n\
                    vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"1\",engine=\"1\"} 1\n\
                    vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"99999999999\"} 1\n\
                    vllm:generation_tokens_total 7 1790000000000\ngarbage\n";
        let metrics = Metrics::parse(text);
        let spec = metrics.spec.unwrap();
        assert_eq!(spec.acceptance_length(), Some(2.0));
        assert_eq!(spec.accepted_per_position, [0.0, 5.0]);
        assert_eq!(metrics.generation_tokens, 7.0);
        assert_eq!(Metrics::parse("").spec, None);
    }
}
