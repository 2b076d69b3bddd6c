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

use tokio::runtime::Handle;
use tokio::sync::oneshot;

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

/// The threads. Dropping this ends them, with whatever still runs on them.
pub(super) struct Workers {
    first: Worker,
    others: Vec<Worker>,
}

struct Worker {
    handle: Handle,
    /// Connections that it has.
    open: Arc<AtomicUsize>,
    _stop: oneshot::Sender<()>,
}

impl Worker {
    fn start(number: usize) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        std::thread::Builder::new().name(format!("proxy-{number}")).spawn(move || {
            INDEX.set(Some(number));
            // Only ever dropped.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Self { handle, open: Arc::default(), _stop: stop })
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
