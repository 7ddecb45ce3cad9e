//! Saved state of a block device: what the guest knows of the disk, and which
//! blocks the delta holds.

use serde::{Deserialize, Serialize};

use super::allocation::Allocation;
use super::disk::{Disk, DiskConfig};
use super::{BLOCK_BYTES, BlockError, SECTOR_BYTES};
use crate::persist::{StateError, decode, encode};

/// Version of [`BlockState`].
pub const VERSION: u16 = 1;

const DEVICE: &str = "block";

/// Schema of the saved state.
#[derive(Debug, Serialize, Deserialize)]
struct BlockState {
    /// Size the guest knows.
    sectors: u64,
    /// Runs of allocated blocks; empty for disks without a delta.
    allocated: Vec<(u64, u64)>,
}

/// Encodes the state of `disk`.
pub fn save(disk: &Disk) -> (u16, Vec<u8>) {
    let state = BlockState {
        sectors: disk.bytes() / SECTOR_BYTES,
        allocated: disk.allocation().map(Allocation::to_runs).unwrap_or_default(),
    };
    (VERSION, encode(&state))
}

/// Makes the disk of `config` from saved state.
pub fn restore(config: DiskConfig, version: u16, bytes: &[u8]) -> Result<Disk, BlockError> {
    let state: BlockState = decode(DEVICE, VERSION, version, bytes)?;
    let blocks = state.sectors.saturating_mul(SECTOR_BYTES).div_ceil(BLOCK_BYTES);
    let allocation =
        Allocation::from_runs(&state.allocated, blocks).ok_or(StateError::Invalid {
            device: DEVICE,
            reason: "allocation map goes beyond the disk",
        })?;
    let has_delta = matches!(config, DiskConfig::CopyOnWrite { .. });
    if !has_delta && !allocation.is_empty() {
        let reason = "blocks of a delta, but the disk has none";
        return Err(StateError::Invalid { device: DEVICE, reason }.into());
    }
    let disk = Disk::new(config, allocation)?;
    let found = disk.bytes() / SECTOR_BYTES;
    if found != state.sectors {
        return Err(BlockError::SizeChanged {
            path: disk.path().to_owned(),
            found,
            saved: state.sectors,
        });
    }
    Ok(disk)
}
