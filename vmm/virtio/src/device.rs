//! What a virtio device is to the transport and to the event loop.
//!
//! A device owns its behaviour and its host resources; the transport owns the
//! registers, the queues and the interrupt. All calls into one device are
//! serialised by the lock around its [`crate::transport::MmioTransport`].

use std::any::Any;
use std::os::fd::BorrowedFd;

use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;

/// Readiness a device wants to be told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// The descriptor can be read.
    Readable,
    /// The descriptor can be written.
    Writable,
    /// Either of the two.
    Both,
    /// Registered, but silent for now.
    Nothing,
}

/// Readiness that was reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Readiness {
    /// The descriptor can be read (or has reached end of file).
    pub readable: bool,
    /// The descriptor can be written.
    pub writable: bool,
    /// The peer hung up, or the descriptor is in error.
    pub closed: bool,
}

/// The event loop as one device sees it: tokens are the device's own.
///
/// The VMM implements it over epoll. A clone is given devices restored from
/// saved state after the fork, so registrations never cross one.
pub trait EventRegistry: Send + Sync {
    /// Watches `fd` under `token`.
    fn add(&self, fd: BorrowedFd<'_>, token: u32, interest: Interest) -> std::io::Result<()>;
    /// Changes what is watched.
    fn modify(&self, fd: BorrowedFd<'_>, token: u32, interest: Interest) -> std::io::Result<()>;
    /// Stops watching; call before the descriptor is closed.
    fn remove(&self, fd: BorrowedFd<'_>) -> std::io::Result<()>;
}

/// Raises the device's interrupt line. The VMM implements it with an irqfd that
/// is made on first use.
pub trait Interrupt: Send + Sync {
    /// Pulses the line (edge-triggered).
    fn trigger(&self) -> std::io::Result<()>;
}

/// What a device works with while it is called.
pub struct DeviceContext<'a> {
    /// Guest RAM.
    pub memory: &'a GuestMemoryMmap,
    /// The device's queues, ready ones only usable.
    pub queues: &'a mut [Queue],
    /// Where descriptors are watched.
    pub events: &'a dyn EventRegistry,
}

/// What the transport does after a call into the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub struct Outcome {
    /// A used ring changed in a way the driver wants to hear of.
    pub used_buffers: bool,
    /// The configuration space changed.
    pub config_changed: bool,
    /// The guest broke the protocol beyond repair: set DEVICE_NEEDS_RESET.
    pub failed: bool,
    /// The device stopped at its work bound with work left: the transport has
    /// the event loop call it again, after others had their turn.
    pub unfinished: bool,
}

impl Outcome {
    /// Adds what another part of the same call found.
    pub fn merge(&mut self, other: Outcome) {
        self.used_buffers |= other.used_buffers;
        self.config_changed |= other.config_changed;
        self.failed |= other.failed;
        self.unfinished |= other.unfinished;
    }
}

/// A device behind a transport. Every byte it reads from the guest is hostile:
/// no call may panic, loop without bound or touch memory outside guest RAM.
pub trait VirtioDevice: Any + Send {
    /// Device type number (virtio 1.2, section 5).
    fn device_type(&self) -> u32;

    /// Name for logs and statistics, such as `block-rootfs`.
    fn name(&self) -> &str;

    /// Features offered, without the transport's own (VERSION_1, EVENT_IDX).
    fn features(&self) -> u64;

    /// Largest size of each queue; the length is the number of queues.
    fn queue_sizes(&self) -> &[u16];

    /// Reads `data.len()` bytes of configuration space at `offset`; bytes beyond
    /// its end read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes configuration space; devices without writable fields ignore it.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// The driver set DRIVER_OK with `features` acknowledged.
    fn activate(&mut self, features: u64, context: &mut DeviceContext<'_>) -> Outcome;

    /// The transport was restored with a driver that had set DRIVER_OK: take up
    /// work where the saved device left it. Must stay cheap; the guest may never
    /// use the device again.
    fn resume(&mut self, features: u64, context: &mut DeviceContext<'_>) -> Outcome {
        let _ = (features, context);
        Outcome::default()
    }

    /// The driver wrote 0 to the status register: forget everything.
    fn reset(&mut self, events: &dyn EventRegistry);

    /// The driver notified queue `index`, which is valid and ready.
    fn notify(&mut self, index: usize, context: &mut DeviceContext<'_>) -> Outcome;

    /// A descriptor registered under `token` is ready.
    fn event(
        &mut self,
        token: u32,
        readiness: Readiness,
        context: &mut DeviceContext<'_>,
    ) -> Outcome {
        let _ = (token, readiness, context);
        Outcome::default()
    }

    /// Brings in-flight work to an end and lets go of what must not be inherited
    /// by a forked process; the vCPUs are stopped, and every ready queue was
    /// notified before. Afterwards [`VirtioDevice::save`] is called, and then
    /// either the process forks or the device runs on.
    fn quiesce(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let _ = context;
        Outcome::default()
    }

    /// The device's own state, versioned by the device: `(version, bytes)`.
    /// Bytes come back to the device's own restore constructor, hostile.
    fn save(&self) -> (u16, Vec<u8>);

    /// Counters of this device, by name.
    fn metrics(&self) -> Vec<(&'static str, u64)>;
}

/// Serves a read of a configuration space held as bytes; what lies beyond its end
/// reads as zero.
pub fn copy_config(space: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let rest = usize::try_from(offset).ok().and_then(|offset| space.get(offset..));
    for (to, from) in data.iter_mut().zip(rest.unwrap_or_default()) {
        *to = *from;
    }
}
