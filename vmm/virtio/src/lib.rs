//! virtio devices over virtio-mmio: queues, transport, one folder per device.
//!
//! This crate knows nothing of KVM. The VMM gives each device an [`Interrupt`]
//! and an [`EventRegistry`], and routes MMIO accesses to its
//! [`transport::MmioTransport`].

pub mod block;
pub mod console;
mod device;
#[cfg(test)]
mod fuzz_tests;
mod metrics;
pub mod net;
pub mod persist;
pub mod queue;
pub mod rng;
mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod timer;
pub mod transport;
pub mod vsock;

pub use device::{
    DeviceContext, EventRegistry, Interest, Interrupt, Outcome, Readiness, VirtioDevice,
    copy_config,
};
