//! Fuzz targets for what strangers' bytes reach: events, answers, requests, WAL-bound JSON edits. `cargo test` runs each for
//! a second on random input; `cargo bolero test sse --engine libfuzzer` searches by coverage for as long as one likes.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use bolero::check;
use draftsmith::openai::exchange::Answer;
use draftsmith::openai::ids::{StreamRestorer, ask_for_ids, restore_json};
use draftsmith::openai::sse::Decoder;
use draftsmith::openai::{Dialect, RequestView};

const TIME: Duration = Duration::from_secs(1);
const DIALECTS: [Dialect; 3] = [Dialect::Choices, Dialect::Responses, Dialect::Messages];

/// Bytes cut into chunks at the given distances.
fn cut<'a>(bytes: &'a [u8], cuts: &[u8]) -> Vec<&'a [u8]> {
    let mut chunks = Vec::new();
    let mut rest = bytes;
    for length in cuts {
        let (head, tail) = rest.split_at(usize::from(*length).min(rest.len()));
        chunks.push(head);
        rest = tail;
    }
    chunks.push(rest);
    chunks
}

/// The bytes that came out, and the data of the events.
fn decode(chunks: &[&[u8]]) -> (Vec<u8>, Vec<Option<Vec<u8>>>) {
    let mut decoder = Decoder::new();
    let mut events = Vec::new();
    for chunk in chunks {
        events.extend(decoder.push(chunk));
    }
    events.extend(decoder.finish());
    let raw = events.iter().flat_map(|event| event.raw.clone()).collect();
    (raw, events.into_iter().map(|event| event.data).filter(Option::is_some).collect())
}

/// However a stream is cut, every byte comes out, and the same events do.
#[test]
fn sse() {
    check!().with_type::<(Vec<u8>, Vec<u8>)>().with_test_time(TIME).for_each(|(noise, cuts)| {
        // Few letters, so that line ends and fields are frequent.
        let letters = b"data: {}\n\r\n\r\"x\xef\xbb\xbf:";
        let bytes: Vec<u8> = noise.iter().map(|byte| letters[usize::from(*byte) % letters.len()]).collect();
        let whole = decode(&[&bytes]);
        assert_eq!(whole.0, bytes);
        let in_pieces = decode(&cut(&bytes, cuts));
        assert_eq!(in_pieces.0, bytes);
        assert_eq!(in_pieces.1, whole.1);
    });
}

/// No answer makes the recorder's parser panic, and a client gets the same bytes however they come.
#[test]
fn answers() {
    check!().with_type::<(Vec<u8>, Vec<u8>)>().with_test_time(TIME).for_each(|(bytes, cuts)| {
        for dialect in DIALECTS {
            for content_type in [Some("text/event-stream"), Some("application/json"), None] {
                Answer::read(dialect, 200, content_type, bytes);
                Answer::read(dialect, 500, content_type, bytes);
            }
        }
        restore_json(bytes);
        let restore = |chunks: &[&[u8]]| {
            let mut restorer = StreamRestorer::new(1 << 20);
            let mut restored = Vec::new();
            for chunk in chunks {
                restored.extend(restorer.push(chunk));
            }
            restored.extend(restorer.finish());
            restored
        };
        assert_eq!(restore(&cut(bytes, cuts)), restore(&[bytes]));
    });
}

/// No request makes the parsers panic, and what is sent in its place is JSON if it was.
#[test]
fn requests() {
    check!().with_type::<Vec<u8>>().with_test_time(TIME).for_each(|bytes| {
        for dialect in DIALECTS {
            RequestView::read(dialect, bytes);
        }
        if let Some(edited) = ask_for_ids(bytes) {
            serde_json::from_slice::<serde_json::Value>(&edited).unwrap();
        }
    });
}
