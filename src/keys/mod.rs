//! Bearer keys of clients and operators. The file holds their hashes alone, so who reads it gets in nowhere.
//!
//! One key a line, `NAME sha256:HEX`; empty lines and those that start with `#` are skipped. `draftsmith keys new` makes a
//! key of 256 random bits, which no one can guess from its hash: so a plain hash does, and each request costs one.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::store::hex;

/// Where clients of Anthropic's API put their key.
pub const API_KEY_HEADER: &str = "x-api-key";

/// What a new key begins with, so that people and scanners know it.
const SECRET_PREFIX: &str = "ds-";
const DIGEST_PREFIX: &str = "sha256:";

/// A key file that cannot be used, or no new key.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("key file {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error(
        "key file {path}, line {line}: expected `NAME sha256:` and 64 hex digits; `draftsmith keys new` makes such lines"
    )]
    Line { path: PathBuf, line: usize },
    #[error("no random bytes for a key: {0}")]
    Random(io::Error),
}

type DigestBytes = [u8; 32];

/// The keys of one file, which may be read anew at any time.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    digests: RwLock<Arc<Vec<DigestBytes>>>,
}

impl KeyFile {
    /// Reads the file. One without a key lets nobody in.
    pub fn open(path: &Path) -> Result<Self, KeysError> {
        let digests = RwLock::new(Arc::new(read(path)?));
        Ok(Self { path: path.to_owned(), digests })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file again; true if its keys changed. A file that cannot be used leaves those of before in force.
    pub fn reload(&self) -> Result<bool, KeysError> {
        let fresh = read(&self.path)?;
        let mut held = self.digests.write().unwrap_or_else(PoisonError::into_inner);
        let changed = **held != fresh;
        *held = Arc::new(fresh);
        Ok(changed)
    }

    /// Whether a request with these headers bears one of the keys: `Authorization: Bearer KEY`, or `x-api-key: KEY`.
    pub fn admits(&self, headers: &HeaderMap) -> bool {
        let Some(secret) = presented(headers) else {
            return false;
        };
        let digest: DigestBytes = Sha256::digest(secret).into();
        let held = self.digests.read().unwrap_or_else(PoisonError::into_inner).clone();
        // All are compared, so the time tells neither which one fits nor how far one does.
        let mut found = subtle::Choice::from(0);
        for known in held.iter() {
            found |= known.ct_eq(&digest);
        }
        found.into()
    }
}

/// A key that was just made. The secret is shown once and kept nowhere.
pub struct NewKey {
    pub secret: String,
    /// The line for the key file.
    pub line: String,
}

impl NewKey {
    /// Makes a key from the kernel's random bytes. The name is for people.
    pub fn generate(name: &str) -> Result<Self, KeysError> {
        let mut random = [0; 32];
        File::open("/dev/urandom")
            .and_then(|mut file| file.read_exact(&mut random))
            .map_err(KeysError::Random)?;
        let secret = format!("{SECRET_PREFIX}{}", hex(&random));
        let line = format!("{name} {DIGEST_PREFIX}{}", hex(&Sha256::digest(secret.as_bytes())));
        Ok(Self { secret, line })
    }
}

fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get(AUTHORIZATION) {
        let (scheme, secret) = value.as_bytes().split_at_checked("bearer ".len())?;
        return scheme.eq_ignore_ascii_case(b"bearer ").then(|| secret.trim_ascii());
    }
    headers.get(API_KEY_HEADER).map(|value| value.as_bytes())
}

fn read(path: &Path) -> Result<Vec<DigestBytes>, KeysError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| KeysError::File { path: path.to_owned(), source })?;
    let mut digests = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            continue;
        }
        let digest = digest_of(trimmed);
        digests.push(digest.ok_or_else(|| KeysError::Line { path: path.to_owned(), line: index + 1 })?);
    }
    Ok(digests)
}

fn digest_of(line: &str) -> Option<DigestBytes> {
    let (_, value) = line.split_once(char::is_whitespace)?;
    let digits = value.trim().strip_prefix(DIGEST_PREFIX)?;
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    let mut digest = [0; 32];
    for (position, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * position..2 * position + 2], 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::{HeaderName, HeaderValue};

    fn with(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
        headers
    }

    #[test]
    fn a_key_opens_until_its_line_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        let (ours, other) = (NewKey::generate("a").unwrap(), NewKey::generate("b").unwrap());
        assert!(!ours.line.contains(&ours.secret));
        std::fs::write(&path, format!("# clients\n\n{}\n{}\n", ours.line, other.line)).unwrap();
        let keys = KeyFile::open(&path).unwrap();
        let bearer = |secret: &str| with("authorization", &format!("Bearer {secret}"));
        assert!(keys.admits(&bearer(&ours.secret)) && keys.admits(&bearer(&other.secret)));
        assert!(keys.admits(&with("authorization", &format!("bearer  {} ", ours.secret))));
        assert!(keys.admits(&with("x-api-key", &ours.secret)));
        for refused in [
            HeaderMap::new(),
            with("authorization", &ours.secret),
            with("authorization", &format!("Basic {}", ours.secret)),
            with("authorization", "Bearer "),
            with("authorization", "Bearer"),
            bearer(&ours.secret[..ours.secret.len() - 1]),
            bearer(&format!("{}0", ours.secret)),
            bearer(ours.line.split(':').nth(1).unwrap()),
        ] {
            assert!(!keys.admits(&refused), "{refused:?}");
        }
        std::fs::write(&path, format!("{}\n", other.line)).unwrap();
        assert!(keys.reload().unwrap() && !keys.reload().unwrap());
        assert!(!keys.admits(&bearer(&ours.secret)) && keys.admits(&bearer(&other.secret)));
    }

    #[test]
    fn a_line_that_is_no_key_is_named_and_leaves_the_keys_as_they_were() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        let ours = NewKey::generate("a").unwrap();
        std::fs::write(&path, &ours.line).unwrap();
        let keys = KeyFile::open(&path).unwrap();
        for line in ["name", "name sha256:12", &ours.secret, &format!("name {}", ours.secret)] {
            std::fs::write(&path, format!("{}\n{line}", ours.line)).unwrap();
            let message = keys.reload().unwrap_err().to_string();
            assert!(message.contains("line 2") && !message.contains(&ours.secret), "{message}");
            assert!(keys.admits(&with("x-api-key", &ours.secret)));
        }
    }
}
