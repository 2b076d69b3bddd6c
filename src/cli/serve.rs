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
        let runtime = super::runtime()?;
        let served = runtime.block_on(crate::sidecar::serve(config));
        // Dropping it would wait for blocking work, which a second signal must not do.
        runtime.shutdown_background();
        served.map(|()| ExitCode::SUCCESS)
    }
}
