//! virtio devices over virtio-mmio: queues, transport, one folder per device.
//!
//! This crate knows nothing of KVM. The VMM gives each device an [`Interrupt`]
//! and an [`EventRegistry`], and routes MMIO accesses to its [`MmioTransport`].

mod device;

pub use device::{
    DeviceContext, EventRegistry, Interest, Interrupt, Outcome, Readiness, VirtioDevice,
};
