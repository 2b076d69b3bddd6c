//! What a real vLLM was asked and what it answered, from the fixtures. A file that no sample takes is an error.

#![allow(dead_code)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::http::{CHAT, COMPLETIONS, SSE_HEAD, chunk, find, header};

pub struct Sample {
    pub name: String,
    pub method: &'static str,
    pub path: &'static str,
    pub request: Vec<u8>,
    /// With the blank line.
    pub head: Vec<u8>,
    pub body: Vec<u8>,
    pub status: u16,
    pub streamed: bool,
}

impl Sample {
    /// As it goes over the wire, a stream in one chunk for each event.
    pub fn wire(&self) -> Vec<u8> {
        let mut ends = Vec::new();
        let mut end = 0;
        for event in String::from_utf8(self.body.clone()).unwrap().split_inclusive("\n\n") {
            end += event.len();
            ends.push(end);
        }
        self.wire_cut_at(&ends)
    }

    /// The same, a stream cut into chunks that end at these places of its body.
    pub fn wire_cut_at(&self, ends: &[usize]) -> Vec<u8> {
        let mut wire = self.head.clone();
        if !self.streamed {
            wire.extend(&self.body);
            return wire;
        }
        let mut start = 0;
        for end in ends.iter().copied().chain([self.body.len()]) {
            if end > start {
                wire.extend(chunk(&self.body[start..end]));
                start = end;
            }
        }
        wire.extend(b"0\r\n\r\n");
        wire
    }
}

/// Of the recorded routes: chat and completions.
pub fn samples() -> Vec<Sample> {
    let found = read("samples", |name, request| {
        let chat = find(request, b"\"messages\"").is_some() || name.contains("chat");
        ("POST", if chat { CHAT } else { COMPLETIONS })
    });
    assert!(found.len() > 35, "the samples are there");
    found
}

/// Of the recorded routes that speak otherwise: Responses and Messages.
pub fn dialect_samples() -> Vec<Sample> {
    let found = read("dialects", |name, _| {
        ("POST", if name.starts_with("responses") { "/v1/responses" } else { "/v1/messages" })
    });
    assert!(found.len() > 20, "the samples are there");
    found
}

/// Of routes that are passed on and not recorded.
pub fn other_samples() -> Vec<Sample> {
    const ROUTES: [(&str, &str, &str); 9] = [
        ("detokenize", "POST", "/detokenize"),
        ("err_404", "GET", "/v1/responses/none"),
        ("err_405", "GET", CHAT),
        ("generate", "POST", "/inference/v1/generate"),
        ("health", "GET", "/health"),
        ("models", "GET", "/v1/models"),
        ("render", "POST", "/v1/chat/completions/render"),
        ("tokenize", "POST", "/tokenize"),
        ("version", "GET", "/version"),
    ];
    let found = read("other_samples", |name, _| {
        let route = ROUTES.iter().find(|(start, ..)| name.starts_with(start));
        let (_, method, path) = route.unwrap_or_else(|| panic!("say in ROUTES which route {name} is for"));
        (method, path)
    });
    assert!(found.len() > 10, "the samples are there");
    found
}

/// `route_of` is given a sample's name and request.
fn read(folder: &str, route_of: impl Fn(&str, &[u8]) -> (&'static str, &'static str)) -> Vec<Sample> {
    let directory: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder);
    let mut unused = BTreeSet::new();
    for entry in std::fs::read_dir(&directory).unwrap() {
        unused.insert(entry.unwrap().file_name().into_string().unwrap());
    }
    let mut found = Vec::new();
    for file in unused.clone() {
        let (name, with_head) = match (file.strip_suffix(".resp.http"), file.strip_suffix(".sse")) {
            (Some(name), _) => (name, true),
            (_, Some(name)) => (name, false),
            _ => continue,
        };
        unused.remove(&file);
        let asked = format!("{name}.req.json");
        let request = match unused.remove(&asked) {
            true => std::fs::read(directory.join(asked)).unwrap(),
            // What was asked was not kept: a stream, or a GET.
            false if with_head => Vec::new(),
            false => b"{\"stream\":true}".to_vec(),
        };
        let bytes = std::fs::read(directory.join(&file)).unwrap();
        let (head, body) = match with_head {
            true => bytes.split_at(find(&bytes, b"\r\n\r\n").unwrap() + 4),
            false => (SSE_HEAD, bytes.as_slice()),
        };
        let text = std::str::from_utf8(head).unwrap();
        if let Some(length) = header(text, "content-length") {
            assert_eq!(length, body.len().to_string(), "{file} was edited and is not what vLLM sent");
        }
        let (method, path) = route_of(name, &request);
        found.push(Sample {
            method,
            path,
            status: text.split(' ').nth(1).unwrap().parse().unwrap(),
            streamed: text.contains("transfer-encoding: chunked"),
            request,
            head: head.to_vec(),
            body: body.to_vec(),
            name: name.to_owned(),
        });
    }
    assert!(unused.is_empty(), "no sample takes {unused:?} in {}", directory.display());
    found
}

/// Each id array as null, found by text alone: no sample speaks of ids in its content. The events that vLLM sends for
/// their ids alone (its parser held the text back) are left out, as vLLM does when nobody asks for ids.
pub fn without_ids(body: &[u8]) -> Vec<u8> {
    let whole = String::from_utf8(body.to_vec()).unwrap();
    let for_ids_alone = r#""delta":{},"logprobs":null,"finish_reason":null,"token_ids":["#;
    let mut text: String =
        whole.split_inclusive("\n\n").filter(|event| !event.contains(for_ids_alone)).collect();
    while let Some(start) = text.find("token_ids\":[") {
        let end = start + text[start..].find(']').unwrap() + 1;
        text.replace_range(start..end, "token_ids\":null");
    }
    text.into_bytes()
}
