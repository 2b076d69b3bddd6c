use super::*;
use crate::openai::ids::{StreamRestorer, restore_json};
use proptest::prelude::*;

const SAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/samples");

/// Status, content type and body of a sample.
fn sample(name: &str) -> (u16, String, Vec<u8>) {
    let bytes = std::fs::read(format!("{SAMPLES}/{name}")).unwrap();
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
    Answer::from_response(status, Some(&content_type), &body)
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
    let found = Answer::from_response(200, Some("application/json"), stopped);
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
    let first = Answer::from_response(200, Some("application/json"), whole);
    let second = Answer::from_response(200, Some("text/event-stream; charset=utf-8"), stream);
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
        let choice = Answer::from_response(200, None, body.as_bytes()).choices.remove(0);
        assert_eq!((choice.reasoning.as_deref(), choice.refusal.as_deref()), (Some("why"), Some("no")));
    }
}

#[test]
fn a_restored_answer_has_no_ids_and_is_else_the_same() {
    for name in response_names() {
        let (status, content_type, body) = sample(&name);
        let before = Answer::from_response(status, Some(&content_type), &body);
        let restored = if is_event_stream(Some(&content_type)) {
            restore_stream(&body, body.len())
        } else {
            restore_json(&body)
        };
        let after = Answer::from_response(status, Some(&content_type), &restored);
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_cutting_of_any_sample_gives_the_same(
        which in any::<prop::sample::Index>(),
        cuts in prop::collection::vec(1usize..200, 1..40),
    ) {
        let names = response_names();
        let (status, content_type, body) = sample(&names[which.index(names.len())]);
        prop_assume!(is_event_stream(Some(&content_type)));
        let whole = Answer::from_response(status, Some(&content_type), &body);
        let restored_whole = restore_stream(&body, body.len());
        let mut decoder = Decoder::new();
        let mut restorer = StreamRestorer::new(1 << 20);
        let mut builder = AnswerBuilder::default();
        let mut restored = Vec::new();
        let mut events = Vec::new();
        let mut rest = body.as_slice();
        for cut in cuts.iter().cycle() {
            if rest.is_empty() { break; }
            let (head, tail) = rest.split_at((*cut).min(rest.len()));
            events.extend(decoder.push(head));
            restored.extend(restorer.push(head));
            rest = tail;
        }
        events.extend(decoder.finish());
        restored.extend(restorer.finish());
        for data in events.iter().filter_map(|event| event.data.as_ref()) {
            builder.event(data);
        }
        prop_assert_eq!(builder.finish(), whole);
        prop_assert_eq!(restored, restored_whole);
    }

    #[test]
    fn no_bytes_make_it_panic(
        pieces in prop::collection::vec(prop::sample::select(vec![
            "data: ", "{", "}", "[", "]", "\"choices\":", "\"delta\":", "\"tool_calls\":", "\"index\":", "-1", "1e99", "null",
            "\"x\"", ",", "\n", "\n\n", "\r", "\"logprobs\":", "\"usage\":", "\"token_ids\":", "99999999999", "é", "[DONE]",
        ]), 0..40),
    ) {
        let text: String = pieces.concat();
        for content_type in ["text/event-stream", "application/json"] {
            Answer::from_response(200, Some(content_type), text.as_bytes());
        }
        restore_json(text.as_bytes());
        restore_stream(text.as_bytes(), 3);
        crate::openai::RequestView::parse(text.as_bytes());
        crate::openai::ids::ask_for_ids(text.as_bytes());
    }
}
