//! An event loop over epoll, and an interrupt that counts.
#![allow(clippy::unwrap_used)]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::event::{Timespec, epoll};

use crate::device::{EventRegistry, Interest, Interrupt, Readiness};

/// Counts how often it is raised.
#[derive(Debug, Default)]
pub struct CountingInterrupt {
    count: AtomicUsize,
}

impl CountingInterrupt {
    /// Times it was raised so far.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}

impl Interrupt for CountingInterrupt {
    fn trigger(&self) -> io::Result<()> {
        self.count.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A level-triggered event loop.
#[derive(Debug)]
pub struct PollLoop {
    epoll: OwnedFd,
    watched: AtomicUsize,
}

impl Default for PollLoop {
    fn default() -> Self {
        Self::new()
    }
}

impl PollLoop {
    /// A loop that watches nothing.
    pub fn new() -> Self {
        Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
            watched: AtomicUsize::new(0),
        }
    }

    /// Descriptors watched now.
    pub fn watched(&self) -> usize {
        self.watched.load(Ordering::SeqCst)
    }

    /// Waits for events, up to `wait` for the first.
    pub fn wait(&self, wait: Duration) -> Vec<(u32, Readiness)> {
        let mut found = Vec::with_capacity(64);
        let timeout = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap(),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        let spare = rustix::buffer::spare_capacity(&mut found);
        match epoll::wait(&self.epoll, spare, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => panic!("epoll_wait: {errno}"),
        }
        found
            .iter()
            .map(|event: &epoll::Event| {
                let (token, flags) = (event.data.u64(), event.flags);
                let readiness = Readiness {
                    readable: flags.contains(epoll::EventFlags::IN),
                    writable: flags.contains(epoll::EventFlags::OUT),
                    closed: flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR),
                };
                (u32::try_from(token).unwrap(), readiness)
            })
            .collect()
    }
}

fn flags(interest: Interest) -> epoll::EventFlags {
    match interest {
        Interest::Readable => epoll::EventFlags::IN,
        Interest::Writable => epoll::EventFlags::OUT,
        Interest::Both => epoll::EventFlags::IN | epoll::EventFlags::OUT,
        Interest::Nothing => epoll::EventFlags::empty(),
    }
}

impl EventRegistry for PollLoop {
    fn add(&self, fd: BorrowedFd<'_>, token: u32, interest: Interest) -> io::Result<()> {
        let data = epoll::EventData::new_u64(u64::from(token));
        epoll::add(&self.epoll, fd, data, flags(interest))?;
        self.watched.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn modify(&self, fd: BorrowedFd<'_>, token: u32, interest: Interest) -> io::Result<()> {
        let data = epoll::EventData::new_u64(u64::from(token));
        Ok(epoll::modify(&self.epoll, fd, data, flags(interest))?)
    }

    fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        epoll::delete(&self.epoll, fd)?;
        self.watched.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}
