use super::*;
use crate::openai::ids::{StreamRestorer, restore_json};
use proptest::prelude::*;

const SAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/samples");

/// Status, content type and body of a sample.
fn sample(name: &str) -> (u16, String, Vec<u8>) {
    sample_in(SAMPLES, name)
}

fn sample_in(directory: &str, name: &str) -> (u16, String, Vec<u8>) {
    let bytes = std::fs::read(format!("{directory}/{name}")).unwrap();
    if name.ends_with(".sse") {
        return (200, "text/event-stream".to_owned(), bytes);
    }
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let content_type = head.lines().find_map(|line| line.strip_prefix("content-type: ")).unwrap_or_default();
    (status, content_type.to_owned(), bytes[end + 4..].to_vec())
}

fn answer(name: &str) -> Answer {
    let (status, content_type, body) = sample(name);
    Answer::read(Dialect::Choices, status, Some(&content_type), &body)
}

fn response_names() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(SAMPLES)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.ends_with(".req.json"))
        .collect();
    names.sort();
    assert!(names.len() > 30, "the samples are there");
    names
}

#[test]
fn a_streamed_and_a_whole_answer_are_the_same() {
    for (whole, streamed) in [
        ("chat", "chat_stream"),
        ("chat_logprobs", "chat_logprobs_stream"),
        ("reason_chat_end", "reason_chat_stream"),
        ("reason_switch", "reason_switch_stream"),
        ("tools_named", "tools_named_stream"),
        ("completion_rtid", "completion_rtid_stream"),
    ] {
        let first = answer(&format!("{whole}.resp.http"));
        let second = answer(&format!("{streamed}.resp.http"));
        assert_eq!(first.choices.len(), 1, "{whole}");
        let (mut left, mut right) = (first.choices[0].clone(), second.choices[0].clone());
        // The streamed requests of some pairs did not ask for ids or asked for fewer tokens.
        if left.token_ids.is_none() != right.token_ids.is_none() {
            (left.token_ids, left.prompt_token_ids) = (None, None);
            (right.token_ids, right.prompt_token_ids) = (None, None);
        }
        assert_eq!(left, right, "{whole}");
        assert!(first.complete && second.complete);
    }
}

#[test]
fn ids_usage_and_choices_are_found() {
    let chat = answer("chat_rtid_stream.resp.http");
    assert_eq!(chat.choices[0].token_ids.as_deref(), Some(&[19556, 665, 17, 339][..]));
    assert_eq!(chat.choices[0].prompt_token_ids.as_ref().unwrap().len(), 33);
    assert_eq!((chat.usage.prompt_tokens, chat.usage.completion_tokens), (Some(33), Some(4)));
    assert_eq!(chat.model.as_deref(), Some("smollm2"));
    let two = answer("chat_n2_stream.resp.http");
    assert_eq!(two.choices.len(), 2);
    assert!(
        two.choices.iter().all(|choice| choice.prompt_token_ids.is_some() && choice.finish_reason.is_some())
    );
    let reasoned = answer("reason_chat_end.resp.http");
    assert!(answer("reason_chat.resp.http").choices[0].reasoning.is_some());
    assert_eq!(reasoned.usage.cached_tokens, Some(0));
    assert_eq!(reasoned.usage.reasoning_tokens, Some(0));
}

#[test]
fn endings_are_told_apart() {
    let status = |name: &str, transfer| {
        let found = answer(name);
        found.status_of(found.choices.first(), transfer)
    };
    assert_eq!(status("chat_stream.resp.http", Status::Ok), Status::Length);
    assert_eq!(status("chat_stream.resp.http", Status::Cancelled), Status::Length);
    assert_eq!(status("disconnect.resp.http", Status::Cancelled), Status::Cancelled);
    assert_eq!(status("disconnect.resp.http", Status::Ok), Status::Truncated);
    assert_eq!(status("engine_death_stream.sse", Status::Ok), Status::UpstreamError);
    assert_eq!(status("pause_abort_stream.sse", Status::Ok), Status::Aborted);
    assert_eq!(status("reason_switch.resp.http", Status::Ok), Status::Ok);
    assert_eq!(status("err_model.resp.http", Status::ClientError), Status::ClientError);
    assert!(answer("engine_death_stream.sse").error_json.unwrap().contains("EngineCore"));
    assert!(answer("err_model.resp.http").error_json.unwrap().contains("NotFoundError"));
    let stopped = br#"{"choices":[{"text":"a","finish_reason":"stop","stop_reason":"2"},{"index":1,"finish_reason":"stop","stop_reason":7}]}"#;
    let found = Answer::read(Dialect::Choices, 200, Some("application/json"), stopped);
    assert_eq!(found.choices[0].stop_reason.as_deref(), Some("2"));
    assert_eq!(found.choices[1].stop_reason.as_deref(), Some("7"));
    assert_eq!(found.status_of(found.choices.first(), Status::Ok), Status::Ok);
}

#[test]
fn tool_calls_are_merged_by_index() {
    let whole = br#"{"choices":[{"index":0,"finish_reason":"tool_calls","message":{"role":"assistant","content":null,"tool_calls":[
        {"id":"a","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}},
        {"id":"b","type":"function","function":{"name":"g","arguments":"{}"}}]}}]}"#;
    let stream = br#"data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}

data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"f","arguments":""}}]}}]}

data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"x\":"}},{"index":1,"function":{"arguments":"{"},"type":"function","id":"b"}]}}]}

data: {"choices":[{"index":0,"finish_reason":"tool_calls","delta":{"tool_calls":[{"index":1,"function":{"name":"g","arguments":"}"}},{"index":0,"function":{"arguments":"1}"}}]}}]}

data: [DONE]
"#;
    let first = Answer::read(Dialect::Choices, 200, Some("application/json"), whole);
    let second = Answer::read(Dialect::Choices, 200, Some("text/event-stream; charset=utf-8"), stream);
    assert_eq!(first, second);
    assert_eq!(
        first.choices[0].tool_calls_json.as_deref(),
        Some(
            r#"[{"id":"a","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}},{"id":"b","type":"function","function":{"name":"g","arguments":"{}"}}]"#
        )
    );
}

#[test]
fn both_reasoning_names_are_read_once() {
    for body in [
        r#"{"choices":[{"message":{"reasoning_content":"why","refusal":"no"}}]}"#,
        r#"{"choices":[{"message":{"reasoning":"why","reasoning_content":"why","refusal":"no"}}]}"#,
        r#"{"choices":[{"message":{"reasoning":null,"reasoning_content":"why","refusal":"no"}}]}"#,
    ] {
        let choice = Answer::read(Dialect::Choices, 200, None, body.as_bytes()).choices.remove(0);
        assert_eq!((choice.reasoning.as_deref(), choice.refusal.as_deref()), (Some("why"), Some("no")));
    }
}

#[test]
fn a_restored_answer_has_no_ids_and_is_else_the_same() {
    for name in response_names() {
        let (status, content_type, body) = sample(&name);
        let before = Answer::read(Dialect::Choices, status, Some(&content_type), &body);
        let restored = if is_event_stream(Some(&content_type)) {
            restore_stream(&body, body.len())
        } else {
            restore_json(&body)
        };
        let after = Answer::read(Dialect::Choices, status, Some(&content_type), &restored);
        let mut expected = before;
        for choice in &mut expected.choices {
            (choice.token_ids, choice.prompt_token_ids) = (None, None);
        }
        assert_eq!(after, expected, "{name}");
    }
}

fn restore_stream(body: &[u8], chunk: usize) -> Vec<u8> {
    let mut restorer = StreamRestorer::new(1 << 20);
    let mut out: Vec<u8> = body.chunks(chunk.max(1)).flat_map(|piece| restorer.push(piece)).collect();
    out.extend(restorer.finish());
    out
}

/// Every streamed sample of every dialect.
fn streams() -> &'static [(String, Dialect, Vec<u8>)] {
    static STREAMS: std::sync::OnceLock<Vec<(String, Dialect, Vec<u8>)>> = std::sync::OnceLock::new();
    STREAMS.get_or_init(|| {
        let mut found = Vec::new();
        let choices = response_names().into_iter().map(|name| (Dialect::Choices, sample(&name), name));
        let others = dialect_names().into_iter().map(|name| (dialect_of(&name), dialect_sample(&name), name));
        for (dialect, (_, content_type, body), name) in choices.chain(others) {
            if is_event_stream(Some(&content_type)) {
                found.push((name, dialect, body));
            }
        }
        assert!(found.len() > 20, "the streams are there");
        found
    })
}

fn data_of(chunks: impl Iterator<Item = impl AsRef<[u8]>>) -> (Vec<Vec<u8>>, Vec<u8>) {
    let mut decoder = Decoder::new();
    let mut restorer = StreamRestorer::new(1 << 20);
    let (mut data, mut restored) = (Vec::new(), Vec::new());
    for chunk in chunks {
        data.extend(decoder.push(chunk.as_ref()).into_iter().filter_map(|event| event.data));
        restored.extend(restorer.push(chunk.as_ref()));
    }
    data.extend(decoder.finish().and_then(|event| event.data));
    restored.extend(restorer.finish());
    (data, restored)
}

/// `text/event-stream` as another server may write it: other line ends, comments, fields that mean nothing here.
fn rewritten(body: &[u8], line_end: &str, comment: &str) -> Vec<u8> {
    let text = std::str::from_utf8(body).unwrap();
    let mut other = String::from("\u{feff}");
    for line in text.lines() {
        if !comment.is_empty() && line.starts_with("data:") {
            other.push_str(comment);
            other.push_str(line_end);
        }
        other.push_str(line);
        other.push_str(line_end);
    }
    other.into_bytes()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// What is recorded is made of the events' data alone, and what the client gets of the restored bytes.
    #[test]
    fn any_cutting_of_any_sample_gives_the_same(
        which in any::<prop::sample::Index>(),
        cuts in prop::collection::vec(1usize..200, 1..40),
    ) {
        let (_, _, body) = which.get(streams());
        let whole = data_of([body].into_iter());
        let mut rest = body.as_slice();
        let mut chunks = Vec::new();
        for cut in cuts.iter().cycle() {
            if rest.is_empty() { break; }
            let (head, tail) = rest.split_at((*cut).min(rest.len()));
            chunks.push(head);
            rest = tail;
        }
        prop_assert_eq!(data_of(chunks.into_iter()), whole);
    }
}

proptest! {
    #[test]
    fn any_spelling_of_any_sample_is_the_same_answer(
        which in any::<prop::sample::Index>(),
        line_end in prop::sample::select(vec!["\n", "\r\n", "\r"]),
        comment in prop::sample::select(vec!["", ":", ": ping", "event: x", "id: 7", "retry: 9", "unknown"]),
    ) {
        let (name, dialect, body) = which.get(streams());
        let read = |bytes: &[u8]| Answer::read(*dialect, 200, Some("text/event-stream"), bytes);
        prop_assert_eq!(read(&rewritten(body, line_end, comment)), read(body), "{}", name);
    }

    /// PROPTEST_CASES makes it a longer search.
    #[test]
    fn no_bytes_make_it_panic(
        pieces in prop::collection::vec(prop::sample::select(vec![
            "data: ", "{", "}", "[", "]", "\"choices\":", "\"delta\":", "\"tool_calls\":", "\"index\":", "-1", "1e99", "null",
            "\"x\"", ",", "\n", "\n\n", "\r", "\"logprobs\":", "\"usage\":", "\"token_ids\":", "99999999999", "é", "[DONE]",
            "\"type\":", "\"message_start\"", "\"message\":", "\"content_block_delta\"", "\"response.output_item.added\"", "\"item\":",
            "\"response.completed\"", "\"response\":", "\"output\":", "\"output_index\":", "\"content\":", "\"input\":", "\"system\":",
            "{\"type\":\"content_block_start\",\"index\":18446744073709551615,\"content_block\":", "{\"type\":\"function_call\"}",
        ]), 0..40),
    ) {
        let text: String = pieces.concat();
        for dialect in [Dialect::Choices, Dialect::Responses, Dialect::Messages] {
            for content_type in ["text/event-stream", "application/json"] {
                Answer::read(dialect, 200, Some(content_type), text.as_bytes());
            }
            crate::openai::RequestView::read(dialect, text.as_bytes());
        }
        restore_json(text.as_bytes());
        restore_stream(text.as_bytes(), 3);
        crate::openai::ids::ask_for_ids(text.as_bytes());
    }
}

/// JSON of what may stand in an answer, well formed or not.
fn parts_of_answers() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        Just(Value::from(true)),
        Just(Value::from(0)),
        Just(Value::from(1)),
        Just(Value::from(-1.5)),
        Just(Value::from("")),
        Just(Value::from("error")),
        Just(Value::from("some \"text\" \u{e9}")),
    ];
    leaf.prop_recursive(5, 60, 6, |inner| {
        let keys = vec![
            "object",
            "error",
            "id",
            "model",
            "system_fingerprint",
            "usage",
            "prompt_tokens",
            "prompt_token_ids",
            "choices",
            "index",
            "finish_reason",
            "stop_reason",
            "token_ids",
            "text",
            "logprobs",
            "content",
            "delta",
            "message",
            "role",
            "refusal",
            "reasoning",
            "reasoning_content",
            "tool_calls",
            "function",
            "arguments",
            "name",
            "other",
        ];
        let members = prop::collection::vec((prop::sample::select(keys), inner.clone()), 0..6);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..10).prop_map(Value::from),
            members.prop_map(|members| members
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect()),
            inner.clone().prop_map(|part| serde_json::json!({ "choices": [part] })),
            inner.prop_map(|part| serde_json::json!({ "choices": [{ "index": 0, "delta": part }] })),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5_000))]

    #[test]
    fn the_usual_shape_reads_as_the_general_one_does(parts in prop::collection::vec(parts_of_answers(), 1..4)) {
        let (mut usual, mut general) = (AnswerBuilder::default(), AnswerBuilder::default());
        for part in &parts {
            let text = part.to_string();
            usual.event(text.as_bytes());
            general.general_event(text.as_bytes());
            let (mut usual_body, mut general_body) = (AnswerBuilder::default(), AnswerBuilder::default());
            usual_body.body(200, text.as_bytes());
            general_body.general_body(200, text.as_bytes());
            prop_assert_eq!(usual_body.finish(), general_body.finish());
        }
        prop_assert_eq!(usual.finish(), general.finish());
    }
}

#[test]
fn what_vllm_streams_is_of_the_usual_shape_but_for_errors() {
    let mut usual = 0;
    for (name, dialect, body) in streams() {
        if *dialect != Dialect::Choices {
            continue;
        }
        let mut decoder = Decoder::new();
        for event in decoder.push(body) {
            let data = event.data.unwrap_or_default();
            if data != b"[DONE]" && !data.is_empty() {
                let tells_an_error = data.windows(7).any(|part| part == b"\"error\"");
                assert!(Piece::read(&data).is_some() || tells_an_error, "{name}");
                usual += 1;
            }
        }
    }
    assert!(usual > 50, "{usual}");
}

// ---- The other dialects ----

const DIALECT_SAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/dialects");

fn dialect_of(name: &str) -> Dialect {
    if name.starts_with("responses") { Dialect::Responses } else { Dialect::Messages }
}

fn dialect_sample(name: &str) -> (u16, String, Vec<u8>) {
    sample_in(DIALECT_SAMPLES, name)
}

fn dialect_names() -> Vec<String> {
    let entries = std::fs::read_dir(DIALECT_SAMPLES).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".resp.http"))
        .collect();
    names.sort();
    assert!(names.len() > 20, "the samples are there");
    names
}

fn dialect_answer(name: &str) -> Answer {
    let (status, content_type, body) = dialect_sample(&format!("{name}.resp.http"));
    Answer::read(dialect_of(name), status, Some(&content_type), &body)
}

#[test]
fn a_streamed_and_a_whole_answer_are_the_same_in_each_dialect() {
    for name in [
        "responses_text",
        "responses_items",
        "responses_logprobs",
        "anthropic_text",
        "anthropic_blocks",
        "anthropic_stop",
        "anthropic_reason",
    ] {
        let (whole, streamed) = (dialect_answer(name), dialect_answer(&format!("{name}_stream")));
        assert!(whole.complete && streamed.complete, "{name}");
        assert_eq!(whole.choices.len(), 1, "{name}");
        let (mut left, mut right) = (whole.choices[0].clone(), streamed.choices[0].clone());
        if name == "responses_logprobs" {
            // vLLM's stream leaves out the bytes of tokens here and there.
            assert!(left.logprobs_json.take().is_some() && right.logprobs_json.take().is_some());
        }
        assert_eq!(left, right, "{name}");
        assert_eq!(whole.usage.completion_tokens, streamed.usage.completion_tokens, "{name}");
        assert_eq!(whole.usage.prompt_tokens, streamed.usage.prompt_tokens, "{name}");
        assert!(left.content.is_some() || left.reasoning.is_some(), "{name}");
        // Its last event alone holds a whole response; what its pieces come to must be the same.
        if dialect_of(name) == Dialect::Responses {
            let (_, content_type, body) = dialect_sample(&format!("{name}_stream.resp.http"));
            let end = body.windows(25).position(|window| window == b"event: response.completed").unwrap();
            let pieces = Answer::read(Dialect::Responses, 200, Some(&content_type), &body[..end]);
            let mut joined = pieces.choices[0].clone();
            joined.finish_reason = right.finish_reason.clone();
            joined.logprobs_json = right.logprobs_json.clone();
            assert_eq!(joined, right, "{name}");
            assert!(!pieces.complete);
        }
    }
}

#[test]
fn what_the_other_dialects_say_is_found() {
    let ending = |name: &str| {
        let found = dialect_answer(name);
        let status = if found.choices.is_empty() { Status::ClientError } else { Status::Ok };
        let choice = found.choices.first();
        (choice.and_then(|choice| choice.finish_reason.clone()), found.status_of(choice, status))
    };
    let reason = |text: &str| Some(text.to_owned());
    assert_eq!(ending("responses_text"), (reason("max_output_tokens"), Status::Length));
    assert_eq!(ending("responses_items_stream"), (reason("completed"), Status::Ok));
    assert_eq!(ending("anthropic_text_stream"), (reason("max_tokens"), Status::Length));
    assert_eq!(ending("anthropic_stop"), (reason("stop_sequence"), Status::Ok));
    assert_eq!(ending("anthropic_error_stream"), (None, Status::ClientError));
    assert_eq!(ending("responses_error"), (None, Status::ClientError));
    assert_eq!(dialect_answer("anthropic_stop").choices[0].stop_reason.as_deref(), Some("."));
    assert!(dialect_answer("responses").choices[0].reasoning.is_some());
    assert!(dialect_answer("anthropic_reason").choices[0].reasoning.is_some());
    for name in ["responses_tools", "responses_tools_stream", "anthropic_tools_stream"] {
        let calls = dialect_answer(name).choices[0].tool_calls_json.clone().unwrap();
        assert!(calls.contains(r#""function":{"name":"get_weather","arguments":"#), "{name}: {calls}");
    }
    assert!(dialect_answer("anthropic_error").error_json.unwrap().contains("NotFoundError"));
    assert!(dialect_answer("responses_error").error_json.unwrap().contains("NotFoundError"));
}
