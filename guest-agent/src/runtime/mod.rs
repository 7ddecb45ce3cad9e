//! A single-threaded executor over epoll.
//!
//! In a guest a system call costs more than all the user code of a request,
//! so this executor makes as few as it can: descriptors are tried before they
//! are registered, wake-ups inside the process never touch the kernel, timers
//! are the timeout of the one wait, and an idle agent makes no call at all.
//!
//! Everything runs on the thread that called [`run`]; nothing here is `Send`. What may
//! hold the thread for long goes through [`blocking`].

mod blocking;
mod io;
mod reactor;
mod sync;
mod task;
mod timer;

pub use blocking::blocking;
pub use io::Source;
pub use sync::{Event, Lock, Receiver, Sender, channel};
pub use task::{Task, spawn};
pub use timer::{Sleep, deadline, sleep_until};

use std::future::Future;
use std::io::Result;
use std::pin::pin;
use std::task::{Context, Poll};

/// Runs `main` and every task it spawns until `main` is done.
pub fn run<T>(main: impl Future<Output = T>) -> Result<T> {
    let mut main = pin!(main);
    let root = task::root_waker();
    loop {
        if task::take_root_wake() {
            let mut context = Context::from_waker(&root);
            if let Poll::Ready(value) = main.as_mut().poll(&mut context) {
                return Ok(value);
            }
        }
        task::run_ready();
        if task::idle() {
            reactor::wait(timer::until_next())?;
        } else {
            continue;
        }
        timer::fire();
    }
}

/// Completes with whichever of the two futures is first; the first wins a tie.
pub async fn either<A, B>(
    first: impl Future<Output = A>,
    second: impl Future<Output = B>,
) -> Either<A, B> {
    let mut first = pin!(first);
    let mut second = pin!(second);
    std::future::poll_fn(move |cx| {
        if let Poll::Ready(value) = first.as_mut().poll(cx) {
            return Poll::Ready(Either::First(value));
        }
        second.as_mut().poll(cx).map(Either::Second)
    })
    .await
}

/// Which of two futures finished.
pub enum Either<A, B> {
    /// The first one.
    First(A),
    /// The second one.
    Second(B),
}

/// Lets every other ready task run before this one goes on.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests;
