//! What `serve` reads before it binds a port, so that a file that cannot be used ends it with nothing begun. `config check`
//! reads the same.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use tokenizers::Tokenizer;

use super::proxy_options::proxy_options;
use crate::config::Config;
use crate::head::VerifierShape;
use crate::keys::KeyFile;
use crate::proxy::PreparedProxy;
use crate::store::ObjectTarget;

/// The files of a configuration, read.
pub struct Inputs {
    pub(super) proxy: PreparedProxy,
    pub(super) control_keys: Option<Arc<KeyFile>>,
    pub(super) verifier: Option<VerifierFiles>,
}

/// What of the verifier's directory tells whether states and ids are its own.
pub(super) struct VerifierFiles {
    pub shape: VerifierShape,
    /// None: the model comes with another kind of tokenizer's file, as Kimi's do.
    pub tokenizer: Option<Tokenizer>,
}

impl Inputs {
    /// Reads them all; writes nothing. An error names the setting.
    pub fn read(config: &Config) -> anyhow::Result<Self> {
        could_be_directory("data.directory", &config.data.directory)?;
        if let Some(directory) = &config.states.transfer_directory {
            could_be_directory("states.transfer_directory", directory)?;
        }
        if let Some(url) = &config.record.object_store {
            let target = ObjectTarget::open(url).context("record.object_store")?;
            anyhow::ensure!(
                !target.directory().is_some_and(|place| place
                    .starts_with(std::path::absolute(&config.data.directory).unwrap_or_default())),
                "record.object_store = {url}: it is in data.directory, whose files it is to have copies of; choose another"
            );
        }
        let proxy = PreparedProxy::new(proxy_options(config)?)?;
        let control_keys = config
            .control
            .keys_file
            .as_deref()
            .map(KeyFile::open)
            .transpose()
            .context("control.keys_file")?;
        let verifier = match &config.verifier.directory {
            Some(directory) => Some(VerifierFiles::read(directory).context("verifier.directory")?),
            None => None,
        };
        Ok(Self { proxy, control_keys: control_keys.map(Arc::new), verifier })
    }

    /// What works, and is likely not meant, as [`Config::doubts`] has it.
    pub fn doubts(&self, config: &Config) -> Vec<String> {
        let untold = self.verifier.as_ref().is_some_and(|files| files.tokenizer.is_none());
        match &config.verifier.directory {
            Some(directory) if untold && config.states.transfer_directory.is_some() => vec![format!(
                "token ids will not be checked against the recorded text: verifier.directory = {} has no tokenizer.json",
                directory.display()
            )],
            _ => Vec::new(),
        }
    }
}

impl VerifierFiles {
    fn read(directory: &Path) -> anyhow::Result<Self> {
        let shape = VerifierShape::read(directory)?;
        let path = directory.join("tokenizer.json");
        if !path.exists() {
            return Ok(Self { shape, tokenizer: None });
        }
        let tokenizer = Tokenizer::from_file(&path)
            .map_err(|error| anyhow::anyhow!("tokenizer {}: {error}", path.display()))?;
        Ok(Self { shape, tokenizer: Some(tokenizer) })
    }
}

/// Whether it is a directory, or can be made: the first of its parents that is there is one.
fn could_be_directory(key: &str, path: &Path) -> anyhow::Result<()> {
    let nearest = path.ancestors().find(|place| place.exists());
    anyhow::ensure!(
        nearest.is_none_or(Path::is_dir),
        "{key} = {}: it is a file, or below one; choose a directory",
        path.display()
    );
    Ok(())
}
