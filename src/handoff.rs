//! A queue from many threads that must not wait to one that works on what they hand over.
//!
//! Waking a sleeping thread costs the one that wakes it several microseconds, more than all the rest of a hand-over. So
//! the receiver lingers: woken by the first thing, it lets a little time pass for more to come, and takes all at once;
//! nobody wakes it meanwhile, but for what is urgent. Under load that is two wake-ups for each of those times, not one for
//! each request.
//!
//! The queue itself has no bound: what is handed over is counted, and refused, by those who know its size.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The queue. Share it by reference or in an `Arc`.
#[derive(Debug)]
pub struct Handoff<T> {
    state: Mutex<State<T>>,
    wake: Condvar,
    linger: Duration,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    /// When the first of them came.
    since: Option<Instant>,
    urgent: bool,
    closed: bool,
}

impl<T> Handoff<T> {
    /// `linger`: how long the receiver lets more come.
    pub fn new(linger: Duration) -> Self {
        let state = State { items: VecDeque::new(), since: None, urgent: false, closed: false };
        Self { state: Mutex::new(state), wake: Condvar::new(), linger }
    }

    /// Hands over what can wait for the receiver's next look. Gives it back once the queue is closed.
    pub fn push(&self, item: T) -> Result<(), T> {
        self.add(item, false, false)
    }

    /// Hands over what is to be taken at once, with all before it.
    pub fn push_urgent(&self, item: T) -> Result<(), T> {
        self.add(item, true, false)
    }

    /// Hands over the last thing that is taken.
    pub fn close(&self, item: T) -> Result<(), T> {
        self.add(item, true, true)
    }

    /// Closes the queue and gives what nobody will take any more.
    pub fn shut(&self) -> VecDeque<T> {
        let mut state = self.state();
        state.closed = true;
        std::mem::take(&mut state.items)
    }

    /// All that was handed over, once there is something and the time to linger is over. Empty at the deadline.
    pub fn take(&self, deadline: Option<Instant>) -> VecDeque<T> {
        let mut state = self.state();
        loop {
            let until = match state.since {
                _ if state.urgent => break,
                None => deadline,
                Some(since) => Some(deadline.map_or(since + self.linger, |end| end.min(since + self.linger))),
            };
            let Some(until) = until else {
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.since = None;
        state.urgent = false;
        std::mem::take(&mut state.items)
    }

    fn add(&self, item: T, urgent: bool, last: bool) -> Result<(), T> {
        let mut state = self.state();
        if state.closed {
            return Err(item);
        }
        state.items.push_back(item);
        state.closed = last;
        let first = state.since.is_none();
        if first {
            state.since = Some(Instant::now());
        }
        let wakes = first || (urgent && !state.urgent);
        state.urgent |= urgent;
        drop(state);
        if wakes {
            self.wake.notify_one();
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // A poisoned queue is still a queue: nothing is done under the lock but push and take.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn what_comes_while_the_receiver_lingers_is_taken_together() {
        let handoff = Handoff::new(Duration::from_millis(20));
        let started = Instant::now();
        for number in 0..3 {
            handoff.push(number).unwrap();
        }
        assert_eq!(handoff.take(None), [0, 1, 2]);
        assert!(started.elapsed() >= Duration::from_millis(20));
        assert!(handoff.take(Some(Instant::now())).is_empty());
    }

    #[test]
    fn what_is_urgent_ends_the_lingering_and_keeps_its_place() {
        let handoff = Arc::new(Handoff::new(LONG));
        let sender = handoff.clone();
        let thread = std::thread::spawn(move || {
            sender.push("first").unwrap();
            sender.push_urgent("second").unwrap();
        });
        let mut taken = Vec::new();
        while taken.len() < 2 {
            taken.extend(handoff.take(Some(Instant::now() + LONG)));
        }
        thread.join().unwrap();
        assert_eq!(taken, ["first", "second"]);
    }

    #[test]
    fn nothing_is_taken_after_the_last() {
        let handoff = Handoff::new(LONG);
        handoff.push("row").unwrap();
        handoff.close("stop").unwrap();
        assert_eq!(handoff.push("late"), Err("late"));
        assert_eq!(handoff.push_urgent("later"), Err("later"));
        assert_eq!(handoff.take(None), ["row", "stop"]);
    }

    #[test]
    fn none_is_lost_among_many_senders() {
        let handoff = Arc::new(Handoff::new(Duration::from_micros(50)));
        let senders: Vec<_> = (0..4)
            .map(|sender| {
                let handoff = handoff.clone();
                std::thread::spawn(move || {
                    for number in 0..10_000 {
                        handoff.push((sender, number)).unwrap();
                    }
                })
            })
            .collect();
        let mut next = [0; 4];
        while next != [10_000; 4] {
            for (sender, number) in handoff.take(None) {
                assert_eq!(next[sender], number, "in order");
                next[sender] += 1;
            }
        }
        for sender in senders {
            sender.join().unwrap();
        }
    }
}
