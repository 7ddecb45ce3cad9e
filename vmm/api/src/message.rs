//! Requests, replies and what they carry.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A request with the version it was written for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope<V> {
    /// [`crate::PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// What is asked.
    pub verb: V,
}

/// What can be asked of a microVM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmVerb {
    /// Replies [`VmStatus`].
    Status,
    /// Stops the vCPUs at a safe point. Replies [`VmStatus`].
    Pause,
    /// Lets the vCPUs run again. Replies [`VmStatus`].
    Resume,
    /// Saves a template (`state`, `memory`) into an existing directory and ends
    /// the process. Replies [`VmStatus`] before it ends.
    Freeze {
        /// Where the files go.
        directory: PathBuf,
    },
    /// Keeps this moment: a frozen process is forked off, from which clones are born as
    /// from a template. The microVM runs on. Replies [`CheckpointReply`].
    Checkpoint(CheckpointRequest),
    /// Replies [`VmStats`].
    Stats,
    /// Ends the process at once. Replies [`VmStatus`] before it ends.
    Stop,
}

/// What can be asked of a template process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateVerb {
    /// Replies [`TemplateStatus`].
    Status,
    /// Gives birth to a clone. Replies [`SpawnReply`] from the clone.
    Spawn(SpawnRequest),
    /// Writes a frozen process's moment into an existing directory (`state`, `pages`), from
    /// which a clone of the template can be born later. Replies [`SaveReply`] when the
    /// files are durable.
    Save {
        /// Where the files go.
        directory: PathBuf,
    },
    /// Ends the template process; clones live on. Replies [`TemplateStatus`].
    Stop,
}

/// A clone to be born.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpawnRequest {
    /// Name for logs.
    pub id: String,
    /// Where `control.sock`, `vsock.sock`, `console.log` and `vmm.log` are made.
    /// Must exist.
    pub directory: PathBuf,
    /// For each writable disk, by id, the file that takes the clone's own blocks.
    /// Made on the first write.
    pub disks: BTreeMap<String, PathBuf>,
    /// Directory of a moment of a clone of the template, where [`TemplateVerb::Save`] wrote:
    /// what the clone goes on from, if not from the template's own moment.
    #[serde(default)]
    pub snapshot: Option<PathBuf>,
    /// For writable disks, by id, the files that a checkpoint named as their layers, or
    /// links to these. A process that has them open uses its own where none are named.
    #[serde(default)]
    pub layers: BTreeMap<String, Vec<PathBuf>>,
}

/// Files of a snapshot that were written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveReply {
    /// Bytes of guest RAM in them.
    pub page_bytes: u64,
    /// Microseconds that it took.
    pub save_us: u64,
}

/// A checkpoint of a running clone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointRequest {
    /// Where the frozen process makes `control.sock` and `vmm.log`. Must exist.
    pub directory: PathBuf,
    /// For each writable disk, by id, the file that takes the blocks which the running
    /// microVM writes from now on. Made on the first write.
    pub disks: BTreeMap<String, PathBuf>,
}

/// A checkpoint that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointReply {
    /// The frozen process; it answers [`TemplateVerb`]s.
    pub pid: u32,
    /// Files that the writable disks consist of at this moment, above the template's,
    /// oldest first. Nobody writes them any more.
    pub layers: BTreeMap<String, Vec<PathBuf>>,
    /// Where the time went.
    pub timings: CheckpointTimings,
}

/// Microseconds on the monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CheckpointTimings {
    /// vCPUs asked to stop → vCPUs run again: what the guest misses.
    pub pause_us: u64,
    /// Of these, stopping the vCPUs.
    pub stop_us: u64,
    /// Of these, bringing devices to rest and saving all state but RAM.
    pub save_us: u64,
    /// Of these, `fork(2)`: grows with the private pages.
    pub fork_us: u64,
}

/// A clone that runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnReply {
    /// Process of the clone; a child of the template process.
    pub pid: u32,
    /// Where the time went.
    pub timings: SpawnTimings,
}

/// Microseconds on the monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SpawnTimings {
    /// Request read → first instruction of the child.
    pub fork_us: u64,
    /// KVM VM, memory slots, vCPUs and their state.
    pub vm_us: u64,
    /// Devices and sockets.
    pub devices_us: u64,
    /// Request read → vCPU threads enter the guest.
    pub total_us: u64,
}

/// Life of a microVM process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// vCPUs run.
    Running,
    /// vCPUs are stopped at a safe point.
    Paused,
    /// The process is about to end.
    Stopping,
}

/// Reply to most verbs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmStatus {
    /// As given at birth.
    pub id: String,
    /// Process id.
    pub pid: u32,
    /// Life of the process.
    pub state: VmState,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Guest RAM.
    pub memory_bytes: u64,
}

/// Reply of a template process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateStatus {
    /// Process id.
    pub pid: u32,
    /// Clones born since the process started.
    pub spawned: u64,
    /// Number of vCPUs of a clone.
    pub vcpus: u8,
    /// Guest RAM of a clone.
    pub memory_bytes: u64,
    /// Bytes of the RAM image that hold data.
    pub image_bytes: u64,
}

/// Counters of a microVM since its birth.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct VmStats {
    /// Exits to user space.
    pub exits: ExitStats,
    /// Counters of KVM's own statistics interface, summed over vCPUs. Absent where the
    /// kernel has no such interface.
    pub kvm: Option<KvmStats>,
    /// Guest pages that are the clone's own, in bytes.
    pub private_bytes: u64,
    /// Per device, by name.
    pub devices: BTreeMap<String, DeviceStats>,
}

/// Exits to user space, by cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ExitStats {
    /// Serial console.
    pub serial: u64,
    /// Page zeroing and copying by port.
    pub page_operations: u64,
    /// Other ports.
    pub port: u64,
    /// Device registers.
    pub mmio: u64,
    /// Instructions the KVM back end handed back and the VMM completed.
    pub completed_instructions: u64,
    /// Kicks from the VMM's own threads.
    pub interrupted: u64,
    /// Anything else.
    pub other: u64,
}

/// From `KVM_GET_STATS_FD`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct KvmStats {
    /// All exits.
    pub exits: u64,
    /// Instructions that KVM emulated.
    pub emulated_instructions: u64,
    /// Times the guest halted.
    pub halt_exits: u64,
    /// Interrupts injected.
    pub irq_injections: u64,
}

/// Counters of one device, by name.
pub type DeviceStats = BTreeMap<String, u64>;

/// Reply on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply<T> {
    /// Done.
    Ok(T),
    /// Not done.
    Error(ErrorReply),
}

/// What failed, on what, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReply {
    /// The step that failed, such as `create VM`.
    pub step: String,
    /// The whole chain of causes, as one line.
    pub message: String,
    /// What the reader can do; may be empty.
    pub advice: String,
}
