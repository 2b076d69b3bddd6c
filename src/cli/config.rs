//! `draftsmith config check|show|schema`

use std::process::ExitCode;

use clap::{Args, Subcommand};

use serde_json::json;

use super::{ConfigFlags, WRONG_USE};
use crate::config::Config;
use crate::sidecar::Inputs;

#[derive(Debug, Args)]
pub struct ConfigCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Check file, environment, flags and the files that they name, as `serve` does before it begins; exit 2 and name the
    /// key if something cannot work
    Check {
        #[command(flatten)]
        config: ConfigFlags,
        /// Print the report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the settings in force, as TOML
    Show(ConfigFlags),
    /// Print the JSON schema of the file
    Schema,
}

impl ConfigCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.action {
            Action::Check { config, json } => return check(&config, json),
            Action::Show(flags) => print!("{}", toml::to_string_pretty(&flags.load()?)?),
            Action::Schema => println!("{}", serde_json::to_string_pretty(&Config::schema())?),
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn check(flags: &ConfigFlags, json: bool) -> anyhow::Result<ExitCode> {
    let checked = flags.load().map_err(anyhow::Error::from).and_then(|config| {
        let inputs = Inputs::read(&config)?;
        Ok(config.doubts().into_iter().chain(inputs.doubts(&config)).collect())
    });
    let (doubts, problem) = match checked {
        Ok(doubts) => (doubts, None),
        Err(error) => (Vec::new(), Some(crate::told(&error))),
    };
    if json {
        println!("{:#}", json!({ "usable": problem.is_none(), "problem": problem, "doubts": doubts }));
    } else {
        for doubt in &doubts {
            eprintln!("draftsmith: {doubt}");
        }
    }
    let Some(problem) = problem else {
        if !json {
            println!("configuration is usable");
        }
        return Ok(ExitCode::SUCCESS);
    };
    eprintln!("draftsmith: {problem}");
    Ok(ExitCode::from(WRONG_USE))
}
