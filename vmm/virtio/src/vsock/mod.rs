//! virtio-vsock (virtio 1.2, section 5.10): streams between the guest and unix
//! sockets of the host, with no help of the host's kernel module.
//!
//! ```text
//!  host client ── <path> ── "CONNECT <port>\n" ─► handshake ─► REQUEST ─► guest listener
//!              ◄─ "OK <host port>\n" ◄────────────────────── RESPONSE ◄─┘
//!  host listener ── <path>_<port> ◄───────────────────────── REQUEST ◄── guest client
//! ```
//!
//! * `packet`     – the 44 header bytes.
//! * `credit`     – flow control, as arithmetic only.
//! * `connection` – one stream: its states, and what it still owes either side.
//! * `handshake`  – host clients that have not said which port they want.
//! * `mux`        – the table of connections; packets of the guest and events of
//!   sockets in, packets to the guest out, each connection in its turn.
//! * `device`     – the three queues.
//!
//! Back-pressure goes all the way in both directions. Host data is read straight
//! into the guest's buffers, and only as far as its credit goes; guest data that a
//! host socket does not take waits in a buffer no larger than the credit the guest
//! was given, which exists only while it is not empty.

mod connection;
mod credit;
mod device;
mod handshake;
mod metrics;
mod mux;
mod packet;
mod persist;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

pub use device::{ResetOnRestore, VsockConfig, VsockDevice};
pub use metrics::VsockMetrics;

use crate::persist::StateError;

/// CID of the host, as every guest knows it.
pub const HOST_CID: u64 = 2;

/// CID of the guest.
pub const GUEST_CID: u64 = 3;

/// Descriptors of the receive and the transmit queue. Linux fills the receive
/// queue with buffers of a page each.
pub const QUEUE_SIZE: u16 = 128;

/// Descriptors of the event queue.
pub const EVENT_QUEUE_SIZE: u16 = 8;

/// Connections at once, handshakes included; each is a descriptor of the process.
pub const CONNECTIONS_MAX: usize = 1024;

/// Bytes of guest data that may wait for one host socket: the credit a connection
/// gives the guest.
pub const BUFFER_BYTES: u32 = 128 << 10;

/// Bytes of one packet's payload; twice what Linux sends.
pub const PACKET_BYTES_MAX: u32 = 128 << 10;

/// Guest buffers filled by one read of a host socket, and by one connection before
/// the next has its turn.
pub const BATCH_BUFFERS: usize = 16;

/// Turns of connections in one call of the device.
pub const TURNS_MAX: usize = 64;

/// Connections accepted in one call of the device.
pub const ACCEPTS_MAX: usize = 16;

/// Bytes of a `CONNECT <port>` line, its end included.
pub const HANDSHAKE_BYTES_MAX: usize = 32;

/// How long a host client may take for that line.
pub const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(5);

/// Resets for unknown connections that may wait for guest buffers; beyond it, the
/// guest's packets wait.
pub const RESETS_MAX: usize = 128;

/// First port given to a host client.
pub const FIRST_HOST_PORT: u32 = 1 << 30;

/// Why a vsock device could not be made.
#[derive(Debug, Error)]
pub enum VsockError {
    /// A stale socket could not be removed.
    #[error("cannot remove stale vsock socket {path}")]
    Remove {
        /// Path of the socket.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// Something that is no socket is in the way.
    #[error("{path} exists and is not a socket")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The socket could not be made.
    #[error("cannot listen on vsock socket {path}")]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The CID is reserved.
    #[error("guest CID {0} is reserved")]
    Cid(u64),
    /// The saved state was refused.
    #[error(transparent)]
    State(#[from] StateError),
}
