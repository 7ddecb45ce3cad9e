//! The live transport: register accesses in, device calls and interrupts out.

use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::{EventfdFlags, eventfd};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryMmap;

use super::persist::{QueueState, TransportError, TransportState};
use super::registers::{
    INTERRUPT_CONFIG, INTERRUPT_USED, LAYOUT_VERSION, MAGIC, Register, Status, StatusChange, VENDOR,
};
use super::{TransportMetrics, WINDOW_BYTES};
use crate::device::{
    DeviceContext, EventRegistry, Interest, Interrupt, Outcome, Readiness, VirtioDevice,
};
use crate::queue::to_usize;

/// Token of the transport's own descriptor; devices use smaller ones.
pub const REVISIT_TOKEN: u32 = u32::MAX;

/// Features of the transport, added to every device's.
const TRANSPORT_FEATURES: u64 = (1 << VIRTIO_F_VERSION_1) | (1 << VIRTIO_RING_F_EVENT_IDX);

/// What a register write did that concerns the VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteEffect {
    /// Nothing.
    None,
    /// The driver notified this queue, and the device was called: the next
    /// notification may come through an ioeventfd.
    Notified(usize),
    /// This queue became ready.
    QueueReady(usize),
    /// The driver is ready and the device active.
    Activated,
    /// The device was reset: ioeventfds of its queues should go.
    Reset,
}

/// One virtio-mmio device.
pub struct MmioTransport {
    device: Box<dyn VirtioDevice>,
    memory: GuestMemoryMmap,
    interrupt: Arc<dyn Interrupt>,
    events: Arc<dyn EventRegistry>,
    queues: Vec<Queue>,
    status: Status,
    driver_features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u32,
    interrupt_status: u32,
    config_generation: u32,
    revisit: Revisit,
    metrics: TransportMetrics,
    /// The process that made it: a forked child that drops its inherited copy must
    /// not take registrations away from its parent.
    owner: u32,
}

/// Queues to be looked at again, and the eventfd that asks the event loop for it;
/// made when it is first needed.
#[derive(Default)]
struct Revisit {
    eventfd: Option<OwnedFd>,
    queues: u64,
}

impl MmioTransport {
    /// A device no driver has touched yet.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemoryMmap,
        interrupt: Arc<dyn Interrupt>,
        events: Arc<dyn EventRegistry>,
    ) -> Result<Self, TransportError> {
        let mut queues = Vec::with_capacity(device.queue_sizes().len());
        for size in device.queue_sizes() {
            let queue = Queue::new(*size).map_err(|source| TransportError::QueueSize {
                device: device.name().to_owned(),
                size: *size,
                source,
            })?;
            queues.push(queue);
        }
        Ok(Self {
            device,
            memory,
            interrupt,
            events,
            queues,
            status: Status::default(),
            driver_features: 0,
            device_features_select: 0,
            driver_features_select: 0,
            queue_select: 0,
            interrupt_status: 0,
            config_generation: 0,
            revisit: Revisit::default(),
            metrics: TransportMetrics::default(),
            owner: std::process::id(),
        })
    }

    /// A device as it was when `state` was saved; `device` was restored from its
    /// own state before. An interrupt that was pending is raised again.
    pub fn restore(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemoryMmap,
        interrupt: Arc<dyn Interrupt>,
        events: Arc<dyn EventRegistry>,
        state: &TransportState,
    ) -> Result<Self, TransportError> {
        if state.device_type != device.device_type() {
            return Err(TransportError::DeviceType {
                found: state.device_type,
                wanted: device.device_type(),
            });
        }
        let status = state.check_registers()?;
        let missing = state.driver_features & !(device.features() | TRANSPORT_FEATURES);
        if status.has(Status::FEATURES_OK) && missing != 0 {
            return Err(TransportError::Features {
                device: device.name().to_owned(),
                features: missing,
            });
        }
        let queues = state.queues(device.name(), device.queue_sizes(), status, &memory)?;
        let mut transport = Self {
            device,
            memory,
            interrupt,
            events,
            queues,
            status,
            driver_features: state.driver_features,
            device_features_select: state.device_features_select,
            driver_features_select: state.driver_features_select,
            queue_select: state.queue_select,
            interrupt_status: state.interrupt_status,
            config_generation: state.config_generation,
            revisit: Revisit::default(),
            metrics: TransportMetrics::default(),
            owner: std::process::id(),
        };
        if transport.status.running() {
            let features = transport.driver_features;
            let outcome = transport.call(|device, context| device.resume(features, context));
            transport.settle(outcome, None);
        }
        if transport.interrupt_status != 0 {
            transport.raise();
        }
        Ok(transport)
    }

    /// The registers and queues. Call after [`MmioTransport::quiesce`].
    pub fn save(&mut self) -> TransportState {
        TransportState {
            device_type: self.device.device_type(),
            status: self.status.bits(),
            driver_features: self.driver_features,
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            queue_select: self.queue_select,
            interrupt_status: self.interrupt_status,
            config_generation: self.config_generation,
            queues: self.queues.iter().map(QueueState::of).collect(),
        }
    }

    /// The device's own state, `(version, bytes)`.
    pub fn save_device(&self) -> (u16, Vec<u8>) {
        self.device.save()
    }

    /// Serves what the driver already asked for and brings work in flight to an
    /// end. The vCPUs are stopped.
    pub fn quiesce(&mut self) {
        if !self.status.running() {
            return;
        }
        let mut total = Outcome::default();
        for index in 0..self.queues.len() {
            if self.queue_ready(index) {
                total.merge(self.call(|device, context| device.notify(index, context)));
            }
        }
        // What is unfinished now is for the device's own quiesce to end.
        total.unfinished = false;
        total.merge(self.call(|device, context| device.quiesce(context)));
        self.settle(total, None);
    }

    /// The driver notified queue `index` (its ioeventfd fired).
    pub fn notify(&mut self, index: usize) {
        if !self.status.running() || !self.queue_ready(index) {
            return;
        }
        self.metrics.notifications += 1;
        let outcome = self.call(|device, context| device.notify(index, context));
        self.settle(outcome, Some(index));
    }

    /// A descriptor registered under `token` is ready.
    pub fn event(&mut self, token: u32, readiness: Readiness) {
        if token == REVISIT_TOKEN {
            self.revisit_queues();
            return;
        }
        // A device may hear of a descriptor it had registered before it failed.
        if !self.status.running() {
            return;
        }
        self.metrics.events += 1;
        let outcome = self.call(|device, context| device.event(token, readiness, context));
        self.settle(outcome, None);
    }

    /// Reads `data.len()` bytes at `offset` of the window. Illegal accesses read
    /// as zero.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset >= Register::CONFIG {
            if self.config_access_is_legal(offset, data.len()) {
                self.device.read_config(offset - Register::CONFIG, data);
            }
            return;
        }
        let Some(register) = Register::at(offset) else { return };
        let value = self.read_register(register).to_le_bytes();
        match data.len() == value.len() {
            true => data.copy_from_slice(&value),
            false => self.metrics.refused_accesses += 1,
        }
    }

    /// Writes `data` at `offset` of the window. Illegal accesses are ignored.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> WriteEffect {
        if offset >= Register::CONFIG {
            if self.config_access_is_legal(offset, data.len()) && self.status.has(Status::DRIVER) {
                self.device.write_config(offset - Register::CONFIG, data);
            }
            return WriteEffect::None;
        }
        let (Some(register), Ok(bytes)) = (Register::at(offset), <[u8; 4]>::try_from(data)) else {
            self.metrics.refused_accesses += 1;
            return WriteEffect::None;
        };
        self.write_register(register, u32::from_le_bytes(bytes))
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        self.device.name()
    }

    /// Type of the device.
    pub fn device_type(&self) -> u32 {
        self.device.device_type()
    }

    /// The device itself, if it is a `D`.
    pub fn device<D: VirtioDevice>(&mut self) -> Option<&mut D> {
        let device: &mut dyn Any = self.device.as_mut();
        device.downcast_mut()
    }

    /// Lets the owner work with the device and its queues, then delivers the
    /// interrupts that came of it. `None` while no driver runs the device, or if
    /// it is no `D`.
    pub fn with_device<D: VirtioDevice, R>(
        &mut self,
        work: impl FnOnce(&mut D, &mut DeviceContext<'_>) -> (R, Outcome),
    ) -> Option<R> {
        if !self.status.running() {
            return None;
        }
        let mut context = DeviceContext {
            memory: &self.memory,
            queues: &mut self.queues,
            events: self.events.as_ref(),
        };
        let device: &mut dyn Any = self.device.as_mut();
        let (result, outcome) = work(device.downcast_mut()?, &mut context);
        self.settle(outcome, None);
        Some(result)
    }

    /// Counters of the transport.
    pub fn metrics(&self) -> &TransportMetrics {
        &self.metrics
    }

    /// Counters of the device, by name.
    pub fn device_metrics(&self) -> Vec<(&'static str, u64)> {
        self.device.metrics()
    }

    /// Whether the driver set DRIVER_OK and neither side failed since.
    pub fn running(&self) -> bool {
        self.status.running()
    }

    fn config_access_is_legal(&mut self, offset: u64, len: usize) -> bool {
        let legal = matches!(len, 1 | 2 | 4 | 8) && offset < WINDOW_BYTES;
        if !legal {
            self.metrics.refused_accesses += 1;
        }
        legal
    }

    fn read_register(&self, register: Register) -> u32 {
        let queue = self.queues.get(to_usize(self.queue_select));
        match register {
            Register::Magic => MAGIC,
            Register::Version => LAYOUT_VERSION,
            Register::DeviceId => self.device.device_type(),
            Register::VendorId => VENDOR,
            Register::DeviceFeatures => half(self.offered(), self.device_features_select),
            Register::QueueSizeMax => queue.map_or(0, |queue| u32::from(queue.max_size())),
            Register::QueueReady => queue.map_or(0, |queue| u32::from(queue.ready())),
            Register::InterruptStatus => self.interrupt_status,
            Register::Status => self.status.bits(),
            // No device has shared memory: length and base read as all ones.
            Register::SharedMemoryLengthLow
            | Register::SharedMemoryLengthHigh
            | Register::SharedMemoryBaseLow
            | Register::SharedMemoryBaseHigh => u32::MAX,
            Register::ConfigGeneration => self.config_generation,
            // Write-only registers.
            Register::DeviceFeaturesSelect
            | Register::DriverFeatures
            | Register::DriverFeaturesSelect
            | Register::QueueSelect
            | Register::QueueSize
            | Register::QueueNotify
            | Register::InterruptAcknowledge
            | Register::QueueDescriptorLow
            | Register::QueueDescriptorHigh
            | Register::QueueDriverLow
            | Register::QueueDriverHigh
            | Register::QueueDeviceLow
            | Register::QueueDeviceHigh => 0,
        }
    }

    fn write_register(&mut self, register: Register, value: u32) -> WriteEffect {
        match register {
            Register::DeviceFeaturesSelect => self.device_features_select = value,
            Register::DriverFeaturesSelect => self.driver_features_select = value,
            Register::DriverFeatures => self.write_driver_features(value),
            Register::QueueSelect => self.queue_select = value,
            Register::QueueReady => return self.write_queue_ready(value),
            Register::QueueNotify => return self.write_notify(value),
            Register::InterruptAcknowledge => self.interrupt_status &= !value,
            Register::Status => return self.write_status(value),
            Register::QueueSize => self.configure_queue(|queue| {
                if let Ok(size) = u16::try_from(value) {
                    // An illegal size leaves the old one; the driver's rings then
                    // do not fit and the queue is refused when made ready.
                    let _ = queue.try_set_size(size);
                }
            }),
            Register::QueueDescriptorLow => {
                self.configure_queue(|queue| queue.set_desc_table_address(Some(value), None));
            }
            Register::QueueDescriptorHigh => {
                self.configure_queue(|queue| queue.set_desc_table_address(None, Some(value)));
            }
            Register::QueueDriverLow => {
                self.configure_queue(|queue| queue.set_avail_ring_address(Some(value), None));
            }
            Register::QueueDriverHigh => {
                self.configure_queue(|queue| queue.set_avail_ring_address(None, Some(value)));
            }
            Register::QueueDeviceLow => {
                self.configure_queue(|queue| queue.set_used_ring_address(Some(value), None));
            }
            Register::QueueDeviceHigh => {
                self.configure_queue(|queue| queue.set_used_ring_address(None, Some(value)));
            }
            Register::Magic
            | Register::Version
            | Register::DeviceId
            | Register::VendorId
            | Register::DeviceFeatures
            | Register::QueueSizeMax
            | Register::InterruptStatus
            | Register::SharedMemoryLengthLow
            | Register::SharedMemoryLengthHigh
            | Register::SharedMemoryBaseLow
            | Register::SharedMemoryBaseHigh
            | Register::ConfigGeneration => self.metrics.refused_accesses += 1,
        }
        WriteEffect::None
    }

    fn write_driver_features(&mut self, value: u32) {
        let shift = match self.driver_features_select {
            0 => 0,
            1 => 32,
            // Features beyond 64 bits do not exist; only zero is sensible there.
            _ => return,
        };
        if !self.status.negotiating() {
            self.metrics.refused_accesses += 1;
            return;
        }
        self.driver_features &= !(u64::from(u32::MAX) << shift);
        self.driver_features |= u64::from(value) << shift;
    }

    fn configure_queue(&mut self, change: impl FnOnce(&mut Queue)) {
        let legal = self.status.configuring();
        match self.queues.get_mut(to_usize(self.queue_select)) {
            Some(queue) if legal && !queue.ready() => change(queue),
            Some(_) | None => self.metrics.refused_accesses += 1,
        }
    }

    fn write_queue_ready(&mut self, value: u32) -> WriteEffect {
        let index = to_usize(self.queue_select);
        let configuring = self.status.configuring();
        let event_index = self.negotiated(VIRTIO_RING_F_EVENT_IDX);
        let Some(queue) = self.queues.get_mut(index) else {
            self.metrics.refused_accesses += 1;
            return WriteEffect::None;
        };
        if value & 1 == 0 {
            // Allowed at any time; only a reset makes the queue usable again once
            // the driver runs.
            queue.set_ready(false);
            return WriteEffect::None;
        }
        if !configuring || queue.ready() {
            self.metrics.refused_accesses += 1;
            return WriteEffect::None;
        }
        queue.set_ready(true);
        queue.set_event_idx(event_index);
        if queue.is_valid(&self.memory) {
            return WriteEffect::QueueReady(index);
        }
        queue.set_ready(false);
        self.settle(Outcome { failed: true, ..Outcome::default() }, None);
        WriteEffect::None
    }

    fn write_notify(&mut self, value: u32) -> WriteEffect {
        let index = to_usize(value);
        if !self.status.running() || !self.queue_ready(index) {
            self.metrics.refused_accesses += 1;
            return WriteEffect::None;
        }
        self.notify(index);
        WriteEffect::Notified(index)
    }

    fn write_status(&mut self, value: u32) -> WriteEffect {
        match self.status.judge(value) {
            StatusChange::Reset => {
                self.reset();
                WriteEffect::Reset
            }
            StatusChange::CheckFeatures => {
                let unknown = self.driver_features & !self.offered();
                // Without FEATURES_OK reading back, the driver knows it asked too much.
                if unknown == 0 && self.negotiated(VIRTIO_F_VERSION_1) {
                    self.status.accept(value);
                }
                WriteEffect::None
            }
            StatusChange::Activate => {
                self.status.accept(value);
                let features = self.driver_features;
                let outcome = self.call(|device, context| device.activate(features, context));
                self.settle(outcome, None);
                self.look_at_queues();
                WriteEffect::Activated
            }
            StatusChange::Accept => {
                self.status.accept(value);
                WriteEffect::None
            }
            StatusChange::Refuse => {
                self.metrics.refused_accesses += 1;
                WriteEffect::None
            }
        }
    }

    /// Serves buffers the driver made available before DRIVER_OK. Linux does so, and
    /// notifies as early, for the balloon's statistics.
    fn look_at_queues(&mut self) {
        for index in 0..self.queues.len() {
            let Some(queue) = self.queues.get(index) else { break };
            let waiting = queue.ready()
                && queue
                    .avail_idx(&self.memory, Ordering::Acquire)
                    .is_ok_and(|available| available.0 != queue.next_avail());
            if waiting && self.status.running() {
                let outcome = self.call(|device, context| device.notify(index, context));
                self.settle(outcome, Some(index));
            }
        }
    }

    fn reset(&mut self) {
        self.metrics.resets += 1;
        self.device.reset(self.events.as_ref());
        for queue in &mut self.queues {
            queue.reset();
        }
        self.status = Status::default();
        self.driver_features = 0;
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.queue_select = 0;
        self.interrupt_status = 0;
        self.revisit.queues = 0;
    }

    fn offered(&self) -> u64 {
        self.device.features() | TRANSPORT_FEATURES
    }

    fn negotiated(&self, bit: u32) -> bool {
        self.driver_features & (1 << bit) != 0
    }

    fn queue_ready(&self, index: usize) -> bool {
        self.queues.get(index).is_some_and(QueueT::ready)
    }

    fn call(
        &mut self,
        work: impl FnOnce(&mut dyn VirtioDevice, &mut DeviceContext<'_>) -> Outcome,
    ) -> Outcome {
        let mut context = DeviceContext {
            memory: &self.memory,
            queues: &mut self.queues,
            events: self.events.as_ref(),
        };
        work(self.device.as_mut(), &mut context)
    }

    /// Acts on what a device call brought; `index` is the queue it was about.
    fn settle(&mut self, outcome: Outcome, index: Option<usize>) {
        let mut causes = 0;
        if outcome.used_buffers {
            causes |= INTERRUPT_USED;
        }
        if outcome.config_changed {
            self.config_generation = self.config_generation.wrapping_add(1);
            causes |= INTERRUPT_CONFIG;
        }
        if outcome.failed && !self.status.has(Status::NEEDS_RESET) {
            self.metrics.failures += 1;
            self.status.add(Status::NEEDS_RESET);
            // A driver that is not running yet learns of it from the register.
            if self.status.has(Status::DRIVER_OK) {
                causes |= INTERRUPT_CONFIG;
            }
        }
        if causes != 0 {
            self.interrupt_status |= causes;
            self.raise();
        }
        if outcome.unfinished && self.status.running() {
            self.ask_for_revisit(index);
        }
    }

    /// Raises even when a cause is pending already: a spurious edge is cheap, a
    /// lost one hangs the guest.
    fn raise(&mut self) {
        self.metrics.interrupts += 1;
        if self.interrupt.trigger().is_err() {
            self.metrics.interrupt_failures += 1;
        }
    }

    fn ask_for_revisit(&mut self, index: Option<usize>) {
        self.revisit.queues |= match index.and_then(|index| u32::try_from(index).ok()) {
            Some(bit) => 1u64.checked_shl(bit).unwrap_or(u64::MAX),
            None => u64::MAX,
        };
        if self.revisit.eventfd.is_none() {
            let Ok(made) = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) else {
                return;
            };
            if self.events.add(made.as_fd(), REVISIT_TOKEN, Interest::Readable).is_err() {
                return;
            }
            self.revisit.eventfd = Some(made);
        }
        if let Some(eventfd) = &self.revisit.eventfd {
            // The counter cannot overflow: it is read before it is written again.
            let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
        }
    }

    fn revisit_queues(&mut self) {
        if let Some(eventfd) = &self.revisit.eventfd {
            let mut count = [0; 8];
            let _ = rustix::io::read(eventfd, &mut count);
        }
        let queues = std::mem::take(&mut self.revisit.queues);
        if !self.status.running() {
            return;
        }
        self.metrics.revisits += 1;
        for index in 0..self.queues.len() {
            let wanted = queues.checked_shr(u32::try_from(index).unwrap_or(u32::MAX)).unwrap_or(0);
            if wanted & 1 == 1 && self.queue_ready(index) {
                let outcome = self.call(|device, context| device.notify(index, context));
                self.settle(outcome, Some(index));
            }
        }
    }
}

impl Drop for MmioTransport {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return;
        }
        if let Some(eventfd) = self.revisit.eventfd.take() {
            let _ = self.events.remove(eventfd.as_fd());
        }
        self.device.reset(self.events.as_ref());
    }
}

/// The 32 bits of `features` that `select` names.
fn half(features: u64, select: u32) -> u32 {
    let bytes = match select {
        0 => features & u64::from(u32::MAX),
        1 => features >> 32,
        _ => 0,
    };
    u32::try_from(bytes).expect("32 bits were cut out")
}
