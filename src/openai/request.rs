//! What a request asked for, as the record needs it.

use super::spans;

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
    /// Reads a body; never fails.
    pub fn parse(body: &[u8]) -> Self {
        let mut view = Self { n: 1, ..Self::default() };
        let Some(text) = valid_json(body) else {
            return view;
        };
        let Some(members) = spans::members(body, 0) else {
            return view;
        };
        view.is_object = true;
        let mut others: Vec<String> = Vec::new();
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
                    others.push(format!("{}:{value}", serde_json::Value::from(key)));
                }
            }
        }
        if !others.is_empty() {
            view.params_json = Some(format!("{{{}}}", others.join(",")));
        }
        view
    }
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
    fn anything_else_is_empty() {
        for body in [&b""[..], b"not json", b"[1]", b"{\"model\":", b"\xff\xfe", b"{\"model\":\"a\"} x"] {
            assert!(!RequestView::parse(body).is_object);
        }
    }
}
