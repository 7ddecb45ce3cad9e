//! Saved state of the vsock device. Connections do not outlive the process that
//! holds their sockets; what is saved is what the guest must be told of that.

use serde::{Deserialize, Serialize};

use super::{FIRST_HOST_PORT, GUEST_CID, HOST_CID, VsockError};
use crate::persist::{StateError, decode, encode};

/// Version of [`VsockState`].
pub const VERSION: u16 = 1;

const DEVICE: &str = "vsock";

/// Schema of the saved state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// CID the guest knows.
    pub guest_cid: u64,
    /// Next port for a host client: the guest may still know the earlier ones.
    pub next_host_port: u32,
    /// The guest had connections, or was not yet told that it lost some.
    pub guest_has_connections: bool,
}

impl Default for VsockState {
    fn default() -> Self {
        Self { guest_cid: GUEST_CID, next_host_port: FIRST_HOST_PORT, guest_has_connections: false }
    }
}

/// Encodes the state.
pub fn save(state: &VsockState) -> (u16, Vec<u8>) {
    (VERSION, encode(state))
}

/// Decodes and checks saved state.
pub fn restore(version: u16, bytes: &[u8]) -> Result<VsockState, VsockError> {
    let state: VsockState = decode(DEVICE, VERSION, version, bytes)?;
    if state.next_host_port < FIRST_HOST_PORT {
        let reason = "next host port is reserved";
        return Err(StateError::Invalid { device: DEVICE, reason }.into());
    }
    if state.guest_cid <= HOST_CID {
        return Err(VsockError::Cid(state.guest_cid));
    }
    Ok(state)
}
