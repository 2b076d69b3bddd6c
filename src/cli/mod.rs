//! Flags and commands, one file per command; no logic.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong use, 3 partly done (see the error file).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::Config;
use crate::store::DataDir;

mod bench;
mod config;
mod demo;
mod heads;
mod keys;
mod records;
mod replay;
mod serve;
mod states;
mod swap;
mod train;
mod vllm;

/// Exit code of wrong use, as clap itself uses it.
const WRONG_USE: u8 = 2;
/// Exit code of work that is done in part, or found something wrong in part of what it looked at.
const PARTLY_DONE: u8 = 3;

#[derive(Debug, Parser)]
#[command(name = "draftsmith", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve clients in front of vLLM: forward, record, collect hidden states
    Serve(serve::ServeCommand),
    /// Replay a prompt dataset through the proxy
    Replay(replay::ReplayCommand),
    /// Train a candidate head on what was captured
    Train(train::TrainCommand),
    /// Measure the training step
    Bench(bench::BenchCommand),
    /// Score a head on the held-out conversations: expected acceptance for each position
    Eval(train::EvalCommand),
    /// Push a head into a running vLLM, verified
    Swap(swap::SwapCommand),
    /// Write the vLLM plugin, print the launch line, check a server
    Vllm(vllm::VllmCommand),
    /// The whole loop on a small real model, from nothing
    Demo(demo::DemoCommand),
    /// Make, list, show, import, export, promote and roll back draft heads
    Heads(heads::HeadsCommand),
    /// Make keys for clients and operators
    Keys(keys::KeysCommand),
    /// Look into the captured records
    Records(records::RecordsCommand),
    /// Fill in hidden states where vLLM runs without the plugin
    States(states::StatesCommand),
    /// Check, show or describe the configuration
    Config(config::ConfigCommand),
}

/// The flags that choose a configuration, shared by the commands that need one.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ConfigFlags {
    /// The configuration file (TOML); defaults apply without one
    #[arg(long, value_name = "FILE", env = "DRAFTSMITH_CONFIG")]
    pub config: Option<PathBuf>,
    /// vLLM's address, over the file's proxy.upstream
    #[arg(long, value_name = "URL")]
    pub upstream: Option<String>,
    /// The address that clients use, over the file's proxy.listen
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,
    /// The data directory, over the file's data.directory
    #[arg(long, value_name = "DIR")]
    pub data: Option<String>,
}

impl ConfigFlags {
    /// The configuration that these flags choose, checked.
    pub fn load(&self) -> Result<Config, crate::config::ConfigError> {
        self.load_with(&[])
    }

    /// As [`ConfigFlags::load`], with more keys that a command has flags for.
    fn load_with(
        &self,
        more: &[(&'static str, &Option<String>)],
    ) -> Result<Config, crate::config::ConfigError> {
        let flags = [
            ("proxy.upstream", &self.upstream),
            ("proxy.listen", &self.listen),
            ("data.directory", &self.data),
        ];
        let mut given = Vec::new();
        for (key, value) in flags.iter().chain(more) {
            if let Some(value) = value {
                given.push((*key, value.clone()));
            }
        }
        Config::load(self.config.as_deref(), &given)
    }
}

/// The data directory, for commands that read it: they must not make one where a name was mistyped.
fn existing_data(config: &Config) -> anyhow::Result<DataDir> {
    let directory = &config.data.directory;
    anyhow::ensure!(
        directory.is_dir(),
        "data.directory = {}: no such directory; give the one that `draftsmith serve` writes (--data DIR)",
        directory.display()
    );
    Ok(DataDir::new(directory))
}

/// The runtime of the commands that talk to the network.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

/// Resolves at Ctrl-C. Without a signal handler Ctrl-C ends the process at once, which no command minds.
async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Logs go to standard error, so that standard output holds reports alone. `RUST_LOG` chooses what is told.
fn log_to_standard_error() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(terminal).init();
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    log_to_standard_error();
    let result = match cli.command {
        Command::Serve(command) => command.run(),
        Command::Replay(command) => command.run(),
        Command::Train(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Eval(command) => command.run(),
        Command::Swap(command) => command.run(),
        Command::Vllm(command) => command.run(),
        Command::Demo(command) => command.run(),
        Command::Heads(command) => command.run(),
        Command::Keys(command) => command.run(),
        Command::Records(command) => command.run(),
        Command::States(command) => command.run(),
        Command::Config(command) => command.run(),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("draftsmith: {}", crate::told(&error));
            let wrong_use = error.downcast_ref::<crate::config::ConfigError>().is_some();
            if wrong_use { ExitCode::from(WRONG_USE) } else { ExitCode::FAILURE }
        }
    }
}
