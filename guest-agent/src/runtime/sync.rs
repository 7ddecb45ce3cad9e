//! Waiting for one another inside the one thread.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};

/// A list of tasks to wake when something changes.
#[derive(Default)]
pub struct Event {
    waiting: RefCell<Vec<Waker>>,
}

impl Event {
    /// Wakes everyone who waits.
    pub fn notify(&self) {
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    /// Asks to be woken by the next [`Event::notify`].
    pub fn register(&self, cx: &Context<'_>) {
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            waiting.push(cx.waker().clone());
        }
    }

    /// Waits until `ready` gives a value; asked again at every notification.
    pub fn wait_for<T>(&self, mut ready: impl FnMut() -> Option<T>) -> impl Future<Output = T> {
        poll_fn(move |cx| match ready() {
            Some(value) => Poll::Ready(value),
            None => {
                self.register(cx);
                Poll::Pending
            }
        })
    }
}

/// A lock held across waits.
#[derive(Default)]
pub struct Lock {
    held: Cell<bool>,
    freed: Event,
}

/// Frees the lock when dropped.
pub struct Held<'a>(&'a Lock);

impl Lock {
    /// Waits for the lock.
    pub async fn acquire(&self) -> Held<'_> {
        self.freed.wait_for(|| (!self.held.replace(true)).then_some(())).await;
        Held(self)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.set(false);
        self.0.freed.notify();
    }
}

struct Channel<T> {
    items: RefCell<VecDeque<T>>,
    capacity: usize,
    senders: Cell<usize>,
    changed: Event,
}

/// Sending half of a bounded queue.
pub struct Sender<T>(Weak<Channel<T>>);

/// Receiving half of a bounded queue. Dropping it closes the queue.
pub struct Receiver<T>(Rc<Channel<T>>);

/// A queue of at most `capacity` items.
pub fn channel<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let channel = Rc::new(Channel {
        items: RefCell::default(),
        capacity,
        senders: Cell::new(1),
        changed: Event::default(),
    });
    (Sender(Rc::downgrade(&channel)), Receiver(channel))
}

impl<T> Sender<T> {
    /// Queues an item when there is room; gives it back when nobody listens.
    pub async fn send(&self, item: T) -> Result<(), T> {
        let mut item = Some(item);
        poll_fn(|cx| {
            let Some(channel) = self.0.upgrade() else {
                return Poll::Ready(item.take().map_or(Ok(()), Err));
            };
            if channel.items.borrow().len() >= channel.capacity {
                channel.changed.register(cx);
                return Poll::Pending;
            }
            channel.items.borrow_mut().extend(item.take());
            channel.changed.notify();
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// Whether nobody listens any more.
    pub fn is_closed(&self) -> bool {
        self.0.strong_count() == 0
    }

    /// Completes when nobody listens any more.
    pub fn poll_closed(&self, cx: &Context<'_>) -> Poll<()> {
        match self.0.upgrade() {
            Some(channel) => {
                channel.changed.register(cx);
                Poll::Pending
            }
            None => Poll::Ready(()),
        }
    }

    /// Like [`Sender::poll_closed`], as a future.
    pub async fn closed(&self) {
        poll_fn(|cx| self.poll_closed(cx)).await;
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if let Some(channel) = self.0.upgrade() {
            channel.senders.set(channel.senders.get() - 1);
            channel.changed.notify();
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        if let Some(channel) = self.0.upgrade() {
            channel.senders.set(channel.senders.get() + 1);
        }
        Sender(self.0.clone())
    }
}

impl<T> Receiver<T> {
    /// The next item; `None` when the queue is empty and nobody sends.
    pub fn poll_next(&self, cx: &Context<'_>) -> Poll<Option<T>> {
        if let Some(item) = self.0.items.borrow_mut().pop_front() {
            self.0.changed.notify();
            return Poll::Ready(Some(item));
        }
        if self.0.senders.get() == 0 {
            return Poll::Ready(None);
        }
        self.0.changed.register(cx);
        Poll::Pending
    }

    /// Waits until there is an item or no sender.
    pub async fn filled(&self) {
        poll_fn(|cx| {
            if !self.0.items.borrow().is_empty() || self.0.senders.get() == 0 {
                return Poll::Ready(());
            }
            self.0.changed.register(cx);
            Poll::Pending
        })
        .await;
    }

    /// Like [`Receiver::poll_next`], as a future.
    pub async fn next(&self) -> Option<T> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.items.take();
        self.0.changed.notify();
    }
}
