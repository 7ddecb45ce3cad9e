//! Giving a guest's memory back to the host.
//!
//! `device` is the virtio balloon: inflate and deflate, statistics, and free page
//! reporting. How a page is given back is the VMM's to know: it hands in a
//! [`PageReclaimer`].

#![forbid(unsafe_code)]

mod device;

pub use device::{
    BalloonDevice, BalloonError, BalloonMetrics, BalloonPages, BalloonStatistics, PageReclaimer,
};
