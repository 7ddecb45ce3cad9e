//! Harness for tests with real microVMs.
//!
//! A test takes a [`TestNode`]: a real `warrend` in directories of its own, with
//! a template that all tests share. The node and all that it started are gone
//! when the test drops it. What a machine lacks is named by [`missing`], and the
//! test is then counted as skipped.
#![forbid(unsafe_code)]

mod artifacts;
mod census;
mod connect;
mod http;
mod node;
mod requirements;
mod sandbox;
mod shared;

pub use artifacts::Artifacts;
pub use census::Census;
pub use http::{Client, Reply};
pub use node::{NodeOptions, TestNode};
pub use requirements::{Need, missing};
pub use sandbox::{Finished, Sandbox};
