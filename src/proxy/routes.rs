//! Which route a request is for.

use hyper::Method;

use super::observer::Endpoint;

/// What the proxy does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Recorded(Endpoint),
    /// Acts on the server or tells of its inside: not for clients.
    Control,
    Other,
}

impl Route {
    /// The label in metrics.
    pub(super) fn class(self) -> &'static str {
        match self {
            Route::Recorded(Endpoint::ChatCompletions) => "chat",
            Route::Recorded(Endpoint::Completions) => "completions",
            Route::Control => "control",
            Route::Other => "other",
        }
    }
}

/// vLLM 0.32's routes that act on the server, and those of the development and RL modes, by their last segment: vLLM
/// serves some of them under several prefixes, and `--root-path` adds any other.
const CONTROL: [&str; 30] = [
    "abort_requests",
    "collective_rpc",
    "finish_weight_update",
    "get_world_size",
    "init_weight_transfer_engine",
    "is_paused",
    "is_scaling_elastic_ep",
    "is_sleeping",
    "kv_event_sources",
    "load_lora_adapter",
    "pause",
    "release_kv_cache_memory",
    "reset_encoder_cache",
    "reset_mm_cache",
    "reset_prefix_cache",
    "resume",
    "scale_elastic_ep",
    "server_info",
    "shutdown_weight_transfer_engine",
    "sleep",
    "start_draft_weight_update",
    "start_profile",
    "start_weight_update",
    "stop_profile",
    "unload_lora_adapter",
    "update_weight_version",
    "update_weights",
    "wake_up",
    "weight_checker",
    "weight_info",
];

/// Everything below these is control.
const CONTROL_TREES: [&str; 1] = ["fault_tolerance"];

/// Percent-encodings inside each other that are still read.
const MOST_LAYERS: usize = 4;

/// Judges a request by its method and the path as it stands in the request line. `extra` names more control routes.
pub(super) fn route(method: &Method, path: &str, extra: &[String]) -> Route {
    let Some(segments) = normalised(path) else {
        return Route::Control;
    };
    if is_control(&segments, extra) {
        return Route::Control;
    }
    if method != Method::POST {
        return Route::Other;
    }
    // vLLM decodes the path once and compares it exactly; any other spelling is a 404 there, and nothing to record.
    let decoded = percent_decoded(path.as_bytes());
    for endpoint in [Endpoint::ChatCompletions, Endpoint::Completions] {
        if decoded == endpoint.path().as_bytes() {
            return Route::Recorded(endpoint);
        }
    }
    Route::Other
}

fn is_control(segments: &[String], extra: &[String]) -> bool {
    let Some(last) = segments.last() else {
        return false;
    };
    if CONTROL.contains(&last.as_str()) {
        return true;
    }
    if segments.iter().any(|segment| CONTROL_TREES.contains(&segment.as_str())) {
        return true;
    }
    extra
        .iter()
        .filter_map(|path| normalised(path))
        .any(|named| !named.is_empty() && segments.ends_with(&named))
}

/// The path's segments as the most generous server could read them: decoded to the end, lower case, without empty and
/// dot segments, path parameters and stray spaces, with backslashes as separators. None for a path that is encoded
/// again and again: no honest client does that, and each layer costs a pass.
fn normalised(path: &str) -> Option<Vec<String>> {
    let mut bytes = path.as_bytes().to_vec();
    let mut layers = 0;
    loop {
        let decoded = percent_decoded(&bytes);
        if decoded == bytes {
            break;
        }
        if layers == MOST_LAYERS {
            return None;
        }
        layers += 1;
        bytes = decoded;
    }
    let text = String::from_utf8_lossy(&bytes).replace('\\', "/").to_lowercase();
    let before_query = text.split(['?', '#']).next().unwrap_or_default();
    let mut segments: Vec<String> = Vec::new();
    for raw in before_query.split('/') {
        let segment = raw.split(';').next().unwrap_or_default();
        let trimmed = segment.trim_matches(|letter: char| letter.is_whitespace() || letter.is_control());
        match trimmed {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            _ => segments.push(trimmed.to_owned()),
        }
    }
    Some(segments)
}

fn percent_decoded(path: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(path.len());
    let mut position = 0;
    while let Some(&byte) = path.get(position) {
        let pair = (hex(path.get(position + 1)), hex(path.get(position + 2)));
        if byte == b'%'
            && let (Some(high), Some(low)) = pair
        {
            decoded.push(high * 16 + low);
            position += 3;
            continue;
        }
        decoded.push(byte);
        position += 1;
    }
    decoded
}

fn hex(digit: Option<&u8>) -> Option<u8> {
    let value = char::from(*digit?).to_digit(16)?;
    u8::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_is_seen_in_any_spelling() {
        for path in [
            "/pause",
            "//pause",
            "/pause/",
            "/PAUSE",
            "/%70ause",
            "/%2570ause",
            "/./pause",
            "/v1/../pause",
            "/v1/%2e%2e/pause",
            "/%2Fpause",
            "/v1/chat/completions/..%2f..%2f../pause",
            "/prefix/collective_rpc",
            "/\\pause",
            "/pause;x=1",
            "/pause%20",
            "/pause%00",
            "/pause%3Fmode=abort",
            "/pause%23x",
            "/v1/load_lora_adapter",
            "/inference/v1/abort_requests",
            "/fault_tolerance/apply",
            "/%25252525252561",
            "/start_draft_weight_update",
        ] {
            for method in [Method::GET, Method::POST, Method::OPTIONS] {
                assert_eq!(route(&method, path, &[]), Route::Control, "{path}");
            }
        }
    }

    #[test]
    fn inference_is_not_control() {
        for path in [
            "/",
            "",
            "*",
            "/v1/models",
            "/health",
            "/metrics",
            "/v1/pauses",
            "/inference/v1/generate",
            "/v1/responses/resp_1/cancel",
        ] {
            assert_eq!(route(&Method::POST, path, &[]), Route::Other, "{path}");
        }
        assert_eq!(route(&Method::GET, "/metrics", &["/metrics".to_owned()]), Route::Control);
    }

    #[test]
    fn two_routes_are_recorded() {
        let chat = Route::Recorded(Endpoint::ChatCompletions);
        assert_eq!(route(&Method::POST, "/v1/chat/completions", &[]), chat);
        assert_eq!(route(&Method::POST, "/v1/chat/%63ompletions", &[]), chat);
        assert_eq!(route(&Method::POST, "/v1/completions", &[]), Route::Recorded(Endpoint::Completions));
        assert_eq!(route(&Method::GET, "/v1/completions", &[]), Route::Other);
        assert_eq!(route(&Method::POST, "/v1/completions/", &[]), Route::Other);
        assert_eq!(route(&Method::POST, "/completions", &[]), Route::Other);
    }
}
