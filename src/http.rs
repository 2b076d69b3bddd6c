//! The HTTP client of the commands and of object stores: reqwest on rustls with ring, and the system's certificates.
//!
//! A machine without certificates still speaks http: what it lacks is an error of its first https request, not of the
//! start. reqwest's own constructors would panic where no provider of cryptography was chosen, so clippy.toml bans them.

use std::sync::{Once, OnceLock};

use reqwest::{Certificate, Client, ClientBuilder};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;

/// A client with reqwest's defaults.
pub fn client() -> reqwest::Result<Client> {
    client_builder().build()
}

/// The same before it is built.
pub fn client_builder() -> ClientBuilder {
    choose_ring();
    #[expect(clippy::disallowed_methods, reason = "this is the one place: ring was chosen just now")]
    let builder = Client::builder();
    let certificates =
        system_certificates().iter().filter_map(|certificate| Certificate::from_der(certificate).ok());
    builder.tls_certs_only(certificates)
}

/// Has every TLS client of this process that does not choose for itself use ring.
pub fn choose_ring() {
    static CHOSEN: Once = Once::new();
    CHOSEN.call_once(|| {
        // An error means that the process has chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// The authorities that the system trusts, of those that rustls can read.
pub fn system_certificates() -> &'static [CertificateDer<'static>] {
    static CERTIFICATES: OnceLock<Vec<CertificateDer<'static>>> = OnceLock::new();
    CERTIFICATES.get_or_init(|| {
        let mut readable = Vec::new();
        for certificate in rustls_native_certs::load_native_certs().certs {
            if RootCertStore::empty().add(certificate.clone()).is_ok() {
                readable.push(certificate);
            }
        }
        readable
    })
}
