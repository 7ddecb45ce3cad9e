//! Guest RAM: one sealed memfd per template, mapped shared while the template is
//! built and privately in its clones.
//!
//! ```text
//! boot:      memfd ── MAP_SHARED ── guest      free pages are punched out of the memfd
//! freeze:    memfd ── pages that are not zero ──> sparse file `memory`
//! template:  `memory` ──> memfd, collapsed to 2 MiB folios, sealed
//! clone:     memfd ── MAP_PRIVATE ── guest     ranges without data are anonymous memory
//! snapshot:  pages that are the clone's own ──> file `pages`
//! ```
//!
//! A clone's mapping costs no memory; reading shares the template's pages, writing
//! copies 4 KiB. Ranges that held no data in the template are anonymous, so that a
//! first write there neither copies nor fills the memfd, and huge pages are possible.

mod build;
mod diff;
mod image;
mod private;

use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::layout::{HIGH_RAM_START, HUGE_PAGE_BYTES, LOW_RAM_END};

pub use build::{BuildRam, HolePuncher};
pub use diff::RamDiff;
pub use image::{ImageError, TemplateRam};
pub use private::private_runs;

/// Smallest guest.
pub const RAM_BYTES_MIN: u64 = 32 << 20;
/// Largest guest.
pub const RAM_BYTES_MAX: u64 = 64 << 30;

/// Why guest RAM cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// Outside what is supported.
    #[error("guest RAM of {0} bytes: must be 32 MiB to 64 GiB and a multiple of 2 MiB")]
    Size(u64),
    /// The kernel refused.
    #[error("{operation} of {bytes} bytes of guest RAM")]
    System {
        /// What was tried.
        operation: &'static str,
        /// On how much.
        bytes: u64,
        /// Cause.
        #[source]
        source: rustix::io::Errno,
    },
    /// vm-memory refused the mapping.
    #[error("guest RAM map: {0}")]
    Map(String),
}

/// Size of guest RAM, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamSize(u64);

impl RamSize {
    /// Checks a size in bytes.
    ///
    /// # Errors
    /// [`RamError::Size`] when it is outside 32 MiB–64 GiB or not in steps of 2 MiB.
    pub fn new(bytes: u64) -> Result<Self, RamError> {
        let fits = (RAM_BYTES_MIN..=RAM_BYTES_MAX).contains(&bytes);
        if fits && bytes.is_multiple_of(HUGE_PAGE_BYTES) {
            Ok(Self(bytes))
        } else {
            Err(RamError::Size(bytes))
        }
    }

    /// In bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.0
    }

    /// In bytes, as a length of host memory.
    #[must_use]
    pub fn length(self) -> usize {
        usize::try_from(self.0).expect("x86_64 has 64-bit lengths")
    }

    /// Parts of guest-physical memory that are RAM, with their offset in the RAM
    /// image.
    #[must_use]
    pub fn parts(self) -> Vec<RamPart> {
        let low = self.0.min(LOW_RAM_END);
        let mut parts = vec![RamPart { guest: 0, offset: 0, bytes: low }];
        if self.0 > low {
            parts.push(RamPart { guest: HIGH_RAM_START, offset: low, bytes: self.0 - low });
        }
        parts
    }
}

/// A contiguous part of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamPart {
    /// Guest-physical start.
    pub guest: u64,
    /// Start in the RAM image.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// A range of host addresses, 2 MiB aligned, given back on drop.
#[derive(Debug)]
struct Reservation {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the pointer is the address of a mapping that this value owns; nothing is
// read or written through it here.
unsafe impl Send for Reservation {}
// SAFETY: as above; all methods take the address only.
unsafe impl Sync for Reservation {}

impl Reservation {
    fn new(length: usize) -> Result<Self, RamError> {
        let huge = usize::try_from(HUGE_PAGE_BYTES).expect("2 MiB is a length");
        let failed = |source| RamError::System {
            operation: "reserve",
            bytes: u64::try_from(length).unwrap_or(u64::MAX),
            source,
        };
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches
        // no memory that is in use.
        let raw = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length + huge,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(failed)?;
        let aligned = raw.addr().next_multiple_of(huge);
        let lead = aligned - raw.addr();
        // SAFETY: both cuts lie inside the mapping made above, which nobody else knows.
        unsafe {
            if lead > 0 {
                rustix::mm::munmap(raw, lead).map_err(failed)?;
            }
            rustix::mm::munmap(raw.byte_add(lead + length), huge - lead).map_err(failed)?;
        }
        let start = NonNull::new(raw.with_addr(aligned).cast::<u8>())
            .expect("a mapping is never at address zero");
        Ok(Self { start, length })
    }

    /// Address of `offset` in the RAM image.
    fn at(&self, offset: u64) -> *mut u8 {
        let offset = usize::try_from(offset).expect("offset in RAM is a length");
        assert!(offset < self.length, "offset {offset} beyond the RAM image");
        // SAFETY: the offset was just checked to lie inside the reservation.
        unsafe { self.start.as_ptr().add(offset) }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the range was reserved by `new` and belongs to this value; guest
        // memory built on it is dropped first by the owner's field order.
        if let Err(error) = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) } {
            tracing::error!(%error, "guest RAM not unmapped");
        }
    }
}

/// vm-memory's view of RAM that is mapped in `reservation`.
fn guest_memory(
    reservation: &Reservation,
    size: RamSize,
    flags: i32,
) -> Result<GuestMemoryMmap, RamError> {
    let mut regions = Vec::new();
    for part in size.parts() {
        let length = usize::try_from(part.bytes).expect("part of RAM is a length");
        // SAFETY: the range is mapped readable and writable by the caller and outlives
        // the regions, which its owner drops before the reservation.
        let region = unsafe {
            MmapRegionBuilder::new(length)
                .with_raw_mmap_pointer(reservation.at(part.offset))
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(flags)
                .build()
        }
        .map_err(|error| RamError::Map(error.to_string()))?;
        let region = GuestRegionMmap::new(region, GuestAddress(part.guest))
            .ok_or_else(|| RamError::Map("region wraps the address space".to_owned()))?;
        regions.push(region);
    }
    GuestMemoryMmap::from_regions(regions).map_err(|error| RamError::Map(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_outside_limits_is_refused() {
        for bytes in [0, 1 << 20, 31 << 20, (64 << 30) + (2 << 20), (64 << 20) + 4096] {
            assert!(matches!(RamSize::new(bytes), Err(RamError::Size(_))), "{bytes}");
        }
    }

    #[test]
    fn ram_beyond_the_hole_continues_at_4_gib() {
        let parts = RamSize::new(4 << 30).unwrap().parts();
        assert_eq!(parts.len(), 2);
        assert_eq!(parts[0], RamPart { guest: 0, offset: 0, bytes: LOW_RAM_END });
        assert_eq!(
            parts[1],
            RamPart { guest: HIGH_RAM_START, offset: LOW_RAM_END, bytes: 1 << 30 }
        );
    }
}
