//! Saved state of the entropy device: there is none beyond its version.

use serde::{Deserialize, Serialize};

use crate::persist::{StateError, decode, encode};

/// Version of [`RngState`].
pub const VERSION: u16 = 1;

/// Schema of the saved state.
#[derive(Debug, Serialize, Deserialize)]
struct RngState {}

/// Encodes the state.
pub fn save() -> (u16, Vec<u8>) {
    (VERSION, encode(&RngState {}))
}

/// Checks saved state.
pub fn restore(version: u16, bytes: &[u8]) -> Result<(), StateError> {
    let RngState {} = decode("rng", VERSION, version, bytes)?;
    Ok(())
}
