//! A proxy on a port of its own, and what its observer is told.

// Each test file takes what it needs.
#![allow(dead_code)]

use std::sync::Arc;
use std::time::Duration;

use draftsmith::proxy::{Begun, Drained, Exchange, Observer, PreparedProxy, Proxy, ProxyOptions};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};

use super::http::{Seen, find, read_message};

/// Nothing here takes near so long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("it happens soon")
}

pub struct Watching {
    begun: mpsc::UnboundedSender<String>,
    finished: mpsc::UnboundedSender<Exchange>,
}

impl Observer for Watching {
    fn begin(&self, begun: Begun<'_>) {
        // The test may be over already.
        let _ = self.begun.send(begun.request_id.to_owned());
    }

    fn finished(&self, exchange: Exchange) {
        let _ = self.finished.send(exchange);
    }
}

pub struct Running {
    pub address: String,
    pub begun: mpsc::UnboundedReceiver<String>,
    pub finished: mpsc::UnboundedReceiver<Exchange>,
    pub proxy: Arc<Proxy>,
    pub stop: oneshot::Sender<()>,
    pub ended: tokio::task::JoinHandle<Drained>,
}

pub async fn proxy(upstream_address: &str, change: impl FnOnce(&mut ProxyOptions)) -> Running {
    proxy_at(&format!("http://{upstream_address}"), change).await
}

/// All connections share what is kept to vLLM, whichever comes first.
pub fn one_thread(options: &mut ProxyOptions) {
    options.threads = std::num::NonZero::new(1);
}

/// A proxy before an upstream in any of its spellings.
pub async fn proxy_at(upstream: &str, change: impl FnOnce(&mut ProxyOptions)) -> Running {
    let mut options = ProxyOptions::new(upstream.parse().unwrap());
    change(&mut options);
    let (begun_sender, begun) = mpsc::unbounded_channel();
    let (finished_sender, finished) = mpsc::unbounded_channel();
    let observer = Arc::new(Watching { begun: begun_sender, finished: finished_sender });
    let running = Arc::new(PreparedProxy::new(options).unwrap().observed_by(observer));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (stop, stopped) = oneshot::channel();
    let serving = running.clone();
    let ended = tokio::spawn(async move {
        let told = async {
            let _ = stopped.await;
        };
        serving.serve(listener, told).await.unwrap()
    });
    Running { address, begun, finished, proxy: running, stop, ended }
}

impl Running {
    pub async fn exchange(&mut self) -> Exchange {
        soon(self.finished.recv()).await.unwrap()
    }

    pub async fn send(&self, request: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        stream.write_all(request).await.unwrap();
        stream
    }

    /// Sends a request on a connection of its own; gives the whole answer.
    pub async fn ask(&self, request: &[u8]) -> Seen {
        let mut stream = self.send(request).await;
        soon(read_message(&mut stream, &mut Vec::new())).await.expect("a whole answer")
    }
}

pub fn event(text: &str) -> Vec<u8> {
    format!(
        "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"token_ids\":[7]}}]}}\n\n"
    )
    .into_bytes()
}

/// Reads the answer's head, leaving what follows in the buffer.
pub async fn read_head(stream: &mut (impl AsyncRead + Unpin), buffer: &mut Vec<u8>) -> String {
    loop {
        if let Some(position) = find(buffer, b"\r\n\r\n") {
            let head = String::from_utf8(buffer[..position].to_vec()).unwrap();
            buffer.drain(..position + 4);
            return head;
        }
        assert_ne!(soon(stream.read_buf(buffer)).await.unwrap(), 0, "a head comes");
    }
}
