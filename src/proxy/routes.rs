//! Which requests the client port passes, and which of them are recorded.
//!
//! By default a path passes only if it is one of vLLM's inference routes in vLLM's own spelling, so a route that a later
//! vLLM adds is closed until it is named. Where all but control is open, control is looked for in any spelling.

use hyper::Method;

use super::observer::Endpoint;
use crate::config::Routes;

/// What the proxy does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Recorded(Endpoint),
    Passed,
    Refused,
}

impl Route {
    /// The values of the label `route`.
    pub(super) const CLASSES: [&'static str; 6] =
        ["chat", "completions", "responses", "messages", "other", "refused"];

    /// Its own among [`CLASSES`](Self::CLASSES).
    pub(super) fn class(self) -> usize {
        match self {
            Route::Recorded(Endpoint::ChatCompletions) => 0,
            Route::Recorded(Endpoint::Completions) => 1,
            Route::Recorded(Endpoint::Responses) => 2,
            Route::Recorded(Endpoint::Messages) => 3,
            Route::Passed => 4,
            Route::Refused => 5,
        }
    }
}

/// vLLM 0.32's routes that answer clients; `{}` stands for one segment.
const INFERENCE: [&str; 39] = [
    "/classify",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/detokenize",
    "/generative_scoring",
    "/health",
    "/inference/v1/generate",
    "/invocations",
    "/ping",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/tokenizer_info",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/models",
    "/v1/realtime",
    "/v1/rerank",
    "/v1/responses",
    "/v1/responses/render",
    "/v1/responses/{}",
    "/v1/responses/{}/cancel",
    "/v1/score",
    "/v1/systemone",
    "/v2/embed",
    "/v2/rerank",
    "/version",
];

/// vLLM 0.32's routes that act on the server or tell of its inside, and those of the development and RL modes, by their
/// last segment: vLLM serves some of them under several prefixes, and `--root-path` adds any other.
const CONTROL: [&str; 31] = [
    "abort_requests",
    "collective_rpc",
    "finish_weight_update",
    "get_world_size",
    "init_weight_transfer_engine",
    "is_paused",
    "is_scaling_elastic_ep",
    "is_sleeping",
    "kv_event_sources",
    "load",
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

/// Control is every path with a segment that starts so: vLLM's /metrics answers to `/metricsanything` too.
const CONTROL_STARTS: [&str; 3] = ["adapters", "fault_tolerance", "metrics"];

/// Percent-encodings inside each other that are still read.
const MOST_LAYERS: usize = 4;

/// Judges a request by its method and the path as it stands in the request line. `named` are the paths that pass beside
/// those that `routes` lets through.
pub(super) fn route(method: &Method, path: &str, routes: Routes, named: &[String]) -> Route {
    // vLLM decodes the path once and compares it exactly; any other spelling is a 404 there.
    let bytes = percent_decoded(path.as_bytes());
    let decoded = String::from_utf8_lossy(&bytes);
    for endpoint in Endpoint::ALL {
        if method == Method::POST && decoded == endpoint.path() {
            return Route::Recorded(endpoint);
        }
    }
    let passes = match routes {
        Routes::Inference => INFERENCE.iter().any(|template| is_spelled_as(&decoded, template)),
        Routes::AllButControl => !is_control(path),
        Routes::All => true,
    };
    if passes || named.iter().any(|template| is_spelled_as(&decoded, template)) {
        return Route::Passed;
    }
    Route::Refused
}

/// Whether the path is the template, with a plain word in the place of each `{}`.
fn is_spelled_as(path: &str, template: &str) -> bool {
    let mut words = path.split('/');
    for expected in template.split('/') {
        let Some(word) = words.next() else {
            return false;
        };
        if word != expected && !(expected == "{}" && is_plain(word)) {
            return false;
        }
    }
    words.next().is_none()
}

/// Nothing that any server could take for a path of its own.
fn is_plain(word: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    !word.is_empty() && !word.starts_with('.') && word.bytes().all(allowed)
}

fn is_control(path: &str) -> bool {
    let Some(segments) = normalised(path) else {
        return true;
    };
    let starts = |segment: &String| CONTROL_STARTS.iter().any(|start| segment.starts_with(start));
    segments.iter().any(starts) || segments.last().is_some_and(|last| CONTROL.contains(&last.as_str()))
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

    /// Every route of vLLM: its class, method and path.
    fn vllm_routes() -> Vec<(&'static str, Method, &'static str)> {
        let mut found = Vec::new();
        for line in include_str!("../../tests/fixtures/vllm_routes.txt").lines() {
            if line.starts_with('#') {
                continue;
            }
            let words: Vec<&str> = line.split(' ').collect();
            let [class, method, path] = words[..] else { panic!("{line:?} is no class, method and path") };
            assert!(["inference", "other", "control"].contains(&class), "{line}");
            found.push((class, method.parse().unwrap(), path));
        }
        assert!(found.len() > 80, "the routes are there");
        found
    }

    fn passes(method: &Method, path: &str, routes: Routes) -> bool {
        route(method, path, routes, &[]) != Route::Refused
    }

    #[test]
    fn each_of_vllms_routes_is_passed_or_refused() {
        for (class, method, path) in vllm_routes() {
            let asked = path.replace("{response_id}", "resp_1-a.b").replace("{adapter_name}", "sql");
            assert_eq!(passes(&method, &asked, Routes::Inference), class == "inference", "{asked}");
            assert_eq!(passes(&method, &asked, Routes::AllButControl), class != "control", "{asked}");
            assert!(passes(&method, &asked, Routes::All), "{asked}");
            let named = [path.replace("{adapter_name}", "{}").replace("{response_id}", "{}")];
            assert_ne!(route(&method, &asked, Routes::Inference, &named), Route::Refused, "{asked} is named");
        }
    }

    #[test]
    fn the_lists_name_nothing_but_vllms_routes() {
        let routes = vllm_routes();
        for listed in INFERENCE {
            let known = |path: &str| path.replace("{response_id}", "{}") == listed;
            assert!(routes.iter().any(|(class, _, path)| *class == "inference" && known(path)), "{listed}");
        }
        for listed in CONTROL {
            let known = |path: &str| path.rsplit('/').next() == Some(listed);
            assert!(routes.iter().any(|(class, _, path)| *class == "control" && known(path)), "{listed}");
        }
        for listed in CONTROL_STARTS {
            let known = |path: &str| path.starts_with(&format!("/{listed}"));
            assert!(routes.iter().any(|(class, _, path)| *class == "control" && known(path)), "{listed}");
        }
    }

    #[test]
    fn control_is_refused_in_any_spelling() {
        let mut spellings: Vec<String> = Vec::new();
        for (class, _, path) in vllm_routes() {
            if class != "control" {
                continue;
            }
            let bare = path.trim_start_matches('/').replace("{adapter_name}", "sql");
            let first = bare.as_bytes()[0];
            let rest = &bare[1..];
            spellings.extend([
                format!("//{bare}"),
                format!("/{bare}/"),
                format!("/{}", bare.to_uppercase()),
                format!("/%{first:02x}{rest}"),
                format!("/%{first:02X}{rest}"),
                format!("/%25{first:02x}{rest}"),
                format!("/./{bare}"),
                format!("/v1/../{bare}"),
                format!("/v1/%2e%2e/{bare}"),
                format!("/%2F{bare}"),
                format!("/v1/chat/completions/..%2f..%2f../{bare}"),
                format!("/v1/responses/..%2f..%2f{bare}"),
                format!("/v1/responses/%252e%252e%252f{}", bare.replace('/', "%252f")),
                format!("/prefix/{bare}"),
                format!("/\\{bare}"),
                format!("/{bare};x=1"),
                format!("/{bare}%20"),
                format!("/{bare}%00"),
                format!("/{bare}%3Fmode=abort"),
                format!("/{bare}%23x"),
                format!("/%25252525252561{bare}"),
            ]);
        }
        for path in &spellings {
            for method in [Method::GET, Method::POST, Method::DELETE, Method::OPTIONS] {
                assert!(!passes(&method, path, Routes::Inference), "{path}");
                assert!(!passes(&method, path, Routes::AllButControl), "{path}");
            }
        }
    }

    #[test]
    fn other_spellings_of_inference_do_not_pass() {
        for path in [
            "",
            "/",
            "*",
            "/v1/models/",
            "//v1/models",
            "/V1/models",
            "/v1/models%3Fa",
            "/v1/models%2F",
            "/v1/%2e/models",
            "/v1/responses/",
            "/v1/responses/..",
            "/v1/responses/%2e%2e",
            "/v1/responses/a%2fb",
            "/v1/responses/a%252fb",
            "/v1/responses/a/b",
            "/v1/responses/a/cancel/",
            "/v1/pauses",
            "/%ff",
        ] {
            assert!(!passes(&Method::POST, path, Routes::Inference), "{path}");
        }
        assert!(passes(&Method::GET, "/v1/%6dodels", Routes::Inference), "vLLM reads it as /v1/models");
        assert!(passes(&Method::GET, "/v1/pauses", Routes::AllButControl));
    }

    #[test]
    fn named_paths_pass_beside_the_others() {
        let named = ["/metrics".to_owned(), "/adapters/{}".to_owned()];
        for (path, expected) in [
            ("/metrics", Route::Passed),
            ("/adapters/sql", Route::Passed),
            ("/v1/models", Route::Passed),
            ("/adapters", Route::Refused),
            ("/metrics/", Route::Refused),
        ] {
            assert_eq!(route(&Method::GET, path, Routes::Inference, &named), expected, "{path}");
        }
    }

    #[test]
    fn four_routes_are_recorded() {
        let judge = |method: Method, path: &str| route(&method, path, Routes::Inference, &[]);
        let chat = Route::Recorded(Endpoint::ChatCompletions);
        assert_eq!(judge(Method::POST, "/v1/chat/completions"), chat);
        assert_eq!(judge(Method::POST, "/v1/chat/%63ompletions"), chat);
        assert_eq!(judge(Method::POST, "/v1/completions"), Route::Recorded(Endpoint::Completions));
        assert_eq!(judge(Method::POST, "/v1/responses"), Route::Recorded(Endpoint::Responses));
        assert_eq!(judge(Method::POST, "/v1/messages"), Route::Recorded(Endpoint::Messages));
        for passed in
            ["/v1/messages/count_tokens", "/v1/responses/resp_1/cancel", "/v1/embeddings", "/tokenize"]
        {
            assert_eq!(judge(Method::POST, passed), Route::Passed, "{passed}");
        }
        assert_eq!(judge(Method::GET, "/v1/completions"), Route::Passed);
        assert_eq!(judge(Method::POST, "/v1/completions/"), Route::Refused);
        assert_eq!(judge(Method::POST, "/completions"), Route::Refused);
    }
}
