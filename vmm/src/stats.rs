//! Counters that come from the host's kernel: KVM's per-vCPU statistics, and the pages
//! that are a microVM's own.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

use kvm_ioctls::VcpuFd;
use vm_memory::GuestMemoryMmap;
use warren_vmm_api::KvmStats;

use crate::ram::private_runs;

/// `KVM_GET_STATS_FD` (Linux 5.14): `_IO(0xAE, 0xce)`.
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;
/// Header of the statistics file: flags, name size, count, offsets of id,
/// descriptors and data.
const HEADER_BYTES: usize = 24;
/// Descriptor before its name: flags, exponent, size, offset, bucket size.
const DESCRIPTOR_BYTES: usize = 16;
/// Most descriptors that are read; kernels have about 60 per vCPU.
const DESCRIPTORS_MAX: u32 = 512;
/// Longest name that is read.
const NAME_BYTES_MAX: u32 = 256;

/// KVM's statistics of the vCPUs.
#[derive(Debug)]
pub struct KvmCounters {
    vcpus: Vec<libc::c_int>,
    files: Option<Vec<File>>,
}

impl KvmCounters {
    /// For these vCPUs, whose descriptors stay open for the life of the process.
    #[must_use]
    pub fn of(vcpus: &[VcpuFd]) -> Self {
        Self { vcpus: vcpus.iter().map(AsRawFd::as_raw_fd).collect(), files: None }
    }

    /// Whether [`KvmCounters::open`] was called.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.files.is_some()
    }

    /// Opens the statistics; the vCPUs must be paused, since KVM locks a vCPU for it as
    /// it does for running it.
    pub fn open(&mut self) {
        let mut files = Vec::with_capacity(self.vcpus.len());
        for vcpu in &self.vcpus {
            // SAFETY: the request takes no argument and gives a new descriptor or -1.
            let fd = unsafe { libc::ioctl(*vcpu, KVM_GET_STATS_FD) };
            if fd >= 0 {
                // SAFETY: the descriptor was just made for us and nobody else has it.
                files.push(unsafe { File::from_raw_fd(fd) });
            }
        }
        self.files = Some(files);
    }

    /// Sums over the vCPUs; `None` where the kernel has no such statistics.
    #[must_use]
    pub fn read(&self) -> Option<KvmStats> {
        let files = self.files.as_ref().filter(|files| files.len() == self.vcpus.len())?;
        let mut total = KvmStats::default();
        for file in files {
            add(file, &mut total).ok()?;
        }
        Some(total)
    }
}

fn add(file: &File, total: &mut KvmStats) -> std::io::Result<()> {
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0)?;
    let name_bytes = word(&header, 4).min(NAME_BYTES_MAX);
    let count = word(&header, 8).min(DESCRIPTORS_MAX);
    let (descriptors_at, data_at) = (word(&header, 16), word(&header, 20));
    let stride = DESCRIPTOR_BYTES + length(name_bytes);
    let mut descriptors = vec![0; stride * length(count)];
    file.read_exact_at(&mut descriptors, descriptors_at.into())?;
    for descriptor in descriptors.chunks_exact(stride) {
        let name = &descriptor[DESCRIPTOR_BYTES..];
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let counter = match name {
            b"exits" => &mut total.exits,
            b"insn_emulation" => &mut total.emulated_instructions,
            b"halt_exits" => &mut total.halt_exits,
            b"irq_injections" => &mut total.irq_injections,
            _ => continue,
        };
        let mut value = [0; 8];
        file.read_exact_at(&mut value, u64::from(data_at) + u64::from(word(descriptor, 8)))?;
        *counter += u64::from_le_bytes(value);
    }
    Ok(())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn length(value: u32) -> usize {
    usize::try_from(value).expect("u32 fits a length")
}

/// Bytes of guest RAM that are this process's own; 0 where the kernel cannot tell.
#[must_use]
pub fn private_bytes(memory: &GuestMemoryMmap) -> u64 {
    private_runs(memory).unwrap_or_default().iter().map(|run| run.bytes).sum()
}
