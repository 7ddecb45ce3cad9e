//! Saved state of a block device: what the guest knows of the disk, and which
//! blocks the delta holds.

use serde::{Deserialize, Serialize};

use super::allocation::Allocation;
use super::disk::{Allocations, CopyOnWriteDisk, Disk, DiskConfig};
use super::{BLOCK_BYTES, BlockError, SECTOR_BYTES};
use crate::persist::{StateError, decode, encode};

/// Version of [`BlockState`]: 2 has layers.
pub const VERSION: u16 = 2;

const DEVICE: &str = "block";

/// Schema of the saved state.
#[derive(Debug, Serialize, Deserialize)]
struct BlockState {
    /// Size the guest knows.
    sectors: u64,
    /// Runs of the blocks that each layer holds, oldest first.
    layers: Vec<Vec<(u64, u64)>>,
    /// Runs of the blocks of the delta; empty for disks without one.
    allocated: Vec<(u64, u64)>,
}

/// Encodes the state of `disk`.
pub fn save(disk: &Disk) -> (u16, Vec<u8>) {
    let layers = disk.copy_on_write().into_iter().flat_map(CopyOnWriteDisk::layer_allocations);
    let state = BlockState {
        sectors: disk.bytes() / SECTOR_BYTES,
        layers: layers.map(Allocation::to_runs).collect(),
        allocated: disk.allocation().map(Allocation::to_runs).unwrap_or_default(),
    };
    (VERSION, encode(&state))
}

/// Makes the disk of `config` from saved state.
pub fn restore(config: DiskConfig, version: u16, bytes: &[u8]) -> Result<Disk, BlockError> {
    let state: BlockState = decode(DEVICE, VERSION, version, bytes)?;
    let blocks = state.sectors.saturating_mul(SECTOR_BYTES).div_ceil(BLOCK_BYTES);
    let invalid = |reason| StateError::Invalid { device: DEVICE, reason };
    let allocation = |runs: &Vec<_>| {
        Allocation::from_runs(runs, blocks).ok_or(invalid("allocation map goes beyond the disk"))
    };
    let allocations = Allocations {
        layers: state.layers.iter().map(allocation).collect::<Result<_, _>>()?,
        delta: allocation(&state.allocated)?,
    };
    let layers = match &config {
        DiskConfig::CopyOnWrite { layers, .. } => layers.len(),
        DiskConfig::ReadOnly(_) | DiskConfig::ReadWrite(_) if allocations.delta.is_empty() => 0,
        DiskConfig::ReadOnly(_) | DiskConfig::ReadWrite(_) => {
            return Err(invalid("blocks of a delta, but the disk has none").into());
        }
    };
    if layers != allocations.layers.len() {
        return Err(invalid("the disk has another number of layers").into());
    }
    let disk = Disk::new(config, allocations)?;
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
