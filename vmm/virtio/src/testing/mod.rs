//! The other side, for tests: a driver that lays queues in guest memory and works
//! the registers, an interrupt that counts, and an event loop over epoll.
//!
//! Panics freely: it is compiled for tests only.
#![allow(clippy::unwrap_used)]

mod driver;
mod events;

pub use driver::{DriverQueue, INDIRECT, NEXT, Used, WRITE, write_descriptor};
pub use events::{CountingInterrupt, PollLoop};

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::device::VirtioDevice;
use crate::transport::{MmioTransport, TransportState};

/// Guest memory of a [`Machine`].
pub const MEMORY_BYTES: usize = 16 << 20;

/// Where the first queue lies; each has 64 KiB.
const QUEUES_BASE: u64 = 0x10_0000;

/// Where buffers are handed out from.
const BUFFERS_BASE: u64 = 0x40_0000;

/// VERSION_1 and EVENT_IDX.
pub const TRANSPORT_FEATURES: u64 = (1 << 32) | (1 << 29);

/// A guest of one device.
pub struct Machine {
    /// The device's transport.
    pub transport: MmioTransport,
    /// Guest memory.
    pub memory: GuestMemoryMmap,
    /// The driver's side of the queues.
    pub queues: Vec<DriverQueue>,
    /// The device's interrupt.
    pub interrupt: Arc<CountingInterrupt>,
    /// The event loop.
    pub events: Arc<PollLoop>,
    next_buffer: u64,
}

impl Machine {
    /// A guest whose driver took every feature and is running.
    pub fn boot(device: impl VirtioDevice) -> Self {
        Self::boot_with(device, u64::MAX)
    }

    /// A guest whose driver took the features of `mask` that were offered.
    pub fn boot_with(device: impl VirtioDevice, mask: u64) -> Self {
        let mut machine = Self::power_on(device);
        machine.negotiate(mask);
        machine.set_up_queues();
        machine.write(0x70, 15);
        assert_eq!(machine.read(0x70), 15);
        machine
    }

    /// A guest that has not touched the device.
    pub fn power_on(device: impl VirtioDevice) -> Self {
        let memory = memory();
        let interrupt = Arc::new(CountingInterrupt::default());
        let events = Arc::new(PollLoop::new());
        let sizes = device.queue_sizes().to_vec();
        let transport =
            MmioTransport::new(Box::new(device), memory.clone(), interrupt.clone(), events.clone())
                .unwrap();
        let queues = (0u64..)
            .zip(sizes)
            .map(|(index, size)| DriverQueue::new(&memory, QUEUES_BASE + index * 0x1_0000, size))
            .collect();
        Self { transport, memory, queues, interrupt, events, next_buffer: BUFFERS_BASE }
    }

    /// The same guest in a new process: memory and registers as saved, the device
    /// made anew by `restore` from its saved state.
    pub fn clone_with<D: VirtioDevice>(&mut self, restore: impl FnOnce(u16, &[u8]) -> D) -> Self {
        self.transport.quiesce();
        let state = self.transport.save();
        let (version, bytes) = self.transport.save_device();
        self.clone_from_state(restore(version, &bytes), &state)
    }

    /// A guest with a copy of this one's memory and the given state.
    pub fn clone_from_state(&self, device: impl VirtioDevice, state: &TransportState) -> Self {
        let memory = memory();
        let mut copy = vec![0; MEMORY_BYTES];
        self.memory.read_slice(&mut copy, GuestAddress(0)).unwrap();
        memory.write_slice(&copy, GuestAddress(0)).unwrap();
        let interrupt = Arc::new(CountingInterrupt::default());
        let events = Arc::new(PollLoop::new());
        let transport = MmioTransport::restore(
            Box::new(device),
            memory.clone(),
            interrupt.clone(),
            events.clone(),
            state,
        )
        .unwrap();
        let queues = self.queues.iter().map(|queue| queue.over(&memory)).collect();
        Self { transport, memory, queues, interrupt, events, next_buffer: self.next_buffer }
    }

    /// Up to FEATURES_OK.
    pub fn negotiate(&mut self, mask: u64) {
        self.write(0x70, 1);
        self.write(0x70, 3);
        for half in 0..2u32 {
            self.write(0x14, half);
            let offered = self.read(0x10);
            let wanted = u32::try_from((mask >> (32 * half)) & 0xffff_ffff).unwrap();
            // VERSION_1 is not the mask's to refuse.
            let wanted = if half == 1 { wanted | 1 } else { wanted };
            self.write(0x24, half);
            self.write(0x20, offered & wanted);
        }
        self.write(0x70, 11);
        assert_eq!(self.read(0x70), 11);
    }

    /// Makes every queue ready.
    pub fn set_up_queues(&mut self) {
        let layouts: Vec<_> = self.queues.iter().map(DriverQueue::layout).collect();
        for (index, (size, table, available, used)) in (0u32..).zip(layouts) {
            self.write(0x30, index);
            self.write(0x38, u32::from(size));
            for (register, address) in [(0x80, table), (0x90, available), (0xa0, used)] {
                self.write(register, u32::try_from(address).unwrap());
                self.write(register + 4, 0);
            }
            self.write(0x44, 1);
            assert_eq!(self.read(0x44), 1);
        }
    }

    /// Writes a register.
    pub fn write(&mut self, offset: u64, value: u32) {
        let _ = self.transport.write(offset, &value.to_le_bytes());
    }

    /// Reads a register.
    pub fn read(&mut self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.transport.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Fresh guest memory, page-aligned and zero.
    pub fn buffer(&mut self, bytes: usize) -> GuestAddress {
        let address = self.next_buffer;
        self.next_buffer += u64::try_from(bytes.next_multiple_of(4096)).unwrap();
        assert!(self.next_buffer <= u64::try_from(MEMORY_BYTES).unwrap(), "out of guest memory");
        GuestAddress(address)
    }

    /// Fresh guest memory with these bytes.
    pub fn buffer_of(&mut self, data: &[u8]) -> (GuestAddress, u32) {
        let address = self.buffer(data.len().max(1));
        self.memory.write_slice(data, address).unwrap();
        (address, u32::try_from(data.len()).unwrap())
    }

    /// Bytes of guest memory.
    pub fn bytes(&self, address: GuestAddress, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory.read_slice(&mut data, address).unwrap();
        data
    }

    /// Notifies queue `index` as an ioeventfd would.
    pub fn notify(&mut self, index: usize) {
        self.transport.notify(index);
    }

    /// Delivers the events there are, waiting up to `wait` for the first.
    /// Returns how many there were.
    pub fn turn(&mut self, wait: Duration) -> usize {
        let found = self.events.wait(wait);
        for (token, readiness) in &found {
            self.transport.event(*token, *readiness);
        }
        found.len()
    }

    /// Runs the event loop until `done` holds; panics after some seconds.
    pub fn run_until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !done(self) {
            assert!(Instant::now() < deadline, "condition not reached in time");
            self.turn(Duration::from_millis(5));
        }
    }
}

/// 16 MiB of guest memory from 0.
pub fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap()
}
