//! `draftsmith swap`

use std::path::Path;
use std::process::ExitCode;

use clap::Args;

use super::ConfigFlags;
use crate::config::Config;
use crate::head::{Head, VerifierShape};
use crate::promote::{Registry, Swapped, swap_in};
use crate::store::DataDir;
use crate::vllm::{Client, PluginStatus, Timeouts};

#[derive(Debug, Args)]
pub struct SwapCommand {
    /// A registered id (it becomes the live head, whatever the gate would say), or a head's directory
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
        let registry = Registry::of(&DataDir::new(&config.data.directory));
        let given = Path::new(&self.head);
        let swapped = if given.is_dir() {
            let head = Head::read(given, verifier_shape(&config)?.as_ref())?;
            let swapped = swap(&config, &head, given, None)?;
            if let Some(pointer) = registry.live()?
                && !registry.is_of(&pointer.id, &pointer.digest, &swapped.digest)
            {
                eprintln!(
                    "draftsmith: heads/live.json names {} still; the next `heads promote` takes this head into the registry",
                    pointer.id
                );
            }
            swapped
        } else {
            let id = registry.resolve(&self.head)?;
            let swapped = swap_registered(&config, &registry, &id)?;
            registry.promote(&id, "swapped by hand, past the gate")?;
            swapped
        };
        if self.json {
            println!("{}", serde_json::to_string_pretty(&swapped)?);
        } else {
            print(&swapped);
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Puts a registered head into the running vLLM.
pub(super) fn swap_registered(config: &Config, registry: &Registry, id: &str) -> anyhow::Result<Swapped> {
    let (head, _) = registry.load(id)?;
    swap(config, &head, &registry.path(id), Some(id))
}

fn swap(config: &Config, head: &Head, directory: &Path, label: Option<&str>) -> anyhow::Result<Swapped> {
    let client = Client::new(&config.proxy.upstream, Timeouts::default())?;
    let verifier = verifier_shape(config)?;
    Ok(super::runtime()?.block_on(swap_in(&client, head, directory, label, verifier.as_ref()))?)
}

/// Of the configured verifier, which a head that names three layers needs.
pub(super) fn verifier_shape(config: &Config) -> anyhow::Result<Option<VerifierShape>> {
    Ok(config.verifier.directory.as_deref().map(VerifierShape::read).transpose()?)
}

/// What vLLM's plugin says of the head that it runs.
pub(super) fn running(config: &Config) -> anyhow::Result<PluginStatus> {
    let client = Client::new(&config.proxy.upstream, Timeouts::default())?;
    Ok(super::runtime()?.block_on(client.status())?)
}

pub(super) fn print(swapped: &Swapped) {
    println!(
        "{} is live; the engine stood still for at most {:.0} ms, all calls took {:.0} ms",
        swapped.label, swapped.update_ms, swapped.total_ms
    );
}
