//! How busy the machine is: what a process promises within some time, it can only do once it runs and the disk answers.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_millis(20);

/// A thread that wakes, writes and syncs again and again, and notes how long that took.
pub struct StallWatch {
    stop: Arc<AtomicBool>,
    longest: JoinHandle<Duration>,
}

impl StallWatch {
    /// Writes to a file in `directory`.
    pub fn start(directory: &Path) -> StallWatch {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let mut file = File::create(directory.join("stalls")).unwrap();
        let longest = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while !stopped.load(Ordering::Relaxed) {
                let started = Instant::now();
                // Nothing is waited for: how late it wakes is what is measured.
                #[allow(clippy::disallowed_methods)]
                std::thread::sleep(PAUSE);
                file.write_all(b"a line\n").unwrap();
                file.sync_data().unwrap();
                longest = longest.max(started.elapsed() - PAUSE);
            }
            longest
        });
        StallWatch { stop, longest }
    }

    /// The longest time that it was kept waiting.
    pub fn stop(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.longest.join().unwrap()
    }
}
