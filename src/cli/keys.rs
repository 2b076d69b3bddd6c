//! `draftsmith keys new`

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};

use crate::keys::NewKey;

#[derive(Debug, Args)]
pub struct KeysCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Make a key: it is printed once, and only its hash goes into the key file
    New(NewFlags),
}

#[derive(Debug, Args)]
struct NewFlags {
    /// Whose key it is: one word
    name: String,
    /// The key file that gets the line; a running draftsmith reads it at once
    #[arg(long)]
    file: PathBuf,
}

impl KeysCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Action::New(flags) = self.action;
        let plain = !flags.name.is_empty() && !flags.name.starts_with('#');
        let one_word = plain && !flags.name.contains(char::is_whitespace);
        anyhow::ensure!(one_word, "name {:?}: give one word that does not start with #", flags.name);
        let key = NewKey::generate(&flags.name)?;
        append(&flags.file, &key.line).with_context(|| flags.file.display().to_string())?;
        println!("{}", key.secret);
        Ok(ExitCode::SUCCESS)
    }
}

/// Adds a line to a file that only its owner may read, whether or not its last line is ended.
fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(path)?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let start = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    file.write_all(format!("{start}{line}\n").as_bytes())
}
