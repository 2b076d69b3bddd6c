//! Training without an end: one round, and one candidate, after another as samples arrive in the store.
//!
//! A round is a run like any other: its own directory, resumable, on the new samples and a share of old ones. It starts
//! from the candidate before it, with that one's optimizer state.

use std::collections::HashSet;

use super::run::{Begun, begin, options};
use super::run_directory::{last_optimizer, remove_state};
use super::samples::usable;
use super::{
    CurvePoint, Ended, Samples, Side, Start, StateLayout, TrainReport, Verifier, Wake, starting_head,
};
use crate::config::Config;
use crate::promote::Registry;
use crate::states::{Reader, SampleEntry, SampleName};
use crate::store::DataDir;
use crate::train::{SampleSource, Schedule, shuffled};

/// Trains round after round until [`Wake::stop`]; `told` gets the points of each round's curve, `finished` its report.
/// Gives the unfinished round that it stopped in, if it did.
///
/// Samples that the starting head was trained on, as far as its manifest says so, count as old. The round after a
/// candidate starts from that candidate, whatever is live by then.
pub fn follow(
    config: &Config,
    start: &Start,
    wake: &Wake,
    mut told: impl FnMut(&CurvePoint),
    mut finished: impl FnMut(&TrainReport),
) -> anyhow::Result<Option<Ended>> {
    let data = DataDir::new(&config.data.directory);
    data.create()?;
    let verifier = Verifier::read(config)?;
    let registry = Registry::of(&data);
    let (mut head, mut parent) = starting_head(start, &data, &registry, &verifier, config)?;
    let (mut optimizer, mut last_run, mut newest_sample) = (None, None, None);
    if let Some(id) = &parent
        && let Some(training) = registry.show(id)?.training
    {
        newest_sample = training.newest_sample;
        if let Some(run) = training.run {
            optimizer = last_optimizer(&data, &run, &head)?;
        }
    }
    let layout = StateLayout::of(&head.config);
    // Before the first look, so that no sample falls in between.
    let _watcher = wake.watch(&data.states())?;
    let mut reader = Reader::open(&data.states())?;
    let mut old: HashSet<SampleName> = HashSet::new();
    for entry in reader.index() {
        if newest_sample.is_some_and(|time| entry.header.captured_at <= time) {
            old.insert(entry.header.name());
        }
    }
    let mut round = 0;
    loop {
        let samples = loop {
            if wake.is_stopped() {
                return Ok(None);
            }
            let samples = round_samples(config, &reader, &old, &layout, round);
            if let Some(samples) = samples {
                break samples;
            }
            if !wake.wait() {
                return Ok(None);
            }
            reader.refresh()?;
        };
        let training = Samples::from_entries(samples, layout.hidden);
        let trained: Vec<SampleName> = training.names().to_vec();
        let mut round_options = options(config, training.len());
        // There is no last step to come down to, and a carried optimizer is warm already.
        round_options.schedule = Schedule::Constant;
        if optimizer.is_some() {
            round_options.warmup = 0;
        }
        let begun = Begun { head, parent: parent.clone(), optimizer, training, options: round_options };
        let report = match begin(config, &data, &verifier, begun, wake, &mut told)? {
            Ended::Finished(report) => report,
            stopped @ Ended::Stopped { .. } => return Ok(Some(stopped)),
        };
        finished(&report);
        old.extend(trained);
        head = registry.load(&report.head)?.0;
        optimizer = last_optimizer(&data, &report.run, &head)?;
        if let Some(run) = last_run.replace(report.run) {
            remove_state(&data, &run)?;
        }
        parent = Some(report.head);
        round += 1;
        reader.refresh()?;
    }
}

/// The new samples with their share of old ones, drawn at random; None while too few are new.
fn round_samples(
    config: &Config,
    reader: &Reader,
    old: &HashSet<SampleName>,
    layout: &StateLayout,
    round: u64,
) -> Option<Vec<SampleEntry>> {
    let all = reader.index().iter().filter(|entry| usable(entry, Side::Train, layout));
    let (known, fresh): (Vec<&SampleEntry>, Vec<&SampleEntry>) =
        all.partition(|entry| old.contains(&entry.header.name()));
    if fresh.len() < config.train.follow_samples {
        return None;
    }
    let share = config.train.rehearsal_share;
    let rehearsed = (fresh.len() as f64 * share / (1.0 - share)).round() as usize;
    let mut samples: Vec<SampleEntry> = fresh.into_iter().cloned().collect();
    for number in shuffled(known.len(), config.train.seed, round).into_iter().take(rehearsed) {
        samples.push(known[number].clone());
    }
    Some(samples)
}
