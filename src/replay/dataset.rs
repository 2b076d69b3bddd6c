//! Reading prompts: ShareGPT's JSON array, or JSON lines. One row is in memory at a time.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::ReplayError;
use crate::store::hex;

/// A longer row is refused: it would be damage (an unclosed bracket) rather than a prompt. Bytes.
const MAX_ROW: usize = 64 << 20;

#[derive(Clone, Debug, PartialEq)]
pub struct DatasetOptions {
    /// How many turns of the user are replayed; the answers between them are the server's own. At least 1. Rows with
    /// `messages` are sent as they are, in one turn.
    pub turns: usize,
}

impl Default for DatasetOptions {
    fn default() -> Self {
        Self { turns: 1 }
    }
}

/// One row, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayItem {
    /// Unique within the dataset; the journal knows it by this.
    pub id: String,
    /// What the held-out split goes by; visible ASCII, since it travels in a header.
    pub conversation_id: String,
    /// The messages of the first request.
    pub messages: Vec<Value>,
    /// The user's later messages, each sent after the answer to the one before.
    pub follow_ups: Vec<Value>,
    /// Further parameters of the request, as the row gave them.
    pub parameters: Map<String, Value>,
    /// Where the row begins in the file, from 1.
    pub line: usize,
}

/// A row that cannot be replayed.
#[derive(Clone, Debug, PartialEq)]
pub struct BadRow {
    pub line: usize,
    pub id: Option<String>,
    pub reason: String,
}

/// The rows of a file, in order.
#[derive(Debug)]
pub struct Dataset {
    source: BufReader<File>,
    path: PathBuf,
    options: DatasetOptions,
    array: bool,
    /// Line of the next byte, from 1.
    line: usize,
    row: usize,
    /// How often an id was met; later rows of the same id get a suffix.
    ids: HashMap<String, usize>,
    finished: bool,
}

impl Dataset {
    /// Opens a file and finds out its format from its first character.
    pub fn open(path: &Path, options: DatasetOptions) -> Result<Self, ReplayError> {
        let failed = |source| ReplayError::Io { action: "cannot read", path: path.to_path_buf(), source };
        let mut source = BufReader::with_capacity(1 << 20, File::open(path).map_err(failed)?);
        let mut line = 1;
        // A byte order mark is not white space, but some exports begin with one.
        if source.fill_buf().map_err(failed)?.starts_with(&[0xef, 0xbb, 0xbf]) {
            source.consume(3);
        }
        loop {
            let buffer = source.fill_buf().map_err(failed)?;
            let Some(first) = buffer.first().copied() else {
                return Err(ReplayError::Format { path: path.to_path_buf(), start: String::new() });
            };
            if first.is_ascii_whitespace() {
                line += usize::from(first == b'\n');
                source.consume(1);
                continue;
            }
            let array = match first {
                b'[' => true,
                b'{' => false,
                _ => {
                    let start = String::from_utf8_lossy(&buffer[..buffer.len().min(20)]).into_owned();
                    return Err(ReplayError::Format { path: path.to_path_buf(), start });
                }
            };
            if array {
                source.consume(1);
            }
            return Ok(Self {
                source,
                path: path.to_path_buf(),
                options,
                array,
                line,
                row: 0,
                ids: HashMap::new(),
                finished: false,
            });
        }
    }

    /// The bytes of the next row and its line, None at the end.
    fn next_row(&mut self) -> Result<Option<(Vec<u8>, usize)>, BadRow> {
        if self.array { self.next_element() } else { self.next_line() }
    }

    fn next_line(&mut self) -> Result<Option<(Vec<u8>, usize)>, BadRow> {
        loop {
            let mut bytes = Vec::new();
            let line = self.line;
            let limit = MAX_ROW as u64 + 1;
            match (&mut self.source).take(limit).read_until(b'\n', &mut bytes) {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(error) => {
                    return Err(self.broken(line, format!("cannot read {}: {error}", self.path.display())));
                }
            }
            if bytes.len() > MAX_ROW {
                return Err(self.broken(
                    line,
                    format!("the line is longer than {MAX_ROW} bytes; the rest was not read"),
                ));
            }
            self.line += 1;
            if !bytes.trim_ascii().is_empty() {
                return Ok(Some((bytes, line)));
            }
        }
    }

    /// Cuts out the next element of the array by its brackets; what is inside is parsed by itself, so that one broken
    /// row is no loss to the others.
    fn next_element(&mut self) -> Result<Option<(Vec<u8>, usize)>, BadRow> {
        let mut element = Vec::new();
        let (mut depth, mut in_string, mut escaped, mut start_line) = (0usize, false, false, self.line);
        loop {
            let (used, done) = {
                let buffer = match self.source.fill_buf() {
                    Ok(buffer) => buffer,
                    Err(error) => {
                        let reason = format!("cannot read {}: {error}", self.path.display());
                        return Err(self.broken(start_line, reason));
                    }
                };
                if buffer.is_empty() {
                    return Err(
                        self.broken(start_line, "the file ends inside the array; it was cut off".to_string())
                    );
                }
                let (mut used, mut done) = (0, None);
                for byte in buffer {
                    used += 1;
                    self.line += usize::from(*byte == b'\n');
                    if in_string {
                        element.push(*byte);
                        if escaped {
                            escaped = false;
                        } else if *byte == b'\\' {
                            escaped = true;
                        } else if *byte == b'"' {
                            in_string = false;
                        }
                        continue;
                    }
                    if depth == 0 {
                        match byte {
                            b',' if element.is_empty() => continue,
                            b',' => {
                                done = Some(false);
                                break;
                            }
                            b']' => {
                                done = Some(true);
                                break;
                            }
                            space if space.is_ascii_whitespace() => continue,
                            _ => {}
                        }
                        if element.is_empty() {
                            start_line = self.line;
                        }
                    }
                    element.push(*byte);
                    match byte {
                        b'"' => in_string = true,
                        b'{' | b'[' => depth += 1,
                        b'}' | b']' => depth = depth.saturating_sub(1),
                        _ => {}
                    }
                }
                (used, done)
            };
            self.source.consume(used);
            if element.len() > MAX_ROW {
                let reason = format!("the row is longer than {MAX_ROW} bytes; the rest was not read");
                return Err(self.broken(start_line, reason));
            }
            match done {
                Some(true) => {
                    self.finished = true;
                    return Ok((!element.is_empty()).then_some((element, start_line)));
                }
                Some(false) => return Ok(Some((element, start_line))),
                None => {}
            }
        }
    }

    /// A fault after which no further row can be found.
    fn broken(&mut self, line: usize, reason: String) -> BadRow {
        self.finished = true;
        BadRow { line, id: None, reason }
    }

    fn parse(&mut self, bytes: &[u8], line: usize) -> Result<ReplayItem, BadRow> {
        let bad = |id: Option<String>, reason: String| BadRow { line, id, reason };
        let value: Value =
            serde_json::from_slice(bytes).map_err(|error| bad(None, format!("no JSON: {error}")))?;
        let Value::Object(mut object) = value else {
            return Err(bad(None, "it is no JSON object".to_string()));
        };
        let given_id = take_text(&mut object, "id");
        let given_conversation = take_text(&mut object, "conversation_id");
        let fault_id = given_id.clone();
        let base = given_id.unwrap_or_else(|| format!("row-{}", self.row));
        let (messages, follow_ups, is_share_gpt) = if let Some(conversations) = object.remove("conversations")
        {
            let (messages, follow_ups) =
                share_gpt(&conversations, self.options.turns).map_err(|reason| bad(fault_id, reason))?;
            // Anything else in a ShareGPT row describes the row; it is no parameter of a request.
            object.clear();
            (messages, follow_ups, true)
        } else if let Some(messages) = object.remove("messages") {
            (open_ai(messages).map_err(|reason| bad(fault_id, reason))?, Vec::new(), false)
        } else {
            return Err(bad(fault_id, "it has neither `messages` nor `conversations`".to_string()));
        };
        let conversation = match given_conversation {
            Some(conversation) => conversation,
            // ShareGPT cuts long conversations into parts `<id>_<n>`, which must stay on one side of the split.
            None if is_share_gpt => share_gpt_conversation(&base).to_string(),
            None => base.clone(),
        };
        let count = self.ids.entry(base.clone()).or_default();
        *count += 1;
        let id = if *count == 1 { base } else { format!("{base}#{count}") };
        Ok(ReplayItem {
            id,
            conversation_id: header_safe(&conversation),
            messages,
            follow_ups,
            parameters: object,
            line,
        })
    }
}

impl Iterator for Dataset {
    type Item = Result<ReplayItem, BadRow>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finished {
            return None;
        }
        match self.next_row() {
            Ok(Some((bytes, line))) => {
                self.row += 1;
                Some(self.parse(&bytes, line))
            }
            Ok(None) => {
                self.finished = true;
                None
            }
            Err(row) => Some(Err(row)),
        }
    }
}

fn take_text(object: &mut Map<String, Value>, key: &str) -> Option<String> {
    match object.remove(key)? {
        Value::String(text) if !text.is_empty() => Some(text),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// The first request's messages and the later user messages.
fn share_gpt(conversations: &Value, turns: usize) -> Result<(Vec<Value>, Vec<Value>), String> {
    let Some(entries) = conversations.as_array() else {
        return Err("`conversations` is no list".to_string());
    };
    let (mut messages, mut follow_ups, mut seen) = (Vec::new(), Vec::new(), 0);
    for entry in entries {
        let from = entry.get("from").and_then(Value::as_str).unwrap_or_default();
        let text = entry.get("value").and_then(Value::as_str).unwrap_or_default();
        match from {
            "system" if seen == 0 && !text.is_empty() => {
                messages.push(json!({"role": "system", "content": text}))
            }
            "human" | "user" if !text.trim().is_empty() => {
                let message = json!({"role": "user", "content": text});
                seen += 1;
                if seen == 1 {
                    messages.push(message);
                } else {
                    follow_ups.push(message);
                }
                if seen >= turns.max(1) {
                    break;
                }
            }
            _ => {}
        }
    }
    if seen == 0 {
        return Err("no turn of the human has any text".to_string());
    }
    Ok((messages, follow_ups))
}

fn open_ai(messages: Value) -> Result<Vec<Value>, String> {
    let Value::Array(mut messages) = messages else { return Err("`messages` is no list".to_string()) };
    // The last answer is the server's to write.
    while messages
        .last()
        .is_some_and(|message| message.get("role").and_then(Value::as_str) == Some("assistant"))
    {
        messages.pop();
    }
    if messages.is_empty() {
        return Err("`messages` holds nothing to answer".to_string());
    }
    Ok(messages)
}

fn share_gpt_conversation(id: &str) -> &str {
    match id.rsplit_once('_') {
        Some((conversation, part))
            if !conversation.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) =>
        {
            conversation
        }
        _ => id,
    }
}

/// An id that may stand in a header: itself where it is short visible ASCII, else a digest of it.
fn header_safe(id: &str) -> String {
    let safe = id.len() <= 200 && id.trim() == id && id.bytes().all(|b| (0x20..0x7f).contains(&b));
    if safe && !id.is_empty() {
        return id.to_string();
    }
    use sha2::{Digest, Sha256};
    format!("sha256-{}", hex(&Sha256::digest(id.as_bytes())[..16]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str, turns: usize) -> Vec<Result<ReplayItem, BadRow>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        std::fs::write(&path, text).unwrap();
        Dataset::open(&path, DatasetOptions { turns }).unwrap().collect()
    }

    #[test]
    fn share_gpt_rows() {
        let text = r#" [
  {"id": "abc_0", "model": "x", "conversations": [{"from":"system","value":"Be brief."},
     {"from":"human","value":"One ] \" , {"},{"from":"gpt","value":"no"},{"from":"human","value":"Two"}]},
  {"id": "abc_7", "conversations": [{"from":"gpt","value":"only an answer"}]},
  {"id": "abc_0", "conversations": [{"from":"human","value":"Again"}]}
]"#;
        let rows = read(text, 1);
        assert_eq!(rows.len(), 3);
        let first = rows[0].as_ref().unwrap();
        assert_eq!((first.id.as_str(), first.conversation_id.as_str(), first.line), ("abc_0", "abc", 2));
        assert_eq!(first.messages[1], json!({"role": "user", "content": "One ] \" , {"}));
        assert!(first.follow_ups.is_empty() && first.parameters.is_empty());
        let bad = rows[1].as_ref().unwrap_err();
        assert_eq!((bad.line, bad.id.as_deref()), (4, Some("abc_7")));
        assert_eq!(rows[2].as_ref().unwrap().id, "abc_0#2");
        let turns = read(text, 5);
        assert_eq!(turns[0].as_ref().unwrap().follow_ups, [json!({"role": "user", "content": "Two"})]);
    }

    #[test]
    fn json_lines() {
        let text = concat!(
            "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":\"x\"}],\"top_p\":0.5}\n",
            "\n{broken\n",
            "{\"id\":7,\"conversation_id\":\"é\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
        );
        let rows = read(text, 1);
        let first = rows[0].as_ref().unwrap();
        assert_eq!((first.id.as_str(), first.messages.len()), ("row-1", 1));
        assert_eq!(first.parameters["top_p"], json!(0.5));
        assert_eq!(rows[1].as_ref().unwrap_err().line, 3);
        let last = rows[2].as_ref().unwrap();
        assert_eq!((last.id.as_str(), last.line), ("7", 4));
        assert!(last.conversation_id.starts_with("sha256-"));
    }

    #[test]
    fn a_cut_off_array_gives_its_whole_rows() {
        let rows = read(r#"[{"id":"a","conversations":[{"from":"human","value":"x"}]},{"id":"b","conv"#, 1);
        assert!(rows[0].is_ok());
        assert!(rows[1].as_ref().unwrap_err().reason.contains("cut off"));
        assert_eq!(rows.len(), 2);
    }

    #[test]
    fn other_files_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        for text in ["", "id,text\n", "\"text\""] {
            std::fs::write(&path, text).unwrap();
            let error = Dataset::open(&path, DatasetOptions::default()).unwrap_err();
            assert!(matches!(error, ReplayError::Format { .. }), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_survives_the_splitting(texts in prop::collection::vec("\\PC{1,30}x", 1..20)) {
            let rows: Vec<Value> = texts
                .iter()
                .map(|text| json!({"conversations": [{"from": "human", "value": text}]}))
                .collect();
            let read_back: Vec<String> = read(&serde_json::to_string_pretty(&rows).unwrap(), 1)
                .into_iter()
                .map(|row| row.unwrap().messages[0]["content"].as_str().unwrap().to_string())
                .collect();
            prop_assert_eq!(read_back, texts);
        }

        #[test]
        fn no_bytes_panic_or_loop(text in "[\\[{][\\[\\]{}\",:a\\\\ \n]{0,60}") {
            prop_assert!(read(&text, 1).len() <= 100);
        }
    }
}
