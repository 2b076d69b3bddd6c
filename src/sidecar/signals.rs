//! The signals that end a process in good order.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(super) fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Resolves at the next of them.
    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Resolves at SIGTERM or SIGINT.
pub(crate) async fn shutdown_signal() {
    match Signals::listen() {
        Ok(mut signals) => signals.next().await,
        Err(error) => {
            tracing::error!(%error, "cannot listen for signals; stop this process with SIGKILL");
            std::future::pending().await
        }
    }
}
