//! virtio-console (virtio 1.2, section 5.3) with one port: the guest's hvc0.
//!
//! Output goes to a [`ConsoleSink`]; [`ConsoleLog`] is one that keeps a bounded
//! file, made when the first byte is written. Input waits, bounded, for buffers
//! of the guest.

mod device;
mod log;
mod metrics;
mod persist;
#[cfg(test)]
mod tests;

pub use device::{ConsoleDevice, ConsoleSink};
pub use log::ConsoleLog;
pub use metrics::ConsoleMetrics;

/// Descriptors of each queue.
pub const QUEUE_SIZE: u16 = 32;

/// Bytes of input that may wait for the guest.
pub const INPUT_BYTES_MAX: usize = 4096;

/// Bytes taken from one output buffer; what is longer is not console output.
pub const OUTPUT_BYTES_MAX: u64 = 64 << 10;
