//! `draftsmith config check|show|schema`

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::ConfigFlags;
use crate::config::Config;

#[derive(Debug, Args)]
pub struct ConfigCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Check file, environment and flags; exit 2 and name the key if something cannot work
    Check(ConfigFlags),
    /// Print the settings in force, as TOML
    Show(ConfigFlags),
    /// Print the JSON schema of the file
    Schema,
}

impl ConfigCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.action {
            Action::Check(flags) => {
                flags.load()?;
                println!("configuration is usable");
            }
            Action::Show(flags) => print!("{}", toml::to_string_pretty(&flags.load()?)?),
            Action::Schema => println!("{}", serde_json::to_string_pretty(&Config::schema())?),
        }
        Ok(ExitCode::SUCCESS)
    }
}
