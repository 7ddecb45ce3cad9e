//! Counters of the entropy device.

use crate::counters;

counters! {
    /// What the guest asked for.
    RngMetrics {
        /// Requests served.
        requests,
        /// Bytes given.
        bytes,
        /// Times requests had to wait for the rate.
        throttled,
        /// Chains that are no request.
        malformed_requests,
        /// Times the host had no entropy or no timer to give.
        host_failures,
    }
}
