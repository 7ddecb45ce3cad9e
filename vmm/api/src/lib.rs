//! Messages of the VMM's control sockets, and a blocking client for them.
//!
//! All that another process links of the VMM. A control socket is a unix stream
//! socket; a request and its reply are one line of JSON each, at most
//! [`LINE_BYTES_MAX`] long. A connection to a microVM may carry any number of
//! requests, one after the other. A connection to a template carries one: after
//! `spawn` it belongs to the clone, which answers on it and closes it.
//!
//! ```text
//! > {"version":1,"verb":{"spawn":{"id":"i4x…","directory":"/run/…","disks":{"disk":"/var/…"}}}}
//! < {"ok":{"pid":4711,"timings":{"fork_us":320,"vm_us":290,"devices_us":40,"total_us":660}}}
//! ```

mod client;
mod config;
mod message;

pub use client::{ClientError, TemplateClient, VmClient};
pub use config::{BootConfig, BootProtocol, CpuProfile, DiskConfig, DiskMode, NetConfig};
pub use message::{
    CheckpointReply, CheckpointRequest, CheckpointTimings, DeviceStats, Envelope, ErrorReply,
    ExitStats, KvmStats, Reply, SaveReply, SpawnReply, SpawnRequest, SpawnTimings, TemplateStatus,
    TemplateVerb, VmState, VmStats, VmStatus, VmVerb,
};

/// Version of the messages in this crate. A peer of another version answers with
/// an error that names its own.
pub const PROTOCOL_VERSION: u32 = 1;

/// Longest line either side accepts, in bytes. Replies are far smaller; the bound
/// keeps a broken peer from filling memory.
pub const LINE_BYTES_MAX: usize = 1 << 20;
