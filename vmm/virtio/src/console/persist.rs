//! Saved state of the console: input the guest has not taken yet.

use serde::{Deserialize, Serialize};

use super::INPUT_BYTES_MAX;
use crate::persist::{StateError, decode, encode};

/// Version of [`ConsoleState`].
pub const VERSION: u16 = 1;

const DEVICE: &str = "console";

/// Schema of the saved state.
#[derive(Debug, Serialize, Deserialize)]
struct ConsoleState {
    input: Vec<u8>,
}

/// Encodes the waiting input.
pub fn save(input: Vec<u8>) -> (u16, Vec<u8>) {
    (VERSION, encode(&ConsoleState { input }))
}

/// The waiting input.
pub fn restore(version: u16, bytes: &[u8]) -> Result<Vec<u8>, StateError> {
    let ConsoleState { input } = decode(DEVICE, VERSION, version, bytes)?;
    if input.len() > INPUT_BYTES_MAX {
        return Err(StateError::Invalid { device: DEVICE, reason: "too much waiting input" });
    }
    Ok(input)
}
