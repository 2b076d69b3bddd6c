//! `draftsmith swap`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use serde_json::json;

use super::ConfigFlags;
use crate::head::{Fixed, Head, check_swap, file_digest};
use crate::promote::Registry;
use crate::store::DataDir;
use crate::vllm::{Client, Timeouts};

#[derive(Debug, Args)]
pub struct SwapCommand {
    /// A registered id (it becomes the live head), or a head's directory
    head: String,
    #[command(flatten)]
    config: ConfigFlags,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

impl SwapCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let config = self.config.load()?;
        let registry = Registry::open(&DataDir::new(&config.data.directory))?;
        let given = Path::new(&self.head);
        let (directory, head, registered): (PathBuf, Head, Option<String>) = if given.is_dir() {
            (given.canonicalize()?, Head::read(given, None)?, None)
        } else {
            let id = registry.resolve(&self.head)?;
            let head = registry.load(&id)?.0;
            (registry.path(&id).canonicalize()?, head, Some(id))
        };
        if let Some(pointer) = registry.live()? {
            let live = registry.load(&pointer.id)?.0;
            check_swap(
                Fixed { config: &live.config, draft_ids: &live.draft_ids },
                Fixed { config: &head.config, draft_ids: &head.draft_ids },
                true,
            )?;
        }
        let file = directory.join("model.safetensors");
        let digest = file_digest(&file).with_context(|| format!("head file {}", file.display()))?;
        let label = registered.clone().unwrap_or_else(|| digest.chars().take(12).collect());
        let client = Client::new(&config.proxy.upstream, Timeouts::default())?;
        let report = super::runtime()?.block_on(client.swap(&file, &digest, &label))?;
        if let Some(id) = &registered {
            registry.promote(id)?;
        }
        let (update, total) = (report.update.as_secs_f64() * 1e3, report.total.as_secs_f64() * 1e3);
        if self.json {
            println!(
                "{}",
                json!({ "label": label, "digest": digest, "update_ms": update, "total_ms": total })
            );
        } else {
            println!(
                "{label} is live; the engine stood still for at most {update:.0} ms, all calls took {total:.0} ms"
            );
        }
        Ok(ExitCode::SUCCESS)
    }
}
