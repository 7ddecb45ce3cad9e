//! Counters that come from the host's kernel: KVM's per-vCPU statistics, and the pages
//! that are a microVM's own.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

use kvm_ioctls::VcpuFd;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use warren_vmm_api::KvmStats;

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

/// Bytes of guest RAM that are this process's own: present or swapped, and not a
/// file's (`PAGEMAP_SCAN`, Linux 6.7). 0 where the kernel cannot tell.
#[must_use]
pub fn private_bytes(memory: &GuestMemoryMmap) -> u64 {
    let Ok(pagemap) = File::open("/proc/self/pagemap") else { return 0 };
    memory
        .iter()
        .filter_map(|region| {
            let start = memory.get_host_address(region.start_addr()).ok()?.addr();
            scan(&pagemap, u64::try_from(start).ok()?, region.len())
        })
        .sum()
}

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;

fn scan(pagemap: &File, start: u64, bytes: u64) -> Option<u64> {
    let mut regions = [PageRegion::default(); 256];
    let end = start + bytes;
    let mut at = start;
    let mut found = 0;
    while at < end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            flags: 0,
            start: at,
            end,
            walk_end: 0,
            vec: u64::try_from(regions.as_mut_ptr().addr()).ok()?,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: PAGE_IS_FILE,
            category_mask: PAGE_IS_FILE,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        };
        // SAFETY: the argument has the kernel's layout; `vec` points to `vec_len`
        // regions that live through the call.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        let count = usize::try_from(count).ok()?;
        found += regions[..count].iter().map(|region| region.end - region.start).sum::<u64>();
        if argument.walk_end <= at {
            break;
        }
        at = argument.walk_end;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::ram::{BuildRam, RamSize, TemplateRam};

    #[test]
    fn private_bytes_counts_written_pages_only() {
        let size = RamSize::new(32 << 20).unwrap();
        let build = BuildRam::new(size).unwrap();
        build.memory().write_obj(1u64, GuestAddress(0)).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory");
        build.save(&File::create(&path).unwrap()).unwrap();
        let ram = TemplateRam::load(&path, size).unwrap();
        assert_eq!(private_bytes(ram.memory()), 0);
        ram.memory().read_obj::<u64>(GuestAddress(0)).unwrap();
        ram.memory().write_obj(2u64, GuestAddress(0x3000)).unwrap();
        assert_eq!(private_bytes(ram.memory()), 4096);
    }
}
