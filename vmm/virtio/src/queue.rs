//! Walking queues that a hostile guest filled.
//!
//! `virtio-queue` keeps the ring indices; this module reads descriptor chains
//! itself, because a chain that breaks a rule must be seen as broken and not as
//! a shorter chain. A [`Chain`] that was popped lies wholly inside guest RAM,
//! has its readable part before its writable one, and has a bounded length.
//!
//! [`drain`] is the loop every device-bound queue uses: bounded work, one
//! interrupt decision at its end, notifications re-armed only when it ran dry.

use std::sync::atomic::{Ordering, fence};

use thiserror::Error;
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, Permissions,
};

use crate::sys::IoVector;

/// Descriptors one chain may have. Linux makes chains of at most the queue size
/// (256 here) or, indirectly, of the segment limit a device states (below it).
pub const CHAIN_SEGMENTS_MAX: usize = 1024;

/// Bytes of one descriptor in a descriptor table.
const DESCRIPTOR_BYTES: u64 = 16;

/// Zeroes are written to guest memory in pieces of this size.
static ZEROES: [u8; 4096] = [0; 4096];

/// What is wrong with one chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ChainError {
    /// A `next` field points outside its table.
    #[error("descriptor index {0} is outside its table")]
    Index(u16),
    /// The chain comes back to itself or is longer than its table.
    #[error("descriptor chain is longer than its table")]
    Loop,
    /// The chain has more than [`CHAIN_SEGMENTS_MAX`] descriptors.
    #[error("descriptor chain has too many descriptors")]
    TooLong,
    /// A buffer of no bytes.
    #[error("descriptor describes an empty buffer")]
    Empty,
    /// A buffer, or a table, is not inside guest memory.
    #[error("descriptor describes memory outside the guest's")]
    OutOfRange,
    /// A readable buffer after a writable one.
    #[error("readable descriptor follows a writable one")]
    Order,
    /// An indirect table that is nested, misused or of odd length.
    #[error("indirect descriptor is malformed")]
    Indirect,
    /// All buffers together exceed what virtio allows (2^32 bytes).
    #[error("descriptor chain is longer than 4 GiB")]
    Bytes,
}

/// What is wrong with a queue.
#[derive(Debug, Error)]
pub enum QueueError {
    /// One chain is malformed; it can be completed without being served.
    #[error("malformed descriptor chain at head {head}")]
    Chain {
        /// The chain's head, a valid descriptor index.
        head: u16,
        /// What is wrong.
        source: ChainError,
    },
    /// A head beyond the table: there is nothing that could be completed.
    #[error("head {0} is outside the descriptor table")]
    Head(u16),
    /// The ring's own fields are wrong or outside guest memory.
    #[error("virtqueue ring is unusable")]
    Ring(#[source] virtio_queue::Error),
    /// Guest memory could not be accessed.
    #[error("guest memory access failed")]
    Memory(#[source] GuestMemoryError),
}

/// One buffer of a chain, inside guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins.
    pub address: GuestAddress,
    /// Its length, never 0.
    pub len: u32,
}

/// A validated descriptor chain; reused from one pop to the next.
#[derive(Debug, Default)]
pub struct Chain {
    head: u16,
    segments: Vec<Segment>,
    readable_segments: usize,
    readable_bytes: u64,
    writable_bytes: u64,
}

impl Chain {
    /// Index by which the chain is completed.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// The part the device reads.
    pub fn readable(&self) -> Segments<'_> {
        let list = self.segments.get(..self.readable_segments).unwrap_or_default();
        Segments { list, skip: 0, len: self.readable_bytes }
    }

    /// The part the device writes.
    pub fn writable(&self) -> Segments<'_> {
        let list = self.segments.get(self.readable_segments..).unwrap_or_default();
        Segments { list, skip: 0, len: self.writable_bytes }
    }

    fn clear(&mut self, head: u16) {
        self.head = head;
        self.segments.clear();
        self.readable_segments = 0;
        self.readable_bytes = 0;
        self.writable_bytes = 0;
    }

    fn add(&mut self, memory: &GuestMemoryMmap, descriptor: Descriptor) -> Result<(), ChainError> {
        let (address, len) = (descriptor.addr(), descriptor.len());
        if len == 0 {
            return Err(ChainError::Empty);
        }
        if self.segments.len() >= CHAIN_SEGMENTS_MAX {
            return Err(ChainError::TooLong);
        }
        let permissions = match descriptor.is_write_only() {
            true => Permissions::Write,
            false => Permissions::Read,
        };
        if !memory.check_range(address, to_usize(len), permissions) {
            return Err(ChainError::OutOfRange);
        }
        if descriptor.is_write_only() {
            self.writable_bytes += u64::from(len);
        } else {
            if self.readable_segments != self.segments.len() {
                return Err(ChainError::Order);
            }
            self.readable_segments += 1;
            self.readable_bytes += u64::from(len);
        }
        if self.readable_bytes + self.writable_bytes > u64::from(u32::MAX) {
            return Err(ChainError::Bytes);
        }
        self.segments.push(Segment { address, len });
        Ok(())
    }

    /// Follows the chain from its head. The two tables a chain can have are each
    /// left or exhausted after as many steps as they have entries.
    fn read(
        &mut self,
        memory: &GuestMemoryMmap,
        table: u64,
        entries: u16,
    ) -> Result<(), ChainError> {
        let mut table = GuestAddress(table);
        let mut entries = entries;
        let mut index = self.head;
        let mut steps_left = entries;
        let mut indirect = false;
        loop {
            if index >= entries {
                return Err(ChainError::Index(index));
            }
            if steps_left == 0 {
                return Err(ChainError::Loop);
            }
            steps_left -= 1;
            let address = table
                .checked_add(u64::from(index) * DESCRIPTOR_BYTES)
                .ok_or(ChainError::OutOfRange)?;
            let descriptor: Descriptor =
                memory.read_obj(address).map_err(|_| ChainError::OutOfRange)?;

            if descriptor.refers_to_indirect_table() {
                // Only one level, and the table ends the chain (virtio 1.2, 2.7.5.3.1).
                if indirect || descriptor.has_next() {
                    return Err(ChainError::Indirect);
                }
                let bytes = u64::from(descriptor.len());
                if bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) {
                    return Err(ChainError::Indirect);
                }
                entries =
                    u16::try_from(bytes / DESCRIPTOR_BYTES).map_err(|_| ChainError::Indirect)?;
                table = descriptor.addr();
                index = 0;
                steps_left = entries;
                indirect = true;
                continue;
            }

            self.add(memory, descriptor)?;
            if !descriptor.has_next() {
                return Ok(());
            }
            index = descriptor.next();
        }
    }
}

/// A run of guest bytes spread over segments; slicing it allocates nothing.
#[derive(Debug, Clone, Copy)]
pub struct Segments<'a> {
    list: &'a [Segment],
    skip: u64,
    len: u64,
}

impl<'a> Segments<'a> {
    /// Bytes in the run.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the run has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The run without its first `bytes` bytes.
    pub fn skip(mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.len);
        self.len -= bytes;
        self.skip += bytes;
        while let Some((first, rest)) = self.list.split_first() {
            let first_bytes = u64::from(first.len);
            if self.skip < first_bytes {
                break;
            }
            self.skip -= first_bytes;
            self.list = rest;
        }
        self
    }

    /// At most the first `bytes` bytes of the run.
    pub fn limit(mut self, bytes: u64) -> Self {
        self.len = self.len.min(bytes);
        self
    }

    /// The pieces of contiguous guest addresses.
    pub fn iter(self) -> impl Iterator<Item = Segment> + 'a {
        let mut left = self.len;
        let mut skip = self.skip;
        self.list.iter().map_while(move |segment| {
            let usable = (u64::from(segment.len) - skip).min(left);
            let address = segment.address.unchecked_add(skip);
            skip = 0;
            left -= usable;
            let len = u32::try_from(usable).expect("a piece is no longer than its segment");
            (len > 0).then_some(Segment { address, len })
        })
    }

    /// Fills `data` from the run; the number of bytes is the smaller length.
    pub fn read(self, memory: &GuestMemoryMmap, data: &mut [u8]) -> Result<usize, QueueError> {
        let mut done = 0;
        for piece in self.iter() {
            let end = data.len().min(done + to_usize(piece.len));
            let Some(part) = data.get_mut(done..end) else { break };
            memory.read_slice(part, piece.address).map_err(QueueError::Memory)?;
            done = end;
            if done == data.len() {
                break;
            }
        }
        Ok(done)
    }

    /// Writes `data` to the run; the number of bytes is the smaller length.
    pub fn write(self, memory: &GuestMemoryMmap, data: &[u8]) -> Result<usize, QueueError> {
        let mut done = 0;
        for piece in self.iter() {
            let end = data.len().min(done + to_usize(piece.len));
            let Some(part) = data.get(done..end) else { break };
            memory.write_slice(part, piece.address).map_err(QueueError::Memory)?;
            done = end;
            if done == data.len() {
                break;
            }
        }
        Ok(done)
    }

    /// Overwrites the whole run with zeroes.
    pub fn zero(self, memory: &GuestMemoryMmap) -> Result<(), QueueError> {
        for piece in self.iter() {
            let mut address = piece.address;
            let mut left = to_usize(piece.len);
            while left > 0 {
                let part = ZEROES.get(..left).unwrap_or(&ZEROES);
                memory.write_slice(part, address).map_err(QueueError::Memory)?;
                left -= part.len();
                address = address.unchecked_add(to_u64(part.len()));
            }
        }
        Ok(())
    }

    /// Appends the run as host I/O vectors. They stay valid as long as the
    /// regions of `memory` are mapped; whoever keeps them keeps a clone of it.
    pub fn io_vectors(
        self,
        memory: &GuestMemoryMmap,
        vectors: &mut Vec<IoVector>,
    ) -> Result<(), QueueError> {
        for piece in self.iter() {
            let slices = memory
                .get_slices(piece.address, to_usize(piece.len), Permissions::ReadWrite)
                .map_err(QueueError::Memory)?;
            for slice in slices {
                vectors.push(IoVector::from_slice(&slice.map_err(QueueError::Memory)?));
            }
        }
        Ok(())
    }
}

/// Takes the next available chain, if there is one.
///
/// A malformed chain is taken as well: the error names its head, so that it can
/// be completed unserved.
pub fn pop(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    chain: &mut Chain,
) -> Result<bool, QueueError> {
    if !queue.ready() {
        return Ok(false);
    }
    let head = match queue.iter(memory).map_err(QueueError::Ring)?.next() {
        Some(found) => found.head_index(),
        None => return Ok(false),
    };
    if head >= queue.size() {
        return Err(QueueError::Head(head));
    }
    chain.clear(head);
    chain
        .read(memory, queue.desc_table(), queue.size())
        .map_err(|source| QueueError::Chain { head, source })?;
    Ok(true)
}

/// Gives the last `count` popped chains back, to be popped again.
pub fn unpop(queue: &mut Queue, count: u16) {
    queue.set_next_avail(queue.next_avail().wrapping_sub(count));
}

/// Completes a chain, `written` bytes of which the device wrote. A queue that
/// was switched off meanwhile swallows the completion.
pub fn push(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    head: u16,
    written: u32,
) -> Result<(), QueueError> {
    if !queue.ready() {
        return Ok(());
    }
    queue.add_used(memory, head, written).map_err(QueueError::Ring)
}

/// Completes several chains so that the driver sees all of them or none: what one
/// frame over several buffers needs. Ask [`wants_interrupt_since`] afterwards.
pub fn push_group(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    completions: &[(u16, u32)],
) -> Result<(), QueueError> {
    /// Bytes before the ring's elements, and of each.
    const HEADER: u64 = 4;
    const ELEMENT: u64 = 8;
    if !queue.ready() {
        return Ok(());
    }
    let mut next = queue.next_used();
    let ring = GuestAddress(queue.used_ring());
    for (head, written) in completions {
        let slot = u64::from(next.checked_rem(queue.size()).unwrap_or(0));
        let [h0, h1] = head.to_le_bytes();
        let [w0, w1, w2, w3] = written.to_le_bytes();
        memory
            .write_slice(
                &[h0, h1, 0, 0, w0, w1, w2, w3],
                ring.unchecked_add(HEADER + ELEMENT * slot),
            )
            .map_err(QueueError::Memory)?;
        next = next.wrapping_add(1);
    }
    queue.set_next_used(next);
    // Release: the elements are visible before the index that tells of them.
    memory.store(next.to_le(), ring.unchecked_add(2), Ordering::Release).map_err(QueueError::Memory)
}

/// Whether the driver wants an interrupt for what was completed since the used
/// index was `before`.
pub fn wants_interrupt_since(queue: &Queue, memory: &GuestMemoryMmap, before: u16) -> bool {
    /// Bytes before the ring's elements.
    const HEADER: u64 = 4;
    fence(Ordering::SeqCst);
    let ring = GuestAddress(queue.avail_ring());
    if !queue.event_idx_enabled() {
        let flags: u16 = memory.load(ring, Ordering::Relaxed).map(u16::from_le).unwrap_or(0);
        return u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0;
    }
    let event = ring.unchecked_add(HEADER + 2 * u64::from(queue.size()));
    let Ok(event) = memory.load::<u16>(event, Ordering::Relaxed).map(u16::from_le) else {
        return true;
    };
    let now = queue.next_used();
    now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before)
}

/// Whether the driver wants an interrupt for what was completed since the last
/// call that said so.
pub fn wants_interrupt(queue: &mut Queue, memory: &GuestMemoryMmap) -> bool {
    if queue.event_idx_enabled() {
        return queue.needs_notification(memory).unwrap_or(true);
    }
    // Completions must be visible before the driver's wish is read.
    fence(Ordering::SeqCst);
    let flags: u16 = memory
        .load(GuestAddress(queue.avail_ring()), Ordering::Relaxed)
        .map(u16::from_le)
        .unwrap_or(0);
    u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0
}

/// Asks for a notification at the next buffer; true if one is already there.
pub fn rearm(queue: &mut Queue, memory: &GuestMemoryMmap) -> Result<bool, QueueError> {
    queue.enable_notification(memory).map_err(QueueError::Ring)
}

/// What a device did with one chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Served; that many bytes were written.
    Used(u32),
    /// Taken; it will be completed later.
    Taken,
    /// Not taken: leave it where it is and stop.
    Hold,
}

/// Why and how [`drain`] came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub struct Drained {
    /// Something was completed; the interrupt is not decided yet.
    pub completed: bool,
    /// The budget ended before the queue did.
    pub unfinished: bool,
    /// The device held a chain back.
    pub held: bool,
    /// The queue is broken beyond use.
    pub failed: bool,
    /// Chains that were malformed and completed unserved.
    pub malformed: u64,
}

/// Takes up to `budget` chains off `queue` and gives each to `step`.
pub fn drain(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    chain: &mut Chain,
    budget: usize,
    mut step: impl FnMut(&mut Queue, &Chain) -> Step,
) -> Drained {
    let mut drained = Drained::default();
    let mut left = budget;
    loop {
        if left == 0 {
            drained.unfinished = true;
            return drained;
        }
        let (head, written) = match pop(queue, memory, chain) {
            Ok(true) => match step(queue, chain) {
                Step::Used(written) => (chain.head(), written),
                Step::Taken => {
                    left -= 1;
                    continue;
                }
                Step::Hold => {
                    unpop(queue, 1);
                    drained.held = true;
                    return drained;
                }
            },
            Ok(false) => match rearm(queue, memory) {
                Ok(true) if queue.ready() => continue,
                Ok(_) => return drained,
                Err(_) => {
                    drained.failed = true;
                    return drained;
                }
            },
            Err(QueueError::Chain { head, .. }) => {
                drained.malformed += 1;
                (head, 0)
            }
            Err(_) => {
                drained.failed = true;
                return drained;
            }
        };
        left -= 1;
        drained.completed = true;
        if push(queue, memory, head, written).is_err() {
            drained.failed = true;
            return drained;
        }
    }
}

/// Exact on every target Warren builds for: `usize` has 64 bits.
pub fn to_usize(value: u32) -> usize {
    usize::try_from(value).expect("usize holds 32 bits")
}

/// Exact on every target Warren builds for: `usize` has 64 bits.
pub fn to_u64(value: usize) -> u64 {
    u64::try_from(value).expect("usize has at most 64 bits")
}

#[cfg(test)]
mod tests;
