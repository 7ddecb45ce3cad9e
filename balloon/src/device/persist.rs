//! Saved state of the balloon.

use serde::{Deserialize, Serialize};
use warren_virtio::persist::{StateError, decode, encode};

use super::{BalloonStatistics, QUEUE_SIZE};

/// Version of [`BalloonState`].
pub const VERSION: u16 = 1;

const DEVICE: &str = "balloon";

/// Schema of the saved state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonState {
    /// Pages the host wants in the balloon.
    pub target_pages: u32,
    /// Pages the guest says are in it.
    pub actual_pages: u32,
    /// Whether the guest agreed to send statistics.
    pub statistics_agreed: bool,
    /// Head of the statistics buffer the device holds.
    pub statistics_head: Option<u16>,
    /// The last statistics.
    pub statistics: Option<BalloonStatistics>,
}

/// Encodes the state.
pub fn save(state: &BalloonState) -> (u16, Vec<u8>) {
    (VERSION, encode(state))
}

/// Decodes and checks saved state.
pub fn restore(version: u16, bytes: &[u8]) -> Result<BalloonState, StateError> {
    let state: BalloonState = decode(DEVICE, VERSION, version, bytes)?;
    if state.statistics_head.is_some_and(|head| head >= QUEUE_SIZE) {
        let reason = "statistics buffer is outside its queue";
        return Err(StateError::Invalid { device: DEVICE, reason });
    }
    Ok(state)
}
