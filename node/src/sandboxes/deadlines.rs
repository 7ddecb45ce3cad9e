//! When sandboxes' times are over: one ordered set, one task.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::Notify;

use crate::ids::SandboxId;

/// Deadlines are wall-clock times; looking again this often bounds what a step of
/// the clock can do.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Deadlines of all sandboxes.
#[derive(Debug, Default)]
pub struct Deadlines {
    set: Mutex<BTreeSet<(Timestamp, SandboxId)>>,
    earlier: Notify,
}

impl Deadlines {
    /// Adds or moves a deadline.
    pub fn set(&self, id: &SandboxId, before: Option<Timestamp>, at: Timestamp) {
        let is_first = {
            let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(before) = before {
                set.remove(&(before, id.clone()));
            }
            set.insert((at, id.clone()));
            set.first().is_some_and(|(_, first)| first == id)
        };
        if is_first {
            self.earlier.notify_one();
        }
    }

    pub fn remove(&self, id: &SandboxId, at: Timestamp) {
        self.set.lock().unwrap_or_else(PoisonError::into_inner).remove(&(at, id.clone()));
    }

    /// Waits for the next sandboxes whose time is over and takes them out.
    pub async fn expired(&self) -> Vec<SandboxId> {
        loop {
            let now = Timestamp::now();
            let due = self.take_due(now);
            if !due.is_empty() {
                return due;
            }
            let pause = self.next().map_or(LOOK_AGAIN, |next| {
                Duration::try_from(next.duration_since(now)).unwrap_or(Duration::ZERO)
            });
            tokio::select! {
                () = tokio::time::sleep(pause.min(LOOK_AGAIN)) => {}
                () = self.earlier.notified() => {}
            }
        }
    }

    fn next(&self) -> Option<Timestamp> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner).first().map(|(at, _)| *at)
    }

    fn take_due(&self, now: Timestamp) -> Vec<SandboxId> {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        let mut due = Vec::new();
        while set.first().is_some_and(|(at, _)| *at <= now) {
            due.extend(set.pop_first().map(|(_, id)| id));
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    fn at(milliseconds: i64) -> Timestamp {
        Timestamp::now() + SignedDuration::from_millis(milliseconds)
    }

    #[tokio::test]
    async fn earlier_deadline_set_later_comes_first() {
        let deadlines = Deadlines::default();
        let (a, b) = (SandboxId::parse("a").unwrap(), SandboxId::parse("b").unwrap());
        deadlines.set(&a, None, at(60_000));
        let wait = deadlines.expired();
        let set = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            deadlines.set(&b, None, at(10));
        };
        let (due, ()) = tokio::join!(wait, set);
        assert_eq!(due, vec![b]);
    }

    #[tokio::test]
    async fn moved_deadline_does_not_fire_at_the_old_time() {
        let deadlines = Deadlines::default();
        let a = SandboxId::parse("a").unwrap();
        let (old, new) = (at(10), at(60_000));
        deadlines.set(&a, None, old);
        deadlines.set(&a, Some(old), new);
        let wait = tokio::time::timeout(Duration::from_millis(50), deadlines.expired());
        assert!(wait.await.is_err());
        deadlines.remove(&a, new);
        assert_eq!(deadlines.next(), None);
    }
}
