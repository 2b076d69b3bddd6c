//! The proxy's own error answers, in the shape of OpenAI's and vLLM's.

use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};

/// `{"error":{"message","type","param","code"}}`.
pub(super) fn error_response(status: StatusCode, message: &str) -> Response<Bytes> {
    let body = serde_json::json!({
        "error": {"message": message, "type": kind(status), "param": null, "code": status.as_u16()}
    });
    let mut response = Response::new(Bytes::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "AuthenticationError",
        StatusCode::FORBIDDEN => "PermissionDeniedError",
        StatusCode::REQUEST_TIMEOUT => "RequestTimeoutError",
        StatusCode::PAYLOAD_TOO_LARGE => "RequestEntityTooLargeError",
        StatusCode::BAD_GATEWAY => "BadGatewayError",
        StatusCode::GATEWAY_TIMEOUT => "GatewayTimeoutError",
        _ => "BadRequestError",
    }
}
