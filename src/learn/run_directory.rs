//! A run on disk, `data/runs/<id>/`: all that an interrupted run needs to go on exactly, and its metrics.
//!
//! `run.json` fixes options and samples, `start/` is the head that it began with, `checkpoint.json` and its state say how
//! far it came (see `train`), `metrics.jsonl` has a line for each step, and `report.json` is there once it is finished.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::head::{Head, HeadDtype, HeadFormat, VerifierIdentity, VerifierReference, WriteOptions};
use crate::promote::Registry;
use crate::states::SampleName;
use crate::store::{DataDir, new_id, publish, rename_durably};
use crate::train::{AdamW, Checkpoint, Progress, TrainOptions};

const PLAN: &str = "run.json";
const START: &str = "start";
const METRICS: &str = "metrics.jsonl";
const REPORT: &str = "report.json";
const SCHEMA: u32 = 1;

/// What is fixed when a run begins.
#[derive(Serialize, Deserialize)]
pub(super) struct Plan {
    pub schema: u32,
    /// The registered head that it started from.
    pub parent: Option<String>,
    pub verifier: VerifierIdentity,
    pub options: TrainOptions,
    pub training: Vec<SampleName>,
    pub held_out: Vec<SampleName>,
}

impl Plan {
    pub fn new(
        parent: Option<String>,
        verifier: &VerifierIdentity,
        options: TrainOptions,
        [training, held_out]: [&[SampleName]; 2],
    ) -> Self {
        Self {
            schema: SCHEMA,
            parent,
            verifier: verifier.clone(),
            options,
            training: training.to_vec(),
            held_out: held_out.to_vec(),
        }
    }
}

/// The registered heads whose run trained or was scored on any of these requests, and those that go on from them.
pub fn heads_that_learned_from(
    data: &DataDir,
    requests: &BTreeSet<String>,
) -> anyhow::Result<BTreeSet<String>> {
    // Oldest first: a parent comes before what goes on from it.
    let heads = Registry::of(data).list()?.heads;
    let mut found = BTreeSet::new();
    for manifest in heads {
        let from_parent = manifest.parent.as_ref().is_some_and(|parent| found.contains(parent));
        let run = manifest.training.as_ref().and_then(|training| training.run.as_ref());
        let plan = run.and_then(|run| fs::read(data.runs().join(run).join(PLAN)).ok());
        let plan: Option<Plan> = plan.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let uses = |plan: &Plan| {
            plan.training.iter().chain(&plan.held_out).any(|(request_id, _)| requests.contains(request_id))
        };
        if from_parent || plan.as_ref().is_some_and(uses) {
            found.insert(manifest.id);
        }
    }
    Ok(found)
}

/// A run that this process works on; no other one can at the same time.
pub(super) struct RunDirectory {
    pub id: String,
    pub path: PathBuf,
    pub plan: Plan,
    /// The kernel lets go of it even after a kill.
    _lock: File,
}

impl RunDirectory {
    /// Begins a run with `head`, and with the moments of an earlier one where they are given.
    pub fn create(data: &DataDir, plan: Plan, head: &Head, optimizer: Option<AdamW>) -> anyhow::Result<Self> {
        let id = new_id(jiff::Timestamp::now());
        let path = data.runs().join(&id);
        let aside = data.runs().join(format!(".{id}.tmp"));
        fs::create_dir_all(&aside).with_context(|| format!("run directory {}", aside.display()))?;
        let lock = lock(&aside)?;
        let verifier = VerifierReference {
            name_or_path: plan.verifier.name.clone(),
            architectures: plan.verifier.architectures.clone(),
            speculative_tokens: plan.options.unroll,
        };
        let options = WriteOptions {
            format: HeadFormat::Flat,
            dtype: HeadDtype::F32,
            verifier: Some(verifier),
            target_layer: true,
        };
        head.write(&aside.join(START), &options)?;
        if let Some(optimizer) = optimizer {
            let progress = Progress { seed: plan.options.seed, ..Progress::default() };
            let checkpoint = Checkpoint { weights: head.tensors.clone(), optimizer, progress };
            checkpoint.save(&aside, &head.config)?;
        }
        publish(&aside.join(PLAN), &serde_json::to_vec(&plan)?)?;
        rename_durably(&aside, &path)?;
        Ok(Self { id, path, plan, _lock: lock })
    }

    /// Takes up an unfinished run: by the beginning of its id, or the newest one.
    pub fn resume(data: &DataDir, name: Option<&str>) -> anyhow::Result<(Self, Head)> {
        let id = find(data, name)?;
        let path = data.runs().join(&id);
        let lock = lock(&path)?;
        let file = path.join(PLAN);
        let bytes = fs::read(&file).with_context(|| format!("{}", file.display()))?;
        let plan: Plan = serde_json::from_slice(&bytes).with_context(|| format!("{}", file.display()))?;
        ensure!(
            plan.schema == SCHEMA,
            "{}: schema {}; this version reads {SCHEMA}: use the draftsmith that began the run",
            file.display(),
            plan.schema
        );
        let head = Head::read(&path.join(START), None)?;
        Ok((Self { id, path, plan, _lock: lock }, head))
    }

    /// Options with the directory that checkpoints go to.
    pub fn options(&self) -> TrainOptions {
        TrainOptions {
            checkpoint_directory: Some(self.path.clone()),
            resume: true,
            ..self.plan.options.clone()
        }
    }

    /// Ends the run. Its last checkpoint stays, so that `--follow` can go on with the optimizer's state.
    pub fn finish(&self, report: &impl Serialize) -> anyhow::Result<()> {
        publish(&self.path.join(REPORT), &serde_json::to_vec_pretty(report)?)?;
        // The registered head has taken its place.
        fs::remove_dir_all(self.path.join(START))?;
        Ok(())
    }
}

/// The optimizer's state at the end of a finished run, if it is still there.
pub(super) fn last_optimizer(data: &DataDir, run: &str, head: &Head) -> anyhow::Result<Option<AdamW>> {
    let checkpoint = Checkpoint::load(&data.runs().join(run), &head.config)?;
    Ok(checkpoint.map(|checkpoint| checkpoint.optimizer))
}

/// Gives the disk back what a later run has taken over; the metrics stay.
pub(super) fn remove_state(data: &DataDir, run: &str) -> anyhow::Result<()> {
    Ok(Checkpoint::remove(&data.runs().join(run))?)
}

fn lock(directory: &Path) -> anyhow::Result<File> {
    let path = directory.join(".lock");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .with_context(|| format!("{}", path.display()))?;
    file.try_lock()
        .with_context(|| format!("{}: another draftsmith trains this run", directory.display()))?;
    Ok(file)
}

/// The id of the run that a name means.
fn find(data: &DataDir, name: Option<&str>) -> anyhow::Result<String> {
    let directory = data.runs();
    let mut ids = Vec::new();
    if directory.is_dir() {
        for entry in fs::read_dir(&directory).with_context(|| format!("{}", directory.display()))? {
            let id = entry?.file_name().to_string_lossy().into_owned();
            if directory.join(&id).join(PLAN).is_file() && !id.starts_with('.') {
                ids.push(id);
            }
        }
    }
    ids.sort();
    let finished = |id: &String| directory.join(id).join(REPORT).exists();
    let Some(name) = name else {
        let unfinished = ids.into_iter().rfind(|id| !finished(id));
        return unfinished.with_context(|| {
            format!("no unfinished run in {}; begin one without --resume", directory.display())
        });
    };
    ids.retain(|id| id.starts_with(name));
    match ids.as_slice() {
        [id] if finished(id) => bail!(
            "run {id} is finished; train on from its head instead: see {}",
            directory.join(id).join(REPORT).display()
        ),
        [id] => Ok(id.clone()),
        [] => bail!("no run `{name}` in {}", directory.display()),
        several => bail!("`{name}` begins the ids of {} runs; give more of the id", several.len()),
    }
}

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct StepLine {
    pub step: u64,
    pub tokens_seen: u64,
    pub loss: f64,
    /// Where the head was scored after this step.
    pub held_out_acceptance_length: Option<f64>,
    /// Of work on the run, interruptions left out.
    pub seconds: f64,
}

/// `metrics.jsonl` of a run: a line for each step, once, however often the run was interrupted.
pub(super) struct Metrics {
    path: PathBuf,
    lines: Vec<StepLine>,
    /// Opened by the first line of this process.
    file: Option<File>,
    seconds_before: f64,
    began: Instant,
}

impl Metrics {
    pub fn open(run: &Path) -> anyhow::Result<Self> {
        let path = run.join(METRICS);
        let text = if path.exists() { fs::read_to_string(&path)? } else { String::new() };
        // A kill may have torn the last line; its step is done again.
        let lines = text.lines().map_while(|line| serde_json::from_str(line).ok()).collect();
        Ok(Self { path, lines, file: None, seconds_before: 0.0, began: Instant::now() })
    }

    pub fn lines(&self) -> &[StepLine] {
        &self.lines
    }

    pub fn add(
        &mut self,
        progress: &Progress,
        loss: f64,
        held_out_acceptance_length: Option<f64>,
    ) -> anyhow::Result<&StepLine> {
        let mut file = match self.file.take() {
            Some(file) => file,
            None => self.start_at(progress.step)?,
        };
        let line = StepLine {
            step: progress.step,
            tokens_seen: progress.tokens,
            loss,
            held_out_acceptance_length,
            seconds: self.seconds_before + self.began.elapsed().as_secs_f64(),
        };
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        file.write_all(&text).with_context(|| format!("{}", self.path.display()))?;
        self.file = Some(file);
        self.lines.push(line);
        Ok(&self.lines[self.lines.len() - 1])
    }

    /// Drops the lines of steps that the checkpoint does not hold: they are done again.
    fn start_at(&mut self, step: u64) -> anyhow::Result<File> {
        self.lines.retain(|line| line.step < step);
        self.seconds_before = self.lines.last().map_or(0.0, |line| line.seconds);
        let mut text = Vec::new();
        for line in &self.lines {
            serde_json::to_writer(&mut text, line)?;
            text.push(b'\n');
        }
        publish(&self.path, &text)?;
        Ok(OpenOptions::new().append(true).open(&self.path)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_each_step_once_after_a_kill() {
        let directory = tempfile::tempdir().unwrap();
        let progress = |step| Progress { step, tokens: step * 10, ..Progress::default() };
        let mut first = Metrics::open(directory.path()).unwrap();
        for step in 1..=5 {
            first.add(&progress(step), 0.1 + step as f64, None).unwrap();
        }
        let path = directory.path().join(METRICS);
        let mut torn = fs::read(&path).unwrap();
        torn.extend_from_slice(b"{\"step\":6,\"tok");
        fs::write(&path, torn).unwrap();
        let mut second = Metrics::open(directory.path()).unwrap();
        assert_eq!(second.lines().len(), 5);
        // The checkpoint was of step 3.
        second.add(&progress(4), 9.0, Some(1.5)).unwrap();
        let lines = Metrics::open(directory.path()).unwrap().lines;
        assert_eq!(lines.iter().map(|line| line.step).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!((lines[3].loss, lines[3].held_out_acceptance_length), (9.0, Some(1.5)));
        assert!(lines[3].seconds >= lines[2].seconds);
    }
}
