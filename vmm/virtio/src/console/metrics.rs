//! Counters of the console.

use crate::counters;

counters! {
    /// What went through the console.
    ConsoleMetrics {
        /// Bytes the guest wrote.
        output_bytes,
        /// Bytes of them the sink did not take.
        dropped_output_bytes,
        /// Bytes the guest was given.
        input_bytes,
        /// Chains that are no console buffer.
        malformed_requests,
    }
}
