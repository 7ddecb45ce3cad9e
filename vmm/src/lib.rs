//! The virtual machine monitor: one process is one microVM.
//!
//! Two ways lead to a running microVM. `boot` starts a kernel in a cold one, from which a
//! template is saved. `template` loads such a template and gives birth to clones by
//! `fork(2)`. `docs/architecture.md` shows how they meet the node.
//!
//! ```text
//! machine   puts the parts together             arch      entry, CPUID, back ends
//! microvm   the main thread: events, control    vcpu      threads that run the guest
//! template  load, fork, birth                   complete  instructions handed back
//! freeze, checkpoint, state  what is saved      ram, vm, devices, reclaim, stats
//! ```

pub mod arch;
mod checkpoint;
mod command_line;
mod complete;
mod control;
mod devices;
mod error;
mod events;
mod freeze;
mod layout;
pub mod log;
pub mod machine;
mod microvm;
pub mod process;
pub mod ram;
mod reclaim;
mod state;
mod stats;
mod template;
mod vcpu;
mod vm;

pub use error::{Step, VmmError};
pub use template::Template;
