//! Where vLLM listens: a TCP port, with or without TLS, or a Unix-domain socket.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use hyper::Uri;

/// The address behind the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpstreamAddress {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    Tcp { host: String, port: u16, tls: bool },
    /// `unix:/PATH`, as `vllm serve --uds PATH` opens it.
    Unix(PathBuf),
}

/// An address that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "give vLLM's address as http://HOST:PORT, https://HOST:PORT or unix:/PATH, without a path or credentials"
)]
pub struct UpstreamAddressError;

impl FromStr for UpstreamAddress {
    type Err = UpstreamAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return if path.is_absolute() { Ok(Self::Unix(path)) } else { Err(UpstreamAddressError) };
        }
        let uri: Uri = text.parse().map_err(|_| UpstreamAddressError)?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(UpstreamAddressError),
        };
        let authority = uri.authority().ok_or(UpstreamAddressError)?;
        // Credentials in the address would end up in the Host header.
        let plain =
            matches!(uri.path(), "" | "/") && uri.query().is_none() && !authority.as_str().contains('@');
        if !plain || authority.host().is_empty() {
            return Err(UpstreamAddressError);
        }
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        Ok(Self::Tcp { host: authority.host().to_owned(), port, tls })
    }
}

impl UpstreamAddress {
    /// What stands in the Host header.
    pub fn host_header(&self) -> String {
        match self {
            Self::Tcp { host, port, tls } => match (tls, port) {
                (false, 80) | (true, 443) => host.clone(),
                _ => format!("{host}:{port}"),
            },
            Self::Unix(_) => "localhost".to_owned(),
        }
    }
}

impl fmt::Display for UpstreamAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port, tls } => {
                write!(formatter, "{}://{host}:{port}", if *tls { "https" } else { "http" })
            }
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, host_header) in [
            ("http://vllm:8000", "vllm:8000"),
            ("http://[::1]:8000", "[::1]:8000"),
            ("http://vllm:80", "vllm"),
            ("https://vllm:443", "vllm"),
            ("https://vllm:8443", "vllm:8443"),
            ("unix:/run/vllm.sock", "localhost"),
        ] {
            let address: UpstreamAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(address.host_header(), host_header);
        }
        assert_eq!("http://vllm/".parse::<UpstreamAddress>().unwrap().to_string(), "http://vllm:80");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in [
            "",
            "vllm:8000",
            "ftp://vllm",
            "http://",
            "/path",
            "http://vllm/v1",
            "http://vllm?x=1",
            "http://user:secret@vllm",
            "unix:relative.sock",
            "unix:",
        ] {
            assert!(text.parse::<UpstreamAddress>().is_err(), "{text}");
        }
    }
}
