//! Ids, units and audited system calls. No policy.

pub mod guest;
pub mod skip;
pub mod spawn;
