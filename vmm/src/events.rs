//! The event loop: one epoll instance, served by the main thread.
//!
//! Each registration carries 64 bits: whom it is for and that one's own token.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use warren_virtio::{EventRegistry, Interest, Readiness};

/// Events taken from the kernel at once.
const BATCH: usize = 16;

/// Whom an event is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The control socket accepts.
    ControlListener,
    /// A control connection has a request.
    ControlConnection(u32),
    /// A vCPU ended.
    GuestEnd,
    /// A descriptor of a device, under the device's token.
    Device {
        /// Position of the device.
        device: u16,
        /// The device's own token.
        token: u32,
    },
    /// The ioeventfd of a queue.
    Queue {
        /// Position of the device.
        device: u16,
        /// Number of the queue.
        queue: u32,
    },
}

const KIND_SHIFT: u32 = 48;
const DEVICE_SHIFT: u32 = 32;

impl Source {
    fn encode(self) -> u64 {
        let pack = |kind: u64, device: u16, token: u32| {
            (kind << KIND_SHIFT) | (u64::from(device) << DEVICE_SHIFT) | u64::from(token)
        };
        match self {
            Self::ControlListener => pack(0, 0, 0),
            Self::ControlConnection(number) => pack(1, 0, number),
            Self::GuestEnd => pack(2, 0, 0),
            Self::Device { device, token } => pack(3, device, token),
            Self::Queue { device, queue } => pack(4, device, queue),
        }
    }

    fn decode(data: u64) -> Option<Self> {
        let device = u16::try_from((data >> DEVICE_SHIFT) & 0xffff).ok()?;
        let token = u32::try_from(data & 0xffff_ffff).ok()?;
        match data >> KIND_SHIFT {
            0 => Some(Self::ControlListener),
            1 => Some(Self::ControlConnection(token)),
            2 => Some(Self::GuestEnd),
            3 => Some(Self::Device { device, token }),
            4 => Some(Self::Queue { device, queue: token }),
            _ => None,
        }
    }
}

/// Where descriptors are watched. Shared with devices and vCPU threads.
#[derive(Debug, Clone)]
pub struct Watch(Arc<OwnedFd>);

impl Watch {
    /// Nothing watched yet.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(epoll::create(CreateFlags::CLOEXEC)?)))
    }

    /// Watches `fd` for `source`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn add(&self, fd: BorrowedFd<'_>, source: Source, interest: Interest) -> io::Result<()> {
        let data = EventData::new_u64(source.encode());
        Ok(epoll::add(self.0.as_fd(), fd, data, flags(interest))?)
    }

    /// Stops watching `fd`.
    ///
    /// # Errors
    /// When it was not watched.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(self.0.as_fd(), fd)?)
    }

    /// Waits for events, for ever if `timeout` is `None`, and hands each to `serve`.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub fn wait(
        &self,
        timeout: Option<Duration>,
        mut serve: impl FnMut(Source, Readiness),
    ) -> io::Result<()> {
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; BATCH];
        let timeout = timeout.map(|time| rustix::event::Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        let ready = match epoll::wait(self.0.as_fd(), &mut events[..], timeout.as_ref()) {
            Ok(ready) => ready,
            Err(rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        for event in &events[..ready] {
            let (flags, data) = (event.flags, event.data);
            let readiness = Readiness {
                readable: flags.contains(EventFlags::IN),
                writable: flags.contains(EventFlags::OUT),
                closed: flags.intersects(EventFlags::HUP | EventFlags::ERR),
            };
            if let Some(source) = Source::decode(data.u64()) {
                serve(source, readiness);
            }
        }
        Ok(())
    }

    /// The part of one device.
    #[must_use]
    pub fn of_device(&self, device: u16) -> DeviceWatch {
        DeviceWatch { watch: self.clone(), device }
    }
}

/// [`Watch`] as one device sees it.
#[derive(Debug)]
pub struct DeviceWatch {
    watch: Watch,
    device: u16,
}

impl EventRegistry for DeviceWatch {
    fn add(&self, fd: BorrowedFd<'_>, token: u32, interest: Interest) -> io::Result<()> {
        self.watch.add(fd, Source::Device { device: self.device, token }, interest)
    }

    fn modify(&self, fd: BorrowedFd<'_>, token: u32, interest: Interest) -> io::Result<()> {
        let source = Source::Device { device: self.device, token };
        let data = EventData::new_u64(source.encode());
        Ok(epoll::modify(self.watch.0.as_fd(), fd, data, flags(interest))?)
    }

    fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.watch.remove(fd)
    }
}

fn flags(interest: Interest) -> EventFlags {
    match interest {
        Interest::Readable => EventFlags::IN,
        Interest::Writable => EventFlags::OUT,
        Interest::Both => EventFlags::IN | EventFlags::OUT,
        Interest::Nothing => EventFlags::empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_survive_encoding() {
        for source in [
            Source::ControlListener,
            Source::ControlConnection(7),
            Source::GuestEnd,
            Source::Device { device: 3, token: u32::MAX },
            Source::Queue { device: u16::MAX, queue: 2 },
        ] {
            assert_eq!(Source::decode(source.encode()), Some(source));
        }
    }
}
