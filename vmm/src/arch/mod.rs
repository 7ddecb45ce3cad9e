//! x86_64: how a kernel is entered, and what its CPU looks like.

pub mod backend;
pub mod boot;
pub mod cpuid;
mod entry;
mod mptable;

pub use backend::Backend;
