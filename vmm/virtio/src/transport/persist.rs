//! Saved state of a transport: the registers and the queues, not the device.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryMmap;

use super::registers::{INTERRUPT_CONFIG, INTERRUPT_USED, Status};

/// Version of [`TransportState`].
pub const TRANSPORT_STATE_VERSION: u16 = 1;

/// Registers of one transport. Hostile when it comes from a file: only
/// [`super::MmioTransport::restore`] makes something of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// Type of the device behind it.
    pub device_type: u32,
    /// Status register.
    pub status: u32,
    /// Features the driver acknowledged.
    pub driver_features: u64,
    /// Selector registers.
    pub device_features_select: u32,
    /// Selector registers.
    pub driver_features_select: u32,
    /// Selector registers.
    pub queue_select: u32,
    /// Pending interrupt causes.
    pub interrupt_status: u32,
    /// Generation of the configuration space.
    pub config_generation: u32,
    /// One per queue of the device.
    pub queues: Vec<QueueState>,
}

/// One queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// Size the driver chose.
    pub size: u16,
    /// Whether it is in use.
    pub ready: bool,
    /// Whether notifications are suppressed by index.
    pub event_index: bool,
    /// Address of the descriptor table.
    pub descriptor_table: u64,
    /// Address of the available ring.
    pub available_ring: u64,
    /// Address of the used ring.
    pub used_ring: u64,
    /// Next available entry to take.
    pub next_available: u16,
    /// Next used entry to write.
    pub next_used: u16,
}

/// Why a transport could not be made.
#[derive(Debug, Error)]
pub enum TransportError {
    /// The device states a queue size that is no power of two.
    #[error("device {device} has a queue of illegal size {size}")]
    QueueSize {
        /// Name of the device.
        device: String,
        /// The size it states.
        size: u16,
        /// The queue's reason.
        #[source]
        source: virtio_queue::Error,
    },
    /// The state is another device's.
    #[error("state is of a device of type {found}, not of type {wanted}")]
    DeviceType {
        /// Type in the state.
        found: u32,
        /// Type of the device given.
        wanted: u32,
    },
    /// The state has another number of queues.
    #[error("state has {found} queues, device {device} has {wanted}")]
    QueueCount {
        /// Name of the device.
        device: String,
        /// Queues in the state.
        found: usize,
        /// Queues of the device.
        wanted: usize,
    },
    /// The driver uses features the device does not offer any more.
    #[error("driver uses features {features:#x} that device {device} does not offer")]
    Features {
        /// Name of the device.
        device: String,
        /// Those not offered.
        features: u64,
    },
    /// The status register cannot have that value.
    #[error("status {0:#x} cannot be reached")]
    Status(u32),
    /// A queue's fields are illegal.
    #[error("state of queue {index} of device {device} is illegal")]
    Queue {
        /// Name of the device.
        device: String,
        /// Which queue.
        index: usize,
        /// The queue's reason.
        #[source]
        source: virtio_queue::Error,
    },
    /// A ready queue is not inside guest memory.
    #[error("queue {index} of device {device} lies outside guest memory")]
    QueueMemory {
        /// Name of the device.
        device: String,
        /// Which queue.
        index: usize,
    },
    /// A register has an impossible value.
    #[error("{0} is out of range")]
    Register(&'static str),
}

impl QueueState {
    pub(super) fn of(queue: &Queue) -> Self {
        Self {
            size: queue.size(),
            ready: queue.ready(),
            event_index: queue.event_idx_enabled(),
            descriptor_table: queue.desc_table(),
            available_ring: queue.avail_ring(),
            used_ring: queue.used_ring(),
            next_available: queue.next_avail(),
            next_used: queue.next_used(),
        }
    }

    pub(super) fn into_queue(self, size_max: u16) -> Result<Queue, virtio_queue::Error> {
        Queue::try_from(virtio_queue::QueueState {
            max_size: size_max,
            next_avail: self.next_available,
            next_used: self.next_used,
            event_idx_enabled: self.event_index,
            size: self.size,
            ready: self.ready,
            desc_table: self.descriptor_table,
            avail_ring: self.available_ring,
            used_ring: self.used_ring,
        })
    }
}

impl TransportState {
    /// Checks everything that does not need the device.
    pub(super) fn check_registers(&self) -> Result<Status, TransportError> {
        if self.interrupt_status & !(INTERRUPT_USED | INTERRUPT_CONFIG) != 0 {
            return Err(TransportError::Register("interrupt status"));
        }
        Status::from_saved(self.status).ok_or(TransportError::Status(self.status))
    }

    /// Makes the live queues.
    pub(super) fn queues(
        &self,
        device: &str,
        sizes: &[u16],
        status: Status,
        memory: &GuestMemoryMmap,
    ) -> Result<Vec<Queue>, TransportError> {
        if self.queues.len() != sizes.len() {
            return Err(TransportError::QueueCount {
                device: device.to_owned(),
                found: self.queues.len(),
                wanted: sizes.len(),
            });
        }
        let mut queues = Vec::with_capacity(sizes.len());
        for (index, (state, size_max)) in self.queues.iter().zip(sizes).enumerate() {
            let queue = state.clone().into_queue(*size_max).map_err(|source| {
                TransportError::Queue { device: device.to_owned(), index, source }
            })?;
            let legal = status.has(Status::FEATURES_OK) && queue.is_valid(memory);
            if queue.ready() && !legal {
                return Err(TransportError::QueueMemory { device: device.to_owned(), index });
            }
            queues.push(queue);
        }
        Ok(queues)
    }
}
