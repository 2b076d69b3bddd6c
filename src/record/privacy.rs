//! What must not reach the disk, taken out of a request's rows before they are handed to the recorder.
//!
//! Token ids spell out the text that they stand for, and logprobs hold it piece by piece. So a request in which anything
//! was found keeps neither, nor its raw bodies, nor its hidden states; a request whose content is dropped on purpose
//! keeps its ids.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use regex::{Captures, Regex};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::row::{Message, Record};
use crate::config::{Kept, PrivacyConfig, RedactionSet};
use crate::store::publish;

/// `states_status` of a request whose states are not kept because of what was found in it.
const STATES_REDACTED: &str = "redacted";
/// `redaction` of rows without content.
const CONTENT_DROPPED: &str = "content";
const SALT_BYTES: u64 = 32;

/// The patterns that come with draftsmith: the name that replaces a match, and what is matched.
fn patterns(set: RedactionSet) -> (&'static str, &'static str) {
    match set {
        RedactionSet::ApiKeys => (
            "api-key",
            r"(?x)
              -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY-----[\s\S]*?(?:-----END\ [A-Z\ ]*PRIVATE\ KEY-----|\z)
            | \b(?:sk|pk|rk)[-_][A-Za-z0-9][A-Za-z0-9_-]{18,}
            | \bgh[pousr]_[A-Za-z0-9]{30,}
            | \bgithub_pat_[A-Za-z0-9_]{30,}
            | \bglpat-[A-Za-z0-9_-]{20,}
            | \bhf_[A-Za-z0-9]{30,}
            | \bxox[abeoprs]-[A-Za-z0-9-]{10,}
            | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b
            | \bAIza[0-9A-Za-z_-]{35}
            | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}
            | (?i:\bbearer\ +[a-z0-9._~+/-]{16,}=*)",
        ),
        RedactionSet::Email => ("email", r"(?i)\b[a-z0-9._%+-]{1,64}@(?:[a-z0-9-]{1,63}\.)+[a-z]{2,24}\b"),
        RedactionSet::PaymentCards => ("payment-card", r"\b[2-6](?:[ -]?[0-9]){11,18}\b"),
    }
}

/// Privacy rules that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PrivacyError {
    #[error(
        "privacy.patterns: {name} = {pattern:?}: {source}; give a regular expression of the Rust regex crate"
    )]
    Pattern { name: String, pattern: String, source: Box<regex::Error> },
    #[error(
        "cannot {action} the salt {path}: {source}; it must be a file of {SALT_BYTES} bytes, or not exist"
    )]
    Salt { action: &'static str, path: String, source: io::Error },
}

struct Rule {
    name: String,
    pattern: Regex,
    /// Only digits that pass the check of payment cards.
    luhn: bool,
}

/// The rules, ready for use.
pub struct Privacy {
    rules: Vec<Rule>,
    kept: Kept,
    salt: Vec<u8>,
}

impl Privacy {
    /// `salt`: the file of the salt for tenants' names; made if it is not there.
    pub fn new(config: &PrivacyConfig, salt: &Path) -> Result<Self, PrivacyError> {
        let mut rules = Vec::new();
        let own = config.redact.iter().map(|set| {
            let (name, pattern) = patterns(*set);
            (name.to_owned(), pattern, *set == RedactionSet::PaymentCards)
        });
        let given = config.patterns.iter().map(|(name, pattern)| (name.clone(), pattern.as_str(), false));
        for (name, pattern, luhn) in own.chain(given) {
            let compiled = Regex::new(pattern).map_err(|source| PrivacyError::Pattern {
                name: name.clone(),
                pattern: pattern.to_owned(),
                source: Box::new(source),
            })?;
            rules.push(Rule { name, pattern: compiled, luhn });
        }
        let salt = if config.tenant_header.is_some() { read_or_make_salt(salt)? } else { Vec::new() };
        Ok(Self { rules, kept: config.keep, salt })
    }

    /// The tenant's name as the records have it: 32 hex digits that only who has the salt can make again.
    pub fn tenant_hash(&self, tenant: &[u8]) -> String {
        hash(&self.salt, tenant)
    }

    /// Takes out of a request's rows what must not be recorded. True: its hidden states must not be kept either.
    pub fn redact(&self, rows: &mut [Record]) -> bool {
        let mut found = BTreeSet::new();
        for row in rows.iter_mut() {
            self.redact_row(row, &mut found);
        }
        let redacted = !found.is_empty();
        if self.kept == Kept::Ids {
            found.insert(CONTENT_DROPPED.to_owned());
        }
        let names: Vec<&str> = found.iter().map(String::as_str).collect();
        let redaction = Some(names.join(",")).filter(|names| !names.is_empty());
        for row in rows {
            row.redaction = redaction.clone();
            if redacted {
                row.prompt_token_ids = None;
                row.output_token_ids = None;
                row.states_status = Some(STATES_REDACTED.to_owned());
            }
            if redaction.is_some() {
                row.logprobs_json = None;
                row.raw_request = None;
                row.raw_response = None;
            }
            if self.kept == Kept::Ids {
                drop_content(row);
            }
        }
        redacted
    }

    fn redact_row(&self, row: &mut Record, found: &mut BTreeSet<String>) {
        for text in [&mut row.reasoning, &mut row.content, &mut row.refusal] {
            self.redact_text(text, found);
        }
        let in_json = [&mut row.prompt, &mut row.tools_json, &mut row.params_json, &mut row.tool_calls_json];
        for text in in_json {
            self.redact_json(text, found);
        }
        for message in row.messages.iter_mut().flatten() {
            let Message { role, content, name, tool_call_id, tool_calls_json, content_json } = message;
            for text in [content, name, tool_call_id] {
                self.redact_text(text, found);
            }
            for text in [tool_calls_json, content_json] {
                self.redact_json(text, found);
            }
            if let Cow::Owned(changed) = self.replace(role, found) {
                *role = changed;
            }
        }
        // Turns of one conversation still belong together.
        if let Some(id) = &mut row.conversation_id
            && let Cow::Owned(_) = self.replace(id, found)
        {
            *id = format!("redacted-{}", hash(&self.salt, id.as_bytes()));
        }
    }

    fn redact_text(&self, slot: &mut Option<String>, found: &mut BTreeSet<String>) {
        let Some(text) = slot else { return };
        if let Cow::Owned(changed) = self.replace(text, found) {
            *text = changed;
        }
    }

    /// Escapes may hide a match, and a match must not eat into the JSON around it: so string by string. Text that is no
    /// JSON is text.
    fn redact_json(&self, slot: &mut Option<String>, found: &mut BTreeSet<String>) {
        let Some(text) = slot else { return };
        match serde_json::from_str::<Value>(text) {
            Ok(mut value) if value.is_object() || value.is_array() => {
                if self.redact_value(&mut value, found) {
                    *text = value.to_string();
                }
            }
            _ => self.redact_text(slot, found),
        }
    }

    /// Whether anything was changed.
    fn redact_value(&self, value: &mut Value, found: &mut BTreeSet<String>) -> bool {
        match value {
            Value::String(text) => {
                // The arguments of a call are JSON in a string.
                if text.starts_with(['{', '['])
                    && let Ok(mut inner) = serde_json::from_str::<Value>(text)
                {
                    let changed = self.redact_value(&mut inner, found);
                    if changed {
                        *text = inner.to_string();
                    }
                    return changed;
                }
                let Cow::Owned(changed) = self.replace(text, found) else { return false };
                *text = changed;
                true
            }
            Value::Array(values) => {
                values.iter_mut().fold(false, |changed, value| self.redact_value(value, found) | changed)
            }
            Value::Object(fields) => {
                let mut changed = false;
                let mut kept = serde_json::Map::with_capacity(fields.len());
                for (name, mut field) in std::mem::take(fields) {
                    changed |= self.redact_value(&mut field, found);
                    let new_name = self.replace(&name, found).into_owned();
                    changed |= new_name != name;
                    kept.insert(new_name, field);
                }
                *fields = kept;
                changed
            }
            // A card's number may be given as a number.
            Value::Number(number) => {
                let text = number.to_string();
                let Cow::Owned(changed) = self.replace(&text, found) else { return false };
                *value = Value::String(changed);
                true
            }
            Value::Null | Value::Bool(_) => false,
        }
    }

    fn replace<'a>(&self, text: &'a str, found: &mut BTreeSet<String>) -> Cow<'a, str> {
        let mut result = Cow::Borrowed(text);
        for rule in &self.rules {
            if !rule.pattern.is_match(&result) {
                continue;
            }
            let mut hit = false;
            let replaced = rule.pattern.replace_all(&result, |matched: &Captures<'_>| {
                if rule.luhn && !passes_luhn(&matched[0]) {
                    return matched[0].to_owned();
                }
                hit = true;
                format!("[redacted:{}]", rule.name)
            });
            if hit {
                let owned = replaced.into_owned();
                result = Cow::Owned(owned);
                found.insert(rule.name.clone());
            }
        }
        result
    }
}

/// Everything that was said goes; what was asked for in numbers stays.
fn drop_content(row: &mut Record) {
    for text in [
        &mut row.prompt,
        &mut row.tools_json,
        &mut row.reasoning,
        &mut row.content,
        &mut row.tool_calls_json,
        &mut row.refusal,
    ] {
        *text = None;
    }
    row.messages = None;
    let params = row.params_json.take().and_then(|text| serde_json::from_str::<Value>(&text).ok());
    if let Some(Value::Object(mut fields)) = params {
        fields.retain(|_, value| value.is_number() || value.is_boolean());
        row.params_json = Some(Value::Object(fields).to_string());
    }
}

/// The check digit of payment cards.
fn passes_luhn(text: &str) -> bool {
    let digits: Vec<u32> = text.chars().filter_map(|letter| letter.to_digit(10)).collect();
    let mut sum = 0;
    for (place, digit) in digits.iter().rev().enumerate() {
        let doubled = digit * 2;
        sum += match place % 2 {
            0 => *digit,
            _ if doubled > 9 => doubled - 9,
            _ => doubled,
        };
    }
    digits.len() >= 12 && sum % 10 == 0
}

/// The hash of a tenant's name by the salt that records were made with.
pub fn tenant_hash(tenant: &str, salt: &Path) -> Result<String, PrivacyError> {
    let salt = fs::read(salt).map_err(|source| PrivacyError::Salt {
        action: "read",
        path: salt.display().to_string(),
        source,
    })?;
    Ok(hash(&salt, tenant.as_bytes()))
}

fn hash(salt: &[u8], tenant: &[u8]) -> String {
    let digest = Sha256::new().chain_update(salt).chain_update(tenant).finalize();
    format!("{digest:x}")[..32].to_owned()
}

fn read_or_make_salt(path: &Path) -> Result<Vec<u8>, PrivacyError> {
    let failed =
        |action| move |source| PrivacyError::Salt { action, path: path.display().to_string(), source };
    match fs::read(path) {
        Ok(salt) if salt.len() as u64 == SALT_BYTES => return Ok(salt),
        Ok(_) => return Err(failed("use")(io::ErrorKind::InvalidData.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("read")(error)),
    }
    let mut salt = Vec::new();
    let random = File::open("/dev/urandom").map_err(failed("make"))?;
    random.take(SALT_BYTES).read_to_end(&mut salt).map_err(failed("make"))?;
    publish(path, &salt).map_err(failed("write"))?;
    Ok(salt)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::record::row::tests::full_record;

    fn privacy(change: impl FnOnce(&mut PrivacyConfig)) -> Privacy {
        let mut config = PrivacyConfig::default();
        change(&mut config);
        Privacy::new(&config, Path::new("/nonexistent/salt")).unwrap()
    }

    fn replaced(text: &str) -> (String, Vec<String>) {
        let mut found = BTreeSet::new();
        let result = privacy(|_| {}).replace(text, &mut found).into_owned();
        (result, found.into_iter().collect())
    }

    #[test]
    fn secrets_are_found_and_ordinary_text_is_not() {
        // Put together here, so that no scanner takes this file for a leak.
        let key = format!("sk-{}", "a1B2".repeat(8));
        for (text, name) in [
            (key.clone(), "api-key"),
            (format!("gh{}_{}", "p", "x9".repeat(18)), "api-key"),
            (format!("AK{}", "IAIOSFODNN7EXAMPLE"), "api-key"),
            (format!("ey{}.{}.{}", "JhbGciOiJIUzI1", "eyJzdWIiOiIx", "SflKxwRJSMeKKF"), "api-key"),
            (
                format!("-----BEGIN RSA PRIVATE {0}-----\nMIIE\nabc\n-----END RSA PRIVATE {0}-----", "KEY"),
                "api-key",
            ),
            ("Authorization: Bearer abcdefghijklmnop1234".to_owned(), "api-key"),
            ("jane.doe+x@mail.example.org".to_owned(), "email"),
            ("4111 1111 1111 1111".to_owned(), "payment-card"),
            ("5555-5555-5555-4444".to_owned(), "payment-card"),
            ("378282246310005".to_owned(), "payment-card"),
        ] {
            let (result, names) = replaced(&format!("it is ({text}), ok?"));
            assert_eq!(names, [name], "{text}");
            assert!(!result.contains(&text) && result.contains(&format!("[redacted:{name}]")), "{result}");
            assert!(result.starts_with("it is (") && result.ends_with(", ok?"), "{result}");
        }
        for text in [
            "4111 1111 1111 1112",
            "order 1234567890123456789012345",
            "2026-11-30 07:00:00",
            "user@localhost",
            "a sk-ip in the text",
            "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13",
        ] {
            assert_eq!(replaced(text), (text.to_owned(), vec![]));
        }
    }

    #[test]
    fn a_request_in_which_something_was_found_keeps_nothing_that_could_give_it_away() {
        let hidden = r#"[{"function":{"arguments":"{\"to\":\"jane\\u0040mail.example.org\",\"card\":4111111111111111}"}}]"#;
        let mut second = full_record("a");
        second.tool_calls_json = Some(hidden.to_owned());
        let mut rows = [full_record("a"), second];
        assert!(privacy(|_| {}).redact(&mut rows));
        for row in &rows {
            assert_eq!(row.redaction.as_deref(), Some("email,payment-card"));
            assert_eq!(row.states_status.as_deref(), Some("redacted"));
            let gone = [row.raw_request.is_some(), row.raw_response.is_some(), row.logprobs_json.is_some()];
            assert_eq!((gone, &row.prompt_token_ids, &row.output_token_ids), ([false; 3], &None, &None));
        }
        assert_eq!(rows[0].content, full_record("a").content);
        let all = serde_json::to_string(&rows).unwrap();
        assert!(!all.contains("jane") && !all.contains("4111"), "{all}");
    }

    #[test]
    fn a_request_without_finds_is_left_as_it_is() {
        let mut rows = [full_record("a")];
        rows[0].redaction = None;
        let before = rows.clone();
        assert!(!privacy(|_| {}).redact(&mut rows));
        assert_eq!(rows, before);
    }

    #[test]
    fn dropped_content_leaves_ids_and_numbers() {
        let mut rows = [full_record("a")];
        rows[0].params_json =
            Some(r#"{"temperature":0.5,"stop":["x"],"user":"jane","n":2,"echo":true}"#.into());
        let ids = rows[0].output_token_ids.clone();
        assert!(!privacy(|config| config.keep = Kept::Ids).redact(&mut rows));
        let row = &rows[0];
        assert_eq!(row.redaction.as_deref(), Some("content"));
        assert_eq!(row.output_token_ids, ids);
        assert_eq!(row.params_json.as_deref(), Some(r#"{"temperature":0.5,"n":2,"echo":true}"#));
        let texts =
            [&row.prompt, &row.tools_json, &row.reasoning, &row.content, &row.tool_calls_json, &row.refusal];
        assert!(texts.iter().all(|text| text.is_none()) && row.messages.is_none());
        assert!(row.raw_request.is_none() && row.raw_response.is_none() && row.logprobs_json.is_none());
    }

    #[test]
    fn patterns_of_the_operator_are_used_and_wrong_ones_named() {
        let ours = |config: &mut PrivacyConfig| {
            config.patterns = BTreeMap::from([("ticket".to_owned(), r"TCK-\d+".to_owned())]);
        };
        let mut rows = [Record { content: Some("see TCK-17".into()), ..full_record("a") }];
        privacy(ours).redact(&mut rows);
        assert_eq!(rows[0].content.as_deref(), Some("see [redacted:ticket]"));
        let wrong = PrivacyConfig {
            patterns: BTreeMap::from([("ticket".to_owned(), "(".to_owned())]),
            ..PrivacyConfig::default()
        };
        let error = Privacy::new(&wrong, Path::new("/nonexistent/salt")).err().unwrap().to_string();
        assert!(error.contains("ticket") && error.contains("\"(\""), "{error}");
    }

    #[test]
    fn tenants_are_hashed_with_a_salt_that_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tenant.salt");
        let config = PrivacyConfig { tenant_header: Some("x-tenant".into()), ..PrivacyConfig::default() };
        let first = Privacy::new(&config, &path).unwrap().tenant_hash(b"acme");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(Privacy::new(&config, &path).unwrap().tenant_hash(b"acme"), first);
        assert_eq!(first.len(), 32);
        let elsewhere = Privacy::new(&config, &directory.path().join("other.salt")).unwrap();
        assert_ne!(elsewhere.tenant_hash(b"acme"), first);
        fs::write(&path, "short").unwrap();
        assert!(Privacy::new(&config, &path).is_err());
    }
}
