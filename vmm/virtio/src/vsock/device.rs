//! The three queues: receive (to the guest), transmit (from it), events.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryMmap;

use super::mux::Mux;
use super::packet::{HEADER_BYTES, Header, PacketOperation};
use super::persist::{self, VsockState};
use super::{
    EVENT_QUEUE_SIZE, GUEST_CID, HOST_CID, PACKET_BYTES_MAX, QUEUE_SIZE, VsockError, VsockMetrics,
};
use crate::device::{DeviceContext, EventRegistry, Outcome, Readiness, VirtioDevice, copy_config};
use crate::queue::{Chain, Step, drain, to_u64, wants_interrupt};

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENTS: usize = 2;

/// The only event there is: every connection is gone.
const EVENT_TRANSPORT_RESET: [u8; 4] = 0u32.to_le_bytes();

/// Whether a restored guest is told that its connections are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetOnRestore {
    /// If it had any when it was saved. It costs the guest an interrupt.
    IfConnected,
    /// In any case.
    Always,
    /// In no case.
    Never,
}

/// Configuration of a vsock device.
#[derive(Debug, Clone)]
pub struct VsockConfig {
    /// The unix socket host clients connect to; also the stem of the paths the
    /// guest's connections go to.
    pub path: PathBuf,
    /// The guest's CID. A restored guest keeps the one it knows.
    pub guest_cid: u64,
    /// What a restored guest is told.
    pub reset_on_restore: ResetOnRestore,
}

impl VsockConfig {
    /// The usual configuration: CID 3.
    pub fn new(path: PathBuf) -> Self {
        Self { path, guest_cid: GUEST_CID, reset_on_restore: ResetOnRestore::IfConnected }
    }
}

/// What a restored guest knows of the connections it had. Until it has dealt with their
/// loss it would count a new connection among the lost, and not tell its peer: no client is
/// taken before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reset {
    /// It had none, or has dealt with it.
    None,
    /// It is to be told.
    Untold,
    /// It was told. The driver gives the buffer of an event back when it has dealt with it:
    /// it makes more available than it had then.
    Told { posted: u16 },
}

/// A virtio-vsock device.
pub struct VsockDevice {
    mux: Mux,
    chain: Chain,
    /// What the guest knows of connections that are gone.
    reset: Reset,
    /// Packets of the guest wait until resets found buffers.
    transmit_held: bool,
}

impl VsockDevice {
    /// A device no guest has seen yet. Its socket exists from now on.
    pub fn new(config: VsockConfig) -> Result<Self, VsockError> {
        let state = VsockState { guest_cid: config.guest_cid, ..VsockState::default() };
        if state.guest_cid <= HOST_CID {
            return Err(VsockError::Cid(state.guest_cid));
        }
        Self::with_state(&config, state, Reset::None)
    }

    /// A device from saved state. Its socket exists from now on.
    pub fn restore(config: VsockConfig, version: u16, bytes: &[u8]) -> Result<Self, VsockError> {
        let state = persist::restore(version, bytes)?;
        let tell = match config.reset_on_restore {
            ResetOnRestore::IfConnected => state.guest_has_connections,
            ResetOnRestore::Always => true,
            ResetOnRestore::Never => false,
        };
        let reset = if tell { Reset::Untold } else { Reset::None };
        Self::with_state(&config, state, reset)
    }

    fn with_state(
        config: &VsockConfig,
        state: VsockState,
        reset: Reset,
    ) -> Result<Self, VsockError> {
        Ok(Self {
            mux: Mux::new(&config.path, state.guest_cid, state.next_host_port)?,
            chain: Chain::default(),
            reset,
            transmit_held: false,
        })
    }

    /// Counters.
    pub fn vsock_metrics(&self) -> &VsockMetrics {
        &self.mux.metrics
    }

    /// Open connections, those being opened included.
    pub fn connection_count(&self) -> usize {
        self.mux.connection_count()
    }

    /// Sends to the guest, and takes packets up again that waited for that.
    fn run(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let mut outcome = Outcome::default();
        loop {
            outcome.merge(self.receive(context));
            let resume = self.transmit_held && self.mux.takes_packets();
            if outcome.failed || outcome.unfinished || !resume {
                return outcome;
            }
            outcome.merge(self.transmit(context));
        }
    }

    fn receive(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let Some(queue) = context.queues.get_mut(RECEIVE) else { return Outcome::default() };
        if !self.mux.has_output() {
            return Outcome::default();
        }
        let filled = self.mux.fill(queue, context.memory, context.events);
        Outcome {
            used_buffers: filled.completed && wants_interrupt(queue, context.memory),
            failed: filled.failed,
            unfinished: filled.unfinished,
            ..Outcome::default()
        }
    }

    fn transmit(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let Some(queue) = context.queues.get_mut(TRANSMIT) else { return Outcome::default() };
        let Self { mux, chain, .. } = self;
        let (memory, events) = (context.memory, context.events);
        let drained = drain(queue, memory, chain, usize::from(QUEUE_SIZE), |_, chain| {
            if !mux.takes_packets() {
                return Step::Hold;
            }
            let mut bytes = [0; HEADER_BYTES];
            let run = chain.readable();
            let complete = matches!(run.read(memory, &mut bytes), Ok(HEADER_BYTES));
            let header = Header::from_bytes(&bytes);
            // Only data has a payload; a length that other packets state is ignored.
            let len = match header.operation {
                Some(PacketOperation::Data) => header.len,
                Some(_) | None => 0,
            };
            let rest = run.skip(to_u64(HEADER_BYTES));
            if !complete || u64::from(len) > rest.len() || len > PACKET_BYTES_MAX {
                mux.metrics.malformed_packets += 1;
                return Step::Used(0);
            }
            mux.guest_packet(&header, rest.limit(u64::from(len)), memory, events);
            Step::Used(0)
        });
        mux.metrics.malformed_packets += drained.malformed;
        self.transmit_held = drained.held;
        Outcome {
            used_buffers: drained.completed && wants_interrupt(queue, memory),
            failed: drained.failed,
            unfinished: drained.unfinished,
            ..Outcome::default()
        }
    }

    /// Takes clients once the guest has dealt with the news that its connections are gone.
    fn see_reset_done(&mut self, context: &mut DeviceContext<'_>) {
        let Reset::Told { posted } = self.reset else { return };
        let Some(queue) = context.queues.get(EVENTS) else { return };
        let now = queue.avail_idx(context.memory, Ordering::Acquire);
        if now.is_ok_and(|now| now.0 != posted) {
            self.reset = Reset::None;
            self.mux.attach(context.events);
        }
    }

    /// Tells the guest that its connections are gone, if it is to know.
    fn send_event(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let Some(queue) = context.queues.get_mut(EVENTS) else { return Outcome::default() };
        let Self { mux, chain, reset, .. } = self;
        if *reset != Reset::Untold {
            return Outcome::default();
        }
        let memory = context.memory;
        let drained = drain(queue, memory, chain, usize::from(EVENT_QUEUE_SIZE), |_, chain| {
            if *reset != Reset::Untold {
                return Step::Hold;
            }
            match chain.writable().write(memory, &EVENT_TRANSPORT_RESET) {
                Ok(4) => {
                    *reset = Reset::Told { posted: 0 };
                    mux.metrics.transport_resets += 1;
                    Step::Used(4)
                }
                Ok(_) | Err(_) => Step::Used(0),
            }
        });
        mux.metrics.malformed_packets += drained.malformed;
        if let Reset::Told { posted } = reset {
            match watch_for_another(queue, memory) {
                Ok(now) => *posted = now,
                Err(_) => return Outcome { failed: true, ..Outcome::default() },
            }
        }
        let outcome = Outcome {
            used_buffers: drained.completed && wants_interrupt(queue, memory),
            failed: drained.failed,
            unfinished: drained.unfinished,
            ..Outcome::default()
        };
        self.see_reset_done(context);
        outcome
    }
}

/// Has the driver notify of the next buffer that it makes available, whatever is available
/// already; tells how many it has made available so far, modulo 2^16.
fn watch_for_another(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
) -> Result<u16, virtio_queue::Error> {
    let next = queue.next_avail();
    let posted = queue.avail_idx(memory, Ordering::Acquire)?.0;
    queue.set_next_avail(posted);
    let armed = queue.enable_notification(memory);
    queue.set_next_avail(next);
    armed.map(|_| posted)
}

impl VirtioDevice for VsockDevice {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn name(&self) -> &str {
        "vsock"
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE, EVENT_QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        copy_config(&self.mux.guest_cid().to_le_bytes(), offset, data);
    }

    fn activate(&mut self, _features: u64, context: &mut DeviceContext<'_>) -> Outcome {
        self.mux.attach(context.events);
        Outcome::default()
    }

    fn resume(&mut self, _features: u64, context: &mut DeviceContext<'_>) -> Outcome {
        match self.reset {
            Reset::None => {
                self.mux.attach(context.events);
                Outcome::default()
            }
            Reset::Untold | Reset::Told { .. } => self.send_event(context),
        }
    }

    fn reset(&mut self, events: &dyn EventRegistry) {
        self.mux.detach(events);
        self.reset = Reset::None;
        self.transmit_held = false;
    }

    fn notify(&mut self, index: usize, context: &mut DeviceContext<'_>) -> Outcome {
        let mut outcome = match index {
            TRANSMIT => self.transmit(context),
            EVENTS => {
                self.see_reset_done(context);
                return self.send_event(context);
            }
            _ => Outcome::default(),
        };
        if !outcome.failed {
            outcome.merge(self.run(context));
        }
        outcome
    }

    fn event(
        &mut self,
        token: u32,
        readiness: Readiness,
        context: &mut DeviceContext<'_>,
    ) -> Outcome {
        self.mux.event(token, readiness, context.events);
        self.run(context)
    }

    fn save(&self) -> (u16, Vec<u8>) {
        persist::save(&VsockState {
            guest_cid: self.mux.guest_cid(),
            next_host_port: self.mux.next_host_port(),
            guest_has_connections: self.mux.has_connections() || self.reset != Reset::None,
        })
    }

    fn metrics(&self) -> Vec<(&'static str, u64)> {
        self.mux.metrics.entries()
    }
}
