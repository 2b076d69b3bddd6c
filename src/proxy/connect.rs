//! Opens connections to vLLM.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use super::server::keep_probing;
use super::tls::{TlsError, certificates, provider};
use crate::config::UpstreamAddress;
use crate::http;

/// Both ways of one connection, whatever carries it.
pub(super) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// How vLLM is reached.
pub(super) struct Connector {
    address: UpstreamAddress,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    timeout: Duration,
}

impl Connector {
    /// `ca_file` takes the place of the system's certificates where vLLM is reached through TLS.
    pub(super) fn new(
        address: UpstreamAddress,
        ca_file: Option<&Path>,
        timeout: Duration,
    ) -> Result<Self, TlsError> {
        let tls = match &address {
            UpstreamAddress::Tcp { host, tls: true, .. } => {
                let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
                let name = ServerName::try_from(bare).map_err(|_| TlsError::Name(host.clone()))?;
                let config = ClientConfig::builder_with_provider(provider())
                    .with_safe_default_protocol_versions()?
                    .with_root_certificates(roots(ca_file)?)
                    .with_no_client_auth();
                Some((TlsConnector::from(Arc::new(config)), name))
            }
            _ => None,
        };
        Ok(Self { address, tls, timeout })
    }

    pub(super) fn address(&self) -> &UpstreamAddress {
        &self.address
    }

    /// Opens a connection within the timeout.
    pub(super) async fn open(&self) -> io::Result<Watched> {
        let Ok(opened) = tokio::time::timeout(self.timeout, self.open_patiently()).await else {
            let message = format!("no connection within {:?}", self.timeout);
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        };
        Ok(Watched { stream: opened?, answered: Arc::default() })
    }

    async fn open_patiently(&self) -> io::Result<Box<dyn Duplex>> {
        let (host, port) = match &self.address {
            UpstreamAddress::Unix(path) => return Ok(Box::new(UnixStream::connect(path).await?)),
            UpstreamAddress::Tcp { host, port, .. } => (host.trim_matches(['[', ']']), *port),
        };
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        keep_probing(&stream)?;
        match &self.tls {
            Some((connector, name)) => Ok(Box::new(connector.connect(name.clone(), stream).await?)),
            None => Ok(Box::new(stream)),
        }
    }
}

fn roots(ca_file: Option<&Path>) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    let Some(path) = ca_file else {
        store.add_parsable_certificates(http::system_certificates().iter().cloned());
        return if store.is_empty() { Err(TlsError::NoRoots) } else { Ok(store) };
    };
    let setting = "proxy.upstream_ca_file";
    for certificate in certificates(setting, path)? {
        store.add(certificate).map_err(|error| TlsError::File {
            setting,
            path: path.to_owned(),
            reason: error.to_string(),
        })?;
    }
    Ok(store)
}

/// A connection that tells whether anything came since something was last sent.
pub(super) struct Watched {
    stream: Box<dyn Duplex>,
    answered: Arc<AtomicBool>,
}

impl Watched {
    pub(super) fn answered(&self) -> Arc<AtomicBool> {
        self.answered.clone()
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let room = buffer.remaining();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.remaining() < room {
            self.answered.store(true, Ordering::Relaxed);
        }
        polled
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.answered.store(false, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.answered.store(false, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
