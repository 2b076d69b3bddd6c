//! The heads on disk: `heads/<id>/` with config.json, model.safetensors and manifest.json, and `heads/live.json`.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::error::PromoteError;
use super::gate::HeldOutScore;
use super::live::{LivePointer, PastHead};
use super::manifest::{MANIFEST_SCHEMA, Manifest, Origin, TrainingSummary};
use crate::head::{
    Head, HeadDtype, HeadFormat, VerifierIdentity, VerifierReference, VerifierShape, VerifierTensors,
    WriteOptions, file_digest, vocabulary_digest,
};
use crate::store::{DataDir, new_id, publish, rename_durably};

/// Tokens drafted when vLLM is started from an exported speculators head alone.
const SPECULATIVE_TOKENS: usize = 3;

/// The registry of a data directory. Cheap to clone; keeps nothing in memory, so several processes may share it.
#[derive(Clone, Debug)]
pub struct Registry {
    directory: PathBuf,
}

/// A head on its way into the registry.
#[derive(Clone, Debug)]
pub struct Candidate<'a> {
    pub head: &'a Head,
    pub verifier: &'a VerifierIdentity,
    pub origin: Origin,
    pub parent: Option<String>,
    pub training: Option<TrainingSummary>,
    pub score: Option<HeldOutScore>,
    pub format: HeadFormat,
    pub dtype: HeadDtype,
}

/// What is in the registry. One broken head hides no other.
#[derive(Debug)]
pub struct Listing {
    /// Oldest first.
    pub heads: Vec<Manifest>,
    /// Directory name and what is wrong with it.
    pub broken: Vec<(String, PromoteError)>,
}

impl Registry {
    /// The registry of a data directory. Its own directory is made with the first head.
    pub fn of(data: &DataDir) -> Self {
        Self { directory: data.heads() }
    }

    /// The directory of a head; what a vLLM with our plugin is given (four layer ids, see [`WriteOptions`]).
    pub fn path(&self, id: &str) -> PathBuf {
        self.directory.join(id)
    }

    /// Registers a head: written aside, then renamed as a whole.
    pub fn add(&self, candidate: &Candidate<'_>) -> Result<Manifest, PromoteError> {
        fs::create_dir_all(&self.directory).map_err(PromoteError::io(&self.directory))?;
        let now = Timestamp::now();
        let id = new_id(now);
        let aside = self.directory.join(format!(".{id}.tmp"));
        let written = self.write_aside(&aside, &id, now, candidate);
        let manifest = match written {
            Ok(manifest) => manifest,
            Err(error) => {
                // The first error is the one to tell; what could not be removed is hidden and harmless.
                let _ = fs::remove_dir_all(&aside);
                return Err(error);
            }
        };
        let place = self.path(&id);
        rename_durably(&aside, &place).map_err(PromoteError::io(&place))?;
        metrics::counter!("draftsmith_heads_registered_total").increment(1);
        Ok(manifest)
    }

    fn write_aside(
        &self,
        aside: &Path,
        id: &str,
        now: Timestamp,
        candidate: &Candidate<'_>,
    ) -> Result<Manifest, PromoteError> {
        let options = write_options(candidate.format, candidate.dtype, candidate.verifier, true);
        candidate.head.write(aside, &options)?;
        let model = aside.join("model.safetensors");
        let manifest = Manifest {
            schema: MANIFEST_SCHEMA,
            id: id.to_owned(),
            created_at: now.to_string(),
            origin: candidate.origin.clone(),
            parent: candidate.parent.clone(),
            verifier: candidate.verifier.clone(),
            config: candidate.head.config.clone(),
            format: candidate.format,
            dtype: candidate.dtype,
            vocabulary_digest: vocabulary_digest(&candidate.head.draft_ids),
            model_digest: file_digest(&model).map_err(PromoteError::io(&model))?,
            training: candidate.training.clone(),
            score: candidate.score.clone(),
            exported: Vec::new(),
            made_by: env!("CARGO_PKG_VERSION").to_owned(),
        };
        write_json(&aside.join("manifest.json"), &manifest)?;
        Ok(manifest)
    }

    /// Every head. Hidden directories (half-written ones) and files are passed by.
    pub fn list(&self) -> Result<Listing, PromoteError> {
        let mut listing = Listing { heads: Vec::new(), broken: Vec::new() };
        for id in self.ids()? {
            match self.show(&id) {
                Ok(manifest) => listing.heads.push(manifest),
                Err(error) => listing.broken.push((id, error)),
            }
        }
        listing
            .heads
            .sort_by(|left, right| (&left.created_at, &left.id).cmp(&(&right.created_at, &right.id)));
        Ok(listing)
    }

    fn ids(&self) -> Result<Vec<String>, PromoteError> {
        let mut ids = Vec::new();
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(ids),
            found => found.map_err(PromoteError::io(&self.directory))?,
        };
        for entry in entries {
            let entry = entry.map_err(PromoteError::io(&self.directory))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.starts_with('.') && entry.path().is_dir() {
                ids.push(name);
            }
        }
        ids.sort();
        Ok(ids)
    }

    /// The full id for `live`, a whole id, or the beginning of one.
    pub fn resolve(&self, name: &str) -> Result<String, PromoteError> {
        if name == "live" {
            return Ok(self.live()?.ok_or(PromoteError::NothingLive)?.id);
        }
        check_id(name)?;
        let matching: Vec<String> = self.ids()?.into_iter().filter(|id| id.starts_with(name)).collect();
        if matching.iter().any(|id| id == name) {
            return Ok(name.to_owned());
        }
        match matching.as_slice() {
            [id] => Ok(id.clone()),
            [] => Err(self.no_such(name)),
            several => Err(PromoteError::Ambiguous { prefix: name.to_owned(), count: several.len() }),
        }
    }

    /// The manifest of a head.
    pub fn show(&self, id: &str) -> Result<Manifest, PromoteError> {
        check_id(id)?;
        let directory = self.path(id);
        if !directory.is_dir() {
            return Err(self.no_such(id));
        }
        let path = directory.join("manifest.json");
        let bytes = fs::read(&path).map_err(PromoteError::io(&path))?;
        let json = |source| PromoteError::Json { path: path.clone(), source };
        // The schema alone first: a newer manifest may not parse as this one.
        #[derive(serde::Deserialize)]
        struct Versioned {
            schema: u32,
        }
        let versioned: Versioned = serde_json::from_slice(&bytes).map_err(json)?;
        if versioned.schema > MANIFEST_SCHEMA {
            return Err(PromoteError::Schema { path, found: versioned.schema, expected: MANIFEST_SCHEMA });
        }
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(json)?;
        if manifest.id != id {
            let (id, found) = (id.to_owned(), manifest.id);
            return Err(PromoteError::Manifest { expected: found, what: "directory", found: id.clone(), id });
        }
        Ok(manifest)
    }

    /// Whether a model file with the sha256 `found` is the head `id`, which is known to have been `digest`: a manifest
    /// that cannot be read hides the further names of its head alone.
    pub fn is_of(&self, id: &str, digest: &str, found: &str) -> bool {
        digest == found || self.show(id).is_ok_and(|manifest| manifest.is_of(found))
    }

    /// The newest head that a model file with this sha256 (hex) is.
    pub fn find(&self, digest: &str) -> Result<Option<String>, PromoteError> {
        let heads = self.list()?.heads;
        Ok(heads.into_iter().rev().find(|manifest| manifest.is_of(digest)).map(|manifest| manifest.id))
    }

    /// Reads a head and checks it against its manifest: digest, config, vocabulary.
    pub fn load(&self, id: &str) -> Result<(Head, Manifest), PromoteError> {
        let manifest = self.show(id)?;
        let directory = self.path(id);
        let model = directory.join("model.safetensors");
        let found = file_digest(&model).map_err(PromoteError::io(&model))?;
        if found != manifest.model_digest {
            return Err(PromoteError::Digest { path: model, found, expected: manifest.model_digest });
        }
        let head = Head::read(&directory, None)?;
        if head.config != manifest.config {
            let (found, expected) = (format!("{:?}", head.config), format!("{:?}", manifest.config));
            return Err(PromoteError::Manifest { id: id.to_owned(), what: "config.json", found, expected });
        }
        let found = vocabulary_digest(&head.draft_ids);
        if found != manifest.vocabulary_digest {
            let expected = manifest.vocabulary_digest;
            return Err(PromoteError::Manifest {
                id: id.to_owned(),
                what: "draft vocabulary",
                found,
                expected,
            });
        }
        Ok((head, manifest))
    }

    /// Registers a head from any directory, in either format, checked against its verifier. With `tensors`, an
    /// embedding of the head's own must equal the verifier's, and is dropped. The weights are kept in f32, so nothing
    /// is lost.
    pub fn import(
        &self,
        from: &Path,
        shape: &VerifierShape,
        verifier: &VerifierIdentity,
        tensors: Option<&VerifierTensors>,
    ) -> Result<Manifest, PromoteError> {
        let file = from.join("model.safetensors");
        let digest =
            if file.is_file() { Some(file_digest(&file).map_err(PromoteError::io(&file))?) } else { None };
        let mut head = Head::read(from, Some(shape))?;
        if let Some(tensors) = tensors {
            head.share_embedding(from, tensors)?;
        }
        self.add(&Candidate {
            head: &head,
            verifier,
            origin: Origin::Imported { from: from.display().to_string(), digest },
            parent: None,
            training: None,
            score: None,
            format: head.format,
            dtype: HeadDtype::F32,
        })
    }

    /// Writes a head into a directory that is not there yet, in either format; it appears as a whole. `target_layer`:
    /// see [`WriteOptions`]; false for any vLLM without our plugin.
    pub fn export(
        &self,
        id: &str,
        to: &Path,
        format: HeadFormat,
        dtype: HeadDtype,
        target_layer: bool,
    ) -> Result<(), PromoteError> {
        if to.exists() {
            return Err(PromoteError::Exists { path: to.to_path_buf() });
        }
        let (head, manifest) = self.load(id)?;
        let aside = crate::store::temporary_name(to);
        let written = head.write(&aside, &write_options(format, dtype, &manifest.verifier, target_layer));
        if let Err(error) = written {
            let _ = fs::remove_dir_all(&aside);
            return Err(error.into());
        }
        let model = aside.join("model.safetensors");
        let digest = file_digest(&model).map_err(PromoteError::io(&model))?;
        self.note_export(id, digest)?;
        rename_durably(&aside, to).map_err(PromoteError::io(to))
    }

    fn note_export(&self, id: &str, digest: String) -> Result<(), PromoteError> {
        let _lock = self.lock()?;
        let mut manifest = self.show(id)?;
        if manifest.is_of(&digest) {
            return Ok(());
        }
        manifest.exported.push(digest);
        write_json(&self.path(id).join("manifest.json"), &manifest)
    }

    /// Puts a held-out score into a head's manifest.
    pub fn set_score(&self, id: &str, score: HeldOutScore) -> Result<Manifest, PromoteError> {
        let _lock = self.lock()?;
        let mut manifest = self.show(id)?;
        manifest.score = Some(score);
        write_json(&self.path(id).join("manifest.json"), &manifest)?;
        Ok(manifest)
    }

    /// The live head's pointer, if any head is live.
    pub fn live(&self) -> Result<Option<LivePointer>, PromoteError> {
        let path = self.live_path();
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(PromoteError::Io { path, source }),
        };
        serde_json::from_slice(&bytes).map(Some).map_err(|source| PromoteError::Json { path, source })
    }

    /// Makes a head the live one, after checking that it is whole. The pointer alone: the caller has already put the
    /// head into vLLM (see [`super::swap_in`]). `grounds` says for people why it went live: the gate's reason, or that it
    /// was passed by. Promoting the live head again changes nothing.
    pub fn promote(&self, id: &str, grounds: &str) -> Result<LivePointer, PromoteError> {
        let (_, manifest) = self.load(id)?;
        let _lock = self.lock()?;
        let old = self.live()?;
        if let Some(pointer) = &old
            && pointer.id == id
        {
            return Ok(pointer.clone());
        }
        let new = PastHead {
            id: manifest.id,
            digest: manifest.model_digest,
            promoted_at: Timestamp::now().to_string(),
            grounds: grounds.to_owned(),
        };
        let pointer = LivePointer::promoted(old, new);
        write_json(&self.live_path(), &pointer)?;
        metrics::counter!("draftsmith_promotions_total").increment(1);
        Ok(pointer)
    }

    /// Where a roll-back would lead: what to put into vLLM before [`Registry::roll_back`].
    pub fn fallback(&self) -> Result<PastHead, PromoteError> {
        let pointer = self.live()?.ok_or(PromoteError::NothingLive)?;
        pointer.previous.first().cloned().ok_or(PromoteError::NoPrevious { id: pointer.id })
    }

    /// Makes the head before the live one live again, after checking that it is whole.
    pub fn roll_back(&self) -> Result<LivePointer, PromoteError> {
        let _lock = self.lock()?;
        let pointer = self.live()?.ok_or(PromoteError::NothingLive)?;
        let id = pointer.id.clone();
        let back =
            pointer.rolled_back(Timestamp::now().to_string()).ok_or(PromoteError::NoPrevious { id })?;
        self.load(&back.id)?;
        write_json(&self.live_path(), &back)?;
        metrics::counter!("draftsmith_rollbacks_total").increment(1);
        Ok(back)
    }

    /// Removes old heads: keeps the newest `keep`, the live one, and those that a roll-back may need. Gives the ids
    /// removed.
    pub fn prune(&self, keep: usize) -> Result<Vec<String>, PromoteError> {
        let _lock = self.lock()?;
        let live = self.live()?;
        let heads = self.list()?.heads;
        let old = heads.len().saturating_sub(keep);
        let mut removed = Vec::new();
        for manifest in heads.into_iter().take(old) {
            let needed = live.as_ref().is_some_and(|pointer| {
                pointer.id == manifest.id || pointer.previous.iter().any(|past| past.id == manifest.id)
            });
            if needed {
                continue;
            }
            // Hidden by one rename first: no reader sees a head that is half gone.
            let place = self.path(&manifest.id);
            let aside = self.directory.join(format!(".{}.removed", manifest.id));
            rename_durably(&place, &aside).map_err(PromoteError::io(&place))?;
            fs::remove_dir_all(&aside).map_err(PromoteError::io(&aside))?;
            removed.push(manifest.id);
        }
        Ok(removed)
    }

    /// Held while the pointer or a manifest changes: `serve`, the trainer and a command may do so at once.
    fn lock(&self) -> Result<File, PromoteError> {
        fs::create_dir_all(&self.directory).map_err(PromoteError::io(&self.directory))?;
        let path = self.directory.join(".lock");
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(PromoteError::io(&path))?;
        file.lock().map_err(PromoteError::io(&path))?;
        Ok(file)
    }

    fn live_path(&self) -> PathBuf {
        self.directory.join("live.json")
    }

    fn no_such(&self, id: &str) -> PromoteError {
        PromoteError::NoSuchHead { id: id.to_owned(), directory: self.directory.clone() }
    }
}

/// An id is also a directory name: nothing that could lead elsewhere.
fn check_id(id: &str) -> Result<(), PromoteError> {
    let plain = |character: char| character.is_ascii_alphanumeric() || character == '-';
    if !id.is_empty() && id.chars().all(plain) {
        return Ok(());
    }
    Err(PromoteError::BadId { id: id.to_owned() })
}

fn write_options(
    format: HeadFormat,
    dtype: HeadDtype,
    verifier: &VerifierIdentity,
    target_layer: bool,
) -> WriteOptions {
    let reference = VerifierReference {
        name_or_path: verifier.name.clone(),
        architectures: verifier.architectures.clone(),
        speculative_tokens: SPECULATIVE_TOKENS,
    };
    WriteOptions { format, dtype, verifier: Some(reference), target_layer }
}

fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> Result<(), PromoteError> {
    let mut text = serde_json::to_vec_pretty(value)
        .map_err(|source| PromoteError::Json { path: path.to_path_buf(), source })?;
    text.push(b'\n');
    publish(path, &text).map_err(PromoteError::io(path))
}
