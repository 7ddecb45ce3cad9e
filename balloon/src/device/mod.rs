//! virtio-balloon (virtio 1.2, section 5.5).
//!
//! Queues, in the order of the features that were agreed: inflate, deflate,
//! statistics, reporting. PAGE_POISON is never offered: a page that was given back
//! may come back with any content, the template's for one.

mod metrics;
mod model;
mod pages;
mod persist;
mod statistics;
#[cfg(test)]
mod tests;

use thiserror::Error;
use warren_virtio::persist::StateError;

pub use metrics::BalloonMetrics;
pub use model::BalloonDevice;
pub use pages::{BalloonPages, PageReclaimer};
pub use statistics::BalloonStatistics;

/// Descriptors of each queue. Linux has one chain in flight on each.
pub const QUEUE_SIZE: u16 = 32;

/// Chains of one queue served in one call: each may have the host give back 64 MiB.
pub const CHAINS_MAX: usize = 4;

/// Page numbers of one inflate or deflate chain. Linux sends 256 at a time.
pub const CHAIN_PAGES_MAX: u64 = 1024;

/// Page numbers sorted and joined at once.
pub const BATCH_PAGES: usize = 256;

/// Bytes of one statistics buffer: six times what Linux sends.
pub const STATISTICS_BYTES_MAX: u64 = 1000;

/// Why a balloon could not be made.
#[derive(Debug, Error)]
pub enum BalloonError {
    /// The saved state was refused.
    #[error(transparent)]
    State(#[from] StateError),
}
