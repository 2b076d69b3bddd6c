//! `draftsmith serve`

use std::process::ExitCode;

use clap::Args;

use super::ConfigFlags;

#[derive(Debug, Args)]
pub struct ServeCommand {
    #[command(flatten)]
    config: ConfigFlags,
}

impl ServeCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let config = self.config.load()?;
        super::runtime()?.block_on(crate::sidecar::serve(config))?;
        Ok(ExitCode::SUCCESS)
    }
}
