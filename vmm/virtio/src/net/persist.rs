//! Saved state of a network device: what the guest read from its configuration.

use serde::{Deserialize, Serialize};

use super::NetError;
use super::device::{check_mac, check_mtu};
use crate::persist::{decode, encode};

/// Version of [`NetState`].
pub const VERSION: u16 = 1;

/// Schema of the saved state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// The card's address.
    pub mac: [u8; 6],
    /// MTU, if one is prescribed.
    pub mtu: Option<u16>,
}

/// Encodes the state.
pub fn save(state: NetState) -> (u16, Vec<u8>) {
    (VERSION, encode(&state))
}

/// Decodes and checks saved state.
pub fn restore(version: u16, bytes: &[u8]) -> Result<NetState, NetError> {
    let state: NetState = decode("net", VERSION, version, bytes)?;
    check_mac(state.mac)?;
    check_mtu(state.mtu)?;
    Ok(state)
}
