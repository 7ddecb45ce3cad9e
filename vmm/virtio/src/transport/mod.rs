//! virtio-mmio, version 2 of the register layout (virtio 1.2, section 4.2).
//!
//! [`MmioTransport`] owns the registers, the queues and the interrupt status of
//! one device. The VMM calls it under one lock:
//!
//! * `read`, `write` for MMIO exits,
//! * `notify` when a queue's ioeventfd fired,
//! * `event` when a descriptor the device registered is ready,
//! * `quiesce`, then `save` and `save_device`, with the vCPUs stopped.
//!
//! The driver's way through the status register, each step checked:
//!
//! ```text
//!  0 ─ ACKNOWLEDGE ─ DRIVER ─(features)─ FEATURES_OK ─(queues)─ DRIVER_OK
//!  ▲                                                               │
//!  └────────────── write 0: reset ─────────── DEVICE_NEEDS_RESET ◄─┘ protocol broken
//! ```

mod metrics;
mod mmio;
mod persist;
mod registers;
#[cfg(test)]
mod tests;

pub use metrics::TransportMetrics;
pub use mmio::{MmioTransport, REVISIT_TOKEN, WriteEffect};
pub use persist::{QueueState, TRANSPORT_STATE_VERSION, TransportError, TransportState};

/// Bytes of the register window of one device; the configuration space begins
/// at 0x100 and ends with the window.
pub const WINDOW_BYTES: u64 = 0x1000;
