//! Which pages of guest RAM are a process's own.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// A run of guest-physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Guest-physical start, a multiple of a page.
    pub start: u64,
    /// Length, a multiple of a page.
    pub bytes: u64,
}

/// Guest RAM that is this process's own: present or swapped, and neither a file's nor the
/// host's page of zeroes. In order, each run as long as can be.
///
/// # Errors
/// When the kernel cannot tell (`PAGEMAP_SCAN` came with Linux 6.7).
pub fn private_runs(memory: &GuestMemoryMmap) -> io::Result<Vec<Run>> {
    let pagemap = File::open("/proc/self/pagemap")?;
    let mut runs: Vec<Run> = Vec::new();
    for region in memory.iter() {
        let guest = region.start_addr();
        let address = memory.get_host_address(guest).map_err(io::Error::other)?.addr();
        let host = u64::try_from(address).expect("addresses have 64 bits");
        scan(&pagemap, host, region.len(), |from, to| {
            let start = guest.raw_value() + (from - host);
            match runs.last_mut() {
                Some(last) if last.start + last.bytes == start => last.bytes += to - from,
                _ => runs.push(Run { start, bytes: to - from }),
            }
        })?;
    }
    Ok(runs)
}

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;

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

fn scan(pagemap: &File, start: u64, bytes: u64, mut found: impl FnMut(u64, u64)) -> io::Result<()> {
    let mut regions = [PageRegion::default(); 256];
    let end = start + bytes;
    let mut at = start;
    while at < end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            flags: 0,
            start: at,
            end,
            walk_end: 0,
            vec: u64::try_from(regions.as_mut_ptr().addr()).expect("addresses have 64 bits"),
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_mask: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        };
        // SAFETY: the argument has the kernel's layout; `vec` points to `vec_len`
        // regions that live through the call.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for region in &regions[..count] {
            found(region.start, region.end);
        }
        if argument.walk_end <= at {
            break;
        }
        at = argument.walk_end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::ram::{BuildRam, RamSize, TemplateRam};

    #[test]
    fn private_runs_are_what_was_written() {
        let size = RamSize::new(32 << 20).unwrap();
        let build = BuildRam::new(size).unwrap();
        build.memory().write_obj(1u64, GuestAddress(0)).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory");
        build.save(&File::create(&path).unwrap()).unwrap();
        let ram = TemplateRam::load(&path, size).unwrap();
        assert_eq!(private_runs(ram.memory()).unwrap(), []);
        // Read: of the template, and of memory that nobody has written.
        ram.memory().read_obj::<u64>(GuestAddress(0)).unwrap();
        ram.memory().read_obj::<u64>(GuestAddress(20 << 20)).unwrap();
        assert_eq!(private_runs(ram.memory()).unwrap(), []);
        for page in [0x3000, 0x4000, 20 << 20] {
            ram.memory().write_obj(2u64, GuestAddress(page)).unwrap();
        }
        let runs = private_runs(ram.memory()).unwrap();
        let expected = [(0x3000, 0x2000), (20 << 20, 0x1000)];
        assert_eq!(runs, expected.map(|(start, bytes)| Run { start, bytes }));
    }
}
