//! Counters of the transport.

use crate::counters;

counters! {
    /// What the driver and the device had the transport do.
    TransportMetrics {
        /// Queue notifications, by MMIO exit or ioeventfd.
        notifications,
        /// Times the interrupt was raised.
        interrupts,
        /// Times raising it failed.
        interrupt_failures,
        /// Events of the device's own descriptors.
        events,
        /// Times a device stopped at its work bound and was called again.
        revisits,
        /// Register accesses that were ignored as illegal.
        refused_accesses,
        /// Resets by the driver.
        resets,
        /// Times the device was marked as needing a reset.
        failures,
    }
}
