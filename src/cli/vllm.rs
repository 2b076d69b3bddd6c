//! `draftsmith vllm plugin|args|check`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;

use super::ConfigFlags;
use crate::vllm::{Client, LaunchOptions, Timeouts, launch, plugin};

#[derive(Debug, Args)]
pub struct VllmCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Write the vLLM plugin to a directory
    Plugin {
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Print the environment and the flags for `vllm serve`
    Args {
        /// The verifier: a directory or a name that vLLM knows
        #[arg(long)]
        model: String,
        /// The head to start with, made by `draftsmith heads init`
        #[arg(long, value_name = "DIR")]
        head: PathBuf,
        /// The sidecar's states.transfer_directory
        #[arg(long, value_name = "DIR")]
        transfer: PathBuf,
        /// Where `draftsmith vllm plugin` wrote the plugin
        #[arg(long, value_name = "DIR")]
        plugin: PathBuf,
        /// Tokens drafted in each step
        #[arg(long, default_value_t = 3)]
        speculative_tokens: usize,
        /// Further vLLM arguments
        #[arg(last = true)]
        extra: Vec<String>,
    },
    /// Ask a running vLLM what it can do
    Check {
        #[command(flatten)]
        config: ConfigFlags,
        /// JSON is what this prints in any case
        #[arg(long)]
        json: bool,
    },
}

impl VllmCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.action {
            Action::Plugin { directory } => {
                plugin::write(&directory)?;
                println!("{}", directory.display());
            }
            Action::Args { model, head, transfer, plugin, speculative_tokens, extra } => {
                println!(
                    "{}",
                    launch(&LaunchOptions { model, head, transfer, plugin, speculative_tokens, extra })
                );
            }
            Action::Check { config, json: _ } => {
                let client = Client::new(&config.load()?.proxy.upstream, Timeouts::default())?;
                let answer = super::runtime()?.block_on(async {
                    client.health().await?;
                    let version = client.version().await?;
                    let models = client.models().await?;
                    let names: Vec<&str> = models.iter().map(|model| model.id.as_str()).collect();
                    let speculating = client.metrics().await?.spec.is_some();
                    let status = client.status().await;
                    let plugin = match &status {
                        Ok(status) => json!({ "head_digest": status.digest, "tap": status.tap.enabled }),
                        Err(error) => json!({ "missing": error.to_string() }),
                    };
                    Ok::<_, crate::vllm::ClientError>(
                        json!({ "version": version, "models": names, "speculating": speculating, "plugin": plugin }),
                    )
                })?;
                println!("{}", serde_json::to_string_pretty(&answer)?);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
