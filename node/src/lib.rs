//! The node daemon: owns the sandboxes of one machine and serves their API.
//!
//! ```text
//! server ─▶ proxy ─────────────▶ agent::Channels ─▶ guest
//!    │                              ▲
//!    └────▶ api ─▶ sandboxes ───────┘
//!               │     │ └─▶ kinds ─▶ kinds/microvm ─▶ warren-vmm
//!               │     └───▶ store
//!               └▶ templates, keys, idempotency
//! ```
//!
//! A create can be read in this order: `server`, `api/sandboxes`, `admission`,
//! `sandboxes/create`, `kinds/microvm`, `agent/calls`, `store`.

#![forbid(unsafe_code)]

mod admission;
mod agent;
mod api;
mod cgroup;
pub mod config;
mod daemon;
mod error;
pub mod flags;
mod idempotency;
mod ids;
mod keys;
mod keys_command;
mod kinds;
mod lifecycle;
mod lock;
mod logs;
mod metrics;
mod process;
mod proxy;
mod random;
mod sandboxes;
mod server;
mod store;
mod templates;
#[cfg(test)]
mod tests;

pub use daemon::{RunError, run};
pub use keys_command::{KeysError, manage_keys};
