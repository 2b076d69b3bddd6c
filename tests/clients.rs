//! A client library in common use, async-openai, through the sidecar: it reads what it reads from vLLM itself.

// The lint's exemption for tests does not see a test file's helpers.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::path::Path;

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use bytes::Bytes;
use common::sidecar::Sidecar;
use draftsmith::record::{Status, rows};
use draftsmith::store::DataDir;
use futures_util::{Stream, StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde_json::{Value, from_str, to_value};
use tokio::net::TcpListener;

mod common {
    pub mod sidecar;
}

/// Bodies of a real vLLM: tests/fixtures/samples.
const SAMPLES: [&str; 8] = [
    "chat",
    "chat_stream",
    "chat_logprobs",
    "chat_logprobs_stream",
    "completion",
    "completion_stream",
    "completion_logprobs",
    "err_model",
];
/// The request's header that names the sample to answer with.
const SAMPLE: &str = "x-sample";

fn sample(name: &str, part: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/samples");
    std::fs::read_to_string(folder.join(format!("{name}.{part}"))).unwrap()
}

type Frames = Vec<Result<Frame<Bytes>, Infallible>>;

/// The recorded answer, an event a frame.
async fn answer(
    request: Request<Incoming>,
) -> Result<Response<StreamBody<stream::Iter<<Frames as IntoIterator>::IntoIter>>>, Infallible> {
    let name = request.headers()[SAMPLE].to_str().unwrap().to_owned();
    request.into_body().collect().await.unwrap();
    let recorded = sample(&name, "resp.http");
    let (head, body) = recorded.split_once("\r\n\r\n").unwrap();
    let content_type = head.lines().find_map(|line| line.strip_prefix("content-type: ")).unwrap();
    let mut frames = Frames::new();
    for event in body.split_inclusive("\n\n") {
        frames.push(Ok(Frame::data(Bytes::copy_from_slice(event.as_bytes()))));
    }
    let response = Response::builder().status(head.split(' ').nth(1).unwrap());
    Ok(response.header("content-type", content_type).body(StreamBody::new(stream::iter(frames))).unwrap())
}

/// The address of a server that answers as vLLM did.
async fn recorded_vllm() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(answer)));
        }
    });
    address
}

/// What the client makes of each message of the answer.
type Read = Vec<Result<Value, String>>;

fn read<T: Serialize>(message: Result<T, OpenAIError>) -> Result<Value, String> {
    message.map(|message| to_value(message).unwrap()).map_err(|error| error.to_string())
}

async fn read_all<T: Serialize>(messages: impl Stream<Item = Result<T, OpenAIError>>) -> Read {
    messages.map(read).collect().await
}

async fn ask(address: &str, name: &str) -> Read {
    let config = OpenAIConfig::new().with_api_base(format!("http://{address}/v1")).with_api_key("none");
    // It makes a client of its own accord first.
    draftsmith::http::choose_ring();
    let client = Client::with_config(config.with_header(SAMPLE, name).unwrap());
    let request = sample(name, "req.json");
    match (request.contains("\"messages\""), request.contains("\"stream\":true")) {
        (true, false) => vec![read(client.chat().create(from_str(&request).unwrap()).await)],
        (true, true) => {
            read_all(client.chat().create_stream(from_str(&request).unwrap()).await.unwrap()).await
        }
        (false, false) => vec![read(client.completions().create(from_str(&request).unwrap()).await)],
        (false, true) => {
            read_all(client.completions().create_stream(from_str(&request).unwrap()).await.unwrap()).await
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn async_openai_reads_the_same_with_and_without_the_sidecar() {
    let directory = tempfile::tempdir().unwrap();
    let data = DataDir::new(directory.path().join("data"));
    let vllm = recorded_vllm().await;
    let sidecar = Sidecar::start(directory.path(), &vllm, "");
    for name in SAMPLES {
        let direct = ask(&vllm, name).await;
        assert_eq!(ask(&sidecar.address, name).await, direct, "{name}");
        for message in &direct {
            assert_eq!(message.is_ok(), name != "err_model", "{name}: {message:?}");
        }
        assert_eq!(direct.len() > 1, name.ends_with("_stream"), "{name}: {} messages", direct.len());
    }
    assert!(sidecar.stop().success());

    let statuses: Vec<Status> = rows(&data).unwrap().map(|row| row.unwrap().status).collect();
    assert_eq!(statuses.len(), SAMPLES.len());
    let refused = statuses.iter().filter(|status| **status == Status::ClientError).count();
    assert_eq!(refused, 1, "{statuses:?}");
}
