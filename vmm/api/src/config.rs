//! What `warren-vmm boot` is told. The VMM checks it; nobody validates it again.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A cold microVM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootConfig {
    /// Name for logs.
    pub id: String,
    /// Where `control.sock`, `vsock.sock` and `console.log` are made. Must exist.
    pub directory: PathBuf,
    /// Uncompressed ELF `vmlinux`.
    pub kernel: PathBuf,
    /// Appended to the command line that the VMM composes.
    #[serde(default)]
    pub command_line: String,
    /// How the kernel is entered.
    #[serde(default)]
    pub boot_protocol: BootProtocol,
    /// 1 to 32.
    pub vcpus: u8,
    /// 32 MiB to 64 GiB, a multiple of 2 MiB.
    pub memory_bytes: u64,
    /// What the guest's CPUID shows.
    #[serde(default)]
    pub cpu_profile: CpuProfile,
    /// In the guest `/dev/vda`, `/dev/vdb`, … in this order.
    #[serde(default)]
    pub disks: Vec<DiskConfig>,
    /// A virtio-net device over a TAP interface.
    #[serde(default)]
    pub net: Option<NetConfig>,
}

/// How the kernel is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BootProtocol {
    /// The 64-bit Linux boot protocol (Documentation/arch/x86/boot.rst).
    #[default]
    Linux64,
    /// PVH (xen/include/public/arch-x86/hvm/start_info.h).
    Pvh,
}

/// What the guest's CPUID shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuProfile {
    /// All that KVM offers, less what cannot be saved and restored.
    #[default]
    Host,
    /// At most x86-64-v2 (SSE4.2, POPCNT).
    V2,
    /// At most x86-64-v3 (AVX2, BMI2, FMA).
    V3,
}

/// A virtio-blk device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// 1–20 bytes of `[a-z0-9-]`; the guest reads it as the device's serial. In a
    /// template's directory the backing file has this name.
    pub id: String,
    /// Raw image.
    pub path: PathBuf,
    /// Read-only or writable.
    pub mode: DiskMode,
}

/// Whether a disk may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskMode {
    /// Shared by all; writes fail.
    ReadOnly,
    /// Written in place while a template is built, copied on write in clones.
    Writable,
}

/// A virtio-net device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// Name of an existing TAP interface.
    pub tap: String,
    /// Unicast MAC address, six octets.
    pub mac: [u8; 6],
}
