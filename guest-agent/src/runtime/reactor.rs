//! The one epoll instance and who waits on it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::io::Readiness;

/// Events taken by one wait. A guest rarely has more ready at once, and what is
/// left over is reported by the next wait.
const EVENTS_PER_WAIT: usize = 64;

/// Names one registration for ever. A closed descriptor may be reported for a
/// little longer: a child that is about to execute holds a copy of it. So what
/// the kernel hands back is never used as a place that another may have taken.
pub(super) type Key = u64;

struct Reactor {
    epoll: OwnedFd,
    sources: RefCell<HashMap<Key, Weak<Readiness>>>,
    last: Cell<Key>,
    events: RefCell<Vec<epoll::Event>>,
}

thread_local! {
    static REACTOR: Reactor = Reactor {
        epoll: epoll::create(CreateFlags::CLOEXEC).expect("epoll is available"),
        sources: RefCell::default(),
        last: Cell::new(0),
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
) -> io::Result<Key> {
    REACTOR.with(|reactor| {
        let key = reactor.last.get() + 1;
        reactor.last.set(key);
        epoll::add(&reactor.epoll, fd, EventData::new_u64(key), flags(trigger, writing))?;
        reactor.sources.borrow_mut().insert(key, Rc::downgrade(readiness));
        Ok(key)
    })
}

/// Also asks to be told when `fd` can be written to.
pub(super) fn watch_writing(fd: impl AsFd, key: Key, trigger: Trigger) -> io::Result<()> {
    REACTOR.with(|reactor| {
        Ok(epoll::modify(&reactor.epoll, fd, EventData::new_u64(key), flags(trigger, true))?)
    })
}

/// Forgets a key. Closing the descriptor removes it from the kernel's list.
pub(super) fn remove(key: Key) {
    let _ = REACTOR.try_with(|reactor| reactor.sources.borrow_mut().remove(&key));
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
            .filter_map(|event| Some((sources.get(&event.data.u64())?.upgrade()?, event.flags)))
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
