//! Where things are in guest-physical memory.
//!
//! ```text
//! 0            low RAM: GDT, boot parameters, page tables, command line, MP table
//! 0x10_0000    RAM: kernel
//! 0xc000_0000  end of low RAM at the latest; MMIO hole
//! 0xd000_0000  virtio-mmio device registers, 4 KiB each
//! 0xfec0_0000  IOAPIC, 0xfee0_0000 local APIC (in KVM)
//! 0x1_0000_0000  rest of RAM
//! ```

/// End of the RAM below the hole, at the most.
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// Start of the RAM above 4 GiB.
pub const HIGH_RAM_START: u64 = 0x1_0000_0000;
/// Registers of the first virtio device.
pub const MMIO_START: u64 = 0xd000_0000;
/// Registers of one device take this much.
pub const MMIO_STRIDE: u64 = 0x1000;

/// Global descriptor table.
pub const GDT: u64 = 0x500;
/// Boot parameters ("zero page") or PVH start info.
pub const BOOT_PARAMETERS: u64 = 0x7000;
/// Stack pointer at entry.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Page tables for entry in long mode: one page each.
pub const PML4: u64 = 0x9000;
/// Second level.
pub const PDPT: u64 = 0xa000;
/// Third level; 2 MiB pages.
pub const PAGE_DIRECTORY: u64 = 0xb000;
/// PVH memory map.
pub const PVH_MEMORY_MAP: u64 = 0xc000;
/// Kernel command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Longest command line, with its NUL.
pub const COMMAND_LINE_BYTES_MAX: usize = 4096;
/// End of conventional memory; the MP table is in the last KiB below 640 KiB.
pub const CONVENTIONAL_END: u64 = 0x9_fc00;
/// Start of RAM above the legacy hole.
pub const EXTENDED_START: u64 = 0x10_0000;

/// Interrupt lines for virtio devices, in the order of the devices. Line 4 is the
/// serial console's; 0, 1, 2, 8 and 13 are the platform's.
pub const DEVICE_LINES: [u32; 10] = [5, 6, 7, 10, 11, 12, 9, 14, 15, 3];
/// Interrupt line of the serial console.
pub const SERIAL_LINE: u32 = 4;

/// I/O ports of the serial console.
pub const SERIAL_PORTS: std::ops::Range<u16> = 0x3f8..0x400;
/// The keyboard controller, of which only "pulse the reset line" is there.
pub const KEYBOARD_COMMAND_PORT: u16 = 0x64;
/// Writing a byte ends the microVM.
pub const END_PORT: u16 = 0x501;
/// Zeroes the page whose frame number is written.
pub const ZERO_PAGE_PORT: u16 = 0x540;
/// Latches the frame number of a copy's source.
pub const COPY_SOURCE_PORT: u16 = 0x544;
/// Copies the latched page to the frame whose number is written.
pub const COPY_DESTINATION_PORT: u16 = 0x548;

/// Guest page size.
pub const PAGE_BYTES: u64 = 4096;
/// Huge page size, and the granule of guest RAM.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;
