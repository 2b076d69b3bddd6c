//! Ports for the servers that tests start as processes of their own.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// Below those that Linux gives out by itself: no connection takes one between this look at it and its server's.
const FIRST: u16 = 10_000;
const OF_ONE_PROCESS: u16 = 100;
const PROCESSES: u32 = 200;

/// A port that nobody listens on, and that no other test of this process is given.
pub fn free_port() -> u16 {
    static GIVEN: AtomicU16 = AtomicU16::new(0);
    let share = u16::try_from(std::process::id() % PROCESSES).unwrap();
    loop {
        let number = GIVEN.fetch_add(1, Ordering::Relaxed) % OF_ONE_PROCESS;
        let port = FIRST + share * OF_ONE_PROCESS + number;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
