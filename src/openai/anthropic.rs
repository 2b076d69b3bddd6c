//! Anthropic's Messages API as vLLM speaks it: an answer is a list of blocks, streamed one after the other.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::exchange::{Answer, Choice, append, set_text};

/// Takes an answer piece by piece.
#[derive(Debug, Default)]
pub struct MessagesBuilder {
    answer: Answer,
    role: Option<String>,
    stop_reason: Option<String>,
    stop_sequence: Option<String>,
    blocks: BTreeMap<u64, Block>,
    began: bool,
}

#[derive(Debug, Default)]
struct Block {
    thinking: String,
    text: String,
    /// A tool call without its input.
    call: Option<(Value, Value)>,
    input: String,
}

impl MessagesBuilder {
    /// The data of one event.
    pub fn event(&mut self, data: &[u8]) {
        let Ok(Value::Object(event)) = serde_json::from_slice(data) else { return };
        let index = event.get("index").and_then(Value::as_u64).unwrap_or_default();
        match event.get("type").and_then(Value::as_str).unwrap_or_default() {
            "message_start" => {
                if let Some(Value::Object(message)) = event.get("message") {
                    self.message(message);
                }
            }
            "content_block_start" => {
                let block = event.get("content_block").map(Block::of).unwrap_or_default();
                self.blocks.insert(index, block);
            }
            "content_block_delta" => {
                let block = self.blocks.entry(index).or_default();
                let delta = event.get("delta").unwrap_or(&Value::Null);
                append(&mut block.text, delta.get("text"));
                append(&mut block.thinking, delta.get("thinking"));
                append(&mut block.input, delta.get("partial_json"));
            }
            "message_delta" => {
                if let Some(Value::Object(delta)) = event.get("delta") {
                    self.ending(delta);
                }
                self.usage(event.get("usage"));
            }
            "message_stop" => self.answer.complete = true,
            _ => self.error(&event),
        }
    }

    /// A whole JSON body.
    pub fn body(&mut self, body: &[u8]) {
        let Ok(Value::Object(object)) = serde_json::from_slice(body) else { return };
        self.answer.complete = true;
        if object.get("type").and_then(Value::as_str) == Some("message") {
            self.message(&object);
        } else {
            self.error(&object);
        }
    }

    pub fn finish(mut self) -> Answer {
        if !self.began {
            return self.answer;
        }
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for block in self.blocks.into_values() {
            reasoning.push_str(&block.thinking);
            content.push_str(&block.text);
            if let Some((id, name)) = block.call {
                // The body has the input as JSON, the stream has its text in pieces: one spelling for both.
                let arguments = match serde_json::from_str::<Value>(&block.input) {
                    Ok(input) => input.to_string(),
                    Err(_) if block.input.is_empty() => "{}".to_owned(),
                    Err(_) => block.input,
                };
                calls.push(json!({
                    "id": id, "type": "function", "function": { "name": name, "arguments": arguments },
                }));
            }
        }
        self.answer.choices.push(Choice {
            finish_reason: self.stop_reason,
            stop_reason: self.stop_sequence,
            role: self.role,
            reasoning: Some(reasoning).filter(|text| !text.is_empty()),
            content: Some(content).filter(|text| !text.is_empty()),
            tool_calls_json: Some(calls)
                .filter(|calls| !calls.is_empty())
                .map(|calls| json!(calls).to_string()),
            ..Choice::default()
        });
        self.answer
    }

    fn message(&mut self, message: &Map<String, Value>) {
        self.began = true;
        set_text(&mut self.answer.id, message.get("id"));
        set_text(&mut self.answer.model, message.get("model"));
        set_text(&mut self.role, message.get("role"));
        self.ending(message);
        self.usage(message.get("usage"));
        for (index, block) in
            message.get("content").and_then(Value::as_array).into_iter().flatten().enumerate()
        {
            self.blocks.insert(index as u64, Block::of(block));
        }
    }

    fn ending(&mut self, fields: &Map<String, Value>) {
        set_text(&mut self.stop_reason, fields.get("stop_reason"));
        set_text(&mut self.stop_sequence, fields.get("stop_sequence"));
    }

    fn error(&mut self, object: &Map<String, Value>) {
        if let Some(error) = object.get("error").filter(|error| !error.is_null()) {
            self.answer.error_json = Some(error.to_string());
        }
    }

    /// Anthropic's `input_tokens` leave out what came from the cache.
    fn usage(&mut self, usage: Option<&Value>) {
        let Some(usage) = usage else { return };
        let count = |name: &str| usage[name].as_u64();
        let kept = &mut self.answer.usage;
        kept.cached_tokens = count("cache_read_input_tokens").or(kept.cached_tokens);
        if let Some(fresh) = count("input_tokens") {
            let cached = kept.cached_tokens.unwrap_or_default();
            kept.prompt_tokens =
                Some(fresh + cached + count("cache_creation_input_tokens").unwrap_or_default());
        }
        kept.completion_tokens = count("output_tokens").or(kept.completion_tokens);
    }
}

impl Block {
    fn of(block: &Value) -> Block {
        let mut taken = Block::default();
        append(&mut taken.text, block.get("text"));
        append(&mut taken.thinking, block.get("thinking"));
        if block["type"] == "tool_use" {
            taken.call = Some((block["id"].clone(), block["name"].clone()));
            // A stream starts a call with an empty object and sends the input after it.
            let empty = block["input"].as_object().is_none_or(Map::is_empty);
            if !empty {
                taken.input = block["input"].to_string();
            }
        }
        taken
    }
}

/// The request's prompt as the messages of a chat: `system` first.
pub fn messages(system: Option<&Value>, messages: &Value) -> Vec<Value> {
    let mut found = Vec::new();
    if let Some(system) = system.filter(|system| !system.is_null()) {
        found.push(json!({ "role": "system", "content": system }));
    }
    found.extend(messages.as_array().into_iter().flatten().cloned());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_streamed_and_a_whole_answer_with_calls_are_the_same() {
        let mut whole = MessagesBuilder::default();
        whole.body(
            json!({"type": "message", "id": "m", "role": "assistant", "model": "x", "stop_reason": "tool_use",
                "content": [{"type": "thinking", "thinking": "why", "signature": "s"}, {"type": "text", "text": "é"},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}, {"type": "tool_use", "id": "b", "name": "g", "input": {}}],
                "usage": {"input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 9}})
            .to_string()
            .as_bytes(),
        );
        let mut stream = MessagesBuilder::default();
        for event in [
            json!({"type": "message_start", "message": {"type": "message", "id": "m", "role": "assistant", "model": "x",
                "content": [], "stop_reason": null, "usage": {"input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 0}}}),
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "why"}}),
            json!({"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}}),
            json!({"type": "ping"}),
            json!({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "é"}}),
            json!({"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "a", "name": "f", "input": {}}}),
            json!({"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "{\"x\""}}),
            json!({"type": "content_block_start", "index": 3, "content_block": {"type": "tool_use", "id": "b", "name": "g", "input": {}}}),
            json!({"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ": 1}"}}),
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"input_tokens": 3, "output_tokens": 9}}),
            json!({"type": "message_stop"}),
        ] {
            stream.event(event.to_string().as_bytes());
        }
        let (whole, stream) = (whole.finish(), stream.finish());
        assert_eq!((whole.usage.prompt_tokens, whole.usage.cached_tokens), (Some(5), Some(2)));
        assert_eq!(stream, whole);
    }

    #[test]
    fn an_error_in_mid_stream_is_kept() {
        let mut builder = MessagesBuilder::default();
        builder.event(br#"{"type":"message_start","message":{"type":"message","id":"m","content":[]}}"#);
        builder.event(br#"{"type":"error","error":{"type":"internal_error","message":"no"}}"#);
        let answer = builder.finish();
        assert!(answer.error_json.unwrap().contains("internal_error") && !answer.complete);
    }

    #[test]
    fn the_system_prompt_comes_first() {
        let found = messages(
            Some(&json!([{"type": "text", "text": "s"}])),
            &json!([{"role": "user", "content": "u"}]),
        );
        assert_eq!(found.iter().map(|message| &message["role"]).collect::<Vec<_>>(), ["system", "user"]);
        assert_eq!(messages(None, &json!([])), Vec::<Value>::new());
    }
}
