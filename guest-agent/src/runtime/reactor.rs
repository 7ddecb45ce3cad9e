//! The one epoll instance and who waits on it.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::Timespec;

use super::io::Readiness;

/// Events taken by one wait. A guest rarely has more ready at once, and what is
/// left over is reported by the next wait.
const EVENTS_PER_WAIT: usize = 64;

struct Reactor {
    epoll: OwnedFd,
    sources: RefCell<Vec<Weak<Readiness>>>,
    free: RefCell<Vec<usize>>,
    events: RefCell<Vec<epoll::Event>>,
}

thread_local! {
    static REACTOR: Reactor = Reactor {
        epoll: epoll::create(CreateFlags::CLOEXEC).expect("epoll is available"),
        sources: RefCell::default(),
        free: RefCell::default(),
        events: RefCell::new(Vec::with_capacity(EVENTS_PER_WAIT)),
    };
}

/// Whether one event is reported until it is dealt with, or once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trigger {
    Level,
    Edge,
}

fn flags(trigger: Trigger, writing: bool) -> EventFlags {
    let mut flags = EventFlags::IN | EventFlags::RDHUP;
    if trigger == Trigger::Edge {
        flags |= EventFlags::ET;
    }
    if writing {
        flags |= EventFlags::OUT;
    }
    flags
}

/// Starts to watch `fd`; returns its key.
pub(super) fn add(
    fd: impl AsFd,
    readiness: &Rc<Readiness>,
    trigger: Trigger,
    writing: bool,
) -> io::Result<usize> {
    REACTOR.with(|reactor| {
        let mut sources = reactor.sources.borrow_mut();
        let key = reactor.free.borrow_mut().pop().unwrap_or_else(|| {
            sources.push(Weak::new());
            sources.len() - 1
        });
        let data = EventData::new_u64(u64::try_from(key).expect("keys are small"));
        if let Err(error) = epoll::add(&reactor.epoll, fd, data, flags(trigger, writing)) {
            reactor.free.borrow_mut().push(key);
            return Err(error.into());
        }
        sources[key] = Rc::downgrade(readiness);
        Ok(key)
    })
}

/// Also asks to be told when `fd` can be written to.
pub(super) fn watch_writing(fd: impl AsFd, key: usize, trigger: Trigger) -> io::Result<()> {
    REACTOR.with(|reactor| {
        let data = EventData::new_u64(u64::try_from(key).expect("keys are small"));
        Ok(epoll::modify(&reactor.epoll, fd, data, flags(trigger, true))?)
    })
}

/// Forgets a key. Closing the descriptor removes it from the kernel's list.
pub(super) fn remove(key: usize) {
    let _ = REACTOR.try_with(|reactor| {
        reactor.sources.borrow_mut()[key] = Weak::new();
        reactor.free.borrow_mut().push(key);
    });
}

/// Waits for events, at most for `timeout`, and wakes those they concern.
pub(super) fn wait(timeout: Option<Duration>) -> io::Result<()> {
    REACTOR.with(|reactor| {
        let mut events = reactor.events.borrow_mut();
        events.clear();
        let timeout = timeout.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let spare = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&reactor.epoll, spare, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let sources = reactor.sources.borrow();
        let woken: Vec<_> = events
            .iter()
            .filter_map(|event| {
                let key = usize::try_from(event.data.u64()).ok()?;
                Some((sources.get(key)?.upgrade()?, event.flags))
            })
            .collect();
        drop(sources);
        drop(events);
        for (readiness, flags) in woken {
            let closed = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
            if flags.intersects(closed) {
                readiness.closed();
            }
            // A pipe says so when its writers are gone and it is empty.
            if flags.contains(EventFlags::HUP) && !flags.contains(EventFlags::IN) {
                readiness.ended();
            }
            if flags.intersects(closed | EventFlags::IN) {
                readiness.readable();
            }
            if flags.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR) {
                readiness.writable();
            }
        }
        Ok(())
    })
}
