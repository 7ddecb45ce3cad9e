//! Counters of a network device.

use crate::counters;

counters! {
    /// What went between the guest and the TAP.
    NetMetrics {
        /// Frames to the guest.
        received_frames,
        /// Bytes to the guest, headers included.
        received_bytes,
        /// Frames from the guest.
        sent_frames,
        /// Bytes from the guest, headers included.
        sent_bytes,
        /// Times frames to the guest had to wait for its buffers.
        buffer_stalls,
        /// Times frames from the guest had to wait for the TAP.
        tap_stalls,
        /// Frames of the guest the TAP refused.
        refused_frames,
        /// Frames to the guest that could not be read.
        lost_frames,
        /// Chains that are no frame.
        malformed_frames,
        /// Times the TAP could not be used at all.
        tap_failures,
    }
}
