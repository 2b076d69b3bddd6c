//! TLS on the client port: certificate and key from files that may be exchanged while connections are open.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio_rustls::TlsAcceptor;

/// TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{setting} = {path}: {reason}; give a PEM file")]
    File { setting: &'static str, path: PathBuf, reason: String },
    #[error("proxy.tls_certificate_file = {certificate} with proxy.tls_key_file = {key}: {source}")]
    Pair { certificate: PathBuf, key: PathBuf, source: rustls::Error },
    #[error("TLS: {0}")]
    Setup(#[from] rustls::Error),
    #[error("proxy.upstream: its host {0:?} is no name that a certificate can bear")]
    Name(String),
    #[error("no certificates of authorities on this machine; name a file in proxy.upstream_ca_file")]
    NoRoots,
}

/// The files of the client port's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM, the server's own certificate first.
    pub certificate: PathBuf,
    /// PEM.
    pub key: PathBuf,
}

/// What the files held when they were last read.
pub(super) struct ServerTls {
    files: TlsFiles,
    current: RwLock<Current>,
}

struct Current {
    chain: Vec<CertificateDer<'static>>,
    acceptor: TlsAcceptor,
}

impl ServerTls {
    pub(super) fn open(files: TlsFiles) -> Result<Self, TlsError> {
        let current = RwLock::new(read(&files)?);
        Ok(Self { files, current })
    }

    pub(super) fn files(&self) -> &TlsFiles {
        &self.files
    }

    /// For one connection; those that are open keep theirs.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        self.current.read().unwrap_or_else(PoisonError::into_inner).acceptor.clone()
    }

    /// Reads the files again; true if the certificate changed. Files that cannot be used, such as a new certificate
    /// whose key is not there yet, leave what was read before in force.
    pub(super) fn reload(&self) -> Result<bool, TlsError> {
        let fresh = read(&self.files)?;
        let mut held = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if held.chain == fresh.chain {
            return Ok(false);
        }
        *held = fresh;
        Ok(true)
    }
}

/// ring, named here so that no other part of the process decides for us.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn read(files: &TlsFiles) -> Result<Current, TlsError> {
    let chain = certificates("proxy.tls_certificate_file", &files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| TlsError::File {
        setting: "proxy.tls_key_file",
        path: files.key.clone(),
        reason: error.to_string(),
    })?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain.clone(), key)
        .map_err(|source| TlsError::Pair {
            certificate: files.certificate.clone(),
            key: files.key.clone(),
            source,
        })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Current { chain, acceptor: TlsAcceptor::from(Arc::new(config)) })
}

/// The certificates of a PEM file, at least one. `setting` names the file in errors.
pub(super) fn certificates(
    setting: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |reason: String| TlsError::File { setting, path: path.to_owned(), reason };
    let mut found = Vec::new();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| failed(error.to_string()))? {
        found.push(certificate.map_err(|error| failed(error.to_string()))?);
    }
    if found.is_empty() { Err(failed("no certificate is in it".to_owned())) } else { Ok(found) }
}
