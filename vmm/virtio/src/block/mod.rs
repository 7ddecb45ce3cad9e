//! virtio-blk (virtio 1.2, section 5.2) over raw files and copy-on-write disks.
//!
//! ```text
//!  request ─► disk (which file holds which bytes) ─► engine (page cache, else io_uring)
//! ```
//!
//! * `image`  – an open host file with a known size.
//! * `disk`   – read-only, read-write, or copy-on-write: a read-only base, a
//!   sparse delta file made at the first write, and an `allocation` map of the
//!   4 KiB blocks the delta holds. A checkpoint ends the delta: it becomes a layer
//!   that all who go on from there share, and each gets a delta of its own.
//! * `engine` – transfers in flight. Reads that the host's page cache can answer
//!   are answered at once; only what is left makes the ring, so that a clone
//!   which reads what its siblings read never has one.
//! * `device` – the queue, the requests and their status bytes.
//!
//! The delta's path is the configuration's, not the state's: the same state can
//! be given a file of its own in every clone.

mod allocation;
mod device;
mod disk;
mod engine;
mod image;
mod metrics;
mod persist;
mod request;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

pub use device::{BlockConfig, BlockDevice, FlushPolicy};
pub use disk::DiskConfig;
pub use image::{ImageAccess, ImageFile};
pub use metrics::BlockMetrics;

use crate::persist::StateError;

/// Bytes of a sector, the unit of requests.
pub const SECTOR_BYTES: u64 = 512;

/// Bytes of a block, the unit of the copy-on-write disk: a page of the guest's.
pub const BLOCK_BYTES: u64 = 4096;

/// Descriptors of the request queue.
pub const QUEUE_SIZE: u16 = 256;

/// Data segments of one request.
pub const SEGMENTS_MAX: u16 = 126;

/// Transfers in flight at once, and entries of the ring. One page of entries.
pub const TRANSFERS_MAX: u16 = 64;

/// Bytes of one read or write. Linux asks for at most 1.25 MiB.
pub const REQUEST_BYTES_MAX: u64 = 16 << 20;

/// Ranges in one discard or write-zeroes request.
pub const RANGES_MAX: u32 = 4;

/// Sectors of one such range (256 MiB): bounds the time one request takes.
pub const RANGE_SECTORS_MAX: u32 = 1 << 19;

/// Bytes of the device id.
pub const ID_BYTES: usize = 20;

/// Why a block device could not be made.
#[derive(Debug, Error)]
pub enum BlockError {
    /// The image could not be opened.
    #[error("cannot open disk image {path}")]
    Open {
        /// Path of the image.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// Its size could not be read.
    #[error("cannot read the size of disk image {path}")]
    Size {
        /// Path of the image.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The image is neither a regular file nor a block device.
    #[error("disk image {path} is not a regular file or block device")]
    Kind {
        /// Path of the image.
        path: PathBuf,
    },
    /// The image has no sector.
    #[error("disk image {path} is {bytes} bytes long; a disk has at least {SECTOR_BYTES}")]
    Empty {
        /// Path of the image.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// The image ends within a sector.
    #[error("disk image {path} is {bytes} bytes long, which is no multiple of {SECTOR_BYTES}")]
    Unaligned {
        /// Path of the image.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// A copy-on-write disk smaller than its base.
    #[error("disk of {bytes} bytes is smaller than its base {path} of {base_bytes} bytes")]
    Shrunk {
        /// Path of the base.
        path: PathBuf,
        /// Size asked for.
        bytes: u64,
        /// Size of the base.
        base_bytes: u64,
    },
    /// A layer that belongs to another disk.
    #[error("disk layer {path} is {found} bytes long, the disk {bytes}")]
    LayerSize {
        /// Path of the layer.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// Size of the disk.
        bytes: u64,
    },
    /// The disk is not as large as the one whose state was saved.
    #[error("disk image {path} has {found} sectors, the saved disk had {saved}")]
    SizeChanged {
        /// Path of the image.
        path: PathBuf,
        /// Sectors now.
        found: u64,
        /// Sectors when saved.
        saved: u64,
    },
    /// The id is too long.
    #[error("disk id {id:?} is longer than {ID_BYTES} bytes")]
    Id {
        /// The id.
        id: String,
    },
    /// The saved state was refused.
    #[error(transparent)]
    State(#[from] StateError),
}
