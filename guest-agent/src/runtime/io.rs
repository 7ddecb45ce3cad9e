//! A non-blocking descriptor that is tried first and registered only when it
//! has to be waited for.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::reactor::{self, Trigger};

/// What is known of a descriptor and who waits for it.
pub(super) struct Readiness {
    can_read: Cell<bool>,
    can_write: Cell<bool>,
    hung_up: Cell<bool>,
    /// The other side is closed and nothing is left to read.
    at_end: Cell<bool>,
    reader: RefCell<Option<Waker>>,
    writer: RefCell<Option<Waker>>,
}

impl Readiness {
    pub(super) fn readable(&self) {
        self.can_read.set(true);
        wake(&self.reader);
    }

    pub(super) fn writable(&self) {
        self.can_write.set(true);
        wake(&self.writer);
    }

    pub(super) fn closed(&self) {
        self.hung_up.set(true);
    }

    pub(super) fn ended(&self) {
        self.at_end.set(true);
    }
}

fn wake(waiter: &RefCell<Option<Waker>>) {
    if let Some(waker) = waiter.take() {
        waker.wake();
    }
}

/// A descriptor owned by the event loop. One task may wait to read and one to
/// write.
pub struct Source {
    fd: OwnedFd,
    readiness: Rc<Readiness>,
    trigger: Trigger,
    key: Cell<Option<reactor::Key>>,
    watches_writing: Cell<bool>,
}

impl Source {
    /// Takes a descriptor that is non-blocking.
    pub fn new(fd: OwnedFd) -> Self {
        Self::with_trigger(fd, Trigger::Edge)
    }

    /// Takes a descriptor from which one item is taken at a time, such as a
    /// listening socket: it is reported again while items are left, which
    /// spares the call that would find none.
    pub fn one_at_a_time(fd: OwnedFd) -> Self {
        Self::with_trigger(fd, Trigger::Level)
    }

    /// Takes a non-blocking descriptor that has nothing to read yet, such as a
    /// new pipe: it is waited for before it is tried.
    pub fn empty(fd: OwnedFd) -> Self {
        let source = Self::new(fd);
        source.readiness.can_read.set(false);
        source
    }

    fn with_trigger(fd: OwnedFd, trigger: Trigger) -> Self {
        let readiness = Rc::new(Readiness {
            can_read: Cell::new(trigger == Trigger::Edge),
            can_write: Cell::new(true),
            hung_up: Cell::new(false),
            at_end: Cell::new(false),
            reader: RefCell::default(),
            writer: RefCell::default(),
        });
        Source { fd, readiness, trigger, key: Cell::new(None), watches_writing: Cell::new(false) }
    }

    /// Reads into `buffer`; `Ok(0)` is the end.
    pub fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let length = buffer.len();
        if self.readiness.at_end.get() {
            return Poll::Ready(Ok(0));
        }
        self.poll_input(cx, |fd| {
            let count = rustix::io::read(fd, &mut *buffer)?;
            Ok((count, count == length || count == 0))
        })
    }

    /// Does one `input` call, which says whether more may be waiting.
    pub fn poll_input<T>(
        &self,
        cx: &mut Context<'_>,
        mut input: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<(T, bool)>,
    ) -> Poll<io::Result<T>> {
        loop {
            if !self.readiness.can_read.get() {
                self.register(false)?;
                if !self.readiness.can_read.get() {
                    self.readiness.reader.replace(Some(cx.waker().clone()));
                    return Poll::Pending;
                }
            }
            match input(self.fd.as_fd()) {
                Ok((value, more)) => {
                    if (!more || self.trigger == Trigger::Level) && !self.readiness.hung_up.get() {
                        self.readiness.can_read.set(false);
                    }
                    return Poll::Ready(Ok(value));
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => self.readiness.can_read.set(false),
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    /// Makes the next read ask the kernel, whatever was learned before.
    pub fn try_again(&self) {
        self.readiness.can_read.set(true);
    }

    /// Like [`Source::poll_read`], as a future.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        std::future::poll_fn(|cx| self.poll_read(cx, buffer)).await
    }

    /// Waits until `input` gives something.
    pub async fn input<T>(
        &self,
        mut input: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        std::future::poll_fn(|cx| self.poll_input(cx, |fd| Ok((input(fd)?, true)))).await
    }

    /// Writes some of `slices`.
    pub fn poll_write(
        &self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            if !self.readiness.can_write.get() {
                self.register(true)?;
                self.readiness.writer.replace(Some(cx.waker().clone()));
                return Poll::Pending;
            }
            let written = match slices {
                [one] => rustix::io::write(&self.fd, one),
                many => rustix::io::writev(&self.fd, many),
            };
            match written {
                Ok(count) => return Poll::Ready(Ok(count)),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => self.readiness.can_write.set(false),
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    /// Writes all of `bytes`.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let slices = [IoSlice::new(bytes)];
            let count = std::future::poll_fn(|cx| self.poll_write(cx, &slices)).await?;
            bytes = &bytes[count..];
        }
        Ok(())
    }

    /// Registers it now and not when it is first waited for.
    pub fn prepare(&self) -> io::Result<()> {
        self.register(false)
    }

    fn register(&self, writing: bool) -> io::Result<()> {
        match self.key.get() {
            None => {
                let key = reactor::add(&self.fd, &self.readiness, self.trigger, writing)?;
                self.key.set(Some(key));
                self.watches_writing.set(writing);
            }
            Some(key) if writing && !self.watches_writing.get() => {
                reactor::watch_writing(&self.fd, key, self.trigger)?;
                self.watches_writing.set(true);
            }
            Some(_) => {}
        }
        Ok(())
    }
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some(key) = self.key.get() {
            reactor::remove(key);
        }
    }
}
