//! Rebuilds an answer from the response's bytes, whether it came whole or as a stream of deltas.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::anthropic::MessagesBuilder;
use super::piece::{ChoicePiece, Object, Piece, Text};
use super::responses::ResponsesBuilder;
use super::sse::Decoder;
use super::status::Status;

/// The three ways in which vLLM's generating routes speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Chat and completions.
    Choices,
    /// OpenAI's Responses.
    Responses,
    /// Anthropic's Messages.
    Messages,
}

/// One rebuilt choice. Text that is empty is none: a stream begins with an empty delta where a whole body has null.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    pub index: u64,
    pub finish_reason: Option<String>,
    /// The stop string as it is, or the stop token's id in digits.
    pub stop_reason: Option<String>,
    pub role: Option<String>,
    pub reasoning: Option<String>,
    pub content: Option<String>,
    /// A JSON array of calls, whole, in the order of their indices.
    pub tool_calls_json: Option<String>,
    pub refusal: Option<String>,
    /// vLLM's logprobs object; a stream's pieces are joined array by array.
    pub logprobs_json: Option<String>,
    /// What the engine produced, if the answer told.
    pub token_ids: Option<Vec<u32>>,
    /// The prompt as the engine saw it, if the answer told.
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// Token counts; none where vLLM gave none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    pub prompt_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    pub reasoning_tokens: Option<u64>,
}

/// A rebuilt answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub id: Option<String>,
    pub model: Option<String>,
    pub system_fingerprint: Option<String>,
    /// In the order of their indices; empty if none came.
    pub choices: Vec<Choice>,
    pub usage: Usage,
    /// The error object, from an error body or from the middle of a stream.
    pub error_json: Option<String>,
    /// The answer came to its end: `[DONE]`, or a whole JSON body.
    pub complete: bool,
}

impl Answer {
    /// Rebuilds an answer; never fails. `content_type` and `http_status` are the response's.
    pub fn read(dialect: Dialect, http_status: u16, content_type: Option<&str>, body: &[u8]) -> Self {
        let mut events = Vec::new();
        let streamed = is_event_stream(content_type);
        if streamed {
            let mut decoder = Decoder::new();
            let found = decoder.push(body).into_iter().chain(decoder.finish());
            events.extend(found.filter_map(|event| event.data));
        }
        match dialect {
            Dialect::Choices => {
                let mut builder = AnswerBuilder::default();
                events.iter().for_each(|data| builder.event(data));
                if !streamed {
                    builder.body(http_status, body);
                }
                builder.finish()
            }
            Dialect::Responses => {
                let mut builder = ResponsesBuilder::default();
                events.iter().for_each(|data| builder.event(data));
                if !streamed {
                    builder.body(body);
                }
                builder.finish()
            }
            Dialect::Messages => {
                let mut builder = MessagesBuilder::default();
                events.iter().for_each(|data| builder.event(data));
                if !streamed {
                    builder.body(body);
                }
                builder.finish()
            }
        }
    }

    /// How the choice ended, given how the transfer ended.
    pub fn status_of(&self, choice: Option<&Choice>, transfer: Status) -> Status {
        // A client that has read `[DONE]` may close before the stream's last bytes: it missed nothing.
        let cut_short = match transfer {
            Status::Ok => false,
            Status::Cancelled | Status::Truncated => !self.complete,
            other => return other,
        };
        let finish_reason = choice.and_then(|found| found.finish_reason.as_deref());
        match finish_reason {
            Some("abort" | "cancelled") => return Status::Aborted,
            Some("length" | "max_tokens" | "max_output_tokens") => return Status::Length,
            Some("error" | "failed") => return Status::UpstreamError,
            Some(_) => return Status::Ok,
            None => {}
        }
        if self.error_json.is_some() {
            return Status::UpstreamError;
        }
        if cut_short {
            return transfer;
        }
        // A whole answer that has no choices at all has nothing to miss.
        if choice.is_none() && self.complete { Status::Ok } else { Status::Truncated }
    }
}

/// Whether the content type is that of server-sent events.
pub fn is_event_stream(content_type: Option<&str>) -> bool {
    let essence = content_type.unwrap_or_default().split(';').next().unwrap_or_default();
    essence.trim().eq_ignore_ascii_case("text/event-stream")
}

/// Takes an answer piece by piece.
#[derive(Debug, Default)]
pub struct AnswerBuilder {
    answer: Answer,
    prompt_token_ids: Option<Vec<u32>>,
    choices: BTreeMap<u64, Partial>,
}

#[derive(Debug, Default)]
struct Partial {
    choice: Choice,
    reasoning: String,
    content: String,
    refusal: String,
    tool_calls: BTreeMap<u64, Map<String, Value>>,
    logprobs: Map<String, Value>,
}

impl AnswerBuilder {
    /// The data of one event.
    pub fn event(&mut self, data: &[u8]) {
        if data.trim_ascii() == b"[DONE]" {
            self.answer.complete = true;
            return;
        }
        match Piece::read(data) {
            Some(piece) => self.take_piece(piece),
            None => self.general_event(data),
        }
    }

    fn general_event(&mut self, data: &[u8]) {
        if let Ok(Value::Object(object)) = serde_json::from_slice(data) {
            self.take(object);
        }
    }

    /// A whole JSON body.
    pub fn body(&mut self, http_status: u16, body: &[u8]) {
        if http_status < 400
            && let Some(piece) = Piece::read(body)
        {
            self.answer.complete = true;
            return self.take_piece(piece);
        }
        self.general_body(http_status, body);
    }

    fn general_body(&mut self, http_status: u16, body: &[u8]) {
        let Ok(Value::Object(object)) = serde_json::from_slice::<Value>(body) else {
            return;
        };
        self.answer.complete = true;
        if http_status >= 400 && !object.contains_key("error") {
            self.answer.error_json = Some(Value::Object(object).to_string());
            return;
        }
        self.take(object);
    }

    pub fn finish(mut self) -> Answer {
        let shared = self.prompt_token_ids;
        for (index, partial) in self.choices {
            let mut choice = partial.finish(index);
            if choice.prompt_token_ids.is_none() {
                choice.prompt_token_ids = shared.clone();
            }
            self.answer.choices.push(choice);
        }
        self.answer
    }

    fn take_piece(&mut self, piece: Piece<'_>) {
        keep(&mut self.answer.id, piece.id);
        keep(&mut self.answer.model, piece.model);
        keep(&mut self.answer.system_fingerprint, piece.system_fingerprint);
        if let Some(usage) = &piece.usage {
            self.take_usage(usage);
        }
        if self.prompt_token_ids.is_none() {
            self.prompt_token_ids = piece.prompt_token_ids;
        }
        for (position, Object(choice)) in piece.choices.into_iter().flatten().enumerate() {
            let index = choice.index.unwrap_or(position as u64);
            self.choices.entry(index).or_default().take_piece(choice);
        }
    }

    fn take(&mut self, mut object: Map<String, Value>) {
        if object.get("object").and_then(Value::as_str) == Some("error") && !object.contains_key("error") {
            self.answer.error_json = Some(Value::Object(object).to_string());
            return;
        }
        set_text(&mut self.answer.id, object.get("id"));
        set_text(&mut self.answer.model, object.get("model"));
        set_text(&mut self.answer.system_fingerprint, object.get("system_fingerprint"));
        if let Some(error) = object.get("error").filter(|error| !error.is_null()) {
            self.answer.error_json = Some(error.to_string());
        }
        if let Some(usage) = object.get("usage") {
            self.take_usage(usage);
        }
        if self.prompt_token_ids.is_none() {
            self.prompt_token_ids = object.get("prompt_token_ids").and_then(token_ids);
        }
        let Some(Value::Array(choices)) = object.remove("choices") else {
            return;
        };
        for (position, choice) in choices.into_iter().enumerate() {
            let Value::Object(fields) = choice else {
                continue;
            };
            let index = fields.get("index").and_then(Value::as_u64).unwrap_or(position as u64);
            self.choices.entry(index).or_default().take(fields);
        }
    }

    fn take_usage(&mut self, usage: &Value) {
        // With continuous usage every event carries counts so far; the last word counts.
        let kept = &mut self.answer.usage;
        let count =
            |pointer: &str, before: Option<u64>| usage.pointer(pointer).and_then(Value::as_u64).or(before);
        kept.prompt_tokens = count("/prompt_tokens", kept.prompt_tokens);
        kept.completion_tokens = count("/completion_tokens", kept.completion_tokens);
        kept.cached_tokens = count("/prompt_tokens_details/cached_tokens", kept.cached_tokens);
        kept.reasoning_tokens = count("/completion_tokens_details/reasoning_tokens", kept.reasoning_tokens);
    }
}

impl Partial {
    fn take_piece(&mut self, piece: ChoicePiece<'_>) {
        keep(&mut self.choice.finish_reason, piece.finish_reason);
        self.take_stop_reason(piece.stop_reason.as_ref());
        if let Some(ids) = piece.token_ids {
            self.choice.token_ids.get_or_insert_default().extend(ids);
        }
        if self.choice.prompt_token_ids.is_none() {
            self.choice.prompt_token_ids = piece.prompt_token_ids;
        }
        add(&mut self.content, piece.text.as_ref());
        if let Some(Value::Object(logprobs)) = piece.logprobs {
            join_logprobs(&mut self.logprobs, logprobs);
        }
        for Object(message) in [piece.delta, piece.message].into_iter().flatten() {
            keep(&mut self.choice.role, message.role);
            add(&mut self.content, message.content.as_ref());
            add(&mut self.refusal, message.refusal.as_ref());
            add(&mut self.reasoning, message.reasoning.as_ref().or(message.reasoning_content.as_ref()));
            self.take_calls(message.tool_calls.unwrap_or_default());
        }
    }

    fn take_stop_reason(&mut self, reason: Option<&Value>) {
        match reason {
            Some(Value::String(text)) => self.choice.stop_reason = Some(text.clone()),
            None | Some(Value::Null) => {}
            Some(other) => self.choice.stop_reason = Some(other.to_string()),
        }
    }

    fn take(&mut self, mut fields: Map<String, Value>) {
        set_text(&mut self.choice.finish_reason, fields.get("finish_reason"));
        self.take_stop_reason(fields.get("stop_reason"));
        if let Some(ids) = fields.get("token_ids").and_then(token_ids) {
            self.choice.token_ids.get_or_insert_default().extend(ids);
        }
        if self.choice.prompt_token_ids.is_none() {
            self.choice.prompt_token_ids = fields.get("prompt_token_ids").and_then(token_ids);
        }
        append(&mut self.content, fields.get("text"));
        if let Some(Value::Object(logprobs)) = fields.remove("logprobs") {
            join_logprobs(&mut self.logprobs, logprobs);
        }
        for key in ["delta", "message"] {
            if let Some(Value::Object(message)) = fields.remove(key) {
                self.take_message(message);
            }
        }
    }

    fn take_message(&mut self, mut message: Map<String, Value>) {
        set_text(&mut self.choice.role, message.get("role"));
        append(&mut self.content, message.get("content"));
        append(&mut self.refusal, message.get("refusal"));
        // vLLM's older versions and other servers say `reasoning_content`; some say both, with the same text.
        let reasoning = message.get("reasoning").filter(|value| value.is_string());
        append(&mut self.reasoning, reasoning.or_else(|| message.get("reasoning_content")));
        if let Some(Value::Array(calls)) = message.remove("tool_calls") {
            self.take_calls(calls);
        }
    }

    fn take_calls(&mut self, calls: Vec<Value>) {
        for (position, call) in calls.into_iter().enumerate() {
            let Value::Object(mut fields) = call else {
                continue;
            };
            let index = fields.remove("index").and_then(|index| index.as_u64()).unwrap_or(position as u64);
            merge_call(self.tool_calls.entry(index).or_default(), fields);
        }
    }

    fn finish(self, index: u64) -> Choice {
        let mut choice = self.choice;
        choice.index = index;
        choice.content = Some(self.content).filter(|text| !text.is_empty());
        choice.reasoning = Some(self.reasoning).filter(|text| !text.is_empty());
        choice.refusal = Some(self.refusal).filter(|text| !text.is_empty());
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.into_values().map(|call| Value::Object(in_order(call))).collect();
            choice.tool_calls_json = Some(Value::Array(calls).to_string());
        }
        if !self.logprobs.is_empty() {
            choice.logprobs_json = Some(Value::Object(self.logprobs).to_string());
        }
        choice
    }
}

/// A call's keys in one order, whichever way it came.
fn in_order(mut call: Map<String, Value>) -> Map<String, Value> {
    let mut ordered = Map::new();
    for key in ["id", "type", "function"] {
        if let Some(value) = call.shift_remove(key) {
            ordered.insert(key.to_owned(), value);
        }
    }
    if let Some(Value::Object(function)) = ordered.get_mut("function")
        && let Some(arguments) = function.shift_remove("arguments")
    {
        function.insert("arguments".to_owned(), arguments);
    }
    ordered.extend(call);
    ordered
}

/// Adds one delta of a tool call: arguments grow, all else is said once.
fn merge_call(call: &mut Map<String, Value>, delta: Map<String, Value>) {
    for (key, value) in delta {
        if key == "function"
            && let Value::Object(function) = value
        {
            let slot = call.entry("function").or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(known) = slot {
                merge_function(known, function);
            }
            continue;
        }
        set_value(call, key, value);
    }
}

fn merge_function(known: &mut Map<String, Value>, delta: Map<String, Value>) {
    for (key, value) in delta {
        if key == "arguments"
            && let Value::String(more) = &value
            && let Some(Value::String(arguments)) = known.get_mut("arguments")
        {
            arguments.push_str(more);
            continue;
        }
        set_value(known, key, value);
    }
}

fn set_value(object: &mut Map<String, Value>, key: String, value: Value) {
    let blank = |kept: &Value| kept.is_null() || kept.as_str() == Some("");
    match object.get_mut(&key) {
        Some(kept) if blank(kept) => *kept = value,
        Some(_) => {}
        None => {
            object.insert(key, value);
        }
    }
}

fn join_logprobs(known: &mut Map<String, Value>, delta: Map<String, Value>) {
    for (key, value) in delta {
        if let Value::Array(more) = value {
            match known.get_mut(&key) {
                Some(Value::Array(kept)) => kept.extend(more),
                _ => {
                    known.insert(key, Value::Array(more));
                }
            }
            continue;
        }
        set_value(known, key, value);
    }
}

fn add(text: &mut String, delta: Option<&Text<'_>>) {
    if let Some(more) = delta {
        text.push_str(more.as_str());
    }
}

fn keep(slot: &mut Option<String>, text: Option<Text<'_>>) {
    let Some(text) = text else { return };
    // Every delta of a stream says it again.
    if slot.as_deref() != Some(text.as_str()) {
        *slot = Some(text.as_str().to_owned());
    }
}

pub(super) fn append(text: &mut String, delta: Option<&Value>) {
    if let Some(more) = delta.and_then(Value::as_str) {
        text.push_str(more);
    }
}

pub(super) fn set_text(slot: &mut Option<String>, value: Option<&Value>) {
    if let Some(text) = value.and_then(Value::as_str) {
        *slot = Some(text.to_owned());
    }
}

/// The ids, if the value is an array of ids and nothing else.
fn token_ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| id.as_u64().and_then(|wide| u32::try_from(wide).ok())).collect()
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
