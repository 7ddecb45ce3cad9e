//! The request queue: requests in, transfers to the engine, status bytes out.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_IOERR,
    VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use virtio_queue::Queue;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::allocation::Allocation;
use super::disk::{Allocations, CopyOnWriteDisk, Disk, DiskConfig, Source, Writable, punch_hole};
use super::engine::{Completion, Engine, Operation, Transfer};
use super::image::ImageFile;
use super::request::{Action, DiskRange, RangeError, Request, Unmap, parse_ranges};
use super::{
    BLOCK_BYTES, BlockError, BlockMetrics, ID_BYTES, QUEUE_SIZE, RANGE_SECTORS_MAX, RANGES_MAX,
    SECTOR_BYTES, SEGMENTS_MAX, persist,
};
use crate::device::{DeviceContext, EventRegistry, Outcome, Readiness, VirtioDevice, copy_config};
use crate::queue::{Chain, Drained, Segments, Step, drain, push, wants_interrupt};

/// Token of the ring.
const RING_TOKEN: u32 = 0;

/// Rounds of serving and reaping in one call.
const ROUNDS_MAX: usize = 8;

const CONFIG_BYTES: usize = 60;

/// What a guest's flush does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlushPolicy {
    /// Written data is made durable on the host.
    Durable,
    /// Acknowledged only: for disks that never outlive the machine's memory, such
    /// as a clone's, whose RAM a host crash loses as well.
    Acknowledge,
}

/// Configuration of a block device.
#[derive(Debug, Clone)]
pub struct BlockConfig {
    /// Name for logs and statistics.
    pub name: String,
    /// What the guest reads as the serial number; at most [`ID_BYTES`] bytes.
    pub id: String,
    /// The disk.
    pub disk: DiskConfig,
    /// What a flush does.
    pub flush: FlushPolicy,
}

/// A virtio-blk device.
pub struct BlockDevice {
    name: String,
    service: Service,
    chain: Chain,
}

/// All of the device but the chain being read, so that the two can be borrowed
/// at once.
struct Service {
    id: [u8; ID_BYTES],
    disk: Disk,
    flush: FlushPolicy,
    engine: Engine,
    pending: Vec<Option<Pending>>,
    metrics: BlockMetrics,
    /// Something was completed since the interrupt was last decided.
    completed: bool,
}

/// A request with transfers that have not ended.
#[derive(Debug)]
struct Pending {
    head: u16,
    status: GuestAddress,
    written: u32,
    transfers: usize,
    result: Status,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Ok,
    Failed,
    Unsupported,
}

impl Status {
    fn byte(self) -> u8 {
        let code = match self {
            Self::Ok => VIRTIO_BLK_S_OK,
            Self::Failed => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        };
        u8::try_from(code).expect("status codes are small")
    }
}

impl BlockDevice {
    /// A disk no guest has seen yet.
    pub fn new(config: BlockConfig) -> Result<Self, BlockError> {
        let disk = Disk::new(config.disk, Allocations::default())?;
        Self::with_disk(config.name, &config.id, config.flush, disk)
    }

    /// The disk as it was when `bytes` were saved. A copy-on-write disk whose
    /// saved delta held blocks finds them in the configured delta file.
    pub fn restore(config: BlockConfig, version: u16, bytes: &[u8]) -> Result<Self, BlockError> {
        let disk = persist::restore(config.disk, version, bytes)?;
        Self::with_disk(config.name, &config.id, config.flush, disk)
    }

    /// Ends the delta of a quiesced copy-on-write disk: it becomes a layer, and writes go
    /// to a new file at `delta`. Other disks have nothing to end.
    ///
    /// # Errors
    /// When the old delta cannot be opened; the disk is then as it was.
    pub fn end_delta(&mut self, delta: PathBuf) -> Result<(), BlockError> {
        let Disk::CopyOnWrite(disk) = &mut self.service.disk else { return Ok(()) };
        disk.end_delta(delta)?;
        self.service.count_blocks();
        Ok(())
    }

    /// Files of the layers of a copy-on-write disk, oldest first; their blocks are part
    /// of the saved state.
    pub fn layers(&self) -> Vec<ImageFile> {
        let disk = self.service.disk.copy_on_write();
        disk.into_iter().flat_map(CopyOnWriteDisk::layers).cloned().collect()
    }

    fn with_disk(
        name: String,
        id: &str,
        flush: FlushPolicy,
        disk: Disk,
    ) -> Result<Self, BlockError> {
        let mut id_bytes = [0; ID_BYTES];
        id_bytes
            .get_mut(..id.len())
            .ok_or_else(|| BlockError::Id { id: id.to_owned() })?
            .copy_from_slice(id.as_bytes());
        let metrics = BlockMetrics {
            delta_blocks: disk.allocation().map_or(0, Allocation::blocks),
            ..BlockMetrics::default()
        };
        Ok(Self {
            name,
            service: Service {
                id: id_bytes,
                disk,
                flush,
                engine: Engine::new(),
                pending: Vec::new(),
                metrics,
                completed: false,
            },
            chain: Chain::default(),
        })
    }

    /// Counters.
    pub fn block_metrics(&self) -> &BlockMetrics {
        &self.service.metrics
    }

    fn config_space(&self) -> [u8; CONFIG_BYTES] {
        let disk = &self.service.disk;
        let mut space = [0; CONFIG_BYTES];
        let mut put = |offset: usize, bytes: &[u8]| {
            if let Some(field) = space.get_mut(offset..offset + bytes.len()) {
                field.copy_from_slice(bytes);
            }
        };
        let block_sectors = u32::try_from(BLOCK_BYTES / SECTOR_BYTES).expect("8");
        let sector_bytes = u32::try_from(SECTOR_BYTES).expect("512");
        put(0, &(disk.bytes() / SECTOR_BYTES).to_le_bytes());
        put(12, &u32::from(SEGMENTS_MAX).to_le_bytes());
        put(20, &sector_bytes.to_le_bytes());
        // Physical blocks are 2^3 sectors; that is also the least sensible transfer.
        put(24, &[3, 0]);
        put(26, &8u16.to_le_bytes());
        if disk.writable() == Writable::Yes {
            put(36, &RANGE_SECTORS_MAX.to_le_bytes());
            put(40, &RANGES_MAX.to_le_bytes());
            put(44, &block_sectors.to_le_bytes());
            put(48, &RANGE_SECTORS_MAX.to_le_bytes());
            put(52, &RANGES_MAX.to_le_bytes());
            put(56, &[1]);
        }
        space
    }

    /// Serves the queue and collects transfers until neither moves.
    fn run(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let mut outcome = Outcome::default();
        let Some(queue) = context.queues.first_mut() else { return outcome };
        let Self { service, chain, .. } = self;
        for round in 1.. {
            let drained = service.serve(queue, context.memory, chain);
            outcome.failed |= drained.failed;
            let submitted = service.engine.submit(context.events, RING_TOKEN, &mut service.metrics);
            service.engine.reap();
            let ended = service.settle(queue, context.memory, &mut outcome);
            let stuck = submitted.is_err();
            // A request that was held waits for a transfer to end; if none did, the
            // ring's descriptor will tell.
            let more =
                drained.unfinished || (drained.held && ended > 0) || service.engine.can_submit();
            if outcome.failed || !(more || stuck) {
                break;
            }
            if round == ROUNDS_MAX || stuck {
                outcome.unfinished = true;
                break;
            }
        }
        if std::mem::take(&mut service.completed) {
            outcome.used_buffers = wants_interrupt(queue, context.memory);
        }
        outcome
    }
}

impl VirtioDevice for BlockDevice {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn features(&self) -> u64 {
        let common = (1 << VIRTIO_BLK_F_SEG_MAX)
            | (1 << VIRTIO_BLK_F_BLK_SIZE)
            | (1 << VIRTIO_BLK_F_TOPOLOGY);
        common
            | match self.service.disk.writable() {
                Writable::No => 1 << VIRTIO_BLK_F_RO,
                Writable::Yes => {
                    (1 << VIRTIO_BLK_F_FLUSH)
                        | (1 << VIRTIO_BLK_F_DISCARD)
                        | (1 << VIRTIO_BLK_F_WRITE_ZEROES)
                }
            }
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        copy_config(&self.config_space(), offset, data);
    }

    fn activate(&mut self, _features: u64, _context: &mut DeviceContext<'_>) -> Outcome {
        Outcome::default()
    }

    fn reset(&mut self, events: &dyn EventRegistry) {
        let service = &mut self.service;
        service.engine.cancel();
        service.engine.release(events);
        service.pending = Vec::new();
        service.completed = false;
    }

    fn notify(&mut self, _index: usize, context: &mut DeviceContext<'_>) -> Outcome {
        self.run(context)
    }

    fn event(
        &mut self,
        _token: u32,
        _readiness: Readiness,
        context: &mut DeviceContext<'_>,
    ) -> Outcome {
        let Some(queue) = context.queues.first_mut() else { return Outcome::default() };
        let mut outcome = Outcome::default();
        self.service.engine.reap();
        self.service.settle(queue, context.memory, &mut outcome);
        outcome.merge(self.run(context));
        outcome
    }

    fn quiesce(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let mut outcome = Outcome::default();
        loop {
            let part = self.run(context);
            outcome.merge(part);
            if outcome.failed || (self.service.engine.is_idle() && !part.unfinished) {
                break;
            }
            let waited = self.service.engine.wait();
            if let Some(queue) = context.queues.first_mut() {
                self.service.settle(queue, context.memory, &mut outcome);
            }
            if waited.is_err() {
                std::thread::yield_now();
            }
        }
        if outcome.failed {
            self.service.engine.cancel();
        }
        outcome.unfinished = false;
        self.service.engine.release(context.events);
        outcome
    }

    fn save(&self) -> (u16, Vec<u8>) {
        persist::save(&self.service.disk)
    }

    fn metrics(&self) -> Vec<(&'static str, u64)> {
        self.service.metrics.entries()
    }
}

impl Service {
    /// Takes requests off the queue until it is empty or the engine full.
    fn serve(&mut self, queue: &mut Queue, memory: &GuestMemoryMmap, chain: &mut Chain) -> Drained {
        let drained = drain(queue, memory, chain, usize::from(QUEUE_SIZE), |_, chain| {
            if self.engine.is_full() {
                return Step::Hold;
            }
            self.begin(memory, chain)
        });
        self.metrics.malformed_requests += drained.malformed;
        self.completed |= drained.completed;
        drained
    }

    fn begin(&mut self, memory: &GuestMemoryMmap, chain: &Chain) -> Step {
        let Ok(request) = Request::parse(chain, memory, self.disk.bytes()) else {
            self.metrics.malformed_requests += 1;
            return Step::Used(0);
        };
        if self.must_wait(&request.action, memory) {
            return Step::Hold;
        }
        // The slot exists before the transfers do: they name it.
        let slot = self.free_slot();
        let written = match request.action {
            Action::Read { data, .. } | Action::Id { data } => data.len() + 1,
            Action::Write { .. }
            | Action::Flush
            | Action::Discard { .. }
            | Action::WriteZeroes { .. }
            | Action::Invalid
            | Action::Unsupported => 1,
        };
        let pending = Pending {
            head: chain.head(),
            status: request.status,
            written: u32::try_from(written).unwrap_or(1),
            transfers: 0,
            result: Status::Ok,
        };
        self.put_slot(slot, Some(pending));

        let result = match request.action {
            Action::Read { offset, data } => self.read(slot, offset, data, memory),
            Action::Write { offset, data } => self.write(slot, offset, data, memory),
            Action::Flush => self.flush(slot, memory),
            Action::Id { data } => self.tell_id(data, memory),
            Action::Discard { ranges } => self.discard(ranges, memory),
            Action::WriteZeroes { ranges } => self.write_zeroes(ranges, memory),
            Action::Invalid => Status::Failed,
            Action::Unsupported => Status::Unsupported,
        };

        let Some(pending) = self.pending.get_mut(slot).and_then(Option::as_mut) else {
            return Step::Used(0);
        };
        if result != Status::Ok {
            pending.result = result;
        }
        if pending.transfers > 0 {
            return Step::Taken;
        }
        let (status, written, result) = (pending.status, pending.written, pending.result);
        self.put_slot(slot, None);
        self.conclude(status, result, memory);
        Step::Used(written)
    }

    fn free_slot(&mut self) -> usize {
        self.pending.iter().position(Option::is_none).unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len() - 1
        })
    }

    fn put_slot(&mut self, slot: usize, pending: Option<Pending>) {
        if let Some(place) = self.pending.get_mut(slot) {
            *place = pending;
        }
    }

    /// Counts the result and writes the status byte.
    fn conclude(&mut self, status: GuestAddress, result: Status, memory: &GuestMemoryMmap) {
        match result {
            Status::Ok => {}
            Status::Failed => self.metrics.failed_requests += 1,
            Status::Unsupported => self.metrics.unsupported_requests += 1,
        }
        // The address was checked when the chain was read.
        let _ = memory.write_obj(result.byte(), status);
    }

    /// Completes requests whose transfers all ended; returns how many transfers did.
    fn settle(
        &mut self,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        outcome: &mut Outcome,
    ) -> usize {
        let completions = self.engine.completed();
        let ended = completions.len();
        for completion in completions {
            self.settle_one(completion, queue, memory, outcome);
        }
        ended
    }

    fn settle_one(
        &mut self,
        completion: Completion,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        outcome: &mut Outcome,
    ) {
        let Completion { request, allocates, result } = completion;
        let failed = result.is_err();
        match result {
            Ok(()) if !allocates.is_empty() => {
                if let Disk::CopyOnWrite(disk) = &mut self.disk {
                    disk.allocate(allocates);
                    self.count_blocks();
                }
            }
            Ok(()) => {}
            Err(error) => self.count_host_error(&error),
        }
        let Some(Some(pending)) = self.pending.get_mut(request) else { return };
        if failed {
            pending.result = Status::Failed;
        }
        pending.transfers = pending.transfers.saturating_sub(1);
        if pending.transfers > 0 {
            return;
        }
        let (head, written) = (pending.head, pending.written);
        let (status, result) = (pending.status, pending.result);
        self.put_slot(request, None);
        self.conclude(status, result, memory);
        self.completed = true;
        outcome.failed |= push(queue, memory, head, written).is_err();
    }

    fn count_host_error(&mut self, error: &io::Error) {
        let full = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
        self.metrics.host_disk_full += u64::from(full);
    }

    fn count_blocks(&mut self) {
        self.metrics.delta_blocks = self.disk.allocation().map_or(0, Allocation::blocks);
    }

    fn failed(&mut self, error: &io::Error) -> Status {
        self.count_host_error(error);
        Status::Failed
    }

    /// Starts one transfer of the request in `slot`.
    fn transfer(&mut self, transfer: Transfer, memory: &GuestMemoryMmap) {
        let slot = transfer.request;
        if !self.engine.start(transfer, memory, &mut self.metrics)
            && let Some(Some(pending)) = self.pending.get_mut(slot)
        {
            pending.transfers += 1;
        }
    }

    fn read(
        &mut self,
        slot: usize,
        offset: u64,
        data: Segments<'_>,
        memory: &GuestMemoryMmap,
    ) -> Status {
        self.metrics.reads += 1;
        self.metrics.read_bytes += data.len();
        let mut at = offset;
        let end = offset + data.len();
        let mut rest = data;
        while at < end {
            let (source, bytes) = match self.disk.source(at..end) {
                Ok(found) => found,
                Err(error) => return self.failed(&error),
            };
            let part = rest.limit(bytes);
            match source {
                Source::Zero => {
                    if part.zero(memory).is_err() {
                        return Status::Failed;
                    }
                }
                Source::File(file) => {
                    let mut vectors = Vec::new();
                    if part.io_vectors(memory, &mut vectors).is_err() {
                        return Status::Failed;
                    }
                    let transfer = Transfer {
                        request: slot,
                        operation: Operation::Read,
                        file,
                        offset: at,
                        vectors,
                        allocates: 0..0,
                    };
                    self.transfer(transfer, memory);
                }
            }
            at += bytes;
            rest = rest.skip(bytes);
        }
        Status::Ok
    }

    fn write(
        &mut self,
        slot: usize,
        offset: u64,
        data: Segments<'_>,
        memory: &GuestMemoryMmap,
    ) -> Status {
        self.metrics.writes += 1;
        let range = offset..offset + data.len();
        let (file, allocates) = match self.write_target(&range) {
            Ok(Some(target)) => target,
            Ok(None) => return Status::Failed,
            Err(error) => return self.failed(&error),
        };
        let mut vectors = Vec::new();
        if data.io_vectors(memory, &mut vectors).is_err() {
            return Status::Failed;
        }
        self.metrics.written_bytes += data.len();
        let operation = Operation::Write;
        let transfer = Transfer { request: slot, operation, file, offset, vectors, allocates };
        self.transfer(transfer, memory);
        Status::Ok
    }

    /// The file a write to `range` goes to, and the blocks it allocates there.
    /// Blocks written in part are completed from the base first. `None` if the
    /// disk takes no writes.
    fn write_target(&mut self, range: &Range<u64>) -> io::Result<Option<(Arc<File>, Range<u64>)>> {
        let disk = match &mut self.disk {
            Disk::ReadOnly(_) => return Ok(None),
            Disk::ReadWrite(image) => return Ok(Some((image.file().clone(), 0..0))),
            Disk::CopyOnWrite(disk) => disk,
        };
        for block in disk.partial_blocks(range) {
            disk.copy_block(block)?;
            self.metrics.copied_blocks += 1;
        }
        let target = (disk.delta()?.clone(), disk.whole_blocks(range));
        self.count_blocks();
        Ok(Some(target))
    }

    /// Whether the request needs the map to be right about blocks that a transfer
    /// in flight is about to allocate: it then waits for that transfer.
    fn must_wait(&self, action: &Action<'_>, memory: &GuestMemoryMmap) -> bool {
        let Disk::CopyOnWrite(disk) = &self.disk else { return false };
        let unmap = match action {
            Action::Write { offset, data } => {
                let range = *offset..*offset + data.len();
                return disk
                    .partial_blocks(&range)
                    .any(|block| self.engine.is_writing(&(block..block + 1)));
            }
            Action::Discard { .. } => Unmap::Forbidden,
            Action::WriteZeroes { .. } => Unmap::Allowed,
            Action::Read { .. }
            | Action::Flush
            | Action::Id { .. }
            | Action::Invalid
            | Action::Unsupported => return false,
        };
        let (Action::Discard { ranges } | Action::WriteZeroes { ranges }) = action else {
            return false;
        };
        let ranges = self.ranges(*ranges, memory, unmap).unwrap_or_default();
        ranges.iter().any(|DiskRange { offset, bytes }| {
            let blocks = offset / BLOCK_BYTES..(offset + bytes).div_ceil(BLOCK_BYTES);
            self.engine.is_writing(&blocks)
        })
    }

    fn flush(&mut self, slot: usize, memory: &GuestMemoryMmap) -> Status {
        self.metrics.flushes += 1;
        if self.flush == FlushPolicy::Acknowledge {
            return Status::Ok;
        }
        if let Some(file) = self.disk.flush_target() {
            let transfer = Transfer {
                request: slot,
                operation: Operation::Flush,
                file,
                offset: 0,
                vectors: Vec::new(),
                allocates: 0..0,
            };
            self.transfer(transfer, memory);
        }
        Status::Ok
    }

    fn tell_id(&mut self, data: Segments<'_>, memory: &GuestMemoryMmap) -> Status {
        // A shorter buffer gets the beginning, a longer one nothing after the id.
        match data.write(memory, &self.id) {
            Ok(_) => Status::Ok,
            Err(_) => Status::Failed,
        }
    }

    fn discard(&mut self, ranges: Segments<'_>, memory: &GuestMemoryMmap) -> Status {
        let ranges = match self.ranges(ranges, memory, Unmap::Forbidden) {
            Ok(ranges) => ranges,
            Err(status) => return status,
        };
        self.metrics.discards += 1;
        for DiskRange { offset, bytes } in ranges {
            let range = offset..offset + bytes;
            let result = match &mut self.disk {
                Disk::ReadOnly(_) => return Status::Failed,
                // A discard is a hint: a host that cannot follow it does no harm.
                Disk::ReadWrite(image) => {
                    punch_hole(image.file(), range).or_else(unless_unsupported)
                }
                Disk::CopyOnWrite(disk) => {
                    let whole = disk.whole_blocks(&range);
                    disk.zero_blocks(whole)
                }
            };
            self.count_blocks();
            if let Err(error) = result {
                return self.failed(&error);
            }
        }
        Status::Ok
    }

    fn write_zeroes(&mut self, ranges: Segments<'_>, memory: &GuestMemoryMmap) -> Status {
        let ranges = match self.ranges(ranges, memory, Unmap::Allowed) {
            Ok(ranges) => ranges,
            Err(status) => return status,
        };
        self.metrics.write_zeroes += 1;
        for DiskRange { offset, bytes } in ranges {
            let range = offset..offset + bytes;
            let result = match &mut self.disk {
                Disk::ReadOnly(_) => return Status::Failed,
                Disk::ReadWrite(image) => match punch_hole(image.file(), range) {
                    // The driver then writes zeroes itself.
                    Err(error) if is_unsupported(&error) => return Status::Unsupported,
                    result => result,
                },
                Disk::CopyOnWrite(disk) => disk.zero(&range),
            };
            self.count_blocks();
            if let Err(error) = result {
                return self.failed(&error);
            }
        }
        Status::Ok
    }

    fn ranges(
        &self,
        ranges: Segments<'_>,
        memory: &GuestMemoryMmap,
        unmap: Unmap,
    ) -> Result<Vec<DiskRange>, Status> {
        parse_ranges(ranges, memory, self.disk.bytes(), unmap).map_err(|error| match error {
            RangeError::Invalid => Status::Failed,
            RangeError::Unsupported => Status::Unsupported,
        })
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV))
}

fn unless_unsupported(error: io::Error) -> io::Result<()> {
    if is_unsupported(&error) { Ok(()) } else { Err(error) }
}
