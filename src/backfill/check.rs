//! The spot check: states that are stored are computed again by another source, and compared row by row.
//!
//! The checks that every file passes see damage and wrong shapes. They cannot see rows of the right shape that belong to
//! other tokens, which is what a fault in the plugin, or in vLLM's cache, would give.

use std::collections::BTreeMap;
use std::pin::pin;

use anyhow::ensure;
use serde::Serialize;

use super::FillFrom;
use super::local::LocalSource;
use super::sink::verifier_directory;
use super::source::{SourceError, StateSource};
use super::stock::StockServer;
use crate::config::Config;
use crate::states::{Reader, Sample, SampleEntry, StateDtype, StatesError, StockSample, TransferFile};
use crate::store::{DataDir, is_drawn};

/// How far a row's values may be, for each layer, from those of the other source: the norm of the difference over the
/// norm. Two engines in bf16 differ by up to 6% (measured), fp8 adds up to 5%; rows of other tokens differ by half and
/// more.
fn limit(dtype: StateDtype) -> f64 {
    match dtype {
        StateDtype::F32 => 0.01,
        StateDtype::Bf16 | StateDtype::Fp8 => 0.25,
    }
}

/// What to compare, and with what.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    pub from: FillFrom,
    /// Of the samples, so many are drawn.
    pub share: f64,
    /// Each one draws other samples.
    pub seed: String,
    /// At most so many samples.
    pub limit: Option<usize>,
}

/// What the check saw.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CheckReport {
    pub samples: u64,
    pub rows: u64,
    /// Of all rows and layers.
    pub worst_error: f64,
    /// Samples with a row that is too far off.
    pub wrong: Vec<WrongSample>,
    /// Samples that the source could not give, by reason.
    pub failed: BTreeMap<&'static str, u64>,
    /// Samples that tokens alone do not give again: their first rows are missing, or they depend on more than tokens.
    pub not_comparable: u64,
    pub ended_early: Option<String>,
}

/// A sample whose states are not those of its tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WrongSample {
    pub request_id: String,
    pub choice_index: u32,
    /// Rows with a layer that is too far off.
    pub rows: usize,
    pub first_row: usize,
    pub worst_error: f64,
}

impl CheckReport {
    /// 0 all good, 3 something is wrong or could not be compared, 1 nothing was compared.
    pub fn exit_code(&self) -> u8 {
        if self.samples == 0 {
            return 1;
        }
        let good = self.wrong.is_empty() && self.failed.is_empty() && self.ended_early.is_none();
        if good { 0 } else { 3 }
    }
}

/// Checks a share of the samples.
pub async fn check(
    config: &Config,
    options: &CheckOptions,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<CheckReport> {
    let CheckOptions { from, share, seed, limit } = options;
    let share = *share;
    ensure!(share > 0.0 && share <= 1.0, "--share is {share}; give more than 0 and at most 1");
    let reader = Reader::open(&DataDir::new(&config.data.directory).states())?;
    let mut drawn = Vec::new();
    let mut report = CheckReport::default();
    for entry in reader.index() {
        let header = &entry.header;
        if !is_drawn(&format!("{seed} {} {}", header.request_id, header.choice_index), share) {
            continue;
        }
        if header.missing_rows > 0 || !header.prefix_salt.is_empty() {
            report.not_comparable += 1;
        } else if limit.is_none_or(|limit| drawn.len() < limit) {
            drawn.push(entry.clone());
        }
    }
    let Some(first) = drawn.first() else { return Ok(report) };
    match from {
        FillFrom::Vllm { address, transfer_directory, .. } => {
            let source = StockServer::connect(address, transfer_directory.clone()).await?;
            compare_all(drawn, source, report, stop).await
        }
        FillFrom::Local => {
            let source = LocalSource::open(verifier_directory(config)?, &first.header.layer_ids)?;
            compare_all(drawn, source, report, stop).await
        }
    }
}

async fn compare_all(
    drawn: Vec<SampleEntry>,
    source: impl StateSource,
    mut report: CheckReport,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<CheckReport> {
    let mut stop = pin!(stop);
    let bar = crate::replay::progress_bar(Some(drawn.len()));
    for entry in drawn {
        let sample = match entry.load() {
            Ok(sample) => sample,
            Err(StatesError::Evicted { .. }) => continue,
            Err(error @ StatesError::Damaged { .. }) => {
                tracing::warn!("{error}");
                *report.failed.entry("damaged").or_default() += 1;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let asked = StockSample {
            token_ids: sample.token_ids.clone(),
            prompt_length: sample.header.prompt_length,
            layer_ids: sample.header.layer_ids.clone(),
        };
        let answer = tokio::select! {
            answer = source.states(asked, &sample.header.request_id) => answer,
            () = &mut stop => {
                report.ended_early = Some("it was told to stop".to_owned());
                break;
            }
        };
        match answer {
            Ok(file) => compare(&sample, &file, &mut report),
            Err(SourceError::Sample(status)) => *report.failed.entry(status.as_str()).or_default() += 1,
            Err(SourceError::Source(reason)) => {
                report.ended_early = Some(reason);
                break;
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(report)
}

fn compare(sample: &Sample, file: &TransferFile, report: &mut CheckReport) {
    let header = &sample.header;
    let width = header.hidden;
    let computed = file.decoded();
    if computed.len() != sample.states.len() {
        *report.failed.entry("shape").or_default() += 1;
        return;
    }
    // An error of no number would pass for none.
    if !computed.iter().all(|value| value.is_finite()) {
        *report.failed.entry("not_finite").or_default() += 1;
        return;
    }
    let limit = limit(header.dtype);
    let (mut worst, mut rows, mut first_row) = (0.0_f64, 0, None);
    let per_row = header.layers * width;
    for (row, (stored, again)) in
        sample.states.chunks_exact(per_row).zip(computed.chunks_exact(per_row)).enumerate()
    {
        let mut error = 0.0_f64;
        for (stored_layer, layer) in stored.chunks_exact(width).zip(again.chunks_exact(width)) {
            error = error.max(relative_error(stored_layer, layer));
        }
        worst = worst.max(error);
        if error > limit {
            rows += 1;
            first_row.get_or_insert(row);
        }
    }
    report.samples += 1;
    report.rows += header.rows as u64;
    report.worst_error = report.worst_error.max(worst);
    if let Some(first_row) = first_row {
        tracing::error!(
            request_id = header.request_id,
            rows,
            first_row,
            worst,
            "stored states are not those of their tokens"
        );
        report.wrong.push(WrongSample {
            request_id: header.request_id.clone(),
            choice_index: header.choice_index,
            rows,
            first_row,
            worst_error: worst,
        });
    }
}

/// The norm of the difference over the norm of what is right.
fn relative_error(found: &[f32], right: &[f32]) -> f64 {
    let (mut difference, mut norm) = (0.0_f64, 0.0_f64);
    for (a, b) in found.iter().zip(right) {
        difference += f64::from(a - b).powi(2);
        norm += f64::from(*b).powi(2);
    }
    (difference / norm.max(f64::MIN_POSITIVE)).sqrt()
}
