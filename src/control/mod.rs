//! The loopback control API, health and the metrics registry.
//!
//! | route | answer |
//! |---|---|
//! | `GET /healthz` | 200 while the process runs |
//! | `GET /readyz` | 200 when vLLM answers, else 503; the body says what each part reports |
//! | `GET /metrics` | Prometheus text |
//! | `POST /v1/flush` | seals what was recorded so far into Parquet, 204 when it is there |
//! | `POST /v1/forget` | removes rows and their states; the question of `draftsmith records forget` |
//!
//! The port binds to loopback alone (checked in `config`): it is an operator's door, never a client's. With a key file
//! every route but `/healthz` needs a key of its own, `Authorization: Bearer KEY`.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;

use crate::keys::KeyFile;

/// What one part of the sidecar reports to `/readyz`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct PartReport {
    pub part: &'static str,
    /// False makes the whole not ready.
    pub ready: bool,
    pub detail: String,
}

const MOST_QUESTION_BYTES: usize = 1 << 16;

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// What the control API asks of the rest of the process.
pub trait Controlled: Send + Sync + 'static {
    fn readiness(&self) -> BoxFuture<Vec<PartReport>>;
    /// Brings those gauges up to date that nothing else does, before they are read.
    fn measure(&self);
    fn flush(&self) -> BoxFuture<Result<(), String>>;
    /// The body of the question and of the answer are JSON.
    fn forget(&self, selection: Bytes) -> BoxFuture<Result<serde_json::Value, String>>;
}

/// A metrics recorder could not be installed: the process has one already.
#[derive(Debug, thiserror::Error)]
#[error("metrics registry: {0}")]
pub struct MetricsError(#[from] metrics_exporter_prometheus::BuildError);

/// Installs the process's metrics registry.
pub fn install_metrics() -> Result<PrometheusHandle, MetricsError> {
    Ok(PrometheusBuilder::new().install_recorder()?)
}

/// Serves the control API until `shutdown` resolves.
pub async fn serve(
    listener: TcpListener,
    controlled: Arc<dyn Controlled>,
    metrics: PrometheusHandle,
    keys: Option<Arc<KeyFile>>,
    shutdown: impl Future<Output = ()>,
) {
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => return,
        };
        let stream = match accepted {
            Ok((stream, _peer)) => stream,
            Err(error) => {
                tracing::warn!(%error, "control: accept failed");
                continue;
            }
        };
        let controlled = controlled.clone();
        let metrics = metrics.clone();
        let keys = keys.clone();
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request| {
                answer(request, controlled.clone(), metrics.clone(), keys.clone())
            });
            let connection = auto::Builder::new(TokioExecutor::new());
            if let Err(error) = connection.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(%error, "control: connection ended");
            }
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    controlled: Arc<dyn Controlled>,
    metrics: PrometheusHandle,
    keys: Option<Arc<KeyFile>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let admitted = keys.is_none_or(|file| file.admits(request.headers()));
    let response = match (request.method(), request.uri().path()) {
        (&Method::GET, "/healthz") => text(StatusCode::OK, "ok\n"),
        _ if !admitted => {
            let error =
                "no valid key was given; send one of control.keys_file as `Authorization: Bearer KEY`";
            json(StatusCode::UNAUTHORIZED, &serde_json::json!({ "error": error }))
        }
        (&Method::GET, "/readyz") => {
            let reports = controlled.readiness().await;
            let ready = reports.iter().all(|report| report.ready);
            let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            json(status, &serde_json::json!({ "ready": ready, "parts": reports }))
        }
        (&Method::GET, "/metrics") => {
            controlled.measure();
            metrics.run_upkeep();
            text(StatusCode::OK, metrics.render())
        }
        (&Method::POST, "/v1/flush") => match controlled.flush().await {
            Ok(()) => text(StatusCode::NO_CONTENT, ""),
            Err(message) => json(StatusCode::INTERNAL_SERVER_ERROR, &serde_json::json!({ "error": message })),
        },
        (&Method::POST, "/v1/forget") => {
            let read = Limited::new(request.into_body(), MOST_QUESTION_BYTES).collect().await;
            let outcome = match read {
                Ok(body) => controlled.forget(body.to_bytes()).await,
                Err(error) => Err(format!("the question cannot be read: {error}")),
            };
            match outcome {
                Ok(report) => json(StatusCode::OK, &report),
                Err(message) => {
                    json(StatusCode::INTERNAL_SERVER_ERROR, &serde_json::json!({ "error": message }))
                }
            }
        }
        (_, path) => json(
            StatusCode::NOT_FOUND,
            &serde_json::json!({
                "error": format!("no control route {} {path}; see docs/operations.md", request.method())
            }),
        ),
    };
    Ok(response)
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    respond(status, "text/plain; charset=utf-8", body.into())
}

fn json(status: StatusCode, body: &serde_json::Value) -> Response<Full<Bytes>> {
    respond(status, "application/json", Bytes::from(body.to_string()))
}

fn respond(status: StatusCode, content_type: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}
