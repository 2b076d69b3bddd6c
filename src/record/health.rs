//! What the disk does to the recorder, for metrics, `/readyz`, and the reason that a dropped row is counted under.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A write, sync or seal that takes longer than this is a stall.
const STALL: Duration = Duration::from_secs(2);

/// Why something was not recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// Memory was full though the disk works: more is recorded than it can take.
    Overload,
    /// Memory was full because a write does not come back.
    DiskStalled,
    /// Memory was full because writes fail.
    DiskFailing,
    /// The recorder had stopped.
    Stopped,
    /// It cannot be encoded.
    Unencodable,
}

impl DropReason {
    pub const ALL: [DropReason; 5] = [
        DropReason::Overload,
        DropReason::DiskStalled,
        DropReason::DiskFailing,
        DropReason::Stopped,
        DropReason::Unencodable,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            DropReason::Overload => "overload",
            DropReason::DiskStalled => "disk_stalled",
            DropReason::DiskFailing => "disk_failing",
            DropReason::Stopped => "stopped",
            DropReason::Unencodable => "unencodable",
        }
    }
}

/// How one of the recorder's two jobs on the disk goes.
#[derive(Clone, Debug, PartialEq)]
pub enum Health {
    Good,
    /// Something asked of the disk has not come back for so long.
    Stalled(Duration),
    /// The last try failed, for so long now; it is tried again.
    Failing {
        since: Duration,
        error: String,
    },
}

impl Health {
    /// 0 good, 1 failing, 2 stalled: the value of `draftsmith_record_disk_state`.
    pub fn code(&self) -> u8 {
        match self {
            Health::Good => 0,
            Health::Failing { .. } => 1,
            Health::Stalled(_) => 2,
        }
    }
}

impl fmt::Display for Health {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Health::Good => formatter.write_str("good"),
            Health::Stalled(time) => write!(formatter, "stalled for {} s", time.as_secs()),
            Health::Failing { since, error } => {
                write!(formatter, "failing for {} s, tried again: {error}", since.as_secs())
            }
        }
    }
}

/// Written by the thread that works on the disk, read by all others.
#[derive(Debug, Default)]
pub(super) struct Watch {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    busy_since: Option<Instant>,
    failing: Option<(Instant, String)>,
}

impl Watch {
    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn begins(&self) {
        self.inner().busy_since = Some(Instant::now());
    }

    pub fn ended(&self, outcome: Result<(), String>) {
        let mut inner = self.inner();
        inner.busy_since = None;
        inner.failing = match (outcome, inner.failing.take()) {
            (Ok(()), _) => None,
            (Err(error), Some((since, _))) => Some((since, error)),
            (Err(error), None) => Some((Instant::now(), error)),
        };
    }

    pub fn health(&self) -> Health {
        let inner = self.inner();
        if let Some(since) = inner.busy_since
            && since.elapsed() > STALL
        {
            return Health::Stalled(since.elapsed());
        }
        match &inner.failing {
            None => Health::Good,
            Some((since, error)) => Health::Failing { since: since.elapsed(), error: error.clone() },
        }
    }

    /// Under which reason a row is dropped for which there is no room.
    pub fn reason_for_full(&self) -> DropReason {
        match self.health() {
            Health::Good => DropReason::Overload,
            Health::Stalled(_) => DropReason::DiskStalled,
            Health::Failing { .. } => DropReason::DiskFailing,
        }
    }
}
