//! Header rules of RFC 9110, section 7.6: what speaks of one connection is not passed on to the next.

use hyper::HeaderMap;
use hyper::header::{self, HeaderName, HeaderValue};

/// Headers with this start are for draftsmith and never reach vLLM.
pub(super) const OWN_PREFIX: &str = "x-draftsmith-";
pub(super) const CONVERSATION: &str = "x-draftsmith-conversation";
pub(super) const SOURCE: &str = "x-draftsmith-source";
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// The headers that go on, repeated ones and their order kept.
pub(super) fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        // A client must not use this list to drop what frames the message.
        .filter(|name| name != "content-length" && name != "host")
        .collect();
    let mut kept = HeaderMap::with_capacity(headers.len() + 2);
    for (name, value) in headers {
        let dropped =
            HOP_BY_HOP.contains(&name.as_str()) || named.iter().any(|listed| listed == name.as_str());
        if !dropped {
            kept.append(name.clone(), value.clone());
        }
    }
    kept
}

/// The headers for vLLM.
pub(super) fn for_upstream(headers: &HeaderMap, host: &HeaderValue) -> HeaderMap {
    let mut kept = end_to_end(headers);
    let own: Vec<HeaderName> =
        kept.keys().filter(|name| name.as_str().starts_with(OWN_PREFIX)).cloned().collect();
    for name in own {
        kept.remove(name);
    }
    // hyper has answered it already.
    kept.remove(header::EXPECT);
    kept.insert(header::HOST, host.clone());
    kept.append(header::VIA, HeaderValue::from_static("1.1 draftsmith"));
    kept
}

/// The one value of a header of ours, if it is text and not empty.
pub(super) fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    let value = headers.get(name)?.to_str().ok()?.trim();
    Some(value.to_owned()).filter(|kept| !kept.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hop_by_hop_goes_and_the_rest_stays() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Hop"),
            ("connection", "content-length"),
            ("x-hop", "1"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("transfer-encoding", "chunked"),
            ("proxy-authorization", "secret"),
            ("content-length", "5"),
            ("expect", "100-continue"),
            ("cookie", "a"),
            ("cookie", "b"),
            ("authorization", "Bearer x"),
            ("x-draftsmith-source", "replay"),
            ("host", "client.example"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let sent = for_upstream(&headers, &HeaderValue::from_static("vllm:8000"));
        let mut names: Vec<_> =
            sent.iter().map(|(name, value)| format!("{name}={}", value.to_str().unwrap())).collect();
        names.sort();
        assert_eq!(
            names,
            [
                "authorization=Bearer x",
                "content-length=5",
                "cookie=a",
                "cookie=b",
                "host=vllm:8000",
                "via=1.1 draftsmith"
            ]
        );
    }
}
