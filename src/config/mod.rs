//! The TOML file, its defaults, and the checks that run before a port is bound.
//!
//! One definition feeds the file, the environment (`DRAFTSMITH_PROXY__LISTEN=...`), the flags, the docs and
//! `schemas/config.schema.json`. Later sources win: defaults, file, environment, flags. An error names the key, the value
//! and what is allowed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod check;
mod upstream;

pub use upstream::{UpstreamAddress, UpstreamAddressError};

/// The prefix of environment variables; two underscores stand for the dot of a key.
const ENVIRONMENT_PREFIX: &str = "DRAFTSMITH_";
/// Variables with that prefix that stand for a flag of a command, not for a key of the configuration.
const FLAGS_IN_ENVIRONMENT: [&str; 2] = ["CONFIG", "ENVIRONMENT"];

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("configuration file {path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("configuration {origin}: {message}")]
    Parse { origin: String, message: String },
    #[error("configuration key `{key}` = {value}: {remedy}")]
    Value { key: &'static str, value: String, remedy: String },
}

/// All settings of draftsmith.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub proxy: ProxyConfig,
    pub control: ControlConfig,
    pub data: DataConfig,
    pub verifier: VerifierConfig,
    pub record: RecordConfig,
    pub privacy: PrivacyConfig,
    pub states: StatesConfig,
    pub train: TrainConfig,
    pub gate: GateConfig,
}

/// The client port and the vLLM behind it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ProxyConfig {
    /// The address that clients use, an IP address and a port: `127.0.0.1:8080`, `[::1]:8080`.
    pub listen: SocketAddr,
    /// vLLM's own address: `http://HOST:PORT`, `https://HOST:PORT` or `unix:/PATH`.
    pub upstream: String,
    /// Certificates (PEM) of authorities for an upstream behind TLS; none: the system's.
    pub upstream_ca_file: Option<PathBuf>,
    /// A file with the key that vLLM was started with (`--api-key`), which takes the place of the clients' own.
    pub upstream_key_file: Option<PathBuf>,
    /// The client port's certificate and those between it and its authority (PEM); with `tls_key_file`: TLS on that port.
    pub tls_certificate_file: Option<PathBuf>,
    /// Its key (PEM).
    pub tls_key_file: Option<PathBuf>,
    /// The hashes of the clients' keys, made by `draftsmith keys new`; none: no client needs a key.
    pub client_keys_file: Option<PathBuf>,
    /// What becomes of a client's `Authorization` and `x-api-key`.
    pub authorization: Authorization,
    /// Which of vLLM's routes the client port passes; the others are answered 403.
    pub routes: Routes,
    /// More paths to pass, control routes too, as vLLM spells them; `{}` stands for one segment: `/metrics`,
    /// `/adapters/{}`.
    pub allow_routes: Vec<String>,
    /// The largest request body of a recorded route, in bytes; a larger one is answered 413.
    pub max_request_bytes: usize,
    /// The largest part of an answer that is kept for recording, in bytes. The client always gets all of it.
    pub max_recorded_bytes: usize,
    /// How long a connection to vLLM may take, in seconds.
    pub connect_seconds: u64,
    /// How long a client may be silent within its request's body, in seconds; 0: for ever.
    pub client_body_seconds: u64,
    /// How long vLLM may take to begin an answer, in seconds; 0: for ever. An answer that is not streamed begins when it
    /// is whole.
    pub first_byte_seconds: u64,
    /// How long vLLM may be silent within an answer, in seconds; 0: for ever.
    pub between_chunks_seconds: u64,
    /// A silent stream of events gets a comment line each time this many seconds passed, against idle timeouts on the way
    /// to the client; 0: never. Clients then get more than vLLM's bytes.
    pub sse_keep_alive_seconds: u64,
    /// How long streams may finish after SIGTERM, in seconds.
    pub drain_seconds: u64,
    /// Threads that serve clients, from 1 to 64; 0: one for each processor, eight at most. One takes some ten thousand
    /// requests a second.
    pub threads: usize,
}

/// What becomes of a client's credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Authorization {
    /// Dropped where `client_keys_file` is set, for they are draftsmith's then; else passed to vLLM.
    Auto,
    /// Passed to vLLM.
    Pass,
    /// Dropped.
    Drop,
}

/// Which of vLLM's routes clients reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Routes {
    /// vLLM's inference routes alone: generation, pooling, tokens, audio, models, version and health.
    Inference,
    /// Everything but what acts on the server or tells of its inside (pause, weights, rpc, sleep, profile, adapters,
    /// load, metrics).
    AllButControl,
    /// Everything. Dangerous.
    All,
}

/// Where token ids come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TokenIds {
    /// The vLLM plugin writes them beside the hidden states; bodies are untouched both ways.
    Plugin,
    /// `return_token_ids` is added to requests and taken out of the answers again.
    Request,
}

/// The loopback port for health, metrics and control.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ControlConfig {
    /// A loopback address and a port: `127.0.0.1:8081`.
    pub listen: SocketAddr,
    /// The hashes of the operators' keys, made by `draftsmith keys new`; none: the port needs no key.
    pub keys_file: Option<PathBuf>,
}

/// Where everything that is kept lives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    pub directory: PathBuf,
    /// The share of conversations that is never trained on.
    pub held_out_fraction: f64,
}

/// The model that vLLM serves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VerifierConfig {
    /// Its directory with config.json, tokenizer.json and safetensors; needed for states, training and evaluation.
    pub directory: Option<PathBuf>,
}

/// The recorder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RecordConfig {
    pub enabled: bool,
    /// `plugin`: bodies stay as they are, ids come with the states; `request`: vLLM is asked for them in each request.
    pub token_ids: TokenIds,
    /// A crash loses at most this much, in milliseconds. 0: each request is synced as soon as the disk is free.
    pub flush_interval_ms: u64,
    /// A sync comes earlier when so many bytes wait.
    pub flush_bytes: usize,
    /// Rows waiting for the disk, in bytes; beyond it rows are dropped and counted, never waited for.
    pub queue_bytes: usize,
    /// A WAL segment is sealed into Parquet at this size, in bytes...
    pub segment_bytes: u64,
    /// ...or at this age, in seconds.
    pub seal_after_seconds: u64,
    /// How long a row may wait for its token ids from the plugin before it is sealed without, in seconds.
    pub join_timeout_seconds: u64,
    /// The small Parquet files of an hour are merged so long after its end, in seconds; 0: never.
    pub merge_after_seconds: u64,
    /// Keep the raw bodies beside the parsed columns.
    pub keep_raw: bool,
    /// An object store that gets copies of the sealed files: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`,
    /// `az://CONTAINER/PREFIX`, `file:///DIRECTORY`. Credentials come from the environment.
    pub object_store: Option<String>,
}

/// What is not recorded, and what is taken out of what is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PrivacyConfig {
    /// The share of conversations that is recorded; without a conversation id, of requests.
    pub sample_rate: f64,
    /// Routes that are recorded, of `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`.
    pub routes: Vec<String>,
    /// Models that are recorded, as requests name them; empty: all.
    pub models: Vec<String>,
    /// What is looked for and replaced before anything reaches the disk. A request in which it is found keeps no token
    /// ids and no hidden states, so it is not trained on.
    pub redact: Vec<RedactionSet>,
    /// More to look for: a name, and a regular expression.
    pub patterns: BTreeMap<String, String>,
    /// What is kept of what was said.
    pub keep: Kept,
    /// The header that names the tenant, such as `x-tenant` or `authorization`; records have its salted hash. The salt is
    /// `tenant.salt` in the data directory: without it no hash can be made again.
    pub tenant_header: Option<String>,
}

/// Patterns that come with draftsmith.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RedactionSet {
    /// Keys and tokens of well-known services, private keys, bearer tokens.
    ApiKeys,
    Email,
    /// Numbers that pass the check of payment cards (Luhn).
    PaymentCards,
}

/// What is kept of what was said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kept {
    /// Text and token ids.
    Content,
    /// Token ids, counts and times alone. Whoever has the tokenizer can read ids.
    Ids,
}

/// How hidden states are kept on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StateEncoding {
    /// As vLLM computes them, bf16 for most models.
    #[default]
    AsReceived,
    /// Eight bits a value, with a scale and the few largest values of each row and layer: half of bf16.
    Fp8,
}

/// Hidden states.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StatesConfig {
    /// Where the plugin hands over its files; the same directory as in `draftsmith vllm args`. None: no states.
    pub transfer_directory: Option<PathBuf>,
    /// The size of one segment, the files that states are kept in, in bytes.
    pub segment_bytes: u64,
    /// How values are kept.
    pub encoding: StateEncoding,
    /// All files together, in bytes; old samples whose drafts fared well go first, held-out ones last.
    pub quota_bytes: u64,
    /// A file that no request claims is deleted after this, in seconds.
    pub unmatched_seconds: u64,
}

/// Where heads are trained and scored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TrainDevice {
    /// The first GPU where one can be used, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// The first GPU (`CUDA_VISIBLE_DEVICES` chooses); an error where none can be used.
    Cuda,
}

/// Training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Where heads are trained and scored.
    pub device: TrainDevice,
    /// S, the steps of training-time test; as many as vLLM drafts tokens.
    pub unroll_steps: usize,
    /// The weight of step k is this to the power k.
    pub step_decay: f64,
    pub learning_rate: f64,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// Documents in one optimizer step.
    pub batch_documents: usize,
    /// The largest norm of the whole gradient.
    pub gradient_clip: f64,
    pub weight_decay: f64,
    /// Train the output head too.
    pub train_lm_head: bool,
    /// Passes over the captured samples when `--steps` is not given.
    pub passes: usize,
    pub seed: u64,
    /// Steps between checkpoints of a run; a crash repeats at most so many. 0: only when a run is stopped or ends.
    pub checkpoint_every: u64,
    /// `train --follow` begins a round when so many new training samples have arrived.
    pub follow_samples: usize,
    /// The share of old samples in each round of `train --follow`, so that a head does not forget.
    pub rehearsal_share: f64,
}

/// When a head goes live.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GateConfig {
    /// By how much the held-out acceptance length of a candidate must beat the live head's.
    pub min_gain: f64,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            upstream: "http://127.0.0.1:8000".to_owned(),
            upstream_ca_file: None,
            upstream_key_file: None,
            tls_certificate_file: None,
            tls_key_file: None,
            client_keys_file: None,
            authorization: Authorization::Auto,
            routes: Routes::Inference,
            allow_routes: Vec::new(),
            max_request_bytes: 32 << 20,
            max_recorded_bytes: 64 << 20,
            connect_seconds: 5,
            client_body_seconds: 90,
            first_byte_seconds: 0,
            between_chunks_seconds: 0,
            sse_keep_alive_seconds: 0,
            drain_seconds: 60,
            threads: 0,
        }
    }
}

impl Default for ControlConfig {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 8081)), keys_file: None }
    }
}

impl Default for DataConfig {
    fn default() -> Self {
        Self { directory: PathBuf::from("data"), held_out_fraction: 0.125 }
    }
}

impl Default for RecordConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            token_ids: TokenIds::Plugin,
            flush_interval_ms: 200,
            flush_bytes: 1 << 20,
            queue_bytes: 64 << 20,
            segment_bytes: 16 << 20,
            seal_after_seconds: 60,
            join_timeout_seconds: 10,
            merge_after_seconds: 3600,
            keep_raw: false,
            object_store: None,
        }
    }
}

impl Default for PrivacyConfig {
    fn default() -> Self {
        let routes = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"];
        Self {
            sample_rate: 1.0,
            routes: routes.map(str::to_owned).to_vec(),
            models: Vec::new(),
            redact: vec![RedactionSet::ApiKeys, RedactionSet::Email, RedactionSet::PaymentCards],
            patterns: BTreeMap::new(),
            keep: Kept::Content,
            tenant_header: None,
        }
    }
}

impl Default for StatesConfig {
    fn default() -> Self {
        Self {
            transfer_directory: None,
            segment_bytes: 256 << 20,
            encoding: StateEncoding::default(),
            quota_bytes: 32 << 30,
            unmatched_seconds: 60,
        }
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            device: TrainDevice::Auto,
            unroll_steps: 3,
            step_decay: 0.8,
            learning_rate: 1e-3,
            warmup_steps: 20,
            batch_documents: 4,
            gradient_clip: 1.0,
            weight_decay: 0.0,
            train_lm_head: true,
            passes: 4,
            seed: 0,
            checkpoint_every: 100,
            follow_samples: 64,
            rehearsal_share: 0.5,
        }
    }
}

impl Default for GateConfig {
    fn default() -> Self {
        Self { min_gain: 0.02 }
    }
}

impl Config {
    /// Defaults, then the file, then the environment, then `flags` (dotted keys and TOML values), checked.
    pub fn load(file: Option<&Path>, flags: &[(&str, String)]) -> Result<Self, ConfigError> {
        let mut figment = Figment::from(Serialized::defaults(Config::default()));
        if let Some(path) = file {
            let text = std::fs::read_to_string(path)
                .map_err(|source| ConfigError::File { path: path.to_owned(), source })?;
            // Read by hand first: figment takes a missing file for an empty one.
            figment = figment.merge(Toml::string(&text));
        }
        let environment = Env::prefixed(ENVIRONMENT_PREFIX).ignore(&FLAGS_IN_ENVIRONMENT).split("__");
        figment = figment.merge(environment);
        for (key, value) in flags {
            figment = figment.merge(Serialized::default(key, value));
        }
        let config: Config = figment.extract().map_err(|error| parse_error(file, flags, &figment, error))?;
        check::check(&config)?;
        Ok(config)
    }

    /// What works, and is likely not meant, for people.
    pub fn doubts(&self) -> Vec<String> {
        check::doubts(self)
    }

    /// The JSON schema of the file, as in `schemas/config.schema.json`.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(Config).to_value()
    }
}

fn parse_error(
    file: Option<&Path>,
    flags: &[(&str, String)],
    figment: &Figment,
    error: figment::Error,
) -> ConfigError {
    let key = error.path.join(".");
    let from_environment =
        error.metadata.as_ref().is_some_and(|metadata| metadata.name.contains("environment"));
    let origin = match file {
        _ if flags.iter().any(|(flag, _)| *flag == key) => "from flags".to_owned(),
        _ if from_environment => "from the environment".to_owned(),
        Some(path) => path.display().to_string(),
        None => "from flags".to_owned(),
    };
    // figment does not say in which table an unknown key stands, so the given keys are compared with the known ones.
    let given: Option<serde_json::Value> = figment.extract().ok();
    let known = serde_json::to_value(Config::default()).ok();
    let unknown = given.as_ref().zip(known).and_then(|(given, known)| unknown_key("", given, &known));
    if let Some(message) = unknown {
        return ConfigError::Parse { origin, message };
    }
    if key.is_empty() {
        // Not TOML: the words name line and column.
        return ConfigError::Parse { origin, message: error.kind.to_string() };
    }
    let pointer = format!("/{}", error.path.join("/"));
    let value = given.as_ref().and_then(|given| given.pointer(&pointer));
    let shown = value.map_or_else(String::new, |value| format!(" = {value}"));
    let message = format!("key `{key}`{shown}: {}{}", error.kind, expected(&error.path));
    ConfigError::Parse { origin, message }
}

/// What the schema says of a key, as the end of a message.
fn expected(path: &[String]) -> String {
    let schema = Config::schema();
    let mut place = &schema;
    for name in path {
        let next = &place["properties"][name];
        // A table of its own stands among the definitions.
        let table = next["$ref"].as_str().and_then(|name| schema.pointer(name.trim_start_matches('#')));
        place = table.filter(|table| table["properties"].is_object()).unwrap_or(next);
    }
    place["description"].as_str().map_or_else(String::new, |text| format!("; expected: {text}"))
}

/// Describes the first given key that the defaults lack.
fn unknown_key(prefix: &str, given: &serde_json::Value, known: &serde_json::Value) -> Option<String> {
    let (given_table, known_table) = (given.as_object()?, known.as_object()?);
    for (name, value) in given_table {
        let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let Some(known_value) = known_table.get(name) else {
            let allowed: Vec<&str> = known_table.keys().map(String::as_str).collect();
            return Some(format!("unknown key `{key}` = {value}; allowed here: {}", allowed.join(", ")));
        };
        // Names of the user's own choice, such as those of patterns.
        if known_value.as_object().is_some_and(serde_json::Map::is_empty) {
            continue;
        }
        if let Some(message) = unknown_key(&key, value, known_value) {
            return Some(message);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load_text(text: &str) -> Result<Config, ConfigError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("draftsmith.toml");
        std::fs::write(&path, text).unwrap();
        Config::load(Some(&path), &[])
    }

    #[test]
    fn defaults_are_usable() {
        assert_eq!(Config::load(None, &[]).unwrap(), Config::default());
    }

    #[test]
    fn flags_win_over_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("draftsmith.toml");
        std::fs::write(&path, "[proxy]\nlisten = \"127.0.0.1:1000\"\n").unwrap();
        let config = Config::load(Some(&path), &[("proxy.listen", "127.0.0.1:2000".to_owned())]).unwrap();
        assert_eq!(config.proxy.listen.port(), 2000);
    }

    #[test]
    fn unknown_key_is_named_with_what_is_allowed() {
        let message = load_text("[proxy]\nlistn = \"127.0.0.1:1000\"\n").unwrap_err().to_string();
        assert!(message.contains("`proxy.listn`"), "{message}");
        assert!(message.contains("listen, upstream"), "{message}");
    }

    #[test]
    fn wrong_type_names_key_and_value() {
        let message = load_text("[train]\nunroll_steps = \"three\"\n").unwrap_err().to_string();
        assert!(message.contains("train.unroll_steps") && message.contains("three"), "{message}");
    }

    #[test]
    fn value_that_cannot_be_read_is_named_with_what_is_expected() {
        let message = load_text("[proxy]\nlisten = \"localhost\"\n").unwrap_err().to_string();
        for part in ["draftsmith.toml", "`proxy.listen` = \"localhost\"", "`127.0.0.1:8080`"] {
            assert!(message.contains(part), "{part}: {message}");
        }
    }

    /// Names of patterns are the user's own: they must not be taken for unknown keys, and hide what is wrong.
    #[test]
    fn what_is_wrong_beside_a_pattern_is_named() {
        for (text, parts) in [
            ("[proxy]\nlisten = \"localhost\"\n", ["`proxy.listen`", "127.0.0.1:8080"]),
            ("[train]\npasses = \"x\"\n", ["`train.passes`", "usize"]),
            ("[record]\ntoken_ids = true\n", ["`record.token_ids`", "`request`"]),
        ] {
            let pattern = "[privacy.patterns]\nticket = \"T-[0-9]+\"\n";
            let message = load_text(&format!("{text}{pattern}")).unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
        let message = load_text("[privacy.patterns]\nticket = 3\n").unwrap_err().to_string();
        assert!(
            message.contains("`privacy.patterns.ticket` = 3") && !message.contains("unknown"),
            "{message}"
        );
        let message = load_text("[privacy.patterns]\nticket = \"(\"\n").unwrap_err().to_string();
        assert!(message.contains("privacy.patterns") && message.contains("ticket"), "{message}");
    }

    #[test]
    fn bad_flag_is_not_blamed_on_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("draftsmith.toml");
        std::fs::write(&path, "[proxy]\nlisten = \"127.0.0.1:1000\"\n").unwrap();
        let bad =
            Config::load(Some(&path), &[("proxy.listen", "nonsense".to_owned())]).unwrap_err().to_string();
        assert!(bad.contains("from flags") && bad.contains("nonsense"), "{bad}");
        assert!(!bad.contains("draftsmith.toml"), "{bad}");
    }

    #[test]
    fn what_is_not_toml_is_told_with_its_place() {
        let message = load_text("[proxy\nlisten = 1\n").unwrap_err().to_string();
        assert!(message.contains("draftsmith.toml") && message.contains("line 1"), "{message}");
        assert!(!message.contains("``"), "{message}");
    }

    #[test]
    fn doubts_name_what_to_set() {
        let doubts = Config::default().doubts();
        assert!(doubts.len() == 1 && doubts[0].contains("states.transfer_directory"), "{doubts:?}");
        let text = "[states]\ntransfer_directory = \"/dev/shm/draftsmith\"\n";
        let doubts = load_text(text).unwrap().doubts();
        assert!(doubts.len() == 1 && doubts[0].contains("verifier.directory"), "{doubts:?}");
    }

    #[test]
    fn missing_file_is_an_error() {
        let message = Config::load(Some(Path::new("/nonexistent/x.toml")), &[]).unwrap_err().to_string();
        assert!(message.contains("/nonexistent/x.toml"), "{message}");
    }

    #[test]
    fn every_bad_value_is_refused_by_its_key() {
        let cases = [
            ("proxy.upstream", "[proxy]\nupstream = \"127.0.0.1:8000\"\n"),
            ("proxy.upstream", "[proxy]\nupstream = \"http://127.0.0.1:8000/v1\"\n"),
            ("proxy.upstream", "[proxy]\nupstream = \"unix:vllm.sock\"\n"),
            ("proxy.upstream_ca_file", "[proxy]\nupstream_ca_file = \"/etc/ca.pem\"\n"),
            ("proxy.drain_seconds", "[proxy]\ndrain_seconds = 9000000000\n"),
            ("record.seal_after_seconds", "[record]\nseal_after_seconds = 9223372036854775807\n"),
            ("states.unmatched_seconds", "[states]\nunmatched_seconds = 9223372036854775807\n"),
            ("proxy.tls_key_file", "[proxy]\ntls_certificate_file = \"cert.pem\"\n"),
            ("proxy.connect_seconds", "[proxy]\nconnect_seconds = 0\n"),
            ("proxy.threads", "[proxy]\nthreads = 65\n"),
            ("proxy.allow_routes", "[proxy]\nallow_routes = [\"/metrics\", \"v1/x\"]\n"),
            ("proxy.allow_routes", "[proxy]\nallow_routes = [\"/x?y=1\"]\n"),
            ("proxy.allow_routes", "[proxy]\nallow_routes = [\"/v1/files/{id}\"]\n"),
            ("control.listen", "[control]\nlisten = \"0.0.0.0:8081\"\n"),
            ("control.listen", "[control]\nlisten = \"127.0.0.1:8080\"\n"),
            ("control.listen", "[proxy]\nlisten = \"0.0.0.0:8081\"\n"),
            ("control.listen", "[proxy]\nlisten = \"[::]:8081\"\n"),
            ("data.held_out_fraction", "[data]\nheld_out_fraction = 1.5\n"),
            ("privacy.sample_rate", "[privacy]\nsample_rate = 1.5\n"),
            ("privacy.routes", "[privacy]\nroutes = [\"/v1/embeddings\"]\n"),
            ("privacy.patterns", "[privacy.patterns]\nticket = \"(\"\n"),
            ("privacy.tenant_header", "[privacy]\ntenant_header = \"x tenant\"\n"),
            ("record.queue_bytes", "[record]\nqueue_bytes = 0\n"),
            ("states.quota_bytes", "[states]\nquota_bytes = 1\n"),
            ("train.device", "[train]\ndevice = \"gpu\"\n"),
            ("train.unroll_steps", "[train]\nunroll_steps = 0\n"),
            ("train.learning_rate", "[train]\nlearning_rate = -1.0\n"),
            ("train.follow_samples", "[train]\nfollow_samples = 0\n"),
            ("train.rehearsal_share", "[train]\nrehearsal_share = 1.0\n"),
            ("gate.min_gain", "[gate]\nmin_gain = -0.1\n"),
            ("gate.min_gain", "[gate]\nmin_gain = inf\n"),
            ("train.learning_rate", "[train]\nlearning_rate = inf\n"),
            ("train.weight_decay", "[train]\nweight_decay = inf\n"),
            ("train.weight_decay", "[train]\nweight_decay = nan\n"),
            ("train.gradient_clip", "[train]\ngradient_clip = inf\n"),
            ("train.step_decay", "[train]\nstep_decay = nan\n"),
        ];
        for (key, text) in cases {
            let message = load_text(text).unwrap_err().to_string();
            assert!(message.contains(key), "{text}: {message}");
        }
    }

    #[test]
    fn schema_file_is_in_step_with_the_types() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas/config.schema.json");
        let expected = format!("{}\n", serde_json::to_string_pretty(&Config::schema()).unwrap());
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(found, expected, "run `draftsmith config schema > schemas/config.schema.json`");
    }

    #[test]
    fn shipped_configurations_load() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
        let mut count = 0;
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            Config::load(Some(&path), &[]).unwrap_or_else(|error| panic!("{error}"));
            count += 1;
        }
        assert_eq!(count, 3);
    }
}
