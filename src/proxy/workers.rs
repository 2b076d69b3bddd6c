//! Threads that serve connections, each with an event loop of its own.
//!
//! A connection stays on the thread that it was given to, and so do the connections to vLLM that its requests use. With one
//! loop over several threads, as tokio's default runtime has it, a request crosses threads on its way and each crossing
//! wakes one: that took a third of the whole time that a request costs here.

use std::cell::Cell;
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::event_loop;

/// More threads than this serve no vLLM better: each takes some ten thousand requests a second.
const MOST: usize = 8;

thread_local! {
    static INDEX: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Which worker this thread is, from 0.
pub(super) fn index() -> Option<usize> {
    INDEX.get()
}

/// How many threads there are to be: one for each processor, unless it is said.
pub(super) fn worker_count(threads: Option<NonZero<usize>>) -> usize {
    let processors = || std::thread::available_parallelism().map_or(1, |count| count.get().min(MOST));
    threads.map_or_else(processors, NonZero::get)
}

/// The threads. Dropping this has them end, with whatever still runs on them.
pub(super) struct Workers {
    first: Worker,
    others: Vec<Worker>,
}

struct Worker {
    handle: Handle,
    /// Connections that it has.
    open: Arc<AtomicUsize>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Worker {
    fn start(number: usize) -> io::Result<Self> {
        let (stop, stopped) = oneshot::channel::<()>();
        let (handle, thread) = event_loop::start(format!("proxy-{number}"), move |runtime| {
            INDEX.set(Some(number));
            // Only ever dropped.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Self { handle, open: Arc::default(), stop, thread })
    }
}

/// A connection's place on a worker, held as long as it is open.
pub(super) struct Place {
    pub handle: Handle,
    open: Arc<AtomicUsize>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Relaxed);
    }
}

impl Workers {
    /// So many, and one at least.
    pub fn start(count: usize) -> io::Result<Self> {
        let mut others = Vec::new();
        for number in 1..count {
            others.push(Worker::start(number)?);
        }
        Ok(Self { first: Worker::start(0)?, others })
    }

    /// Ends them, with whatever still runs on them, and waits for that.
    pub async fn end(self) {
        let mut threads = Vec::new();
        for worker in std::iter::once(self.first).chain(self.others) {
            drop(worker.stop);
            threads.push(worker.thread);
        }
        let joined = tokio::task::spawn_blocking(move || {
            for thread in threads {
                if thread.join().is_err() {
                    tracing::error!("a thread of the proxy panicked");
                }
            }
        });
        // It cannot panic.
        let _ = joined.await;
    }

    /// A place on the worker that has the fewest connections.
    pub fn place(&self) -> Place {
        let mut fewest = &self.first;
        for worker in &self.others {
            if worker.open.load(Relaxed) < fewest.open.load(Relaxed) {
                fewest = worker;
            }
        }
        fewest.open.fetch_add(1, Relaxed);
        Place { handle: fewest.handle.clone(), open: fewest.open.clone() }
    }
}
