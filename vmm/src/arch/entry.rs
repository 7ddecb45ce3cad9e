//! Registers and tables with which a vCPU enters a kernel.

use kvm_bindings::{kvm_lapic_state, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::layout::{BOOT_STACK, GDT, PAGE_DIRECTORY, PDPT, PML4};

/// Why a vCPU could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum EntryError {
    /// A table does not fit into guest memory.
    #[error("write boot tables to guest memory")]
    Memory(#[from] vm_memory::GuestMemoryError),
    /// KVM refused a register.
    #[error("{operation} of the boot vCPU")]
    Register {
        /// What was tried.
        operation: &'static str,
        /// Cause.
        #[source]
        source: kvm_ioctls::Error,
    },
}

fn failed(operation: &'static str) -> impl Fn(kvm_ioctls::Error) -> EntryError {
    move |source| EntryError::Register { operation, source }
}

const CODE_64: u64 = 0x00af_9b00_0000_ffff;
const CODE_32: u64 = 0x00cf_9b00_0000_ffff;
const DATA: u64 = 0x00cf_9300_0000_ffff;
const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
/// PE, MP, ET, NE, WP, AM, PG.
const CR0_LONG_MODE: u64 = 0x8005_0033;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME_LMA: u64 = 0x500;

const TABLE_ENTRY: u64 = 3;
const LARGE_PAGE_ENTRY: u64 = 0x83;

/// Enters 64-bit mode at `entry` with the first GiB mapped one to one (64-bit Linux
/// boot protocol: RSI points to the boot parameters, interrupts off).
pub(super) fn long_mode(
    vcpu: &VcpuFd,
    memory: &GuestMemoryMmap,
    entry: u64,
    rsi: u64,
) -> Result<(), EntryError> {
    write_gdt(memory, CODE_64)?;
    memory.write_obj(PDPT | TABLE_ENTRY, GuestAddress(PML4))?;
    memory.write_obj(PAGE_DIRECTORY | TABLE_ENTRY, GuestAddress(PDPT))?;
    for index in 0..512u64 {
        let page = (index << 21) | LARGE_PAGE_ENTRY;
        memory.write_obj(page, GuestAddress(PAGE_DIRECTORY + index * 8))?;
    }
    let mut sregs = vcpu.get_sregs().map_err(failed("read system registers"))?;
    segments(&mut sregs, code_segment(1, 0));
    sregs.cr0 = CR0_LONG_MODE;
    sregs.cr3 = PML4;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME_LMA;
    vcpu.set_sregs(&sregs).map_err(failed("write system registers"))?;
    let regs = kvm_regs { rip: entry, rsi, rsp: BOOT_STACK, rflags: 2, ..Default::default() };
    vcpu.set_regs(&regs).map_err(failed("write registers"))
}

/// Enters 32-bit protected mode without paging at `entry` (PVH: EBX points to the start
/// info).
pub(super) fn protected_mode(
    vcpu: &VcpuFd,
    memory: &GuestMemoryMmap,
    entry: u64,
    start_info: u64,
) -> Result<(), EntryError> {
    write_gdt(memory, CODE_32)?;
    let mut sregs = vcpu.get_sregs().map_err(failed("read system registers"))?;
    segments(&mut sregs, code_segment(0, 1));
    sregs.cr0 = (sregs.cr0 & !CR0_PG) | CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.efer = 0;
    vcpu.set_sregs(&sregs).map_err(failed("write system registers"))?;
    let regs = kvm_regs { rip: entry, rbx: start_info, rflags: 2, ..Default::default() };
    vcpu.set_regs(&regs).map_err(failed("write registers"))
}

/// Wires LINT0 to the interrupt controller and LINT1 to NMI, as firmware does.
pub(super) fn wire_local_apic(vcpu: &VcpuFd) -> Result<(), EntryError> {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const MODE_EXTINT: u32 = 0x700;
    const MODE_NMI: u32 = 0x400;
    let mut lapic = vcpu.get_lapic().map_err(failed("read local APIC"))?;
    set_lapic_register(&mut lapic, LVT_LINT0, MODE_EXTINT);
    set_lapic_register(&mut lapic, LVT_LINT1, MODE_NMI);
    vcpu.set_lapic(&lapic).map_err(failed("write local APIC"))
}

fn set_lapic_register(lapic: &mut kvm_lapic_state, at: usize, value: u32) {
    for (place, byte) in lapic.regs[at..at + 4].iter_mut().zip(value.to_le_bytes()) {
        *place = i8::from_le_bytes([byte]);
    }
}

fn write_gdt(memory: &GuestMemoryMmap, code: u64) -> Result<(), EntryError> {
    for (index, descriptor) in (0u64..).zip([0, 0, code, DATA]) {
        memory.write_obj(descriptor, GuestAddress(GDT + index * 8))?;
    }
    Ok(())
}

fn segments(sregs: &mut kvm_sregs, code: kvm_segment) {
    let data = kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: DATA_SELECTOR,
        type_: 3,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = code;
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.gdt.base = GDT;
    sregs.gdt.limit = 31;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
}

fn code_segment(l: u8, db: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: CODE_SELECTOR,
        type_: 11,
        present: 1,
        l,
        db,
        s: 1,
        g: 1,
        ..Default::default()
    }
}
