//! The two queues: receive (from the TAP), transmit (to it).

use std::io::ErrorKind;
use std::os::fd::AsFd;

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MTU,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryMmap;

use super::persist::{self, NetState};
use super::tap::{Offloads, Tap, TapSource};
use super::{
    FRAME_BYTES_MAX, FRAME_BYTES_MIN, FRAMES_MAX, HEADER_BYTES, NetError, NetMetrics,
    PLAIN_FRAME_BYTES_MAX, QUEUE_SIZE,
};
use crate::device::{
    DeviceContext, EventRegistry, Interest, Outcome, Readiness, VirtioDevice, copy_config,
};
use crate::queue::{
    self, Chain, QueueError, Step, drain, to_u64, wants_interrupt, wants_interrupt_since,
};
use crate::sys::IoVector;

const TAP_TOKEN: u32 = 0;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

/// Offset of the number of buffers within the header.
const BUFFERS_OFFSET: u64 = 10;

const CONFIG_BYTES: usize = 12;

/// Configuration of a network device.
#[derive(Debug, Clone)]
pub struct NetConfig {
    /// Name for logs and statistics.
    pub name: String,
    /// The TAP.
    pub tap: TapSource,
    /// The card's address. A restored guest keeps the one it knows.
    pub mac: [u8; 6],
    /// MTU to prescribe, if any. A restored guest keeps the one it knows.
    pub mtu: Option<u16>,
}

/// A virtio-net device.
pub struct NetDevice {
    name: String,
    source: TapSource,
    state: NetState,
    link: Option<Link>,
    chain: Chain,
    buffers: Buffers,
    vectors: Vec<IoVector>,
    metrics: NetMetrics,
}

/// The TAP while the driver runs.
#[derive(Debug)]
struct Link {
    tap: Tap,
    registered: Interest,
    /// The guest has no buffers.
    receive_blocked: bool,
    /// The TAP has no room.
    transmit_blocked: bool,
    /// Frames may be spread over buffers.
    mergeable: bool,
    /// Bytes the largest frame may need, header included.
    room_bytes: u64,
}

/// Guest buffers popped and not filled yet, in order.
#[derive(Debug, Default)]
struct Buffers {
    chains: Vec<Chain>,
    /// Those before it are filled.
    filled: usize,
    /// Those behind it are spare chains.
    popped: usize,
}

impl Buffers {
    fn waiting(&self) -> &[Chain] {
        self.chains.get(self.filled..self.popped).unwrap_or_default()
    }

    fn room_bytes(&self) -> u64 {
        self.waiting().iter().map(|chain| chain.writable().len()).sum()
    }

    /// Pops until there is `room_bytes`, or a chain if they are not mergeable.
    /// False if the guest has no more.
    fn gather(
        &mut self,
        link: &Link,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
    ) -> Result<bool, QueueError> {
        loop {
            let enough = match link.mergeable {
                true => self.room_bytes() >= link.room_bytes,
                false => !self.waiting().is_empty(),
            };
            if enough {
                return Ok(true);
            }
            if self.popped == self.chains.len() {
                self.chains.push(Chain::default());
            }
            let Some(chain) = self.chains.get_mut(self.popped) else { return Ok(false) };
            if !queue::pop(queue, memory, chain)? {
                return Ok(false);
            }
            let unfit = chain.writable().len() < HEADER_BYTES + FRAME_BYTES_MIN;
            if unfit || !chain.readable().is_empty() {
                let source = queue::ChainError::Order;
                return Err(QueueError::Chain { head: chain.head(), source });
            }
            self.popped += 1;
        }
    }

    /// Gives what was not filled back to the queue.
    fn give_back(&mut self, queue: &mut Queue) {
        queue::unpop(queue, u16::try_from(self.waiting().len()).expect("at most a queue's size"));
        self.filled = 0;
        self.popped = 0;
    }
}

/// Why receiving stopped.
enum Stop {
    /// The TAP has no frame.
    Empty,
    /// The guest has no buffers.
    NoBuffers,
    /// Others should have their turn.
    Budget,
    /// The queue is broken.
    Failed,
}

/// Refuses group addresses and the zero address.
pub fn check_mac(mac: [u8; 6]) -> Result<(), NetError> {
    let [first, ..] = mac;
    match first & 1 == 1 || mac == [0; 6] {
        true => Err(NetError::Mac(mac)),
        false => Ok(()),
    }
}

/// Refuses an MTU IPv4 does not allow, or frames beyond [`FRAME_BYTES_MAX`].
pub fn check_mtu(mtu: Option<u16>) -> Result<(), NetError> {
    match mtu {
        Some(mtu) if !(68..=65_521).contains(&mtu) => Err(NetError::Mtu(mtu)),
        Some(_) | None => Ok(()),
    }
}

impl NetDevice {
    /// A card no guest has seen yet. The TAP is opened when the driver runs.
    pub fn new(config: NetConfig) -> Result<Self, NetError> {
        check_mac(config.mac)?;
        check_mtu(config.mtu)?;
        let state = NetState { mac: config.mac, mtu: config.mtu };
        Ok(Self::with_state(config, state))
    }

    /// A card from saved state: address and MTU are those the guest knows.
    pub fn restore(config: NetConfig, version: u16, bytes: &[u8]) -> Result<Self, NetError> {
        let state = persist::restore(version, bytes)?;
        Ok(Self::with_state(config, state))
    }

    fn with_state(config: NetConfig, state: NetState) -> Self {
        Self {
            name: config.name,
            source: config.tap,
            state,
            link: None,
            chain: Chain::default(),
            buffers: Buffers::default(),
            vectors: Vec::new(),
            metrics: NetMetrics::default(),
        }
    }

    /// Counters.
    pub fn net_metrics(&self) -> &NetMetrics {
        &self.metrics
    }

    /// Attaches to the TAP. A card without one works, as one without a cable does.
    fn connect(&mut self, features: u64, events: &dyn EventRegistry) {
        let has = |bit: u32| features & (1 << bit) != 0;
        let offloads = Offloads {
            checksum: has(VIRTIO_NET_F_GUEST_CSUM),
            tso4: has(VIRTIO_NET_F_GUEST_TSO4),
            tso6: has(VIRTIO_NET_F_GUEST_TSO6),
        };
        let large = offloads.checksum && (offloads.tso4 || offloads.tso6);
        let mtu_frame = self.state.mtu.map_or(0, |mtu| u64::from(mtu) + 18);
        let frame_bytes = match large {
            true => FRAME_BYTES_MAX,
            false => PLAIN_FRAME_BYTES_MAX.max(mtu_frame),
        };
        let opened = Tap::open(&self.source, offloads);
        self.link = match opened {
            Ok(tap) if events.add(tap.as_fd(), TAP_TOKEN, Interest::Readable).is_ok() => {
                Some(Link {
                    tap,
                    registered: Interest::Readable,
                    receive_blocked: false,
                    transmit_blocked: false,
                    mergeable: has(VIRTIO_NET_F_MRG_RXBUF),
                    room_bytes: HEADER_BYTES + frame_bytes,
                })
            }
            Ok(_) | Err(_) => {
                self.metrics.tap_failures += 1;
                None
            }
        };
    }

    fn update_interest(&mut self, events: &dyn EventRegistry) {
        let Some(link) = &mut self.link else { return };
        let wanted = match (link.receive_blocked, link.transmit_blocked) {
            (false, false) => Interest::Readable,
            (false, true) => Interest::Both,
            (true, true) => Interest::Writable,
            (true, false) => Interest::Nothing,
        };
        if wanted != link.registered {
            match events.modify(link.tap.as_fd(), TAP_TOKEN, wanted) {
                Ok(()) => link.registered = wanted,
                Err(_) => self.metrics.tap_failures += 1,
            }
        }
    }

    fn receive(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let mut outcome = Outcome::default();
        let Some(queue) = context.queues.get_mut(RECEIVE) else { return outcome };
        if !queue.ready() || self.link.is_none() {
            return outcome;
        }
        let memory = context.memory;
        let before = queue.next_used();
        let stop = self.receive_frames(queue, memory);
        self.buffers.give_back(queue);
        let blocked = match stop {
            // Level-triggered: what is left in the TAP is reported again.
            Stop::Empty | Stop::Budget => false,
            Stop::NoBuffers => {
                self.metrics.buffer_stalls += 1;
                true
            }
            Stop::Failed => {
                outcome.failed = true;
                true
            }
        };
        if let Some(link) = &mut self.link {
            link.receive_blocked = blocked;
        }
        if queue.next_used() != before {
            outcome.used_buffers = wants_interrupt_since(queue, memory, before);
        }
        outcome
    }

    fn receive_frames(&mut self, queue: &mut Queue, memory: &GuestMemoryMmap) -> Stop {
        for _ in 0..FRAMES_MAX {
            let Some(link) = &self.link else { return Stop::Empty };
            match self.buffers.gather(link, queue, memory) {
                Ok(true) => {}
                // The guest may have added buffers before it saw that it should tell.
                Ok(false) => match queue::rearm(queue, memory) {
                    Ok(true) => continue,
                    Ok(false) => return Stop::NoBuffers,
                    Err(_) => return Stop::Failed,
                },
                Err(_) => return Stop::Failed,
            }
            self.vectors.clear();
            let mut room = link.room_bytes;
            for chain in self.buffers.waiting() {
                let part = chain.writable().limit(room);
                room -= part.len();
                if part.io_vectors(memory, &mut self.vectors).is_err() {
                    return Stop::Failed;
                }
            }
            match link.tap.read(&self.vectors) {
                Ok(bytes) => {
                    if self.fill(to_u64(bytes), queue, memory).is_err() {
                        return Stop::Failed;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Stop::Empty,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.metrics.lost_frames += 1,
            }
        }
        Stop::Budget
    }

    /// Completes the buffers a frame of `bytes` went into, all at once.
    fn fill(
        &mut self,
        bytes: u64,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
    ) -> Result<(), QueueError> {
        let waiting = self.buffers.waiting();
        let mut left = bytes;
        let mut completions = Vec::new();
        for chain in waiting {
            let part = chain.writable().len().min(left);
            let written = u32::try_from(part).expect("a frame is short");
            completions.push((chain.head(), written));
            left -= part;
            if left == 0 {
                break;
            }
        }
        let number = u16::try_from(completions.len()).expect("at most a queue's size");
        if let Some(first) = waiting.first() {
            first.writable().skip(BUFFERS_OFFSET).write(memory, &number.to_le_bytes())?;
        }
        self.buffers.filled += completions.len();
        self.metrics.received_frames += 1;
        self.metrics.received_bytes += bytes;
        queue::push_group(queue, memory, &completions)
    }

    fn transmit(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let Some(queue) = context.queues.get_mut(TRANSMIT) else { return Outcome::default() };
        let Self { link, chain, vectors, metrics, .. } = self;
        let memory = context.memory;
        let drained = drain(queue, memory, chain, usize::from(QUEUE_SIZE), |_, chain| {
            let run = chain.readable();
            let legal = HEADER_BYTES + FRAME_BYTES_MIN..=HEADER_BYTES + FRAME_BYTES_MAX;
            vectors.clear();
            if !legal.contains(&run.len()) || run.io_vectors(memory, vectors).is_err() {
                metrics.malformed_frames += 1;
                return Step::Used(0);
            }
            let Some(link) = link else {
                metrics.refused_frames += 1;
                return Step::Used(0);
            };
            match link.tap.write(vectors) {
                Ok(_) => {
                    metrics.sent_frames += 1;
                    metrics.sent_bytes += run.len();
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Step::Hold,
                // A bad offload header, or an interface that is down.
                Err(_) => metrics.refused_frames += 1,
            }
            Step::Used(0)
        });
        metrics.malformed_frames += drained.malformed;
        metrics.tap_stalls += u64::from(drained.held);
        if let Some(link) = link {
            link.transmit_blocked = drained.held;
        }
        Outcome {
            used_buffers: drained.completed && wants_interrupt(queue, memory),
            failed: drained.failed,
            unfinished: drained.unfinished,
            ..Outcome::default()
        }
    }
}

impl VirtioDevice for NetDevice {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn features(&self) -> u64 {
        let mtu = u64::from(self.state.mtu.is_some()) << VIRTIO_NET_F_MTU;
        mtu | (1 << VIRTIO_NET_F_MAC)
            | (1 << VIRTIO_NET_F_MRG_RXBUF)
            | (1 << VIRTIO_NET_F_CSUM)
            | (1 << VIRTIO_NET_F_GUEST_CSUM)
            | (1 << VIRTIO_NET_F_HOST_TSO4)
            | (1 << VIRTIO_NET_F_HOST_TSO6)
            | (1 << VIRTIO_NET_F_GUEST_TSO4)
            | (1 << VIRTIO_NET_F_GUEST_TSO6)
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut space = [0; CONFIG_BYTES];
        let (mac, mtu) = (self.state.mac, self.state.mtu.unwrap_or(0).to_le_bytes());
        for (place, byte) in space.iter_mut().zip(mac.into_iter().chain([0; 4]).chain(mtu)) {
            *place = byte;
        }
        copy_config(&space, offset, data);
    }

    fn activate(&mut self, features: u64, context: &mut DeviceContext<'_>) -> Outcome {
        self.connect(features, context.events);
        Outcome::default()
    }

    fn resume(&mut self, features: u64, context: &mut DeviceContext<'_>) -> Outcome {
        self.connect(features, context.events);
        Outcome::default()
    }

    fn reset(&mut self, events: &dyn EventRegistry) {
        if let Some(link) = self.link.take() {
            let _ = events.remove(link.tap.as_fd());
        }
        self.buffers = Buffers::default();
        self.vectors = Vec::new();
    }

    fn notify(&mut self, index: usize, context: &mut DeviceContext<'_>) -> Outcome {
        let outcome = match index {
            // Buffers are of interest only to frames that wait for them.
            RECEIVE if self.link.as_ref().is_some_and(|link| link.receive_blocked) => {
                self.receive(context)
            }
            TRANSMIT => self.transmit(context),
            _ => Outcome::default(),
        };
        self.update_interest(context.events);
        outcome
    }

    fn event(
        &mut self,
        _token: u32,
        readiness: Readiness,
        context: &mut DeviceContext<'_>,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        if readiness.closed {
            // The interface was deleted: the event would come back for ever.
            self.metrics.tap_failures += 1;
            self.reset(context.events);
            return outcome;
        }
        if readiness.readable {
            outcome.merge(self.receive(context));
        }
        if readiness.writable {
            outcome.merge(self.transmit(context));
        }
        self.update_interest(context.events);
        outcome
    }

    fn save(&self) -> (u16, Vec<u8>) {
        persist::save(self.state)
    }

    fn metrics(&self) -> Vec<(&'static str, u64)> {
        self.metrics.entries()
    }
}
