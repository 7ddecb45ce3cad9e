//! The table of connections.
//!
//! Connections with something for the guest stand in one queue and have their
//! turns in order; a turn fills a bounded number of guest buffers. A connection
//! that waits for the guest's credit leaves the queue until credit arrives; when
//! the guest's buffers run out the queue stays as it is.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect, socket_with,
};
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;

use super::connection::{Connection, Delivery, Phase, Ports};
use super::handshake::{Handshake, HandshakeProgress};
use super::packet::{HEADER_BYTES, Header, PacketOperation, TYPE_STREAM};
use super::{
    ACCEPTS_MAX, BATCH_BUFFERS, CONNECTIONS_MAX, FIRST_HOST_PORT, HOST_CID, QUEUE_SIZE, RESETS_MAX,
    TURNS_MAX, VsockError, VsockMetrics,
};
use crate::device::{EventRegistry, Interest, Readiness};
use crate::queue::{self, Chain, QueueError, Segments, to_u64, to_usize};
use crate::sys::IoVector;
use crate::timer::Timer;

const LISTENER_TOKEN: u32 = 0;
const TIMER_TOKEN: u32 = 1;
const FIRST_CONNECTION_TOKEN: u32 = 16;
const LAST_CONNECTION_TOKEN: u32 = u32::MAX - 16;

/// All connections of one device, and the socket they come in by.
pub struct Mux {
    listener: Listener,
    guest_cid: u64,
    connections: BTreeMap<u32, Connection>,
    by_ports: BTreeMap<Ports, u32>,
    handshakes: BTreeMap<u32, Handshake>,
    /// Connections with something for the guest, in order of their turns.
    ready: VecDeque<u32>,
    /// Resets of connections that do not exist.
    resets: VecDeque<Ports>,
    next_token: u32,
    next_host_port: u32,
    timer: Timer,
    buffers: Vec<Chain>,
    vectors: Vec<IoVector>,
    /// Counters.
    pub metrics: VsockMetrics,
}

/// The listening socket; its file goes when the device does.
struct Listener {
    path: PathBuf,
    socket: UnixListener,
    registered: bool,
    /// The process that made it: a forked child that drops its inherited copy must
    /// not remove its parent's file.
    owner: u32,
}

/// How [`Mux::fill`] came to its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filled {
    /// Buffers were used.
    pub completed: bool,
    /// There is more to send, and there are buffers, but turns ran out.
    pub unfinished: bool,
    /// The queue is broken.
    pub failed: bool,
}

/// How one turn came to its end.
enum Turn {
    /// The connection had its turn.
    Done,
    /// There is no buffer for it.
    NoBuffer,
    /// The queue is broken.
    Failed,
}

impl Listener {
    fn new(path: &Path) -> Result<Self, VsockError> {
        match std::fs::symlink_metadata(path) {
            Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path)
                .map_err(|source| VsockError::Remove { path: path.to_owned(), source })?,
            Ok(_) => return Err(VsockError::NotASocket { path: path.to_owned() }),
            Err(_) => {}
        }
        let listen = |source| VsockError::Listen { path: path.to_owned(), source };
        let socket = UnixListener::bind(path).map_err(listen)?;
        socket.set_nonblocking(true).map_err(listen)?;
        let owner = std::process::id();
        Ok(Self { path: path.to_owned(), socket, registered: false, owner })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.owner == std::process::id() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Mux {
    /// A table without connections, listening at `path`.
    pub fn new(path: &Path, guest_cid: u64, next_host_port: u32) -> Result<Self, VsockError> {
        Ok(Self {
            listener: Listener::new(path)?,
            guest_cid,
            connections: BTreeMap::new(),
            by_ports: BTreeMap::new(),
            handshakes: BTreeMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            next_token: FIRST_CONNECTION_TOKEN,
            next_host_port,
            timer: Timer::new(TIMER_TOKEN),
            buffers: Vec::new(),
            vectors: Vec::new(),
            metrics: VsockMetrics::default(),
        })
    }

    /// Begins to take host clients in.
    pub fn attach(&mut self, events: &dyn EventRegistry) {
        let Listener { socket, registered, .. } = &mut self.listener;
        if !*registered {
            *registered = events.add(socket.as_fd(), LISTENER_TOKEN, Interest::Readable).is_ok();
        }
    }

    /// Closes every connection and stops taking host clients in.
    pub fn detach(&mut self, events: &dyn EventRegistry) {
        for (token, connection) in &mut self.connections {
            connection.finish(PacketOperation::Reset);
            let _ = connection.update_interest(*token, events);
        }
        for handshake in self.handshakes.values() {
            let _ = events.remove(handshake.socket.as_fd());
        }
        self.connections = BTreeMap::new();
        self.by_ports = BTreeMap::new();
        self.handshakes = BTreeMap::new();
        self.ready = VecDeque::new();
        self.resets = VecDeque::new();
        self.timer.disarm(events);
        if self.listener.registered {
            let _ = events.remove(self.listener.socket.as_fd());
            self.listener.registered = false;
        }
    }

    /// CID of the guest.
    pub fn guest_cid(&self) -> u64 {
        self.guest_cid
    }

    /// Port the next host client gets.
    pub fn next_host_port(&self) -> u32 {
        self.next_host_port
    }

    /// Whether there is any connection.
    pub fn has_connections(&self) -> bool {
        !self.connections.is_empty()
    }

    /// Number of connections, handshakes included.
    pub fn connection_count(&self) -> usize {
        self.connections.len() + self.handshakes.len()
    }

    /// Whether another packet of the guest may be taken: it may cost a reset.
    pub fn takes_packets(&self) -> bool {
        self.resets.len() < RESETS_MAX
    }

    /// Whether there is something to send to the guest.
    pub fn has_output(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// A descriptor is ready.
    pub fn event(&mut self, token: u32, readiness: Readiness, events: &dyn EventRegistry) {
        match token {
            LISTENER_TOKEN => self.accept(events),
            TIMER_TOKEN => self.expire_handshakes(events),
            token if self.handshakes.contains_key(&token) => self.shake(token, events),
            token => self.socket_event(token, readiness, events),
        }
    }

    fn socket_event(&mut self, token: u32, readiness: Readiness, events: &dyn EventRegistry) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if readiness.writable || readiness.closed {
            connection.flush();
        }
        if readiness.readable {
            connection.readable = true;
        }
        if readiness.closed {
            connection.host_hung_up();
        }
        self.settle(token, events);
    }

    fn accept(&mut self, events: &dyn EventRegistry) {
        for _ in 0..ACCEPTS_MAX {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match accept_with(&self.listener.socket, flags) {
                Ok(socket) => socket,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    // Without descriptors or memory the event would come back at
                    // once. The next connection that ends is a better time.
                    self.metrics.accept_pauses += 1;
                    if events.remove(self.listener.socket.as_fd()).is_ok() {
                        self.listener.registered = false;
                    }
                    return;
                }
            };
            if self.connection_count() >= CONNECTIONS_MAX {
                self.metrics.refused_by_limit += 1;
                continue;
            }
            let token = self.free_token();
            self.handshakes.insert(token, Handshake::new(socket, Instant::now()));
            self.shake_first(token, events);
        }
    }

    /// Tries the line of a new client before anything is registered for it.
    fn shake_first(&mut self, token: u32, events: &dyn EventRegistry) {
        let Some(handshake) = self.handshakes.get_mut(&token) else { return };
        match handshake.advance() {
            HandshakeProgress::Waiting => {
                let watched =
                    events.add(handshake.socket.as_fd(), token, Interest::Readable).is_ok()
                        && (self.timer.is_armed()
                            || self.timer.arm(events, super::HANDSHAKE_TIME_MAX).is_ok());
                if !watched {
                    self.fail_handshake(token, events);
                }
            }
            HandshakeProgress::Connect(port) => {
                if let Some(handshake) = self.handshakes.remove(&token) {
                    self.request(token, handshake.socket, port, None, events);
                }
            }
            HandshakeProgress::Failed => self.fail_handshake(token, events),
        }
    }

    fn shake(&mut self, token: u32, events: &dyn EventRegistry) {
        let Some(handshake) = self.handshakes.get_mut(&token) else { return };
        match handshake.advance() {
            HandshakeProgress::Waiting => {}
            HandshakeProgress::Connect(port) => {
                if let Some(handshake) = self.handshakes.remove(&token) {
                    let registered = Some(Interest::Readable);
                    self.request(token, handshake.socket, port, registered, events);
                }
            }
            HandshakeProgress::Failed => self.fail_handshake(token, events),
        }
        if self.handshakes.is_empty() {
            self.timer.disarm(events);
        }
    }

    fn fail_handshake(&mut self, token: u32, events: &dyn EventRegistry) {
        self.metrics.failed_handshakes += 1;
        if let Some(handshake) = self.handshakes.remove(&token) {
            let _ = events.remove(handshake.socket.as_fd());
        }
    }

    fn expire_handshakes(&mut self, events: &dyn EventRegistry) {
        let now = Instant::now();
        let late: Vec<u32> = self
            .handshakes
            .iter()
            .filter(|(_, handshake)| handshake.deadline <= now)
            .map(|(token, _)| *token)
            .collect();
        for token in late {
            self.fail_handshake(token, events);
        }
        self.timer.disarm(events);
        let next = self.handshakes.values().map(|handshake| handshake.deadline).min();
        if let Some(deadline) = next
            && self.timer.arm(events, deadline.saturating_duration_since(now)).is_err()
        {
            // Nobody would ever end them.
            for token in self.handshakes.keys().copied().collect::<Vec<_>>() {
                self.fail_handshake(token, events);
            }
        }
        self.attach(events);
    }

    /// Asks the guest for a connection on behalf of a host client.
    fn request(
        &mut self,
        token: u32,
        socket: OwnedFd,
        guest_port: u32,
        registered: Option<Interest>,
        events: &dyn EventRegistry,
    ) {
        self.metrics.host_connections += 1;
        let ports = Ports { host: self.free_host_port(), guest: guest_port };
        let mut connection = Connection::new(ports, socket, Phase::Requested, registered);
        connection.owed.request = true;
        self.connections.insert(token, connection);
        self.by_ports.insert(ports, token);
        self.settle(token, events);
    }

    fn free_token(&mut self) -> u32 {
        loop {
            let token = self.next_token;
            self.next_token = match token {
                LAST_CONNECTION_TOKEN.. => FIRST_CONNECTION_TOKEN,
                token => token + 1,
            };
            if !self.connections.contains_key(&token) && !self.handshakes.contains_key(&token) {
                return token;
            }
        }
    }

    fn free_host_port(&mut self) -> u32 {
        loop {
            let port = self.next_host_port;
            self.next_host_port = match port.checked_add(1) {
                // The highest number means "any".
                Some(next) if next < u32::MAX => next,
                Some(_) | None => FIRST_HOST_PORT,
            };
            if !self.by_ports.keys().any(|ports| ports.host == port) {
                return port;
            }
        }
    }

    /// A packet of the guest; `payload` is what follows the header in its buffer.
    pub fn guest_packet(
        &mut self,
        header: &Header,
        payload: Segments<'_>,
        memory: &GuestMemoryMmap,
        events: &dyn EventRegistry,
    ) {
        self.metrics.guest_packets += 1;
        if header.source_cid != self.guest_cid || header.destination_cid != HOST_CID {
            // Not from this guest, or not for this host: there is nobody to answer.
            self.metrics.protocol_errors += 1;
            return;
        }
        let ports = Ports { host: header.destination_port, guest: header.source_port };
        let token = self.by_ports.get(&ports).copied();
        let operation = match header.operation {
            Some(operation) if header.socket_type == TYPE_STREAM => operation,
            Some(_) | None => return self.protocol_error(ports, token, events),
        };
        let Some(token) = token else {
            match operation {
                PacketOperation::Request => self.guest_connects(ports, header, events),
                PacketOperation::Reset => {}
                PacketOperation::Response
                | PacketOperation::Shutdown
                | PacketOperation::Data
                | PacketOperation::CreditUpdate
                | PacketOperation::CreditRequest => self.resets.push_back(ports),
            }
            return;
        };
        let Some(connection) = self.connections.get_mut(&token) else { return };
        connection.credit.learn(header.buffer_bytes, header.forwarded);
        let sound = match operation {
            PacketOperation::Request => false,
            PacketOperation::Response => {
                connection.phase == Phase::Requested && {
                    connection.phase = Phase::Open;
                    if !connection.greet() {
                        connection.host_hung_up();
                    }
                    true
                }
            }
            PacketOperation::Reset => {
                self.metrics.refused_by_guest += u64::from(connection.phase == Phase::Requested);
                connection.guest_reset();
                true
            }
            PacketOperation::Shutdown => {
                connection.guest_shut_down(header.flags);
                true
            }
            PacketOperation::Data => match connection.takes_data() {
                true => Self::deliver(connection, payload, memory, &mut self.metrics),
                // An ending connection's guest may not know of it yet.
                false => matches!(connection.phase, Phase::Ending(_) | Phase::Flushing),
            },
            PacketOperation::CreditUpdate => true,
            PacketOperation::CreditRequest => {
                connection.owed.credit = connection.phase == Phase::Open;
                true
            }
        };
        if sound {
            self.settle(token, events);
        } else {
            self.protocol_error(ports, Some(token), events);
        }
    }

    fn deliver(
        connection: &mut Connection,
        payload: Segments<'_>,
        memory: &GuestMemoryMmap,
        metrics: &mut VsockMetrics,
    ) -> bool {
        let bytes = payload.len();
        let Ok(delivery) = connection.deliver(payload, memory) else { return false };
        metrics.guest_bytes += bytes;
        match delivery {
            Delivery::Done => {}
            Delivery::Delayed => metrics.delayed_writes += 1,
            Delivery::Discarded => metrics.discarded_bytes += bytes,
        }
        if connection.credit.update_is_due() {
            connection.owed.credit = true;
        }
        true
    }

    fn protocol_error(&mut self, ports: Ports, token: Option<u32>, events: &dyn EventRegistry) {
        self.metrics.protocol_errors += 1;
        match token.and_then(|token| Some((token, self.connections.get_mut(&token)?))) {
            Some((token, connection)) => {
                connection.finish(PacketOperation::Reset);
                self.settle(token, events);
            }
            None => self.resets.push_back(ports),
        }
    }

    fn guest_connects(&mut self, ports: Ports, header: &Header, events: &dyn EventRegistry) {
        self.metrics.guest_connections += 1;
        if self.connection_count() >= CONNECTIONS_MAX {
            self.metrics.refused_by_limit += 1;
            self.resets.push_back(ports);
            return;
        }
        let mut path = self.listener.path.clone().into_os_string();
        path.push(format!("_{}", ports.host));
        let Ok(socket) = connect_to(Path::new(&path)) else {
            self.metrics.refused_by_host += 1;
            self.resets.push_back(ports);
            return;
        };
        let token = self.free_token();
        let mut connection = Connection::new(ports, socket, Phase::Open, None);
        connection.credit.learn(header.buffer_bytes, header.forwarded);
        connection.owed.response = true;
        self.connections.insert(token, connection);
        self.by_ports.insert(ports, token);
        self.settle(token, events);
    }

    /// After anything happened to a connection: give it its place in the queue,
    /// watch for what it waits for, drop it if it is gone.
    fn settle(&mut self, token: u32, events: &dyn EventRegistry) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if connection.update_interest(token, events).is_err() {
            connection.finish(PacketOperation::Reset);
            let _ = connection.update_interest(token, events);
        }
        if connection.is_gone() {
            self.forget(token, events);
            return;
        }
        let has_data = connection.has_input() && connection.credit.sendable_bytes() > 0;
        if !connection.queued && (connection.owes() || has_data) {
            connection.queued = true;
            self.ready.push_back(token);
        }
    }

    /// Removes a connection whose socket is closed.
    fn forget(&mut self, token: u32, events: &dyn EventRegistry) {
        if let Some(connection) = self.connections.remove(&token) {
            self.by_ports.remove(&connection.ports);
            self.metrics.closed_connections += 1;
        }
        // A place in the queue may be left; a token is not used again soon, and a
        // turn without anything to send does no harm.
        self.attach(events);
    }

    /// Sends what there is to the guest, as far as its buffers and credit go.
    pub fn fill(
        &mut self,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        events: &dyn EventRegistry,
    ) -> Filled {
        let mut filled = Filled::default();
        let mut turns = 0;
        while self.has_output() {
            if turns == TURNS_MAX {
                filled.unfinished = true;
                break;
            }
            turns += 1;
            let turn = match self.resets.front().copied() {
                Some(ports) => self.send_reset(ports, queue, memory, &mut filled),
                None => match self.ready.front().copied() {
                    Some(token) => self.turn(token, queue, memory, &mut filled, events),
                    None => break,
                },
            };
            match turn {
                Turn::Done => {}
                Turn::NoBuffer => match queue::rearm(queue, memory) {
                    Ok(true) => {}
                    Ok(false) => {
                        self.metrics.buffer_stalls += 1;
                        break;
                    }
                    Err(_) => {
                        filled.failed = true;
                        break;
                    }
                },
                Turn::Failed => {
                    filled.failed = true;
                    break;
                }
            }
        }
        filled
    }

    fn send_reset(
        &mut self,
        ports: Ports,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        filled: &mut Filled,
    ) -> Turn {
        let header = self.header(ports, PacketOperation::Reset, 0, 0, (0, 0));
        let turn = self.send_packet(header, queue, memory, filled);
        if matches!(turn, Turn::Done) {
            self.resets.pop_front();
        }
        turn
    }

    /// The turn of the connection at the head of the queue.
    fn turn(
        &mut self,
        token: u32,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        filled: &mut Filled,
        events: &dyn EventRegistry,
    ) -> Turn {
        let turn = match self.connections.get_mut(&token) {
            None => Turn::Done,
            Some(connection) if connection.owes() => {
                self.send_owed(token, queue, memory, filled, events)
            }
            Some(connection) if connection.has_input() => {
                self.send_data(token, queue, memory, filled)
            }
            Some(_) => Turn::Done,
        };
        if !matches!(turn, Turn::Done) {
            return turn;
        }
        self.ready.pop_front();
        if let Some(connection) = self.connections.get_mut(&token) {
            connection.queued = false;
            self.settle(token, events);
        }
        turn
    }

    /// Sends the first of the packets without data that are owed.
    fn send_owed(
        &mut self,
        token: u32,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        filled: &mut Filled,
        events: &dyn EventRegistry,
    ) -> Turn {
        let Some(connection) = self.connections.get_mut(&token) else { return Turn::Done };
        let (operation, ending) = match connection.phase {
            Phase::Ending(farewell) => (farewell, true),
            Phase::Requested | Phase::Open | Phase::Flushing => (connection.owed.first(), false),
        };
        let flags = match operation {
            PacketOperation::Shutdown => connection.shutdown_flags(),
            PacketOperation::Request
            | PacketOperation::Response
            | PacketOperation::Reset
            | PacketOperation::Data
            | PacketOperation::CreditUpdate
            | PacketOperation::CreditRequest => 0,
        };
        let (ports, mut credit) = (connection.ports, connection.credit);
        let header = self.header(ports, operation, 0, flags, credit.announce());
        let turn = self.send_packet(header, queue, memory, filled);
        if !matches!(turn, Turn::Done) {
            return turn;
        }
        if ending {
            self.forget(token, events);
        } else if let Some(connection) = self.connections.get_mut(&token) {
            connection.credit = credit;
            // Any packet carries the credit along.
            connection.owed.credit = false;
            match operation {
                PacketOperation::Request => connection.owed.request = false,
                PacketOperation::Response => connection.owed.response = false,
                PacketOperation::Shutdown => connection.owed.shutdown = false,
                PacketOperation::Reset
                | PacketOperation::Data
                | PacketOperation::CreditUpdate
                | PacketOperation::CreditRequest => {}
            }
        }
        turn
    }

    fn send_packet(
        &mut self,
        header: Header,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        filled: &mut Filled,
    ) -> Turn {
        match self.gather(1, queue, memory, filled) {
            Ok(0) => return Turn::NoBuffer,
            Ok(_) => {}
            Err(_) => return Turn::Failed,
        }
        let Some(chain) = self.buffers.first() else { return Turn::NoBuffer };
        let written = chain.writable().write(memory, &header.to_bytes());
        let bytes = u32::try_from(HEADER_BYTES).expect("44");
        if written.is_err() || queue::push(queue, memory, chain.head(), bytes).is_err() {
            return Turn::Failed;
        }
        self.metrics.host_packets += 1;
        filled.completed = true;
        Turn::Done
    }

    /// Reads the host socket into guest buffers: one first, as most messages are
    /// small, then as many as a turn allows if that one was filled.
    fn send_data(
        &mut self,
        token: u32,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        filled: &mut Filled,
    ) -> Turn {
        for (round, wanted) in [1, BATCH_BUFFERS - 1].into_iter().enumerate() {
            let Some(connection) = self.connections.get(&token) else { return Turn::Done };
            let allowed = connection.credit.sendable_bytes();
            if allowed == 0 {
                self.metrics.credit_stalls += 1;
                return Turn::Done;
            }
            let gathered = match self.gather(wanted, queue, memory, filled) {
                Ok(0) if round == 0 => return Turn::NoBuffer,
                Ok(0) => return Turn::Done,
                Ok(gathered) => gathered,
                Err(_) => return Turn::Failed,
            };
            match self.read_into(token, gathered, allowed, queue, memory, filled) {
                Ok(true) => {}
                Ok(false) => return Turn::Done,
                Err(_) => return Turn::Failed,
            }
        }
        Turn::Done
    }

    /// One read of the host socket into the gathered buffers. True if it filled
    /// them, so that more is likely.
    fn read_into(
        &mut self,
        token: u32,
        gathered: usize,
        allowed: u32,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        filled: &mut Filled,
    ) -> Result<bool, QueueError> {
        let Self { connections, buffers, vectors, .. } = self;
        let Some(connection) = connections.get_mut(&token) else { return Ok(false) };
        let buffers = buffers.get(..gathered).unwrap_or_default();
        vectors.clear();
        let mut room = u64::from(allowed);
        for chain in buffers {
            let payload = chain.writable().skip(to_u64(HEADER_BYTES)).limit(room);
            payload.io_vectors(memory, vectors)?;
            room -= payload.len();
        }
        let capacity = u64::from(allowed) - room;
        let read = connection.read(vectors);
        vectors.clear();
        let bytes = match read {
            Ok(Some(bytes @ 1..)) => to_u64(bytes),
            Ok(Some(_)) | Err(_) => {
                queue::unpop(queue, count(gathered));
                connection.end_of_input();
                return Ok(false);
            }
            Ok(None) => {
                queue::unpop(queue, count(gathered));
                connection.readable = false;
                return Ok(false);
            }
        };
        let ports = connection.ports;
        connection.credit.send(u32::try_from(bytes).expect("no more than was allowed"));
        let credit = connection.credit.announce();
        connection.owed.credit = false;

        let mut left = bytes;
        let mut used = 0;
        for index in 0..gathered {
            let Some(chain) = self.buffers.get(index) else { break };
            let room = chain.writable().len() - to_u64(HEADER_BYTES);
            let part = u32::try_from(room.min(left)).expect("a chain has at most 4 GiB");
            if part == 0 {
                break;
            }
            let header = self.header(ports, PacketOperation::Data, part, 0, credit);
            chain.writable().write(memory, &header.to_bytes())?;
            let written = part + u32::try_from(HEADER_BYTES).expect("44");
            queue::push(queue, memory, chain.head(), written)?;
            filled.completed = true;
            self.metrics.host_packets += 1;
            left -= u64::from(part);
            used += 1;
        }
        self.metrics.host_bytes += bytes;
        queue::unpop(queue, count(gathered - used));
        Ok(bytes == capacity)
    }

    /// Takes up to `wanted` guest buffers that hold a header and a byte; unfit ones
    /// are given back unused.
    fn gather(
        &mut self,
        wanted: usize,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        filled: &mut Filled,
    ) -> Result<usize, QueueError> {
        let mut gathered = 0;
        // Unfit buffers are bounded as well: the guest may add them as we go.
        for _ in 0..to_usize(u32::from(QUEUE_SIZE)) + wanted {
            if gathered == wanted {
                break;
            }
            if self.buffers.len() <= gathered {
                self.buffers.push(Chain::default());
            }
            let Some(chain) = self.buffers.get_mut(gathered) else { break };
            let head = match queue::pop(queue, memory, chain) {
                Ok(true) if chain.writable().len() > to_u64(HEADER_BYTES) => {
                    gathered += 1;
                    continue;
                }
                Ok(true) => chain.head(),
                Ok(false) => break,
                Err(QueueError::Chain { head, .. }) => head,
                Err(error) => return Err(error),
            };
            if gathered > 0 {
                // Chains are given back from the end only; this one's time comes.
                queue::unpop(queue, 1);
                break;
            }
            self.metrics.malformed_packets += 1;
            queue::push(queue, memory, head, 0)?;
            filled.completed = true;
        }
        Ok(gathered)
    }

    fn header(
        &self,
        ports: Ports,
        operation: PacketOperation,
        len: u32,
        flags: u32,
        (buffer_bytes, forwarded): (u32, u32),
    ) -> Header {
        Header {
            source_cid: HOST_CID,
            destination_cid: self.guest_cid,
            source_port: ports.host,
            destination_port: ports.guest,
            len,
            socket_type: TYPE_STREAM,
            operation: Some(operation),
            flags,
            buffer_bytes,
            forwarded,
        }
    }
}

/// A number of gathered buffers.
fn count(buffers: usize) -> u16 {
    u16::try_from(buffers).expect("a batch is small")
}

fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
