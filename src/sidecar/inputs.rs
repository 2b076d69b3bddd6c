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

/// The files of a configuration, read.
pub struct Inputs {
    pub(super) proxy: PreparedProxy,
    pub(super) control_keys: Option<Arc<KeyFile>>,
    pub(super) verifier: Option<VerifierFiles>,
}

/// What of the verifier's directory tells whether states and ids are its own.
pub(super) struct VerifierFiles {
    pub shape: VerifierShape,
    pub tokenizer: Tokenizer,
}

impl Inputs {
    /// Reads them all; writes nothing. An error names the setting.
    pub fn read(config: &Config) -> anyhow::Result<Self> {
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
}

impl VerifierFiles {
    fn read(directory: &Path) -> anyhow::Result<Self> {
        let shape = VerifierShape::read(directory)?;
        let path = directory.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path)
            .map_err(|error| anyhow::anyhow!("tokenizer {}: {error}", path.display()))?;
        Ok(Self { shape, tokenizer })
    }
}
