//! Asking vLLM for token ids on the client's behalf, and taking them out of the answer again.
//!
//! Without the plugin, `"return_token_ids":true` in the request is the one way to learn the ids that the engine really
//! produced. The client did not ask, so its answer is put back to what it would have been: at the levels where vLLM
//! places ids, `prompt_token_ids` (top level for chat, in each choice for completions) and `token_ids` (in each
//! choice), the array becomes `null`. Where the flag makes vLLM send a chat chunk that it would have kept back (an
//! empty delta), the event is dropped. Edits are byte spans; the rest of the text is never written anew.

use std::ops::Range;

use super::request::valid_json;
use super::spans;
use super::sse::{Decoder, Event};

/// The request body with `"return_token_ids":true`; none if it must go as it is: it is no JSON object, the client asks
/// for ids itself (or sends something that vLLM should judge), or it has `echo`, whose text the flag would change.
pub fn ask_for_ids(body: &[u8]) -> Option<Vec<u8>> {
    let text = valid_json(body)?.as_bytes();
    let members = spans::members(text, 0)?;
    if members.iter().any(|member| member.key == "echo" && !is_off(&text[member.value.clone()])) {
        return None;
    }
    let mut asked = members.iter().filter(|member| member.key == "return_token_ids").peekable();
    if asked.peek().is_some() {
        let spans: Vec<Range<usize>> = asked.map(|member| member.value.clone()).collect();
        if spans.iter().any(|span| !is_off(&text[span.clone()])) {
            return None;
        }
        return Some(replace(text, &spans, b"true"));
    }
    let inside = spans::skip_space(text, 0) + 1;
    let flag: &[u8] =
        if members.is_empty() { b"\"return_token_ids\":true" } else { b"\"return_token_ids\":true," };
    let mut edited = Vec::with_capacity(text.len() + flag.len());
    edited.extend_from_slice(&text[..inside]);
    edited.extend_from_slice(flag);
    edited.extend_from_slice(&text[inside..]);
    Some(edited)
}

/// A whole answer, or the data of one event, as it would have been without the flag.
pub fn restore_json(text: &[u8]) -> Vec<u8> {
    replace(text, &id_arrays(text), b"null")
}

/// Restores a streamed answer event by event.
#[derive(Debug)]
pub struct StreamRestorer {
    decoder: Decoder,
    /// An event was dropped up to its CR: the LF that completes the line end goes too.
    drop_line_feed: bool,
    /// One event outgrew the limit: what follows is passed on as it comes.
    gave_up: bool,
    limit: usize,
}

impl StreamRestorer {
    /// `limit` bounds the bytes held back for one event; an answer with a larger event is passed on unrestored.
    pub fn new(limit: usize) -> Self {
        Self { decoder: Decoder::new(), drop_line_feed: false, gave_up: false, limit }
    }

    /// Takes the next bytes; gives what can go to the client now.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        if self.gave_up {
            return bytes.to_vec();
        }
        let mut out = Vec::with_capacity(bytes.len());
        for event in self.decoder.push(bytes) {
            self.restore(&event, &mut out);
        }
        if self.decoder.pending_bytes() > self.limit {
            self.gave_up = true;
            out.append(&mut self.finish());
        }
        out
    }

    /// The stream has ended; gives what was held back.
    pub fn finish(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(event) = self.decoder.finish() {
            self.restore(&event, &mut out);
        }
        out
    }

    fn restore(&mut self, event: &Event, out: &mut Vec<u8>) {
        let mut raw = event.raw.as_slice();
        if std::mem::take(&mut self.drop_line_feed) {
            raw = raw.strip_prefix(b"\n").unwrap_or(raw);
        }
        let Some(data) = &event.data else {
            out.extend_from_slice(raw);
            return;
        };
        if event.data_lines != 1 {
            // vLLM never cuts its JSON into lines; whoever does is passed on as it is.
            out.extend_from_slice(raw);
            return;
        }
        if exists_only_for_ids(data) {
            self.drop_line_feed = raw.ends_with(b"\r");
            return;
        }
        let Some(start) = raw.windows(data.len().max(1)).position(|window| window == data.as_slice()) else {
            out.extend_from_slice(raw);
            return;
        };
        out.extend_from_slice(&raw[..start]);
        out.append(&mut restore_json(data));
        out.extend_from_slice(&raw[start + data.len()..]);
    }
}

fn is_off(value: &[u8]) -> bool {
    value == b"false" || value == b"null"
}

fn replace(text: &[u8], spans: &[Range<usize>], with: &[u8]) -> Vec<u8> {
    let mut edited = Vec::with_capacity(text.len());
    let mut done = 0;
    for span in spans {
        edited.extend_from_slice(&text[done..span.start]);
        edited.extend_from_slice(with);
        done = span.end;
    }
    edited.extend_from_slice(&text[done..]);
    edited
}

/// The spans of the id arrays, in their order.
fn id_arrays(text: &[u8]) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let is_array = |span: &Range<usize>| text.get(span.start) == Some(&b'[');
    for member in spans::members(text, 0).unwrap_or_default() {
        if member.key == "prompt_token_ids" && is_array(&member.value) {
            found.push(member.value);
            continue;
        }
        if member.key != "choices" {
            continue;
        }
        for choice in spans::elements(text, member.value.start).unwrap_or_default() {
            for part in spans::members(text, choice.start).unwrap_or_default() {
                if matches!(part.key.as_str(), "prompt_token_ids" | "token_ids") && is_array(&part.value) {
                    found.push(part.value);
                }
            }
        }
    }
    found
}

/// Whether vLLM sent this chat chunk for its ids alone: it has choices, and each has an empty delta, no logprobs and no
/// finish reason.
fn exists_only_for_ids(text: &[u8]) -> bool {
    let Some(members) = spans::members(text, 0) else {
        return false;
    };
    let Some(choices) = members.iter().find(|member| member.key == "choices") else {
        return false;
    };
    let choices = spans::elements(text, choices.value.start).unwrap_or_default();
    !choices.is_empty() && choices.iter().all(|choice| is_bare(text, choice.start))
}

fn is_bare(text: &[u8], choice: usize) -> bool {
    let mut empty_delta = false;
    let mut has_ids = false;
    for part in spans::members(text, choice).unwrap_or_default() {
        let value = &text[part.value.clone()];
        match part.key.as_str() {
            "delta" => {
                empty_delta = spans::members(text, part.value.start).is_some_and(|members| members.is_empty())
            }
            "token_ids" => has_ids = value.starts_with(b"["),
            "index" => {}
            _ if value == b"null" => {}
            _ => return false,
        }
    }
    empty_delta && has_ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_is_added_in_place() {
        let edit = |body: &str| ask_for_ids(body.as_bytes()).map(|edited| String::from_utf8(edited).unwrap());
        assert_eq!(edit(r#" {"model":"m"}"#).unwrap(), r#" {"return_token_ids":true,"model":"m"}"#);
        assert_eq!(edit("{}").unwrap(), r#"{"return_token_ids":true}"#);
        assert_eq!(
            edit(r#"{"return_token_ids":false,"a":1}"#).unwrap(),
            r#"{"return_token_ids":true,"a":1}"#
        );
        assert_eq!(
            edit(r#"{"return_\u0074oken_ids": null }"#).unwrap(),
            r#"{"return_\u0074oken_ids": true }"#
        );
        assert!(edit(r#"{"messages":"return_token_ids"}"#).is_some());
        for kept in [
            r#"{"return_token_ids":true}"#,
            r#"{"return_token_ids":"yes"}"#,
            r#"{"return_token_ids":false,"return_token_ids":true}"#,
            r#"{"echo":true}"#,
            "[1]",
            "{",
            "",
        ] {
            assert_eq!(edit(kept), None, "{kept}");
        }
    }

    #[test]
    fn only_vllms_own_levels_are_restored() {
        let text = br#"{"prompt_token_ids":[1],"token_ids":[9],"choices":[{"token_ids":[ 2 ],"prompt_token_ids":[],"message":{"token_ids":[3],"content":"\"token_ids\":[4]"}}, 5],"extra":{"prompt_token_ids":[6]}}"#;
        let expected = r#"{"prompt_token_ids":null,"token_ids":[9],"choices":[{"token_ids":null,"prompt_token_ids":null,"message":{"token_ids":[3],"content":"\"token_ids\":[4]"}}, 5],"extra":{"prompt_token_ids":[6]}}"#;
        assert_eq!(String::from_utf8(restore_json(text)).unwrap(), expected);
        for kept in [&b"[DONE]"[..], b"", b"{\"choices\":[{\"token_ids\":[1]", b"{\"choices\":null}"] {
            assert_eq!(restore_json(kept), kept);
        }
    }

    #[test]
    fn a_chunk_sent_for_its_ids_alone_is_dropped() {
        let bare = r#"data: {"id":"x","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null,"token_ids":[5]}]}"#;
        let last = r#"data: {"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","token_ids":[5]}]}"#;
        for end in ["\n\n", "\r\n\r\n", "\r\r"] {
            let text = format!("{bare}{end}{last}{end}");
            let expected = format!("{last}{end}").replace("[5]", "null");
            for cut in 1..text.len() {
                let mut restorer = StreamRestorer::new(1 << 20);
                let mut out = restorer.push(&text.as_bytes()[..cut]);
                out.extend(restorer.push(&text.as_bytes()[cut..]));
                out.extend(restorer.finish());
                assert_eq!(String::from_utf8(out).unwrap(), expected, "{end:?} {cut}");
            }
        }
    }

    #[test]
    fn an_event_beyond_the_limit_passes_on() {
        let mut restorer = StreamRestorer::new(8);
        let mut out = restorer.push(b"data: 0123456789");
        out.extend(restorer.push(b"abc\n\n"));
        out.extend(restorer.finish());
        assert_eq!(out, b"data: 0123456789abc\n\n");
    }
}
