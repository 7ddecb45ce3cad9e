//! virtio-rng (virtio 1.2, section 5.4): the host's entropy for the guest.
//!
//! A guest that asks without end is slowed down: requests beyond the rate wait in
//! the queue until a timer, made for that wait only, goes off.

mod device;
mod metrics;
mod persist;
#[cfg(test)]
mod tests;

pub use device::RngDevice;
pub use metrics::RngMetrics;

/// Descriptors of the request queue. Linux has one request in flight.
pub const QUEUE_SIZE: u16 = 8;

/// Bytes given per request at most; the rest of a larger buffer stays unused.
pub const REQUEST_BYTES_MAX: u64 = 4096;

/// Bytes per second in the long run: far above what seeding needs, far below what
/// would keep a host core busy.
pub const BYTES_PER_SECOND: u64 = 1 << 20;

/// Bytes that may be taken at once after a rest.
pub const BURST_BYTES: u64 = 64 << 10;
