//! Loads a kernel and prepares the boot vCPU to enter it.

use std::fs::File;
use std::path::Path;

use kvm_ioctls::VcpuFd;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::start_info::{hvm_memmap_table_entry, hvm_start_info};
use linux_loader::loader::{Elf, KernelLoader, KernelLoaderResult};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};
use warren_vmm_api::BootProtocol;

use super::{entry, mptable};
use crate::error::{Step, VmmError};
use crate::layout::{
    BOOT_PARAMETERS, COMMAND_LINE, COMMAND_LINE_BYTES_MAX, CONVENTIONAL_END, EXTENDED_START,
    PVH_MEMORY_MAP,
};
use crate::ram::RamSize;

const E820_RAM: u32 = 1;
const PVH_RAM: u32 = 1;
const PVH_MAGIC: u32 = 0x336e_c578;
const LINUX_MAGIC: u32 = 0x5372_6448;
const BOOT_SECTOR_MAGIC: u16 = 0xaa55;
const LOADER_UNDEFINED: u8 = 0xff;
const LOADED_HIGH: u8 = 1;

const ADVICE: &str = "give an uncompressed 64-bit ELF kernel (vmlinux, not bzImage); \
                      `make guest-kernel` builds one";

/// What is booted, and how.
#[derive(Debug)]
pub struct Boot<'a> {
    /// ELF `vmlinux`.
    pub kernel: &'a Path,
    /// The whole command line.
    pub command_line: &'a str,
    /// How the kernel is entered.
    pub protocol: BootProtocol,
    /// Size of RAM.
    pub ram: RamSize,
    /// Number of vCPUs.
    pub vcpus: u8,
}

impl Boot<'_> {
    /// Loads the kernel into `memory` and sets the registers of `vcpu`.
    ///
    /// # Errors
    /// When the kernel is not what it should be, does not fit, or KVM refuses.
    pub fn prepare(&self, memory: &GuestMemoryMmap, vcpu: &VcpuFd) -> Result<(), VmmError> {
        let kernel = self.load(memory)?;
        self.write_command_line(memory)?;
        if self.vcpus > 1 {
            mptable::write(memory, self.vcpus).step(|| "write MP table".to_owned(), "")?;
        }
        let step = || "prepare the boot vCPU".to_owned();
        entry::wire_local_apic(vcpu).step(step, "")?;
        match self.protocol {
            BootProtocol::Linux64 => {
                self.write_zero_page(memory)?;
                let start = kernel.kernel_load.0;
                entry::long_mode(vcpu, memory, start, BOOT_PARAMETERS).step(step, "")
            }
            BootProtocol::Pvh => {
                let PvhBootCapability::PvhEntryPresent(start) = kernel.pvh_boot_cap else {
                    return Err(VmmError::new(
                        format!("boot {} by PVH", self.kernel.display()),
                        "build the kernel with CONFIG_PVH, or use the linux64 protocol",
                        "the kernel has no PVH entry point",
                    ));
                };
                self.write_start_info(memory)?;
                entry::protected_mode(vcpu, memory, start.0, BOOT_PARAMETERS).step(step, "")
            }
        }
    }

    fn load(&self, memory: &GuestMemoryMmap) -> Result<KernelLoaderResult, VmmError> {
        let step = || format!("load kernel {}", self.kernel.display());
        let mut file = File::open(self.kernel).step(step, "check the path of the kernel")?;
        let length = file.metadata().step(step, "")?.len();
        if length < 64 {
            let problem = format!("the file has {length} bytes");
            return Err(VmmError::new(step(), ADVICE, problem));
        }
        Elf::load(memory, None, &mut file, Some(GuestAddress(EXTENDED_START))).step(step, ADVICE)
    }

    fn write_command_line(&self, memory: &GuestMemoryMmap) -> Result<(), VmmError> {
        let step = || "write the kernel command line".to_owned();
        if self.command_line.len() >= COMMAND_LINE_BYTES_MAX {
            let problem = format!(
                "{} bytes, at most {} fit",
                self.command_line.len(),
                COMMAND_LINE_BYTES_MAX - 1
            );
            return Err(VmmError::new(step(), "shorten the command line", problem));
        }
        let mut bytes = self.command_line.as_bytes().to_vec();
        bytes.push(0);
        memory.write_slice(&bytes, GuestAddress(COMMAND_LINE)).step(step, "")
    }

    /// RAM that the kernel may use, as (start, length).
    fn usable_ram(&self) -> Vec<(u64, u64)> {
        let mut usable = vec![(0, CONVENTIONAL_END)];
        for part in self.ram.parts() {
            let start = part.guest.max(EXTENDED_START);
            usable.push((start, part.guest + part.bytes - start));
        }
        usable
    }

    fn write_zero_page(&self, memory: &GuestMemoryMmap) -> Result<(), VmmError> {
        let mut params = boot_params::default();
        params.hdr.boot_flag = BOOT_SECTOR_MAGIC;
        params.hdr.header = LINUX_MAGIC;
        params.hdr.version = 0x20c;
        params.hdr.type_of_loader = LOADER_UNDEFINED;
        params.hdr.loadflags = LOADED_HIGH;
        params.hdr.kernel_alignment = 0x20_0000;
        params.hdr.cmd_line_ptr = u32::try_from(COMMAND_LINE).expect("below 4 GiB");
        params.hdr.cmdline_size = u32::try_from(self.command_line.len()).expect("checked");
        let usable = self.usable_ram();
        for (place, (addr, size)) in params.e820_table.iter_mut().zip(&usable) {
            *place = boot_e820_entry { addr: *addr, size: *size, r#type: E820_RAM };
        }
        params.e820_entries = u8::try_from(usable.len()).expect("three at most");
        memory
            .write_slice(Parameters(params).as_slice(), GuestAddress(BOOT_PARAMETERS))
            .step(|| "write boot parameters".to_owned(), "")
    }

    fn write_start_info(&self, memory: &GuestMemoryMmap) -> Result<(), VmmError> {
        let step = || "write PVH start info".to_owned();
        let usable = self.usable_ram();
        let entry_bytes = size_of::<hvm_memmap_table_entry>() as u64;
        for (index, (addr, size)) in (0u64..).zip(&usable) {
            let entry =
                hvm_memmap_table_entry { addr: *addr, size: *size, type_: PVH_RAM, reserved: 0 };
            let at = GuestAddress(PVH_MEMORY_MAP + index * entry_bytes);
            memory.write_slice(MapEntry(entry).as_slice(), at).step(step, "")?;
        }
        let info = hvm_start_info {
            magic: PVH_MAGIC,
            version: 1,
            cmdline_paddr: COMMAND_LINE,
            memmap_paddr: PVH_MEMORY_MAP,
            memmap_entries: u32::try_from(usable.len()).expect("three at most"),
            ..Default::default()
        };
        memory.write_slice(StartInfo(info).as_slice(), GuestAddress(BOOT_PARAMETERS)).step(step, "")
    }
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Parameters(boot_params);
// SAFETY: the structure is the kernel's ABI: integers without padding between them.
unsafe impl ByteValued for Parameters {}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct MapEntry(hvm_memmap_table_entry);
// SAFETY: integers without padding (xen/include/public/arch-x86/hvm/start_info.h).
unsafe impl ByteValued for MapEntry {}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct StartInfo(hvm_start_info);
// SAFETY: integers without padding (xen/include/public/arch-x86/hvm/start_info.h).
unsafe impl ByteValued for StartInfo {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usable_ram_leaves_out_the_legacy_hole_and_the_mmio_hole() {
        let boot = Boot {
            kernel: Path::new("vmlinux"),
            command_line: "",
            protocol: BootProtocol::Linux64,
            ram: RamSize::new(4 << 30).unwrap(),
            vcpus: 1,
        };
        assert_eq!(
            boot.usable_ram(),
            [(0, 0x9_fc00), (0x10_0000, 0xc000_0000 - 0x10_0000), (0x1_0000_0000, 0x4000_0000),]
        );
    }

    #[test]
    fn kernel_that_is_no_elf_is_refused_with_advice() {
        let directory = tempfile::tempdir().unwrap();
        let kernel = directory.path().join("vmlinux");
        std::fs::write(&kernel, vec![b'x'; 4096]).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 32 << 20)]).unwrap();
        let boot = Boot {
            kernel: &kernel,
            command_line: "",
            protocol: BootProtocol::Linux64,
            ram: RamSize::new(32 << 20).unwrap(),
            vcpus: 1,
        };
        let error = boot.load(&memory).unwrap_err();
        assert!(error.to_string().contains("load kernel"));
        assert!(error.advice().contains("vmlinux"));
    }
}
