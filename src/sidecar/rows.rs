//! From an exchange on the wire to rows of the record, and to what the collector must know of it.

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::openai::{Choice, RequestView};
use crate::proxy::{Exchange, Parsed};
use crate::record::{Privacy, Record, messages_from_json};
use crate::states::{ChoiceText, RequestSummary};
use crate::store::{hex, is_held_out};

/// `states_status` of a request whose states cannot be told from others'.
const STATES_WITHOUT_ID: &str = "no_request_id";

/// How rows are made.
pub struct RowOptions {
    pub held_out_fraction: f64,
    pub keep_raw: bool,
    /// The rows wait for token ids from the plugin, so the answer carries none.
    pub ids_from_plugin: bool,
    pub privacy: Privacy,
    /// The header that names the tenant.
    pub tenant_header: Option<String>,
}

/// The rows of one exchange (always at least one) and, where the plugin gives states, what the collector expects.
pub fn rows(exchange: &Exchange, options: &RowOptions) -> (Vec<Record>, RequestSummary) {
    let parsed = exchange.parse();
    let request = &parsed.request;
    let messages: Option<Value> =
        request.messages_json.as_deref().and_then(|text| serde_json::from_str(text).ok());
    let conversation_id = conversation_of(exchange, request, messages.as_ref());
    let mut base = Record::new(
        exchange.request_id.clone(),
        exchange.endpoint.path(),
        exchange.received_at.as_microsecond(),
    );
    base.first_byte_at = exchange.first_byte_at.map(|time| time.as_microsecond());
    base.finished_at = Some(exchange.finished_at.as_microsecond());
    base.model = request.model.clone().or_else(|| parsed.answer.model.clone());
    base.stream = request.stream;
    base.http_status = exchange.http_status;
    base.messages = messages.as_ref().and_then(messages_from_json);
    base.prompt = request.prompt_json.as_deref().map(plain_or_json);
    base.tools_json = request.tools_json.clone();
    base.params_json = request.params_json.clone();
    let usage = &parsed.answer.usage;
    base.prompt_tokens = signed(usage.prompt_tokens);
    base.source = exchange.source;
    let tenant = options.tenant_header.as_ref().and_then(|name| exchange.request_headers.get(name));
    base.tenant_hash = tenant.map(|value| options.privacy.tenant_hash(value.as_bytes()));
    if options.ids_from_plugin && !exchange.endpoint.keeps_request_id() {
        base.states_status = Some(STATES_WITHOUT_ID.to_owned());
    }
    if options.keep_raw {
        base.raw_request = Some(exchange.request_body.to_vec());
        base.raw_response = Some(exchange.response_body.to_vec());
    }
    let base = base.with_conversation(Some(conversation_id.clone()), options.held_out_fraction);

    let choices = &parsed.answer.choices;
    let mut records = Vec::with_capacity(choices.len().max(1));
    for choice in choices {
        let mut record = base.for_choice(u32::try_from(choice.index).unwrap_or(u32::MAX));
        fill_choice(&mut record, choice, &parsed, options);
        // Usage is the whole answer's: it is a choice's own only where there is one.
        if choices.len() == 1 {
            record.completion_tokens = signed(usage.completion_tokens);
            record.cached_tokens = signed(usage.cached_tokens);
            record.reasoning_tokens = signed(usage.reasoning_tokens);
        }
        records.push(record);
    }
    if records.is_empty() {
        let mut record = base;
        record.status = parsed.status_of(None);
        records.push(record);
    }
    let redacted = options.privacy.redact(&mut records);
    let has_states = exchange.endpoint.keeps_request_id() && !redacted;
    let summary = RequestSummary {
        request_id: exchange.request_id.clone(),
        held_out: is_held_out(&conversation_id, options.held_out_fraction),
        conversation_id,
        source: exchange.source.as_str().to_owned(),
        status: exchange.transfer.as_str().to_owned(),
        n: usize::try_from(request.n).unwrap_or(1).max(1),
        // None: files of states are deleted as they come.
        choices: choices.iter().filter(|_| has_states).map(choice_text).collect(),
    };
    (records, summary)
}

fn fill_choice(record: &mut Record, choice: &Choice, parsed: &Parsed, options: &RowOptions) {
    record.status = parsed.status_of(Some(choice));
    record.finish_reason = choice.finish_reason.clone();
    record.reasoning = choice.reasoning.clone();
    record.content = choice.content.clone();
    record.tool_calls_json = choice.tool_calls_json.clone();
    record.refusal = choice.refusal.clone();
    record.logprobs_json = choice.logprobs_json.clone();
    if !options.ids_from_plugin {
        record.prompt_token_ids = choice.prompt_token_ids.as_deref().map(signed_ids);
        record.output_token_ids = choice.token_ids.as_deref().map(signed_ids);
    }
}

fn choice_text(choice: &Choice) -> ChoiceText {
    ChoiceText {
        content: choice.content.clone().unwrap_or_default(),
        reasoning: choice.reasoning.clone().unwrap_or_default(),
        has_tool_calls: choice.tool_calls_json.is_some(),
    }
}

/// The client's own conversation id; else one made from the messages up to the first of the user, which all turns of a
/// conversation share, so that they land on the same side of the split.
fn conversation_of(exchange: &Exchange, request: &RequestView, messages: Option<&Value>) -> String {
    if let Some(id) = &exchange.conversation_id {
        return id.clone();
    }
    let opening = messages.and_then(opening_of);
    let key = opening.or_else(|| request.prompt_json.clone()).unwrap_or_else(|| exchange.request_id.clone());
    format!("opening-{}", hex(&Sha256::digest(key.as_bytes())[..12]))
}

fn opening_of(messages: &Value) -> Option<String> {
    let messages = messages.as_array()?;
    let first_user = messages.iter().position(|message| message["role"] == "user")?;
    serde_json::to_string(&messages[..=first_user]).ok()
}

/// The text of a JSON string; any other JSON as it is.
fn plain_or_json(json: &str) -> String {
    serde_json::from_str::<String>(json).unwrap_or_else(|_| json.to_owned())
}

fn signed(count: Option<u64>) -> Option<i64> {
    count.and_then(|count| i64::try_from(count).ok())
}

pub(super) fn signed_ids(ids: &[u32]) -> Vec<i32> {
    ids.iter().map(|id| i32::try_from(*id).unwrap_or(i32::MAX)).collect()
}
