//! Header rules of RFC 9110, section 7.6: what speaks of one connection is not passed on to the next.

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::Version;

/// Headers with this start are for draftsmith and never reach vLLM.
pub(super) const OWN_PREFIX: &str = "x-draftsmith-";
pub(super) const CONVERSATION: &str = "x-draftsmith-conversation";
pub(super) const SOURCE: &str = "x-draftsmith-source";
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// `Trailer` is not among them: it names what comes after the body, which is passed on too.
const HOP_BY_HOP: [&str; 8] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
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

/// The headers for vLLM, from a request that came in `version`.
pub(super) fn for_upstream(headers: &HeaderMap, host: &HeaderValue, version: Version) -> HeaderMap {
    let mut kept = end_to_end(headers);
    let own: Vec<HeaderName> =
        kept.keys().filter(|name| name.as_str().starts_with(OWN_PREFIX)).cloned().collect();
    for name in own {
        kept.remove(name);
    }
    // hyper has answered it already.
    kept.remove(header::EXPECT);
    kept.insert(header::HOST, host.clone());
    if lists(headers, &header::TE, "trailers") {
        kept.insert(header::TE, HeaderValue::from_static("trailers"));
        kept.insert(header::CONNECTION, HeaderValue::from_static("te"));
    }
    if version == Version::HTTP_2 {
        join_cookies(&mut kept);
    }
    kept.append(header::VIA, HeaderValue::from_static(via(version)));
    kept
}

/// HTTP/2 lets a client cut its cookies into many fields; HTTP/1.1 knows one (RFC 9113, section 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<&[u8]> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if cookies.len() < 2 {
        return;
    }
    if let Ok(joined) = HeaderValue::from_bytes(&cookies.join(b"; ".as_slice())) {
        headers.insert(header::COOKIE, joined);
    }
}

fn via(version: Version) -> &'static str {
    match version {
        Version::HTTP_2 => "2 draftsmith",
        Version::HTTP_10 => "1.0 draftsmith",
        _ => "1.1 draftsmith",
    }
}

/// Whether one of the header's comma-separated words is this one.
pub(super) fn lists(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|found| found.trim().eq_ignore_ascii_case(word))
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
            ("te", "gzip;q=0.5, trailers"),
            ("trailer", "x-checksum"),
            ("keep-alive", "timeout=5"),
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
        let sent = for_upstream(&headers, &HeaderValue::from_static("vllm:8000"), Version::HTTP_11);
        let mut names: Vec<_> =
            sent.iter().map(|(name, value)| format!("{name}={}", value.to_str().unwrap())).collect();
        names.sort();
        assert_eq!(
            names,
            [
                "authorization=Bearer x",
                "connection=te",
                "content-length=5",
                "cookie=a",
                "cookie=b",
                "host=vllm:8000",
                "te=trailers",
                "trailer=x-checksum",
                "via=1.1 draftsmith"
            ]
        );
    }

    #[test]
    fn cookies_of_http2_are_one_field() {
        let mut headers = HeaderMap::new();
        for cookie in ["a=1", "b=2", "c=3"] {
            headers.append(header::COOKIE, HeaderValue::from_static(cookie));
        }
        let sent = for_upstream(&headers, &HeaderValue::from_static("vllm"), Version::HTTP_2);
        let cookies: Vec<_> = sent.get_all(header::COOKIE).iter().collect();
        assert_eq!(cookies, ["a=1; b=2; c=3"]);
        assert_eq!(sent[header::VIA], "2 draftsmith");
    }
}
