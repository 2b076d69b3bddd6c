//! Places for copies of what is kept: buckets of S3, Google Cloud Storage and Azure, and directories, all by URL.
//!
//! Credentials and endpoints come from the environment variables that the providers' own tools read (`AWS_*`, `GOOGLE_*`,
//! `AZURE_*`), never from the configuration, which may be shown to others.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::buffered::BufWriter;
use object_store::client::{Certificate, ClientOptions, HttpClient, HttpConnector, ReqwestConnector};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt, ObjectStoreScheme, RetryConfig};
use tokio::io::AsyncWriteExt;
use url::Url;

use super::create_private_directory;
use crate::http;

/// Larger files go up in parts of this size, one at a time: a copy holds two in memory.
const PART_BYTES: usize = 8 << 20;
const READ_BYTES: usize = 256 << 10;
/// Who copies tries again later anyway.
const RETRIES: usize = 2;
const RETRY_TIME: Duration = Duration::from_secs(10);

/// Why an object store cannot be used, or did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    #[error(
        "{url}: {reason}; give s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY, with \
         credentials in the environment as the provider's own tools read them"
    )]
    Target { url: String, reason: String },
    #[error("cannot {action} {object} in the object store: {source}")]
    Store { action: &'static str, object: String, source: object_store::Error },
    #[error("cannot read {object} for the object store: {source}")]
    Read { object: String, source: std::io::Error },
    #[error("cannot use the directory of {object} in the object store: {source}")]
    Directory { object: String, source: std::io::Error },
}

/// One place, opened. Nothing is asked of it before the first object.
pub struct ObjectTarget {
    store: Arc<dyn ObjectStore>,
    prefix: ObjectPath,
    /// The same store, where it is a directory.
    local: Option<Arc<LocalFileSystem>>,
}

impl ObjectTarget {
    /// Reads the URL, and the environment for the rest.
    pub fn open(url: &str) -> Result<Self, ObjectError> {
        http::choose_ring();
        let wrong = |reason: String| ObjectError::Target { url: url.to_owned(), reason };
        let parsed = Url::parse(url).map_err(|error| wrong(error.to_string()))?;
        let (scheme, prefix) = ObjectStoreScheme::parse(&parsed).map_err(|error| wrong(error.to_string()))?;
        let unusable = |error: object_store::Error| wrong(error.to_string());
        let retry = RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_TIME, ..RetryConfig::default() };
        let mut local = None;
        let store: Arc<dyn ObjectStore> = match scheme {
            ObjectStoreScheme::AmazonS3 => {
                let builder = AmazonS3Builder::from_env().with_url(url).with_retry(retry);
                Arc::new(builder.with_http_connector(SystemRoots).build().map_err(unusable)?)
            }
            ObjectStoreScheme::GoogleCloudStorage => {
                let builder = GoogleCloudStorageBuilder::from_env().with_url(url).with_retry(retry);
                Arc::new(builder.with_http_connector(SystemRoots).build().map_err(unusable)?)
            }
            ObjectStoreScheme::MicrosoftAzure => {
                let builder = MicrosoftAzureBuilder::from_env().with_url(url).with_retry(retry);
                Arc::new(builder.with_http_connector(SystemRoots).build().map_err(unusable)?)
            }
            ObjectStoreScheme::Local => {
                let directory = Arc::new(LocalFileSystem::new().with_fsync(true));
                local = Some(directory.clone());
                directory
            }
            _ => return Err(wrong(format!("`{}` is no object store that is known here", parsed.scheme()))),
        };
        Ok(Self { store, prefix, local })
    }

    /// Where the objects are, if that is a directory of this machine.
    pub fn directory(&self) -> Option<PathBuf> {
        self.local.as_ref()?.path_to_filesystem(&self.prefix).ok()
    }

    /// Stores what is left of the file under the name (`dt=2026-12-01/hour=17/x.parquet`), in place of what was there;
    /// readers see all of it or none. Gives the bytes.
    pub async fn put(&self, name: &str, file: &mut File) -> Result<u64, ObjectError> {
        let object = self.object(name);
        self.make_directory(&object)?;
        self.remove_unfinished(&object)?;
        let failed = |source| ObjectError::Store { action: "store", object: object.to_string(), source };
        let mut writer =
            BufWriter::with_capacity(self.store.clone(), object.clone(), PART_BYTES).with_max_concurrency(1);
        let mut bytes = 0;
        loop {
            let mut buffer = BytesMut::zeroed(READ_BYTES);
            let count = match file.read(&mut buffer) {
                Ok(count) => count,
                Err(source) => {
                    abandon(writer, &object).await;
                    return Err(ObjectError::Read { object: object.to_string(), source });
                }
            };
            if count == 0 {
                break;
            }
            buffer.truncate(count);
            bytes += count as u64;
            if let Err(source) = writer.put(buffer.freeze()).await {
                abandon(writer, &object).await;
                return Err(failed(source));
            }
        }
        writer.shutdown().await.map_err(|error| failed(store_error(error)))?;
        Ok(bytes)
    }

    /// Removes the object; one that is not there is no error.
    pub async fn delete(&self, name: &str) -> Result<(), ObjectError> {
        let object = self.object(name);
        self.remove_unfinished(&object)?;
        match self.store.delete(&object).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(ObjectError::Store { action: "delete", object: object.to_string(), source }),
        }
    }

    fn object(&self, name: &str) -> ObjectPath {
        let mut object = self.prefix.clone();
        for part in name.split('/') {
            object = object.join(part);
        }
        object
    }

    /// In a directory an object is written as `NAME#1` until it is whole; a process that died left that.
    fn remove_unfinished(&self, object: &ObjectPath) -> Result<(), ObjectError> {
        let Some(local) = &self.local else { return Ok(()) };
        let unusable = |source| ObjectError::Store { action: "store", object: object.to_string(), source };
        let path = local.path_to_filesystem(object).map_err(unusable)?;
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
        let failed = |source| ObjectError::Directory { object: object.to_string(), source };
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(failed(error)),
        };
        let unfinished = format!("{}#", name.to_string_lossy());
        for entry in entries {
            let found = entry.map_err(failed)?;
            if found.file_name().to_string_lossy().starts_with(&unfinished) {
                std::fs::remove_file(found.path()).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// The store would make directories and files that all can read: the directories are made here, for the owner alone.
    fn make_directory(&self, object: &ObjectPath) -> Result<(), ObjectError> {
        let Some(local) = &self.local else { return Ok(()) };
        let failed = |source| ObjectError::Store { action: "store", object: object.to_string(), source };
        let path = local.path_to_filesystem(object).map_err(failed)?;
        let Some(directory) = path.parent() else { return Ok(()) };
        create_private_directory(directory)
            .map_err(|source| ObjectError::Directory { object: object.to_string(), source })
    }
}

/// Takes back the parts that were stored already; the store's own rules must do it where this fails.
async fn abandon(mut writer: BufWriter, object: &ObjectPath) {
    if let Err(error) = writer.abort().await {
        tracing::debug!(%error, %object, "the parts of an unfinished object were not taken back");
    }
}

/// What the store said, out of the shape that a writer must give it.
fn store_error(error: std::io::Error) -> object_store::Error {
    match error.downcast::<object_store::Error>() {
        Ok(source) => source,
        Err(other) => object_store::Error::Generic { store: "writer", source: Box::new(other) },
    }
}

/// The system's certificates as [`http`] reads them: a machine without any can still use a store that speaks http.
#[derive(Debug)]
struct SystemRoots;

impl HttpConnector for SystemRoots {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut options = options.clone().with_no_system_certificates(true);
        for der in http::system_certificates() {
            options = options.with_root_certificate(Certificate::from_der(der)?);
        }
        ReqwestConnector::default().connect(&options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_object_store_is_refused_by_name() {
        for url in ["records", "ftp://host/x", "http://host/x", "memory:///x", "https://example.org/x"] {
            let message = ObjectTarget::open(url).map(|_| ()).unwrap_err().to_string();
            assert!(message.contains(url) && message.contains("s3://BUCKET"), "{url}: {message}");
        }
    }

    #[tokio::test]
    async fn a_directory_takes_objects_in_parts_and_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let content: Vec<u8> = (0..3 * PART_BYTES + 5).map(|index| (index % 251) as u8).collect();
        let source = directory.path().join("source");
        std::fs::write(&source, &content).unwrap();
        let url = format!("file://{}/copies", directory.path().display());
        let target = ObjectTarget::open(&url).unwrap();
        let name = "dt=2026-12-01/hour=17/x.parquet";
        for _ in 0..2 {
            let bytes = target.put(name, &mut File::open(&source).unwrap()).await.unwrap();
            assert_eq!(bytes, content.len() as u64);
        }
        let copied = directory.path().join("copies").join(name);
        assert_eq!(std::fs::read(&copied).unwrap(), content);
        let beside = std::fs::read_dir(copied.parent().unwrap()).unwrap().count();
        assert_eq!(beside, 1, "nothing half done is left");
        let mode = std::fs::metadata(directory.path().join("copies")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        target.delete(name).await.unwrap();
        target.delete(name).await.unwrap();
        assert!(!copied.exists());
    }
}
