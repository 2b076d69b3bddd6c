//! `records forget`: rows, the hidden states of their requests, and the names of the heads that learned from them.
//!
//! The process that records does it, since it alone may write: `serve` when it runs, else the command itself. States go
//! first and rows last, so that a run that ended early still finds by the rows what is left to do.

use std::collections::{BTreeSet, HashSet};

use anyhow::Context;

use crate::config::Config;
use crate::http;
use crate::learn;
use crate::record::{
    Forgotten, RecordError, Recorder, RecorderHandle, RecorderOptions, Selection, has_copies,
    selected_requests,
};
use crate::states::{StateStore, StatesError, StoreOptions};
use crate::store::DataDir;

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Report {
    pub requests: u64,
    pub records: Forgotten,
    /// Samples of hidden states.
    pub samples: usize,
    /// Heads that were trained on any of the requests, or scored by them, or that go on from such a head. They stay.
    pub heads: BTreeSet<String>,
    /// Why an object store may still have such rows.
    #[serde(default)]
    pub object_store_left: Option<String>,
}

/// Forgets in the process that has the recorder. `forget_states` removes the samples of requests.
pub fn forget(
    data: &DataDir,
    recorder: &RecorderHandle,
    forget_states: impl FnOnce(HashSet<String>) -> Result<usize, StatesError>,
    selection: &Selection,
) -> anyhow::Result<Report> {
    recorder.seal().context("sealing what was recorded; nothing was removed")?;
    let requests = selected_requests(data, selection)?;
    let heads = learn::heads_that_learned_from(data, &requests)?;
    let samples = forget_states(requests.iter().cloned().collect()).context("no rows were removed")?;
    let records = recorder.forget(selection.clone())?;
    let object_store_left = object_store_left(data, recorder)?;
    Ok(Report { requests: requests.len() as u64, records, samples, heads, object_store_left })
}

/// What of the rows may still be in an object store, and why.
fn object_store_left(data: &DataDir, recorder: &RecorderHandle) -> anyhow::Result<Option<String>> {
    if recorder.object_store_health().is_none() {
        let copied = has_copies(data)?.then(|| {
            format!(
                "{} speaks of copies, and record.object_store is not set here; they go once `serve` runs with it, or this with it",
                data.mirrored().display()
            )
        });
        return Ok(copied);
    }
    Ok(match recorder.settle_object_store() {
        Ok(0) => None,
        Ok(kept) => Some(format!(
            "{kept} objects stay though their files were removed by hand, and may hold such rows; delete them there"
        )),
        Err(error) => Some(error.to_string()),
    })
}

/// Forgets here, or asks the `serve` that records into this directory.
pub async fn forget_anywhere(config: &Config, selection: Selection) -> anyhow::Result<Report> {
    let data = DataDir::new(&config.data.directory);
    let options =
        RecorderOptions { object_store: config.record.object_store.clone(), ..RecorderOptions::default() };
    let recorder = match Recorder::start(&data, options) {
        Ok(recorder) => recorder,
        Err(RecordError::Locked { .. }) => return ask_serve(config, &selection).await,
        Err(error) => return Err(error.into()),
    };
    let options = StoreOptions::of(&config.states);
    let done = tokio::task::spawn_blocking(move || {
        let in_store = |requests: HashSet<String>| {
            let mut store = StateStore::open(&data.states(), options)?;
            store.forget(|request_id| requests.contains(request_id))
        };
        let report = forget(&data, &recorder, in_store, &selection);
        recorder.shutdown()?;
        report
    });
    done.await?
}

async fn ask_serve(config: &Config, selection: &Selection) -> anyhow::Result<Report> {
    let url = format!("http://{}/v1/forget", config.control.listen);
    let asked = http::client()?.post(&url).json(selection).send().await;
    let answer = asked.with_context(|| {
        format!("another process records into this directory, and {url} does not answer: is control.listen its address?")
    })?;
    let status = answer.status();
    let text = answer.text().await?;
    anyhow::ensure!(status.is_success(), "{url} answers {status}: {text}");
    Ok(serde_json::from_str(&text)?)
}
