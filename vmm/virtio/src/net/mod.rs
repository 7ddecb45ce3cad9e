//! virtio-net (virtio 1.2, section 5.1) over a TAP device.
//!
//! Frames go between the guest's buffers and the TAP without a copy of ours; the
//! offload header goes along, so that checksums and segmentation are done once, or
//! never. One pair of queues, no control queue.
//!
//! Without buffers of the guest the TAP is not read, and without room in the TAP
//! the transmit queue is not; the host's own queue then drops, as any link does.

mod device;
mod metrics;
mod persist;
mod tap;
#[cfg(test)]
mod tests;

use std::io;

use thiserror::Error;

pub use device::{NetConfig, NetDevice};
pub use metrics::NetMetrics;
pub use tap::TapSource;

/// Descriptors of each queue.
pub const QUEUE_SIZE: u16 = 256;

/// Bytes of the offload header before each frame.
pub const HEADER_BYTES: u64 = 12;

/// Bytes of the largest frame: what segmentation offload makes of 64 KiB.
pub const FRAME_BYTES_MAX: u64 = 65_550;

/// Bytes of the smallest frame: an Ethernet header.
pub const FRAME_BYTES_MIN: u64 = 14;

/// Bytes of the largest frame without segmentation offload and with the usual MTU,
/// a VLAN tag included.
pub const PLAIN_FRAME_BYTES_MAX: u64 = 1518;

/// Frames taken from the TAP in one call of the device.
pub const FRAMES_MAX: usize = 64;

/// Why a TAP could not be used.
#[derive(Debug, Error)]
pub enum NetError {
    /// The TAP driver could not be opened.
    #[error("cannot open /dev/net/tun")]
    Open(#[source] io::Error),
    /// The name is not one of an interface.
    #[error("{0:?} is no name of a network interface")]
    Name(String),
    /// The interface could not be attached to.
    #[error("cannot attach to TAP interface {name}")]
    Attach {
        /// Name of the interface.
        name: String,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The TAP does not speak the offload header.
    #[error("cannot set the header size or offloads of the TAP")]
    Configure(#[source] io::Error),
    /// The address is a group's, or zero.
    #[error("{0:02x?} is no address of a network card")]
    Mac([u8; 6]),
    /// The MTU is too small or too large.
    #[error("MTU {0} is not between 68 and 65521")]
    Mtu(u16),
    /// The saved state was refused.
    #[error(transparent)]
    State(#[from] crate::persist::StateError),
}
