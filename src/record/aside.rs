//! Work that gives way to those that serve.

use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy, set_thread_priority_and_policy,
    thread_native_id,
};

/// The least share of the processor: a sixtieth beside a thread that wants all of it.
const NICE: i32 = 19;

/// Works on a thread that gives way to others: what is sealed is safe on the disk already, and each moment of a
/// processor would else hold up an answer. A thread of its own, since one that gave way may not take its priority back.
pub(super) fn aside<T: Send>(give_way: fn(), work: impl FnOnce() -> T + Send) -> T {
    let outcome = std::thread::scope(|scope| {
        let aside = scope.spawn(|| {
            give_way();
            work()
        });
        aside.join()
    });
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Has the calling thread take a small share beside others that want to run: for work of any length.
pub(super) fn be_nice() {
    // On Linux this is the calling thread's own.
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!(%error, "a thread keeps its priority");
    }
}

/// Has the calling thread run when no other wants to: for short work.
pub(super) fn give_way() {
    let idle = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
    let changed = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, idle);
    if let Err(error) = changed {
        tracing::debug!(?error, "a thread keeps its priority");
    }
}
