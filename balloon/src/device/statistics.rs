//! What the guest tells of its memory.

use serde::{Deserialize, Serialize};

/// Bytes of one entry: a tag and a value, packed.
pub const ENTRY_BYTES: usize = 10;

/// The guest's own numbers. What it did not tell is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BalloonStatistics {
    /// Bytes swapped in since boot.
    pub swapped_in_bytes: Option<u64>,
    /// Bytes swapped out since boot.
    pub swapped_out_bytes: Option<u64>,
    /// Major page faults since boot.
    pub major_faults: Option<u64>,
    /// Minor page faults since boot.
    pub minor_faults: Option<u64>,
    /// Bytes not used at all.
    pub free_bytes: Option<u64>,
    /// Bytes there are.
    pub total_bytes: Option<u64>,
    /// Bytes that could be had without swapping.
    pub available_bytes: Option<u64>,
    /// Bytes of page cache that could be had quickly.
    pub cached_bytes: Option<u64>,
    /// Huge pages allocated since boot.
    pub huge_pages_allocated: Option<u64>,
    /// Huge pages that could not be allocated.
    pub huge_pages_failed: Option<u64>,
    /// Processes killed for want of memory.
    pub oom_kills: Option<u64>,
    /// Allocations that had to wait for reclaim.
    pub allocation_stalls: Option<u64>,
    /// Pages looked at by reclaim in the background.
    pub background_scans: Option<u64>,
    /// Pages looked at by reclaim in an allocation.
    pub direct_scans: Option<u64>,
    /// Pages reclaimed in the background.
    pub background_reclaims: Option<u64>,
    /// Pages reclaimed in an allocation.
    pub direct_reclaims: Option<u64>,
}

impl BalloonStatistics {
    /// Takes one entry; unknown tags are skipped, as newer guests have some.
    pub fn take(&mut self, entry: [u8; ENTRY_BYTES]) {
        let [t0, t1, v0, v1, v2, v3, v4, v5, v6, v7] = entry;
        let value = u64::from_le_bytes([v0, v1, v2, v3, v4, v5, v6, v7]);
        let field = match u16::from_le_bytes([t0, t1]) {
            0 => &mut self.swapped_in_bytes,
            1 => &mut self.swapped_out_bytes,
            2 => &mut self.major_faults,
            3 => &mut self.minor_faults,
            4 => &mut self.free_bytes,
            5 => &mut self.total_bytes,
            6 => &mut self.available_bytes,
            7 => &mut self.cached_bytes,
            8 => &mut self.huge_pages_allocated,
            9 => &mut self.huge_pages_failed,
            10 => &mut self.oom_kills,
            11 => &mut self.allocation_stalls,
            12 => &mut self.background_scans,
            13 => &mut self.direct_scans,
            14 => &mut self.background_reclaims,
            15 => &mut self.direct_reclaims,
            _ => return,
        };
        *field = Some(value);
    }
}
