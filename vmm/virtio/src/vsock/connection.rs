//! One stream.
//!
//! ```text
//!  host client   Requested ──RESPONSE──► Open ──both ends done──► Ending ─► gone
//!  guest client  ───────────REQUEST────► Open ──guest reset, data left──► Flushing ─► gone
//! ```
//!
//! Each direction ends by itself. The host's end of file becomes a SHUTDOWN of
//! sending; the guest's SHUTDOWN of sending becomes a half-close of the socket, once
//! everything before it went through.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use vm_memory::GuestMemoryMmap;

use super::credit::{Credit, CreditExceeded};
use super::packet::{PacketOperation, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use crate::device::{EventRegistry, Interest};
use crate::queue::{Segments, to_u64};
use crate::sys::{self, IoVector};

/// The two ends of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ports {
    /// On the host's side.
    pub host: u32,
    /// On the guest's side.
    pub guest: u32,
}

/// Where a connection is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The guest has not answered the request.
    Requested,
    /// Data flows.
    Open,
    /// The guest is done with it; the host socket gets what is left.
    Flushing,
    /// The socket is closed; one last packet is owed to the guest.
    Ending(PacketOperation),
}

/// Packets without data that are owed to the guest.
#[derive(Debug, Clone, Copy, Default)]
pub struct Owed {
    /// REQUEST.
    pub request: bool,
    /// RESPONSE.
    pub response: bool,
    /// CREDIT_UPDATE.
    pub credit: bool,
    /// SHUTDOWN of sending.
    pub shutdown: bool,
}

impl Owed {
    /// The packet to send before the others; a credit update if nothing else is owed.
    pub fn first(self) -> PacketOperation {
        if self.request {
            PacketOperation::Request
        } else if self.response {
            PacketOperation::Response
        } else if self.shutdown {
            PacketOperation::Shutdown
        } else {
            PacketOperation::CreditUpdate
        }
    }
}

/// Guest data the host socket has not taken.
#[derive(Debug, Default)]
struct Backlog {
    bytes: Vec<u8>,
    start: usize,
}

impl Backlog {
    fn pending(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }

    fn is_empty(&self) -> bool {
        self.start == self.bytes.len()
    }

    fn take(&mut self, bytes: usize) {
        self.start += bytes;
        if self.is_empty() {
            *self = Self::default();
        }
    }

    /// Appends what `run` holds; false if guest memory could not be read.
    fn append(&mut self, run: Segments<'_>, memory: &GuestMemoryMmap) -> bool {
        self.bytes.drain(..self.start);
        self.start = 0;
        let old = self.bytes.len();
        let added = usize::try_from(run.len()).unwrap_or(0);
        self.bytes.resize(old + added, 0);
        let place = self.bytes.get_mut(old..).unwrap_or_default();
        matches!(run.read(memory, place), Ok(bytes) if bytes == added)
    }
}

/// One stream.
#[derive(Debug)]
pub struct Connection {
    /// Its two ends.
    pub ports: Ports,
    /// Where it is in its life.
    pub phase: Phase,
    /// Flow control.
    pub credit: Credit,
    /// Packets owed to the guest.
    pub owed: Owed,
    /// It is in the queue of connections that have something for the guest.
    pub queued: bool,
    /// The host socket has data, or its end, that was not read yet.
    pub readable: bool,
    /// The host client closed both directions.
    pub hung_up: bool,
    socket: Option<OwnedFd>,
    registered: Option<Interest>,
    backlog: Backlog,
    /// Nothing more is read from the host socket.
    read_ended: bool,
    /// Nothing more is written to the host socket.
    write_ended: bool,
    /// Directions the guest has shut down, as packet flags.
    guest_shutdown: u32,
}

/// What became of guest data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// The socket took it all.
    Done,
    /// Some of it waits.
    Delayed,
    /// Nobody wants it any more.
    Discarded,
}

impl Connection {
    /// A connection over `socket`, which is watched for `registered`.
    pub fn new(ports: Ports, socket: OwnedFd, phase: Phase, registered: Option<Interest>) -> Self {
        Self {
            ports,
            phase,
            credit: Credit::default(),
            owed: Owed::default(),
            queued: false,
            readable: false,
            hung_up: false,
            socket: Some(socket),
            registered,
            backlog: Backlog::default(),
            read_ended: false,
            write_ended: false,
            guest_shutdown: 0,
        }
    }

    /// Whether the guest may send data.
    pub fn takes_data(&self) -> bool {
        self.phase == Phase::Open && self.guest_shutdown & SHUTDOWN_SEND == 0
    }

    /// Whether the host socket should be read now.
    pub fn has_input(&self) -> bool {
        self.phase == Phase::Open && self.readable && !self.read_ended
    }

    /// Whether a packet without data is owed to the guest.
    pub fn owes(&self) -> bool {
        let Owed { request, response, credit, shutdown } = self.owed;
        request || response || credit || shutdown || matches!(self.phase, Phase::Ending(_))
    }

    /// Whether nothing is left to do for either side.
    pub fn is_gone(&self) -> bool {
        self.phase == Phase::Flushing && self.backlog.is_empty()
    }

    /// Reads from the host socket into guest buffers. `Ok(None)`: nothing there now.
    pub fn read(&mut self, vectors: &[IoVector]) -> Result<Option<usize>, Errno> {
        let Some(socket) = &self.socket else { return Ok(Some(0)) };
        match sys::read(socket.as_fd(), vectors) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::AGAIN | Errno::INTR) => Ok(None),
                Some(errno) => Err(errno),
                None => Err(Errno::IO),
            },
        }
    }

    /// The host will send no more (end of file, or a broken socket).
    pub fn end_of_input(&mut self) {
        self.read_ended = true;
        self.readable = false;
        if self.phase != Phase::Open {
            return;
        }
        if self.hung_up {
            self.finish(PacketOperation::Shutdown);
        } else {
            self.owed.shutdown = true;
        }
    }

    /// The host client is gone in both directions. Data it left is still read.
    pub fn host_hung_up(&mut self) {
        self.hung_up = true;
        match self.phase {
            Phase::Requested => self.finish(PacketOperation::Reset),
            Phase::Open if self.read_ended => self.finish(PacketOperation::Shutdown),
            Phase::Open => self.readable = true,
            Phase::Flushing => self.drop_backlog(),
            Phase::Ending(_) => {}
        }
    }

    /// Tells the host client that the guest accepted. False if it is gone.
    pub fn greet(&mut self) -> bool {
        let line = format!("OK {}\n", self.ports.host);
        let Some(socket) = &self.socket else { return false };
        // The socket's buffer is empty: it takes the line whole or not at all.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        send(socket, line.as_bytes(), flags) == Ok(line.len())
    }

    /// Passes the payload of a packet on.
    pub fn deliver(
        &mut self,
        payload: Segments<'_>,
        memory: &GuestMemoryMmap,
    ) -> Result<Delivery, CreditExceeded> {
        let bytes = u32::try_from(payload.len()).map_err(|_| CreditExceeded)?;
        self.credit.receive(bytes)?;
        let mut rest = payload;
        if self.backlog.is_empty() && !self.write_ended {
            let mut vectors = Vec::new();
            if payload.io_vectors(memory, &mut vectors).is_ok() {
                let sent = to_u64(self.send_vectors(&vectors));
                self.credit.forward(u32::try_from(sent).expect("part of the payload"));
                rest = payload.skip(sent);
            }
        }
        if rest.is_empty() {
            return Ok(Delivery::Done);
        }
        if self.write_ended || !self.backlog.append(rest, memory) {
            self.credit.forward(u32::try_from(rest.len()).expect("part of the payload"));
            return Ok(Delivery::Discarded);
        }
        Ok(Delivery::Delayed)
    }

    /// Gives the socket what waits for it.
    pub fn flush(&mut self) {
        while !self.backlog.is_empty() && !self.write_ended {
            let Some(socket) = &self.socket else { break };
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(socket, self.backlog.pending(), flags) {
                Ok(bytes) => {
                    self.backlog.take(bytes);
                    self.forwarded(bytes);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.drop_backlog(),
            }
        }
        self.after_flush();
    }

    /// The guest shut down directions of its socket.
    pub fn guest_shut_down(&mut self, flags: u32) {
        self.guest_shutdown |= flags & SHUTDOWN_BOTH;
        if self.guest_shutdown & SHUTDOWN_RECEIVE != 0 {
            self.read_ended = true;
            self.owed.shutdown = false;
        }
        self.after_flush();
    }

    /// The guest reset the connection. What it sent before an orderly shutdown is
    /// still delivered.
    pub fn guest_reset(&mut self) {
        self.owed = Owed::default();
        self.read_ended = true;
        self.phase = Phase::Flushing;
        if self.guest_shutdown & SHUTDOWN_SEND == 0 {
            self.drop_backlog();
        }
    }

    /// Closes the socket; `farewell` is the last packet the guest gets.
    pub fn finish(&mut self, farewell: PacketOperation) {
        self.owed = Owed::default();
        self.read_ended = true;
        self.drop_backlog();
        self.phase = Phase::Ending(farewell);
    }

    /// Flags of a SHUTDOWN sent now.
    pub fn shutdown_flags(&self) -> u32 {
        match self.phase {
            Phase::Ending(_) => SHUTDOWN_BOTH,
            Phase::Requested | Phase::Open | Phase::Flushing => SHUTDOWN_SEND,
        }
    }

    /// Watches for what the connection waits for, and closes the socket of one
    /// that ends.
    pub fn update_interest(
        &mut self,
        token: u32,
        events: &dyn EventRegistry,
    ) -> std::io::Result<()> {
        let ending = matches!(self.phase, Phase::Ending(_)) || self.is_gone();
        let wanted = if ending { None } else { self.wanted_interest() };
        if wanted != self.registered
            && let Some(socket) = &self.socket
        {
            match (self.registered, wanted) {
                (None, Some(interest)) => events.add(socket.as_fd(), token, interest)?,
                (Some(_), Some(interest)) => events.modify(socket.as_fd(), token, interest)?,
                (Some(_), None) => events.remove(socket.as_fd())?,
                (None, None) => {}
            }
            self.registered = wanted;
        }
        if ending {
            self.socket = None;
        }
        Ok(())
    }

    /// `None` means that not even a hang-up may be reported: it would be reported
    /// again and again until the guest makes room for the data before it.
    fn wanted_interest(&self) -> Option<Interest> {
        let write = !self.backlog.is_empty() && !self.write_ended;
        let read = self.phase == Phase::Open && !self.read_ended && !self.readable;
        match (read, write) {
            (true, true) => Some(Interest::Both),
            (true, false) => Some(Interest::Readable),
            (false, true) => Some(Interest::Writable),
            (false, false) if self.has_input() || self.hung_up => None,
            (false, false) => Some(Interest::Nothing),
        }
    }

    fn send_vectors(&mut self, vectors: &[IoVector]) -> usize {
        let Some(socket) = &self.socket else { return 0 };
        match sys::send(socket.as_fd(), vectors) {
            Ok(bytes) => bytes,
            Err(error) => {
                match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN | Errno::INTR) => {}
                    Some(_) | None => self.write_ended = true,
                }
                0
            }
        }
    }

    fn forwarded(&mut self, bytes: usize) {
        self.credit.forward(u32::try_from(bytes).expect("part of the backlog"));
        if self.credit.update_is_due() && self.takes_data() {
            self.owed.credit = true;
        }
    }

    fn drop_backlog(&mut self) {
        let bytes = self.backlog.pending().len();
        self.backlog = Backlog::default();
        self.write_ended = true;
        self.forwarded(bytes);
    }

    /// Does what had to wait until the host socket had everything.
    fn after_flush(&mut self) {
        if !self.backlog.is_empty() || self.phase != Phase::Open {
            return;
        }
        if self.guest_shutdown == SHUTDOWN_BOTH {
            self.finish(PacketOperation::Reset);
        } else if self.guest_shutdown & SHUTDOWN_SEND != 0 && !self.write_ended {
            self.write_ended = true;
            if let Some(socket) = &self.socket {
                let _ = shutdown(socket, Shutdown::Write);
            }
        }
    }
}
