//! Counters of the balloon.

use warren_virtio::counters;

counters! {
    /// What the guest gave and took.
    BalloonMetrics {
        /// Pages given by inflating.
        inflated_pages,
        /// Pages taken back.
        deflated_pages,
        /// Bytes reported free.
        reported_bytes,
        /// Ranges given back to the host, from inflating and reporting.
        released_ranges,
        /// Ranges the host could not take back.
        release_failures,
        /// Statistics received.
        statistics_updates,
        /// Pages or ranges that are not the guest's.
        foreign_pages,
        /// Chains that are no request.
        malformed_requests,
    }
}
