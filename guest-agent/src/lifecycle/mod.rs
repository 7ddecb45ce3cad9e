//! What a template does between its boot and its freeze.

mod hot_files;
mod own_request;
mod quiesce;
mod warmup;

pub use quiesce::quiesce;
pub use warmup::warm_up;
