//! Timers: a sorted map whose first entry is the timeout of the next wait.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

#[derive(Default)]
struct Timers {
    waiting: RefCell<BTreeMap<(Instant, u64), Waker>>,
    last: Cell<u64>,
}

thread_local! {
    static TIMERS: Timers = Timers::default();
}

/// Completes at an instant.
pub struct Sleep {
    at: Instant,
    key: Option<(Instant, u64)>,
}

/// Completes at `at`.
pub fn sleep_until(at: Instant) -> Sleep {
    Sleep { at, key: None }
}

/// Completes at `at`, or never.
pub async fn deadline(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

impl Sleep {
    /// Moves the timer to another instant.
    pub fn reset(&mut self, at: Instant) {
        self.forget();
        self.at = at;
    }

    fn forget(&mut self) {
        if let Some(key) = self.key.take() {
            let _ = TIMERS.try_with(|t| t.waiting.borrow_mut().remove(&key));
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.at {
            self.forget();
            return Poll::Ready(());
        }
        TIMERS.with(|timers| {
            let mut waiting = timers.waiting.borrow_mut();
            let at = self.at;
            let key = *self.key.get_or_insert_with(|| {
                timers.last.set(timers.last.get() + 1);
                (at, timers.last.get())
            });
            match waiting.get_mut(&key) {
                Some(waker) => waker.clone_from(cx.waker()),
                None => drop(waiting.insert(key, cx.waker().clone())),
            }
        });
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.forget();
    }
}

/// Time until the first timer is due; `None` when nothing waits.
pub(super) fn until_next() -> Option<Duration> {
    TIMERS.with(|timers| {
        let waiting = timers.waiting.borrow();
        let (at, _) = waiting.keys().next()?;
        Some(at.saturating_duration_since(Instant::now()))
    })
}

/// Wakes whoever waits for a time that has come.
pub(super) fn fire() {
    let due = TIMERS.with(|timers| {
        let mut waiting = timers.waiting.borrow_mut();
        if waiting.is_empty() {
            return BTreeMap::new();
        }
        let later = waiting.split_off(&(Instant::now(), u64::MAX));
        std::mem::replace(&mut *waiting, later)
    });
    due.into_values().for_each(Waker::wake);
}
