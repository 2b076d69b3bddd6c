//! What a request asked for, as the record needs it.

use serde_json::Value;

use super::{Dialect, anthropic, responses, spans};

/// The parts of a request body, each as the JSON text that the client sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestView {
    /// Whether the body is a JSON object. If not, all else is empty.
    pub is_object: bool,
    pub model: Option<String>,
    pub stream: bool,
    /// Answers asked for, each prompt.
    pub n: u64,
    pub messages_json: Option<String>,
    pub prompt_json: Option<String>,
    pub tools_json: Option<String>,
    /// An object of everything else (sampling, `n`, stop strings, unknown fields), as sent.
    pub params_json: Option<String>,
    /// Whether the client itself asked for token ids.
    pub return_token_ids: bool,
}

impl RequestView {
    /// Reads a body as the dialect has it; never fails. The prompt of Responses and Messages becomes `messages_json`, the
    /// messages of a chat.
    pub fn read(dialect: Dialect, body: &[u8]) -> Self {
        let taken: [&str; 2] = match dialect {
            Dialect::Choices => return Self::parse(body),
            Dialect::Responses => ["instructions", "input"],
            Dialect::Messages => ["system", "messages"],
        };
        let mut view = Self::parse(body);
        let mut parts = [Value::Null, Value::Null];
        let mut others = Vec::new();
        for member in spans::members(body, 0).filter(|_| view.is_object).unwrap_or_default() {
            let Ok(value) = std::str::from_utf8(&body[member.value]) else { continue };
            match taken.iter().position(|key| *key == member.key) {
                Some(place) => parts[place] = serde_json::from_str(value).unwrap_or_default(),
                None if matches!(member.key.as_str(), "model" | "stream" | "tools") => {}
                None => others.push((member.key, value)),
            }
        }
        let [first, second] = parts;
        let messages = match dialect {
            Dialect::Responses => responses::messages(Some(&first), &second),
            _ => anthropic::messages(Some(&first), &second),
        };
        view.messages_json = view.is_object.then(|| Value::Array(messages).to_string());
        view.prompt_json = None;
        view.n = 1;
        view.params_json = object_of(&others);
        view
    }

    /// Reads a body of chat or completions; never fails.
    pub fn parse(body: &[u8]) -> Self {
        let mut view = Self { n: 1, ..Self::default() };
        let Some(text) = valid_json(body) else {
            return view;
        };
        let Some(members) = spans::members(body, 0) else {
            return view;
        };
        view.is_object = true;
        let mut others = Vec::new();
        for member in members {
            let Some(value) = text.get(member.value) else {
                continue;
            };
            match member.key.as_str() {
                "model" => view.model = serde_json::from_str(value).ok(),
                "stream" => view.stream = value == "true",
                "messages" => view.messages_json = Some(value.to_owned()),
                "prompt" => view.prompt_json = Some(value.to_owned()),
                "tools" => view.tools_json = Some(value.to_owned()).filter(|tools| tools != "null"),
                key => {
                    if key == "return_token_ids" {
                        view.return_token_ids = value == "true";
                    }
                    if key == "n" {
                        view.n = value.parse().unwrap_or(1);
                    }
                    others.push((member.key, value));
                }
            }
        }
        view.params_json = object_of(&others);
        view
    }
}

/// A JSON object of values as they were sent; none for no members.
fn object_of(members: &[(String, &str)]) -> Option<String> {
    let joined: Vec<String> =
        members.iter().map(|(key, value)| format!("{}:{value}", Value::from(key.as_str()))).collect();
    Some(joined).filter(|joined| !joined.is_empty()).map(|joined| format!("{{{}}}", joined.join(",")))
}

/// The text, if it is valid JSON.
pub(super) fn valid_json(body: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(body).ok()?;
    serde_json::from_str::<serde::de::IgnoredAny>(text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_keep_the_clients_text() {
        let view = RequestView::parse(
            br#"{"model":"m\u00e9","messages":[{"role":"user","content":"x"}], "temperature":0.10,"n":2,"stream":true,"return_token_ids":true,"seed":12345678901234567890123}"#,
        );
        assert_eq!(view.model.as_deref(), Some("mé"));
        assert_eq!((view.stream, view.n, view.return_token_ids), (true, 2, true));
        assert_eq!(view.messages_json.as_deref(), Some(r#"[{"role":"user","content":"x"}]"#));
        assert_eq!(
            view.params_json.as_deref(),
            Some(r#"{"temperature":0.10,"n":2,"return_token_ids":true,"seed":12345678901234567890123}"#)
        );
    }

    #[test]
    fn the_other_dialects_prompts_are_chats() {
        let responses = RequestView::read(
            Dialect::Responses,
            br#"{"model":"m","instructions":"brief","input":"hi","stream":true,"max_output_tokens":4}"#,
        );
        let chat = r#"[{"role":"system","content":"brief"},{"role":"user","content":"hi"}]"#;
        assert_eq!(responses.messages_json.as_deref(), Some(chat));
        assert_eq!(responses.params_json.as_deref(), Some(r#"{"max_output_tokens":4}"#));
        assert!(responses.stream && responses.model.as_deref() == Some("m"));
        let messages = RequestView::read(
            Dialect::Messages,
            br#"{"system":"brief","messages":[{"role":"user","content":"hi"}],"max_tokens":4,"prompt":"x"}"#,
        );
        assert_eq!(messages.messages_json.as_deref(), Some(chat));
        assert_eq!(messages.params_json.as_deref(), Some(r#"{"max_tokens":4,"prompt":"x"}"#));
        assert_eq!(
            RequestView::read(Dialect::Messages, b"[1]"),
            RequestView { n: 1, ..RequestView::default() }
        );
    }

    #[test]
    fn anything_else_is_empty() {
        for body in [&b""[..], b"not json", b"[1]", b"{\"model\":", b"\xff\xfe", b"{\"model\":\"a\"} x"] {
            assert!(!RequestView::parse(body).is_object);
        }
    }
}
