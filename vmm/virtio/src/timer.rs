//! A timer that exists only while it is armed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::device::{EventRegistry, Interest};

/// One timer of a device.
#[derive(Debug)]
pub struct Timer {
    token: u32,
    descriptor: Option<OwnedFd>,
}

impl Timer {
    /// A timer that is not armed and owns nothing; `token` is what it reports under.
    pub fn new(token: u32) -> Self {
        Self { token, descriptor: None }
    }

    /// Whether it will go off.
    pub fn is_armed(&self) -> bool {
        self.descriptor.is_some()
    }

    /// Goes off once after `delay`; until [`Timer::disarm`], the event repeats.
    pub fn arm(&mut self, events: &dyn EventRegistry, delay: Duration) -> io::Result<()> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let descriptor = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let value = Timespec {
            tv_sec: i64::try_from(delay.as_secs()).unwrap_or(i64::MAX),
            // All zero would mean: never.
            tv_nsec: i64::from(delay.subsec_nanos()).max(1),
        };
        let interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let when = Itimerspec { it_interval: interval, it_value: value };
        timerfd_settime(&descriptor, TimerfdTimerFlags::empty(), &when)?;
        self.disarm(events);
        events.add(descriptor.as_fd(), self.token, Interest::Readable)?;
        self.descriptor = Some(descriptor);
        Ok(())
    }

    /// Gives the timer up.
    pub fn disarm(&mut self, events: &dyn EventRegistry) {
        if let Some(descriptor) = self.descriptor.take() {
            let _ = events.remove(descriptor.as_fd());
        }
    }
}
