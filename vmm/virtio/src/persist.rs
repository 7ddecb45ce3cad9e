//! Bytes of saved device state, on their way out and back in.
//!
//! Each device has schema structs of its own, apart from the live ones, and a
//! version number. Bytes that come back are hostile: their length is capped, all
//! of them must be used, and the live type is made from the schema by a checked
//! conversion in the device's `persist.rs`.

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// Saved state of one device is never longer. The largest is a block device's
/// allocation map: at worst some bytes per run of blocks.
pub const STATE_BYTES_MAX: usize = 64 << 20;

/// Why saved state was refused.
#[derive(Debug, Error)]
pub enum StateError {
    /// A version this build does not know.
    #[error("state of {device} has version {found}, this build knows {known}")]
    Version {
        /// Whose state.
        device: &'static str,
        /// Version that was saved.
        found: u16,
        /// Newest version known.
        known: u16,
    },
    /// Longer than [`STATE_BYTES_MAX`].
    #[error("state of {device} is {bytes} bytes long")]
    TooLong {
        /// Whose state.
        device: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// Not the encoding of the schema.
    #[error("state of {device} cannot be decoded")]
    Decode {
        /// Whose state.
        device: &'static str,
        /// The decoder's reason.
        #[source]
        source: postcard::Error,
    },
    /// More bytes than the schema has.
    #[error("state of {device} has {bytes} bytes too many")]
    Trailing {
        /// Whose state.
        device: &'static str,
        /// How many.
        bytes: usize,
    },
    /// Decoded, but makes no sense.
    #[error("state of {device} is inconsistent: {reason}")]
    Invalid {
        /// Whose state.
        device: &'static str,
        /// What is wrong.
        reason: &'static str,
    },
}

/// Encodes a schema struct.
pub fn encode<T: Serialize>(state: &T) -> Vec<u8> {
    postcard::to_stdvec(state).expect("schema structs are plain data and always encode")
}

/// Decodes a schema struct of version `known`.
pub fn decode<T: DeserializeOwned>(
    device: &'static str,
    known: u16,
    found: u16,
    bytes: &[u8],
) -> Result<T, StateError> {
    if found != known {
        return Err(StateError::Version { device, found, known });
    }
    if bytes.len() > STATE_BYTES_MAX {
        return Err(StateError::TooLong { device, bytes: bytes.len() });
    }
    let (state, rest) =
        postcard::take_from_bytes(bytes).map_err(|source| StateError::Decode { device, source })?;
    if !rest.is_empty() {
        return Err(StateError::Trailing { device, bytes: rest.len() });
    }
    Ok(state)
}
