//! One row per choice of each recorded request. schemas/records.md says what each column means.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub use crate::openai::Status;

/// Where the traffic came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Live,
    Replay,
}

impl Source {
    pub fn as_str(self) -> &'static str {
        match self {
            Source::Live => "live",
            Source::Replay => "replay",
        }
    }

    pub fn parse(text: &str) -> Option<Source> {
        match text {
            "live" => Some(Source::Live),
            "replay" => Some(Source::Replay),
            _ => None,
        }
    }
}

/// Which side of the held-out boundary the conversation is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    Train,
    HeldOut,
}

impl Split {
    pub fn as_str(self) -> &'static str {
        match self {
            Split::Train => "train",
            Split::HeldOut => "held_out",
        }
    }

    pub fn parse(text: &str) -> Option<Split> {
        match text {
            "train" => Some(Split::Train),
            "held_out" => Some(Split::HeldOut),
            _ => None,
        }
    }
}

/// One message of a chat request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    /// The text. Of content in parts: the text parts, joined.
    pub content: Option<String>,
    pub name: Option<String>,
    pub tool_call_id: Option<String>,
    pub tool_calls_json: Option<String>,
    /// The content as it was sent, when it was not a string.
    pub content_json: Option<String>,
}

impl Message {
    /// Reads one message of a request; anything that is missing or of another type is left out.
    pub fn from_json(message: &serde_json::Value) -> Message {
        let field = |name: &str| message.get(name).and_then(|value| value.as_str()).map(str::to_owned);
        let content_value = message.get("content").filter(|value| !value.is_null());
        let (content, content_json) = match content_value {
            None => (None, None),
            Some(serde_json::Value::String(text)) => (Some(text.clone()), None),
            Some(other) => (text_of_parts(other), Some(other.to_string())),
        };
        Message {
            role: field("role").unwrap_or_default(),
            content,
            name: field("name"),
            tool_call_id: field("tool_call_id"),
            tool_calls_json: message
                .get("tool_calls")
                .filter(|value| !value.is_null())
                .map(|value| value.to_string()),
            content_json,
        }
    }
}

fn text_of_parts(content: &serde_json::Value) -> Option<String> {
    let mut text = String::new();
    let mut found = false;
    for part in content.as_array()? {
        if let Some(piece) = part.get("text").and_then(|value| value.as_str()) {
            text.push_str(piece);
            found = true;
        }
    }
    found.then_some(text)
}

/// The `messages` of a chat request; `None` when it is not a list.
pub fn messages_from_json(messages: &serde_json::Value) -> Option<Vec<Message>> {
    Some(messages.as_array()?.iter().map(Message::from_json).collect())
}

/// One choice of one recorded request. `None` means unknown or not there.
///
/// Made with [`Record::new`] and struct update syntax:
/// `Record { model: Some(name), ..Record::new(request_id, endpoint, started_at) }`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// UUIDv7, unique over all rows.
    pub record_id: String,
    /// The id that vLLM saw. Must be unique per request: rows, token ids and states meet by it.
    pub request_id: String,
    pub choice_index: u32,
    pub conversation_id: Option<String>,
    /// Microseconds since the Unix epoch, UTC, as are the two below.
    pub started_at: i64,
    pub first_byte_at: Option<i64>,
    pub finished_at: Option<i64>,
    /// The path, such as `/v1/chat/completions`.
    pub endpoint: String,
    pub model: Option<String>,
    pub stream: bool,
    pub status: Status,
    pub http_status: Option<u16>,
    pub finish_reason: Option<String>,
    pub messages: Option<Vec<Message>>,
    /// The prompt of a completions request; its JSON when it was not a string.
    pub prompt: Option<String>,
    pub tools_json: Option<String>,
    /// The rest of the request: everything but model, messages, prompt and tools.
    pub params_json: Option<String>,
    pub reasoning: Option<String>,
    pub content: Option<String>,
    pub tool_calls_json: Option<String>,
    pub prompt_token_ids: Option<Vec<i32>>,
    pub output_token_ids: Option<Vec<i32>>,
    pub prompt_tokens: Option<i64>,
    pub completion_tokens: Option<i64>,
    pub cached_tokens: Option<i64>,
    pub reasoning_tokens: Option<i64>,
    /// sha256 of the model file of the draft head that drafted the whole answer.
    pub draft_head: Option<String>,
    /// Steps in which drafted tokens were verified. The acceptance length is 1 + accepted / drafts.
    pub drafts: Option<i64>,
    pub drafted_tokens: Option<i64>,
    pub accepted_tokens: Option<i64>,
    pub source: Source,
    pub split: Split,
    pub tenant_hash: Option<String>,
    pub refusal: Option<String>,
    pub logprobs_json: Option<String>,
    /// What was taken out before recording; `None` when nothing was.
    pub redaction: Option<String>,
    /// What became of the hidden states. A row that has it waits for no join.
    pub states_status: Option<String>,
    pub raw_request: Option<Vec<u8>>,
    pub raw_response: Option<Vec<u8>>,
}

impl Record {
    /// A row with a fresh id, status `proxy_restart` (true until the end is known), live traffic, split `train`.
    /// `started_at` is in microseconds since the Unix epoch.
    pub fn new(request_id: impl Into<String>, endpoint: impl Into<String>, started_at: i64) -> Record {
        Record {
            record_id: Uuid::now_v7().to_string(),
            request_id: request_id.into(),
            choice_index: 0,
            conversation_id: None,
            started_at,
            first_byte_at: None,
            finished_at: None,
            endpoint: endpoint.into(),
            model: None,
            stream: false,
            status: Status::ProxyRestart,
            http_status: None,
            finish_reason: None,
            messages: None,
            prompt: None,
            tools_json: None,
            params_json: None,
            reasoning: None,
            content: None,
            tool_calls_json: None,
            prompt_token_ids: None,
            output_token_ids: None,
            prompt_tokens: None,
            completion_tokens: None,
            cached_tokens: None,
            reasoning_tokens: None,
            draft_head: None,
            drafts: None,
            drafted_tokens: None,
            accepted_tokens: None,
            source: Source::Live,
            split: Split::Train,
            tenant_hash: None,
            refusal: None,
            logprobs_json: None,
            redaction: None,
            states_status: None,
            raw_request: None,
            raw_response: None,
        }
    }

    /// The same request as another choice, with its own record id.
    pub fn for_choice(&self, choice_index: u32) -> Record {
        Record { record_id: Uuid::now_v7().to_string(), choice_index, ..self.clone() }
    }

    /// Sets the conversation and, from it alone, the split. Without a conversation the request is its own.
    pub fn with_conversation(mut self, conversation_id: Option<String>, held_out_fraction: f64) -> Record {
        let key = conversation_id.as_deref().unwrap_or(&self.request_id);
        let held_out = crate::store::is_held_out(key, held_out_fraction);
        self.split = if held_out { Split::HeldOut } else { Split::Train };
        self.conversation_id = conversation_id;
        self
    }

    /// About how many bytes the row holds in memory; what the recorder's bound counts.
    pub(super) fn approximate_bytes(&self) -> usize {
        let texts = [
            &self.prompt,
            &self.tools_json,
            &self.params_json,
            &self.reasoning,
            &self.content,
            &self.tool_calls_json,
            &self.refusal,
            &self.logprobs_json,
        ];
        let mut bytes = size_of::<Record>() + 256;
        for text in texts {
            bytes += text.as_ref().map_or(0, String::len);
        }
        for ids in [&self.prompt_token_ids, &self.output_token_ids] {
            bytes += ids.as_ref().map_or(0, |ids| ids.len() * size_of::<i32>());
        }
        for raw in [&self.raw_request, &self.raw_response] {
            bytes += raw.as_ref().map_or(0, Vec::len);
        }
        for message in self.messages.iter().flatten() {
            bytes += size_of::<Message>() + message.role.len();
            let parts = [&message.content, &message.name, &message.tool_calls_json, &message.content_json];
            bytes += parts.iter().map(|part| part.as_ref().map_or(0, String::len)).sum::<usize>();
        }
        bytes
    }
}

/// The present as a column holds it.
pub fn now_micros() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A row with something in every column.
    pub fn full_record(request_id: &str) -> Record {
        let some = |text: &str| Some(text.to_owned());
        Record {
            choice_index: 1,
            conversation_id: some("conversation"),
            first_byte_at: Some(1_764_437_000_100_000),
            finished_at: Some(1_764_437_001_000_001),
            model: some("model"),
            stream: true,
            status: Status::Ok,
            http_status: Some(200),
            finish_reason: some("stop"),
            messages: Some(vec![
                Message { role: "user".into(), content: some("héllo"), ..Message::default() },
                Message {
                    role: "tool".into(),
                    tool_call_id: some("call"),
                    name: some("n"),
                    ..Message::default()
                },
            ]),
            prompt: some("prompt"),
            tools_json: some("[]"),
            params_json: some("{\"temperature\":0}"),
            reasoning: some("because"),
            content: some("line\n\u{1F600}"),
            tool_calls_json: some("[1]"),
            prompt_token_ids: Some(vec![1, 2, 3]),
            output_token_ids: Some(vec![4, 5]),
            prompt_tokens: Some(3),
            completion_tokens: Some(2),
            cached_tokens: Some(1),
            reasoning_tokens: Some(0),
            draft_head: some("head"),
            drafts: Some(2),
            drafted_tokens: Some(6),
            accepted_tokens: Some(4),
            source: Source::Replay,
            split: Split::HeldOut,
            tenant_hash: some("hash"),
            refusal: some("no"),
            logprobs_json: some("{}"),
            redaction: some("rules"),
            states_status: some("stored"),
            raw_request: Some(b"{}".to_vec()),
            raw_response: Some(vec![0xff, 0x00, 0x80]),
            ..Record::new(request_id, "/v1/chat/completions", 1_764_437_000_000_000)
        }
    }

    #[test]
    fn the_wals_encoding_keeps_every_field() {
        for record in [full_record("a"), Record::new("b", "/v1/completions", 5)] {
            let bytes = postcard::to_stdvec(&record).unwrap();
            assert_eq!(postcard::from_bytes::<Record>(&bytes).unwrap(), record);
        }
    }

    #[test]
    fn message_content_is_text_and_parts_stay_whole() {
        let parts = serde_json::json!([
            {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "image_url", "image_url": {}},
                {"type": "text", "text": "this"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]},
            {"role": "tool", "content": "42", "tool_call_id": "c"},
        ]);
        let messages = messages_from_json(&parts).unwrap();
        assert_eq!(messages[0].content.as_deref(), Some("what is this"));
        assert_eq!(messages[0].content_json.as_deref(), Some(parts[0]["content"].to_string().as_str()));
        assert_eq!(messages[1].content, None);
        assert_eq!(messages[1].tool_calls_json.as_deref(), Some(r#"[{"id":"c"}]"#));
        assert_eq!(messages[2].content.as_deref(), Some("42"));
        assert_eq!(messages[2].content_json, None);
        assert_eq!(messages[2].tool_call_id.as_deref(), Some("c"));
        assert!(messages_from_json(&serde_json::json!("text")).is_none());
    }

    #[test]
    fn names_are_the_same_in_json_and_in_the_column() {
        for status in Status::ALL {
            assert_eq!(serde_json::to_string(&status).unwrap(), format!("{:?}", status.as_str()));
            assert_eq!(status.as_str().parse(), Ok(status));
        }
        for split in [Split::Train, Split::HeldOut] {
            assert_eq!(serde_json::to_string(&split).unwrap(), format!("{:?}", split.as_str()));
            assert_eq!(Split::parse(split.as_str()), Some(split));
        }
        for source in [Source::Live, Source::Replay] {
            assert_eq!(serde_json::to_string(&source).unwrap(), format!("{:?}", source.as_str()));
            assert_eq!(Source::parse(source.as_str()), Some(source));
        }
    }

    #[test]
    fn choices_share_the_request_and_its_split() {
        let first = Record::new("r", "/v1/completions", 1).with_conversation(Some("c".into()), 1.0);
        let second = first.for_choice(1);
        assert_eq!(first.split, Split::HeldOut);
        assert_eq!(second.split, Split::HeldOut);
        assert_ne!(first.record_id, second.record_id);
        assert_eq!(second.choice_index, 1);
    }
}
