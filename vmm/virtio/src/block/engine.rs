//! Transfers between host files and guest memory.
//!
//! A transfer is tried against the page cache first, if it is a read; what that
//! leaves goes through an io_uring that is made when it is first needed. Where
//! the host refuses a ring, transfers are done in place instead.
//!
//! The engine holds what a transfer in flight points at (buffers' vectors, file,
//! a clone of guest memory's mappings) until the kernel is done with it; dropping
//! the engine waits for that.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use vm_memory::GuestMemoryMmap;

use super::{BlockMetrics, TRANSFERS_MAX};
use crate::device::{EventRegistry, Interest};
use crate::queue::to_u64;
use crate::sys::{self, IoVector};

/// Times a transfer the kernel interrupted is given to it again.
const RETRIES_MAX: u8 = 16;

/// What to do with the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// File to guest.
    Read,
    /// Guest to file.
    Write,
    /// Make the file's data durable.
    Flush,
}

/// One contiguous piece of one file.
#[derive(Debug)]
pub struct Transfer {
    /// Whose transfer it is.
    pub request: usize,
    /// What to do.
    pub operation: Operation,
    /// With which file.
    pub file: Arc<File>,
    /// Where in the file.
    pub offset: u64,
    /// The guest's buffers.
    pub vectors: Vec<IoVector>,
    /// Blocks the delta holds once the transfer is done.
    pub allocates: Range<u64>,
}

/// A transfer that came to its end.
#[derive(Debug)]
pub struct Completion {
    /// Whose transfer it was.
    pub request: usize,
    /// Blocks the delta now holds, if it went well.
    pub allocates: Range<u64>,
    /// How it went.
    pub result: io::Result<()>,
}

#[derive(Debug)]
struct Slot {
    transfer: Transfer,
    retries: u8,
}

/// How transfers reach the kernel.
enum Route {
    /// Not needed yet.
    Unmade,
    /// Through this ring.
    Ring(Box<IoUring>),
    /// In place, because the host refuses a ring.
    Direct,
}

/// All transfers of one device.
pub struct Engine {
    route: Route,
    slots: Vec<Option<Slot>>,
    /// Waiting for room in the ring.
    waiting: VecDeque<usize>,
    in_flight: usize,
    completions: Vec<Completion>,
    /// The file system knows no reads from the page cache only.
    cache_unknown: bool,
    /// Keeps the buffers of transfers mapped.
    memory: Option<GuestMemoryMmap>,
}

impl Engine {
    /// An engine that owns nothing yet.
    pub fn new() -> Self {
        Self {
            route: Route::Unmade,
            slots: Vec::new(),
            waiting: VecDeque::new(),
            in_flight: 0,
            completions: Vec::new(),
            cache_unknown: false,
            memory: None,
        }
    }

    /// Whether a new request must wait.
    pub fn is_full(&self) -> bool {
        self.waiting.len() + self.in_flight >= usize::from(TRANSFERS_MAX)
    }

    /// Whether no transfer is waiting or in flight.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.in_flight == 0
    }

    /// Whether transfers wait that the ring has room for.
    pub fn can_submit(&self) -> bool {
        !self.waiting.is_empty() && self.in_flight < usize::from(TRANSFERS_MAX)
    }

    /// Whether a transfer that has not ended writes any of `blocks`.
    pub fn is_writing(&self, blocks: &Range<u64>) -> bool {
        self.slots.iter().flatten().any(|slot| {
            let writes = &slot.transfer.allocates;
            writes.start < blocks.end && blocks.start < writes.end
        })
    }

    /// Takes a transfer. True if it ended at once and well; otherwise a
    /// [`Completion`] will tell.
    pub fn start(
        &mut self,
        mut transfer: Transfer,
        memory: &GuestMemoryMmap,
        metrics: &mut BlockMetrics,
    ) -> bool {
        if transfer.operation == Operation::Read && self.read_cached(&mut transfer) {
            metrics.cached_transfers += 1;
            return true;
        }
        if self.memory.is_none() {
            self.memory = Some(memory.clone());
        }
        let slot = Some(Slot { transfer, retries: 0 });
        let index = match self.slots.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        if let Some(place) = self.slots.get_mut(index) {
            *place = slot;
        }
        self.waiting.push_back(index);
        false
    }

    /// Reads what the page cache has; true if that was everything.
    fn read_cached(&mut self, transfer: &mut Transfer) -> bool {
        while !self.cache_unknown && !transfer.vectors.is_empty() {
            match sys::read_cached(transfer.file.as_fd(), &transfer.vectors, transfer.offset) {
                Ok(0) => break,
                Ok(bytes) => {
                    sys::advance(&mut transfer.vectors, bytes);
                    transfer.offset += to_u64(bytes);
                }
                Err(error) => {
                    self.cache_unknown |= error.raw_os_error() == Some(libc::EOPNOTSUPP);
                    break;
                }
            }
        }
        transfer.vectors.is_empty()
    }

    /// Hands waiting transfers to the kernel. An error means that the kernel has
    /// no room now and that the call is worth repeating.
    pub fn submit(
        &mut self,
        events: &dyn EventRegistry,
        token: u32,
        metrics: &mut BlockMetrics,
    ) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        if matches!(self.route, Route::Unmade) {
            self.route = make_ring(events, token);
            metrics.rings += u64::from(matches!(self.route, Route::Ring(_)));
        }
        if matches!(self.route, Route::Direct) {
            self.perform_waiting();
            return Ok(());
        }
        let Self { route, slots, waiting, in_flight, .. } = self;
        let Route::Ring(ring) = route else { return Ok(()) };
        while *in_flight < usize::from(TRANSFERS_MAX) {
            let Some(index) = waiting.pop_front() else { break };
            let Some(Some(slot)) = slots.get(index) else { continue };
            let entry = entry(&slot.transfer).user_data(to_u64(index));
            // SAFETY: what the entry points at (vectors, guest memory, file) is
            // owned by the slot and by `memory` and stays in place until the
            // completion was reaped; `Drop` and `release` wait for that.
            if unsafe { ring.submission().push(&entry) }.is_err() {
                waiting.push_front(index);
                break;
            }
            *in_flight += 1;
            metrics.ring_transfers += 1;
        }
        let Err(error) = submit_all(ring) else { return Ok(()) };
        let refused = !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY));
        // Nothing of the ring was taken by the kernel: it can be done without.
        if refused && ring.submission().len() == *in_flight {
            let _ = events.remove(ring.as_fd());
            self.route = Route::Direct;
            self.in_flight = 0;
            self.waiting = (0..self.slots.len())
                .filter(|at| matches!(self.slots.get(*at), Some(Some(_))))
                .collect();
            self.perform_waiting();
            return Ok(());
        }
        Err(error)
    }

    /// Does the waiting transfers in place.
    fn perform_waiting(&mut self) {
        for index in std::mem::take(&mut self.waiting) {
            if let Some(slot) = self.slots.get_mut(index).and_then(Option::take) {
                self.completions.push(perform(slot.transfer));
            }
        }
    }

    /// Collects what ended; [`Engine::completed`] then yields it.
    pub fn reap(&mut self) {
        let Route::Ring(ring) = &mut self.route else { return };
        let ended: Vec<cqueue::Entry> = ring.completion().collect();
        for entry in ended {
            let index = usize::try_from(entry.user_data()).expect("it was an index");
            self.in_flight -= 1;
            self.end(index, entry.result());
        }
    }

    /// Takes the completions collected so far.
    pub fn completed(&mut self) -> Vec<Completion> {
        std::mem::take(&mut self.completions)
    }

    /// Waits until at least one transfer in flight ended.
    pub fn wait(&mut self) -> io::Result<()> {
        if self.in_flight == 0 {
            return Ok(());
        }
        if let Route::Ring(ring) = &mut self.route {
            loop {
                match ring.submit_and_wait(1) {
                    Ok(_) => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        self.reap();
        Ok(())
    }

    /// Gives up the ring. Nothing may be in flight.
    pub fn release(&mut self, events: &dyn EventRegistry) {
        assert!(self.is_idle(), "the engine is released with transfers in flight");
        if let Route::Ring(ring) = std::mem::replace(&mut self.route, Route::Unmade) {
            let _ = events.remove(ring.as_fd());
        }
        self.slots = Vec::new();
        self.waiting = VecDeque::new();
        self.memory = None;
    }

    /// Takes back transfers the kernel was not given, and waits for the others.
    pub fn cancel(&mut self) {
        for index in std::mem::take(&mut self.waiting) {
            if let Some(slot) = self.slots.get_mut(index) {
                *slot = None;
            }
        }
        while self.in_flight > 0 {
            // A ring that cannot be waited for still owns the buffers: trying again
            // is all that is left.
            if self.wait().is_err() {
                std::thread::yield_now();
            }
            // Short transfers queued themselves again.
            for index in std::mem::take(&mut self.waiting) {
                if let Some(slot) = self.slots.get_mut(index) {
                    *slot = None;
                }
            }
        }
        self.completions.clear();
    }

    fn end(&mut self, index: usize, result: i32) {
        let Some(place) = self.slots.get_mut(index) else { return };
        let Some(mut slot) = place.take() else { return };
        let Slot { transfer, retries } = &mut slot;
        let outcome = match usize::try_from(result) {
            Ok(bytes) => progress(transfer, bytes),
            Err(_) => {
                let error = io::Error::from_raw_os_error(result.saturating_neg());
                let again = matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR));
                *retries += u8::from(again);
                match again && *retries < RETRIES_MAX {
                    true => Progress::More,
                    false => Progress::Ended(Err(error)),
                }
            }
        };
        match outcome {
            Progress::More => {
                *place = Some(slot);
                self.waiting.push_front(index);
            }
            Progress::Ended(result) => {
                let Transfer { request, allocates, .. } = slot.transfer;
                self.completions.push(Completion { request, allocates, result });
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.cancel();
    }
}

enum Progress {
    More,
    Ended(io::Result<()>),
}

/// Accounts for `bytes` transferred.
fn progress(transfer: &mut Transfer, bytes: usize) -> Progress {
    if transfer.operation == Operation::Flush {
        return Progress::Ended(Ok(()));
    }
    if bytes == 0 {
        // The file is shorter than the disk it backs.
        return Progress::Ended(Err(io::ErrorKind::UnexpectedEof.into()));
    }
    sys::advance(&mut transfer.vectors, bytes);
    transfer.offset += to_u64(bytes);
    match transfer.vectors.is_empty() {
        true => Progress::Ended(Ok(())),
        false => Progress::More,
    }
}

/// Does a transfer in place.
fn perform(mut transfer: Transfer) -> Completion {
    let result = loop {
        let file = transfer.file.as_fd();
        let moved = match transfer.operation {
            Operation::Read => sys::read_at(file, &transfer.vectors, transfer.offset),
            Operation::Write => sys::write_at(file, &transfer.vectors, transfer.offset),
            Operation::Flush => rustix::fs::fdatasync(file).map(|()| 0).map_err(io::Error::from),
        };
        match moved {
            Ok(bytes) => match progress(&mut transfer, bytes) {
                Progress::More => {}
                Progress::Ended(result) => break result,
            },
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => break Err(error),
        }
    };
    Completion { request: transfer.request, allocates: transfer.allocates, result }
}

fn make_ring(events: &dyn EventRegistry, token: u32) -> Route {
    // A fork must not inherit the ring's memory; the ring is for whichever thread
    // holds the device's lock.
    let made = IoUring::builder().dontfork().setup_clamp().build(u32::from(TRANSFERS_MAX));
    match made {
        Ok(ring) if events.add(ring.as_fd(), token, Interest::Readable).is_ok() => {
            Route::Ring(Box::new(ring))
        }
        Ok(_) | Err(_) => Route::Direct,
    }
}

fn submit_all(ring: &mut IoUring) -> io::Result<()> {
    loop {
        match ring.submit() {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn entry(transfer: &Transfer) -> squeue::Entry {
    let file = types::Fd(transfer.file.as_raw_fd());
    let (vectors, count) = sys::raw(&transfer.vectors);
    match transfer.operation {
        Operation::Read => opcode::Readv::new(file, vectors, count).offset(transfer.offset).build(),
        Operation::Write => {
            opcode::Writev::new(file, vectors, count).offset(transfer.offset).build()
        }
        Operation::Flush => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
    }
}
