//! OpenAI's Responses API as vLLM speaks it: an answer is a list of items, and the stream's last event holds all of it.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::exchange::{Answer, Choice, append, set_text};

/// Takes an answer piece by piece.
#[derive(Debug, Default)]
pub struct ResponsesBuilder {
    answer: Answer,
    finish_reason: Option<String>,
    items: BTreeMap<u64, Item>,
}

#[derive(Debug, Default)]
struct Item {
    reasoning: String,
    content: String,
    refusal: String,
    logprobs: Vec<Value>,
    call: Option<Value>,
    arguments: String,
}

impl ResponsesBuilder {
    /// The data of one event.
    pub fn event(&mut self, data: &[u8]) {
        let Ok(Value::Object(event)) = serde_json::from_slice(data) else { return };
        let index = event.get("output_index").and_then(Value::as_u64).unwrap_or_default();
        let kind = event.get("type").and_then(Value::as_str).unwrap_or_default();
        match kind {
            "response.output_item.added" | "response.output_item.done" => {
                if let Some(item) = event.get("item") {
                    self.set_item(index, item);
                }
            }
            "response.output_text.delta" => {
                let item = self.items.entry(index).or_default();
                append(&mut item.content, event.get("delta"));
                item.logprobs
                    .extend(event.get("logprobs").and_then(Value::as_array).into_iter().flatten().cloned());
            }
            "response.refusal.delta" => {
                append(&mut self.items.entry(index).or_default().refusal, event.get("delta"));
            }
            "response.reasoning_text.delta" => {
                append(&mut self.items.entry(index).or_default().reasoning, event.get("delta"));
            }
            "response.function_call_arguments.delta" => {
                append(&mut self.items.entry(index).or_default().arguments, event.get("delta"));
            }
            "error" => self.answer.error_json = Some(Value::Object(event).to_string()),
            _ => self.take(&event),
        }
    }

    /// A whole JSON body.
    pub fn body(&mut self, body: &[u8]) {
        let Ok(Value::Object(object)) = serde_json::from_slice(body) else { return };
        self.answer.complete = true;
        self.response(&object);
    }

    pub fn finish(mut self) -> Answer {
        if self.items.is_empty() && self.finish_reason.is_none() {
            return self.answer;
        }
        let mut choice = Choice { finish_reason: self.finish_reason, ..Choice::default() };
        let (mut reasoning, mut content, mut refusal) = (String::new(), String::new(), String::new());
        let (mut calls, mut logprobs) = (Vec::new(), Vec::new());
        for item in self.items.into_values() {
            reasoning.push_str(&item.reasoning);
            content.push_str(&item.content);
            refusal.push_str(&item.refusal);
            logprobs.extend(item.logprobs);
            if let Some(mut call) = item.call {
                if let Some(slot) = call.pointer_mut("/function/arguments")
                    && !item.arguments.is_empty()
                {
                    *slot = Value::String(item.arguments);
                }
                calls.push(call);
            }
        }
        choice.role = Some("assistant".to_owned());
        choice.reasoning = Some(reasoning).filter(|text| !text.is_empty());
        choice.content = Some(content).filter(|text| !text.is_empty());
        choice.refusal = Some(refusal).filter(|text| !text.is_empty());
        choice.tool_calls_json =
            Some(calls).filter(|calls| !calls.is_empty()).map(|calls| json!(calls).to_string());
        choice.logprobs_json =
            Some(logprobs).filter(|all| !all.is_empty()).map(|all| json!({ "content": all }).to_string());
        self.answer.choices.push(choice);
        self.answer
    }

    /// An event that tells of the whole response, or an error without a name.
    fn take(&mut self, event: &Map<String, Value>) {
        if let Some(Value::Object(response)) = event.get("response") {
            self.response(response);
        } else if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            self.answer.error_json = Some(error.to_string());
        }
    }

    fn response(&mut self, response: &Map<String, Value>) {
        set_text(&mut self.answer.id, response.get("id"));
        set_text(&mut self.answer.model, response.get("model"));
        if let Some(error) = response.get("error").filter(|error| !error.is_null()) {
            self.answer.error_json = Some(error.to_string());
        }
        self.usage(response.get("usage"));
        let status = response.get("status").and_then(Value::as_str).unwrap_or_default();
        if matches!(status, "" | "queued" | "in_progress") {
            return;
        }
        // The stream's first events tell of it too, as in progress and without items.
        self.answer.complete = true;
        let reason = response.get("incomplete_details").and_then(|details| details["reason"].as_str());
        self.finish_reason = Some(reason.unwrap_or(status).to_owned());
        for (index, item) in
            response.get("output").and_then(Value::as_array).into_iter().flatten().enumerate()
        {
            self.set_item(index as u64, item);
        }
    }

    fn set_item(&mut self, index: u64, item: &Value) {
        let mut taken = Item::default();
        match item["type"].as_str().unwrap_or_default() {
            "message" => {
                for part in item["content"].as_array().into_iter().flatten() {
                    append(&mut taken.content, part.get("text"));
                    append(&mut taken.refusal, part.get("refusal"));
                    taken.logprobs.extend(part["logprobs"].as_array().into_iter().flatten().cloned());
                }
            }
            "reasoning" => {
                let parts = if item["content"].is_array() { &item["content"] } else { &item["summary"] };
                for part in parts.as_array().into_iter().flatten() {
                    append(&mut taken.reasoning, part.get("text"));
                }
            }
            "function_call" => {
                append(&mut taken.arguments, item.get("arguments"));
                taken.call = Some(json!({
                    "id": item["call_id"], "type": "function",
                    "function": { "name": item["name"], "arguments": "" },
                }));
            }
            // The server's own tools: as they are.
            _ => taken.call = Some(item.clone()),
        }
        // vLLM gives the logprobs of a stream with its deltas alone.
        if let Some(before) = self.items.remove(&index)
            && taken.logprobs.is_empty()
        {
            taken.logprobs = before.logprobs;
        }
        self.items.insert(index, taken);
    }

    fn usage(&mut self, usage: Option<&Value>) {
        let count = |pointer: &str| usage.and_then(|usage| usage.pointer(pointer)).and_then(Value::as_u64);
        let kept = &mut self.answer.usage;
        kept.prompt_tokens = count("/input_tokens").or(kept.prompt_tokens);
        kept.completion_tokens = count("/output_tokens").or(kept.completion_tokens);
        kept.cached_tokens = count("/input_tokens_details/cached_tokens").or(kept.cached_tokens);
        kept.reasoning_tokens = count("/output_tokens_details/reasoning_tokens").or(kept.reasoning_tokens);
    }
}

/// The request's prompt as the messages of a chat: `instructions` first, then `input`, a text or a list of items.
pub fn messages(instructions: Option<&Value>, input: &Value) -> Vec<Value> {
    let mut messages = Vec::new();
    if let Some(text) = instructions.filter(|text| text.is_string()) {
        messages.push(json!({ "role": "system", "content": text }));
    }
    if input.is_string() {
        messages.push(json!({ "role": "user", "content": input }));
    }
    for item in input.as_array().into_iter().flatten() {
        messages.push(match item["type"].as_str() {
            Some("function_call") => json!({
                "role": "assistant",
                "tool_calls": [{
                    "id": item["call_id"], "type": "function",
                    "function": { "name": item["name"], "arguments": item["arguments"] },
                }],
            }),
            Some("function_call_output") => {
                json!({ "role": "tool", "tool_call_id": item["call_id"], "content": item["output"] })
            }
            _ if item["role"].is_string() => item.clone(),
            _ => json!({ "role": "assistant", "content": [item] }),
        });
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_is_cut_off_keeps_what_came() {
        let mut builder = ResponsesBuilder::default();
        for event in [
            json!({"type": "response.created", "response": {"id": "resp_1", "model": "m", "status": "in_progress", "output": []}}),
            json!({"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning", "summary": []}}),
            json!({"type": "response.reasoning_text.delta", "output_index": 0, "delta": "why"}),
            json!({"type": "response.output_item.added", "output_index": 1,
                "item": {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}}),
            json!({"type": "response.function_call_arguments.delta", "output_index": 1, "delta": "{\"x\""}),
            json!({"type": "response.output_text.delta", "output_index": 2, "delta": "ha", "logprobs": [{"token": "ha"}]}),
        ] {
            builder.event(event.to_string().as_bytes());
        }
        let answer = builder.finish();
        assert_eq!((answer.id.as_deref(), answer.complete), (Some("resp_1"), false));
        let choice = &answer.choices[0];
        assert_eq!((choice.reasoning.as_deref(), choice.content.as_deref()), (Some("why"), Some("ha")));
        assert_eq!(choice.finish_reason, None);
        assert_eq!(choice.logprobs_json.as_deref(), Some(r#"{"content":[{"token":"ha"}]}"#));
        assert_eq!(
            choice.tool_calls_json.as_deref(),
            Some(r#"[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"x\""}}]"#)
        );
    }

    #[test]
    fn the_input_is_a_chat() {
        let input = json!([{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "c", "name": "f",
            "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "7"}, {"type": "reasoning", "id": "r"}]);
        let found = messages(Some(&json!("be brief")), &input);
        let roles: Vec<&str> = found.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "assistant"]);
        assert_eq!(found[3], json!({"role": "tool", "tool_call_id": "c", "content": "7"}));
        assert_eq!(messages(None, &json!("hi")), [json!({"role": "user", "content": "hi"})]);
    }
}
