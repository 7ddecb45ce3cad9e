//! The driver's side of one split queue.
#![allow(clippy::unwrap_used)]

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The chain goes on.
pub const NEXT: u16 = 1;
/// The device writes this buffer.
pub const WRITE: u16 = 2;
/// The buffer is a table.
pub const INDIRECT: u16 = 4;

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Head of the chain.
    pub head: u16,
    /// Bytes the device says it wrote.
    pub len: u32,
}

/// A queue as its driver sees it. Descriptors are used in turn and never checked
/// for being free: tests do not have that many in flight.
#[derive(Debug)]
pub struct DriverQueue {
    memory: GuestMemoryMmap,
    size: u16,
    base: u64,
    next_descriptor: u16,
    available: u16,
    used: u16,
}

impl DriverQueue {
    /// An empty queue whose table is at `base`, rings 16 and 32 KiB behind it.
    pub fn new(memory: &GuestMemoryMmap, base: u64, size: u16) -> Self {
        Self { memory: memory.clone(), size, base, next_descriptor: 0, available: 0, used: 0 }
    }

    /// The same queue in a copy of the memory.
    pub fn over(&self, memory: &GuestMemoryMmap) -> Self {
        Self { memory: memory.clone(), ..*self }
    }

    /// Size and addresses: table, available ring, used ring.
    pub fn layout(&self) -> (u16, u64, u64, u64) {
        (self.size, self.base, self.base + 0x4000, self.base + 0x8000)
    }

    /// A device's queue over the same memory, ready.
    pub fn device_queue(&self) -> Queue {
        let (size, table, available, used) = self.layout();
        let mut queue = Queue::new(size).unwrap();
        queue.try_set_desc_table_address(GuestAddress(table)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(available)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(used)).unwrap();
        queue.set_ready(true);
        queue
    }

    /// Writes one descriptor as it is given.
    pub fn write_descriptor(&self, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        write_descriptor(&self.memory, self.base, index, (address, len, flags, next));
    }

    /// Makes `head` available.
    pub fn offer(&mut self, head: u16) {
        let (_, _, ring, _) = self.layout();
        let slot = u64::from(self.available % self.size);
        self.memory.write_obj(head.to_le(), GuestAddress(ring + 4 + 2 * slot)).unwrap();
        self.available = self.available.wrapping_add(1);
        self.memory.write_obj(self.available.to_le(), GuestAddress(ring + 2)).unwrap();
    }

    /// Makes a chain of these buffers available; returns its head.
    pub fn add(
        &mut self,
        readable: &[(GuestAddress, u32)],
        writable: &[(GuestAddress, u32)],
    ) -> u16 {
        let total = readable.len() + writable.len();
        let buffers = readable
            .iter()
            .map(|buffer| (buffer, 0))
            .chain(writable.iter().map(|buffer| (buffer, WRITE)));
        let head = self.next_descriptor;
        for (number, ((address, len), flags)) in buffers.enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (index + 1) % self.size;
            let flags = if number + 1 < total { flags | NEXT } else { flags };
            self.write_descriptor(index, address.0, *len, flags, self.next_descriptor);
        }
        self.offer(head);
        head
    }

    /// Whether the device asked to be notified of the next buffer that is made available
    /// (the field `avail_event`).
    pub fn wants_notification_of_next(&self) -> bool {
        let (_, _, available, ring) = self.layout();
        let next: u16 = self.memory.read_obj(GuestAddress(available + 2)).unwrap();
        let event = ring + 4 + 8 * u64::from(self.size);
        let event: u16 = self.memory.read_obj(GuestAddress(event)).unwrap();
        u16::from_le(event) == u16::from_le(next)
    }

    /// Takes the next completion.
    pub fn take_used(&mut self) -> Option<Used> {
        let (_, _, available, ring) = self.layout();
        let index: u16 = self.memory.read_obj(GuestAddress(ring + 2)).unwrap();
        if u16::from_le(index) == self.used {
            return None;
        }
        let slot = u64::from(self.used % self.size);
        let element: [u32; 2] = self.memory.read_obj(GuestAddress(ring + 4 + 8 * slot)).unwrap();
        self.used = self.used.wrapping_add(1);
        // Asks for an interrupt at the next completion.
        let event = available + 4 + 2 * u64::from(self.size);
        self.memory.write_obj(self.used.to_le(), GuestAddress(event)).unwrap();
        let [head, len] = element.map(u32::from_le);
        Some(Used { head: u16::try_from(head).unwrap(), len })
    }

    /// Takes all completions.
    pub fn take_all_used(&mut self) -> Vec<Used> {
        std::iter::from_fn(|| self.take_used()).collect()
    }
}

/// Writes a descriptor (address, length, flags, next) into a table.
pub fn write_descriptor(
    memory: &GuestMemoryMmap,
    table: u64,
    index: u16,
    (address, len, flags, next): (u64, u32, u16, u16),
) {
    let at = GuestAddress(table + 16 * u64::from(index));
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&address.to_le_bytes());
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes.extend_from_slice(&next.to_le_bytes());
    memory.write_slice(&bytes, at).unwrap();
}
