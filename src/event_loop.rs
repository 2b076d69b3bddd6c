//! Threads that each run an event loop of their own.

use std::io;
use std::sync::mpsc::channel;
use std::thread::{Builder, JoinHandle};

use tokio::runtime::{Handle, Runtime};

/// Starts a thread that makes an event loop and runs with it; comes back when it is made.
///
/// It is made on that thread: one made here would be dropped here where no thread can be started, which panics in async
/// code.
pub(crate) fn start(
    name: String,
    run: impl FnOnce(Runtime) + Send + 'static,
) -> io::Result<(Handle, JoinHandle<()>)> {
    let (begun, has_begun) = channel();
    let thread = Builder::new().name(name).spawn(move || {
        match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                // Whoever started this waits for the word, here and below.
                let _ = begun.send(Ok(runtime.handle().clone()));
                run(runtime);
            }
            Err(error) => {
                let _ = begun.send(Err(error));
            }
        }
    })?;
    let handle = has_begun.recv().unwrap_or_else(|_| Err(io::Error::other("the thread ended at once")))?;
    Ok((handle, thread))
}
