//! Access to guest memory by the kernel's linear addresses, with the page faults a CPU
//! would raise (Intel SDM volume 3, section 4.5).

use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::kvm_sregs;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemory};

/// What is done to the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// A fault for the guest: address for CR2 and error code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PageFault {
    pub(super) address: u64,
    pub(super) error: u32,
}

const CR0_PG: u64 = 1 << 31;
const CR0_WP: u64 = 1 << 16;
const CR4_LA57: u64 = 1 << 12;
const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const PAGE: u64 = 4096;
const FAULT_PROTECTION: u32 = 1;
const FAULT_WRITE: u32 = 2;

/// Most pages that one access spans: the longest area, under 4 KiB, touches two.
const PAGES_MAX: usize = 2;

/// Pages of an access, translated before the first byte moves.
struct Span {
    pages: [GuestAddress; PAGES_MAX],
    lengths: [usize; PAGES_MAX],
}

/// Reads `bytes.len()` bytes (at most 4 KiB). With [`Access::Write`] the pages must be
/// writable too, since the caller is going to write them back.
pub(super) fn read(
    memory: &GuestMemoryMmap,
    sregs: &kvm_sregs,
    address: u64,
    bytes: &mut [u8],
    access: Access,
) -> Result<(), PageFault> {
    let span = translate(memory, sregs, address, bytes.len(), access)?;
    let (first, second) = bytes.split_at_mut(span.lengths[0]);
    let fault = |_| PageFault { address, error: 0 };
    memory.read_slice(first, span.pages[0]).map_err(fault)?;
    if !second.is_empty() {
        memory.read_slice(second, span.pages[1]).map_err(fault)?;
    }
    Ok(())
}

/// Writes `bytes` (at most 4 KiB).
pub(super) fn write(
    memory: &GuestMemoryMmap,
    sregs: &kvm_sregs,
    address: u64,
    bytes: &[u8],
) -> Result<(), PageFault> {
    let span = translate(memory, sregs, address, bytes.len(), Access::Write)?;
    let (first, second) = bytes.split_at(span.lengths[0]);
    let fault = |_| PageFault { address, error: FAULT_WRITE };
    memory.write_slice(first, span.pages[0]).map_err(fault)?;
    if !second.is_empty() {
        memory.write_slice(second, span.pages[1]).map_err(fault)?;
    }
    Ok(())
}

fn translate(
    memory: &GuestMemoryMmap,
    sregs: &kvm_sregs,
    address: u64,
    length: usize,
    access: Access,
) -> Result<Span, PageFault> {
    let in_page = usize::try_from(PAGE - address % PAGE).expect("a page is a length");
    let first = length.min(in_page);
    assert!(length - first <= in_page.max(PAGE as usize), "access spans three pages");
    let mut span = Span {
        pages: [page(memory, sregs, address, access)?; 2],
        lengths: [first, length - first],
    };
    if span.lengths[1] > 0 {
        let next = (address | (PAGE - 1)).wrapping_add(1);
        span.pages[1] = page(memory, sregs, next, access)?;
    }
    Ok(span)
}

/// Guest-physical address of a linear address.
fn page(
    memory: &GuestMemoryMmap,
    sregs: &kvm_sregs,
    address: u64,
    access: Access,
) -> Result<GuestAddress, PageFault> {
    if sregs.cr0 & CR0_PG == 0 {
        return Ok(GuestAddress(address));
    }
    let write = access == Access::Write;
    let write_bit = if write { FAULT_WRITE } else { 0 };
    let missing = PageFault { address, error: write_bit };
    let mut table = sregs.cr3 & ADDRESS;
    let levels = if sregs.cr4 & CR4_LA57 != 0 { 5u32 } else { 4 };
    for level in (0..levels).rev() {
        let shift = 12 + 9 * level;
        let at = GuestAddress(table + ((address >> shift) & 511) * 8);
        // A table outside RAM reads as not present.
        let slice = memory.get_slice(at, 8).map_err(|_| missing)?;
        let entry = slice.get_atomic_ref::<AtomicU64>(0).map_err(|_| missing)?;
        let value = entry.load(Ordering::Relaxed);
        if value & PRESENT == 0 {
            return Err(missing);
        }
        if write && value & WRITABLE == 0 && sregs.cr0 & CR0_WP != 0 {
            return Err(PageFault { address, error: FAULT_PROTECTION | FAULT_WRITE });
        }
        let leaf = level == 0 || (level <= 2 && value & LARGE != 0);
        let set = ACCESSED | if leaf && write { DIRTY } else { 0 };
        if value & set != set {
            entry.fetch_or(set, Ordering::SeqCst);
        }
        if leaf {
            let offset_mask = (1u64 << shift) - 1;
            return Ok(GuestAddress((value & ADDRESS & !offset_mask) | (address & offset_mask)));
        }
        table = value & ADDRESS;
    }
    Err(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RW: u64 = PRESENT | WRITABLE;

    /// 1 MiB of RAM with one 4-level mapping: 0x40_0000 → 0x8000 (writable),
    /// 0x40_1000 → 0x9000 (read-only).
    fn guest() -> (GuestMemoryMmap, kvm_sregs) {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        memory.write_obj(0x2000 | RW, GuestAddress(0x1000)).unwrap();
        memory.write_obj(0x3000 | RW, GuestAddress(0x2000)).unwrap();
        memory.write_obj(0x4000 | RW, GuestAddress(0x3000 + 2 * 8)).unwrap();
        memory.write_obj(0x8000 | RW, GuestAddress(0x4000)).unwrap();
        memory.write_obj(0x9000 | PRESENT, GuestAddress(0x4008)).unwrap();
        let sregs = kvm_sregs { cr0: CR0_PG | CR0_WP, cr3: 0x1000, ..Default::default() };
        (memory, sregs)
    }

    #[test]
    fn bytes_across_pages_are_read_and_marked_accessed() {
        let (memory, sregs) = guest();
        memory.write_slice(&[1; 64], GuestAddress(0x8fc0)).unwrap();
        memory.write_slice(&[2; 64], GuestAddress(0x9000)).unwrap();
        let mut bytes = [0; 128];
        read(&memory, &sregs, 0x40_0fc0, &mut bytes, Access::Read).unwrap();
        assert_eq!((bytes[63], bytes[64]), (1, 2));
        let entry: u64 = memory.read_obj(GuestAddress(0x4000)).unwrap();
        assert_eq!(entry & (ACCESSED | DIRTY), ACCESSED);
    }

    #[test]
    fn write_that_faults_on_its_second_page_changes_nothing() {
        let (memory, sregs) = guest();
        let fault = write(&memory, &sregs, 0x40_0ff0, &[7; 32]).unwrap_err();
        let error = FAULT_PROTECTION | FAULT_WRITE;
        assert_eq!(fault, PageFault { address: 0x40_1000, error });
        assert_eq!(memory.read_obj::<u64>(GuestAddress(0x8ff0)).unwrap(), 0);
    }

    #[test]
    fn unmapped_address_is_a_fault_without_protection_bit() {
        let (memory, sregs) = guest();
        let fault = read(&memory, &sregs, 0x80_0000, &mut [0; 4], Access::Read).unwrap_err();
        assert_eq!(fault, PageFault { address: 0x80_0000, error: 0 });
    }

    #[test]
    fn tables_outside_ram_are_not_present() {
        let (memory, mut sregs) = guest();
        sregs.cr3 = 0xffff_f000;
        assert!(read(&memory, &sregs, 0x40_0000, &mut [0; 4], Access::Read).is_err());
    }
}
