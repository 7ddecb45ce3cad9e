//! Tasks and their wakers.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

type Boxed = Pin<Box<dyn Future<Output = ()>>>;

struct Slot {
    generation: u64,
    future: Option<Boxed>,
    waker: Arc<TaskWaker>,
}

#[derive(Default)]
struct Executor {
    slots: RefCell<Vec<Option<Slot>>>,
    free: RefCell<Vec<usize>>,
    ready: RefCell<VecDeque<(usize, u64)>>,
    generations: Cell<u64>,
    root_woken: Cell<bool>,
}

thread_local! {
    static EXECUTOR: Executor = Executor { root_woken: Cell::new(true), ..Executor::default() };
}

struct TaskWaker {
    index: usize,
    generation: u64,
    queued: AtomicBool,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            EXECUTOR.with(|e| e.ready.borrow_mut().push_back((self.index, self.generation)));
        }
    }
}

struct RootWaker;

impl Wake for RootWaker {
    fn wake(self: Arc<Self>) {
        EXECUTOR.with(|e| e.root_woken.set(true));
    }
}

pub(super) fn root_waker() -> Waker {
    Waker::from(Arc::new(RootWaker))
}

pub(super) fn take_root_wake() -> bool {
    EXECUTOR.with(|e| e.root_woken.replace(false))
}

pub(super) fn idle() -> bool {
    EXECUTOR.with(|e| e.ready.borrow().is_empty() && !e.root_woken.get())
}

/// Owner of a spawned task: dropping it cancels the task.
#[must_use = "dropping a task cancels it"]
pub struct Task {
    index: usize,
    generation: u64,
}

impl Task {
    /// Lets the task run to its own end. For work that ends by itself.
    pub fn detach(self) {
        std::mem::forget(self);
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        // The slot is emptied first and dropped after: the future's own drop
        // may come back to the executor.
        let slot = EXECUTOR.try_with(|e| release(e, self.index, self.generation));
        drop(slot);
    }
}

fn release(executor: &Executor, index: usize, generation: u64) -> Option<Slot> {
    let mut slots = executor.slots.borrow_mut();
    let slot = slots.get_mut(index)?.take_if(|slot| slot.generation == generation)?;
    executor.free.borrow_mut().push(index);
    Some(slot)
}

/// Starts a task; it runs for the first time when its spawner next waits.
pub fn spawn(future: impl Future<Output = ()> + 'static) -> Task {
    EXECUTOR.with(|executor| {
        let mut slots = executor.slots.borrow_mut();
        let index = executor.free.borrow_mut().pop().unwrap_or_else(|| {
            slots.push(None);
            slots.len() - 1
        });
        let generation = executor.generations.get() + 1;
        executor.generations.set(generation);
        let waker = Arc::new(TaskWaker { index, generation, queued: AtomicBool::new(true) });
        slots[index] = Some(Slot { generation, future: Some(Box::pin(future)), waker });
        executor.ready.borrow_mut().push_back((index, generation));
        Task { index, generation }
    })
}

/// Polls every task that is ready, until none is.
pub(super) fn run_ready() {
    while let Some((index, generation)) = EXECUTOR.with(|e| e.ready.borrow_mut().pop_front()) {
        poll(index, generation);
    }
}

fn poll(index: usize, generation: u64) {
    let taken = EXECUTOR.with(|e| {
        let mut slots = e.slots.borrow_mut();
        let slot = slots.get_mut(index)?.as_mut().filter(|s| s.generation == generation)?;
        Some((slot.future.take()?, slot.waker.clone()))
    });
    let Some((mut future, waker)) = taken else { return };
    waker.queued.store(false, Ordering::Relaxed);
    let waker = Waker::from(waker);
    let outcome = future.as_mut().poll(&mut Context::from_waker(&waker));
    let leftover = EXECUTOR.with(|e| match outcome {
        Poll::Ready(()) => (release(e, index, generation), Some(future)),
        Poll::Pending => {
            let mut slots = e.slots.borrow_mut();
            match slots.get_mut(index).and_then(Option::as_mut) {
                Some(slot) if slot.generation == generation => {
                    slot.future = Some(future);
                    (None, None)
                }
                // Cancelled while it ran.
                _ => (None, Some(future)),
            }
        }
    });
    drop(leftover);
}
