//! Counters of a block device.

use crate::counters;

counters! {
    /// What the guest asked of the disk and what came of it.
    BlockMetrics {
        /// Read requests.
        reads,
        /// Write requests.
        writes,
        /// Flush requests.
        flushes,
        /// Discarded ranges.
        discards,
        /// Zeroed ranges.
        write_zeroes,
        /// Bytes read.
        read_bytes,
        /// Bytes written.
        written_bytes,
        /// Transfers the page cache answered at once.
        cached_transfers,
        /// Transfers that went through the ring.
        ring_transfers,
        /// Rings made.
        rings,
        /// Blocks the delta holds.
        delta_blocks,
        /// Partial blocks completed from the base before a write.
        copied_blocks,
        /// Requests that failed.
        failed_requests,
        /// Requests of an unknown kind.
        unsupported_requests,
        /// Chains that are no request.
        malformed_requests,
        /// Failures because the host's disk was full.
        host_disk_full,
    }
}
