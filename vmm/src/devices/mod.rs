//! The devices of one microVM, as its vCPUs and its event loop see them.
//!
//! Lock order: a device's slot, then nothing. A slot is held while one access, one
//! notification or one event is served.

mod interrupt;
mod serial;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_ioctls::{IoEventAddress, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use warren_virtio::transport::{MmioTransport, WriteEffect};
use warren_virtio::{Interest, Readiness};
use warren_vmm_api::DeviceStats;

use crate::events::{Source, Watch};
use crate::layout::{MMIO_START, MMIO_STRIDE};
use crate::vcpu::{GuestEnd, GuestPorts};

pub use interrupt::Line;
pub use serial::{SerialPort, restore_serial, serial};

/// Offset of the register by which a driver notifies a queue (virtio 1.2, 4.2.2).
const QUEUE_NOTIFY: u64 = 0x50;

/// A queue gets its ioeventfd at this notification. The first ones are served on the
/// vCPU thread: most clones notify a queue a few times in all, and an ioeventfd costs a
/// file, a KVM registration and a thread switch for each use.
const IOEVENTFD_AT: u32 = 64;

struct Slot {
    transport: MmioTransport,
    queues: Vec<Notifications>,
}

#[derive(Default)]
struct Notifications {
    seen: u32,
    ioeventfd: Option<EventFd>,
}

/// All devices of a microVM.
pub struct Devices {
    vm: Arc<VmFd>,
    watch: Watch,
    slots: Vec<Mutex<Slot>>,
    serial: Mutex<SerialPort>,
    end: Mutex<Option<GuestEnd>>,
    ended: EventFd,
}

impl Devices {
    /// Puts devices at their addresses, in order.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn new(
        vm: Arc<VmFd>,
        watch: Watch,
        transports: Vec<MmioTransport>,
        serial: SerialPort,
    ) -> std::io::Result<Self> {
        let ended = EventFd::new(EFD_NONBLOCK)?;
        watch.add(borrow(&ended), Source::GuestEnd, Interest::Readable)?;
        let slots = transports
            .into_iter()
            .map(|transport| Mutex::new(Slot { transport, queues: Vec::new() }))
            .collect();
        Ok(Self { vm, watch, slots, serial: Mutex::new(serial), end: Mutex::new(None), ended })
    }

    /// How the guest ended, once it has.
    #[must_use]
    pub fn end(&self) -> Option<GuestEnd> {
        lock(&self.end).clone()
    }

    /// Serves a descriptor of a device.
    pub fn event(&self, device: u16, token: u32, readiness: Readiness) {
        if let Some(slot) = self.slots.get(usize::from(device)) {
            lock(slot).transport.event(token, readiness);
        }
    }

    /// Serves the ioeventfd of a queue.
    pub fn queue_notified(&self, device: u16, queue: u32) {
        let Some(slot) = self.slots.get(usize::from(device)) else { return };
        let mut slot = lock(slot);
        let queue = usize::try_from(queue).expect("u32 fits a length");
        if let Some(Notifications { ioeventfd: Some(ioeventfd), .. }) = slot.queues.get(queue) {
            // Empty when a reset came in between.
            drop(ioeventfd.read());
            slot.transport.notify(queue);
        }
    }

    /// Calls `work` for each transport, in order.
    pub fn for_each(&self, mut work: impl FnMut(&mut MmioTransport)) {
        for slot in &self.slots {
            work(&mut lock(slot).transport);
        }
    }

    /// Calls `work` with the serial console.
    pub fn with_serial<T>(&self, work: impl FnOnce(&mut SerialPort) -> T) -> T {
        work(&mut lock(&self.serial))
    }

    /// Counters of all devices, by name.
    #[must_use]
    pub fn stats(&self) -> Vec<(String, DeviceStats)> {
        let mut stats = Vec::new();
        self.for_each(|transport| {
            let counters = transport.device_metrics().into_iter();
            let counters = counters.map(|(name, value)| (name.to_owned(), value)).collect();
            stats.push((transport.name().to_owned(), counters));
        });
        stats
    }

    fn at(&self, address: u64) -> Option<(u16, &Mutex<Slot>, u64)> {
        let offset = address.checked_sub(MMIO_START)?;
        let index = u16::try_from(offset / MMIO_STRIDE).ok()?;
        Some((index, self.slots.get(usize::from(index))?, offset % MMIO_STRIDE))
    }

    /// Counts a notification that came as an MMIO exit, and gives the queue an
    /// ioeventfd when it is a busy one.
    fn count_notification(&self, device: u16, slot: &mut Slot, queue: usize) {
        if slot.queues.len() <= queue {
            slot.queues.resize_with(queue + 1, Notifications::default);
        }
        let notifications = &mut slot.queues[queue];
        notifications.seen = notifications.seen.saturating_add(1);
        if notifications.seen != IOEVENTFD_AT {
            return;
        }
        let queue = u32::try_from(queue).expect("queue numbers are small");
        match self.make_ioeventfd(device, queue) {
            Ok(ioeventfd) => notifications.ioeventfd = Some(ioeventfd),
            Err(error) => tracing::warn!(%error, device, queue, "queue has no ioeventfd"),
        }
    }

    fn make_ioeventfd(&self, device: u16, queue: u32) -> std::io::Result<EventFd> {
        let ioeventfd = EventFd::new(EFD_NONBLOCK)?;
        let source = Source::Queue { device, queue };
        self.watch.add(borrow(&ioeventfd), source, Interest::Readable)?;
        let address = IoEventAddress::Mmio(notify_address(device));
        self.vm.register_ioevent(&ioeventfd, &address, queue).map_err(errno)?;
        Ok(ioeventfd)
    }

    fn drop_ioeventfds(&self, device: u16, slot: &mut Slot) {
        let address = IoEventAddress::Mmio(notify_address(device));
        for (queue, notifications) in (0u32..).zip(std::mem::take(&mut slot.queues)) {
            let Some(ioeventfd) = notifications.ioeventfd else { continue };
            let unregistered =
                self.vm.unregister_ioevent(&ioeventfd, &address, queue).map_err(errno);
            let unwatched = self.watch.remove(borrow(&ioeventfd));
            if let Err(error) = unregistered.and(unwatched) {
                tracing::warn!(%error, device, queue, "ioeventfd not taken away");
            }
        }
    }
}

impl GuestPorts for Arc<Devices> {
    fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match self.at(address) {
            Some((_, slot, offset)) => lock(slot).transport.read(offset, data),
            None => data.fill(0xff),
        }
    }

    fn mmio_write(&self, address: u64, data: &[u8]) {
        let Some((device, slot, offset)) = self.at(address) else { return };
        let mut slot = lock(slot);
        match slot.transport.write(offset, data) {
            WriteEffect::Notified(queue) => self.count_notification(device, &mut slot, queue),
            WriteEffect::Reset => self.drop_ioeventfds(device, &mut slot),
            WriteEffect::None | WriteEffect::QueueReady(_) | WriteEffect::Activated => {}
        }
    }

    fn serial_read(&self, register: u8) -> u8 {
        lock(&self.serial).read(register)
    }

    fn serial_write(&self, register: u8, value: u8) {
        // Failing to log or to interrupt is no reason to stop the guest.
        if let Err(error) = lock(&self.serial).write(register, value) {
            tracing::debug!(?error, "serial console");
        }
    }

    fn guest_ended(&self, end: GuestEnd) {
        lock(&self.end).get_or_insert(end);
        if let Err(error) = self.ended.write(1) {
            tracing::error!(%error, "end of the guest not reported");
        }
    }
}

fn notify_address(device: u16) -> u64 {
    MMIO_START + MMIO_STRIDE * u64::from(device) + QUEUE_NOTIFY
}

fn errno(error: kvm_ioctls::Error) -> std::io::Error {
    std::io::Error::from_raw_os_error(error.errno())
}

fn borrow(fd: &EventFd) -> std::os::fd::BorrowedFd<'_> {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open for as long as the EventFd that is borrowed.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}

/// A panic while a lock was held leaves a device that may be wrong, but no memory
/// unsafety; the microVM goes on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
