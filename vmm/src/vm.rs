//! The KVM VM: memory slots, interrupt controllers, clock.
//!
//! Memory slots come before the interrupt controllers: some back ends wait several
//! milliseconds for a grace period when a slot is set afterwards. There is no PIT and no
//! RTC: the local APIC's timer is all that a guest needs, and what is not there does not
//! tick.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data,
    kvm_enable_cap, kvm_irqchip, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VmFd};
use serde::{Deserialize, Serialize};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::arch::{Backend, backend};
use crate::error::{Step, VmmError};

/// Three pages below 4 GiB that VT-x without unrestricted guests needs.
const TSS_ADDRESS: usize = 0xfffb_d000;

const IRQCHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// Saved VM, version 1.
#[derive(Debug, Serialize, Deserialize)]
pub struct VmStateV1 {
    clock: kvm_clock_data,
    irqchips: Vec<kvm_irqchip>,
}

/// Makes a VM over `memory` with its interrupt controllers, and no vCPU yet.
///
/// # Errors
/// When KVM refuses a step; it is named.
pub fn create(kvm: &Kvm, memory: &GuestMemoryMmap, backend: Backend) -> Result<VmFd, VmmError> {
    let vm = kvm.create_vm().step(
        || "create a KVM VM".to_owned(),
        "the host may be out of memory or file descriptors",
    )?;
    for (slot, region) in (0u32..).zip(memory.iter()) {
        let step = || format!("give the VM its memory slot {slot}");
        let start = region.start_addr();
        let address = memory.get_host_address(start).step(step, "")?;
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: start.raw_value(),
            memory_size: region.len(),
            userspace_addr: u64::try_from(address.addr()).expect("addresses have 64 bits"),
        };
        // SAFETY: the region belongs to `memory`, which the microVM keeps for as long
        // as the VM; the process ends with the VM.
        unsafe { vm.set_user_memory_region(region) }.step(step, "")?;
    }
    match backend {
        Backend::Hardware => {
            vm.set_tss_address(TSS_ADDRESS).step(|| "set the TSS address".to_owned(), "")?;
        }
        Backend::Emulating => backend::hand_back_instructions(&vm),
    }
    stop_halt_polling(&vm);
    vm.create_irq_chip().step(|| "create the interrupt controllers".to_owned(), "")?;
    Ok(vm)
}

/// Idle vCPUs sleep at once: with thousands of them, spinning first costs other guests
/// more than it gains. Kernels before 5.10 have no such setting.
fn stop_halt_polling(vm: &VmFd) {
    const KVM_CAP_HALT_POLL: u32 = 182;
    let capability = kvm_enable_cap { cap: KVM_CAP_HALT_POLL, ..Default::default() };
    if let Err(error) = vm.enable_cap(&capability) {
        tracing::debug!(%error, "halt polling stays as the host has set it");
    }
}

impl VmStateV1 {
    /// Reads clock and interrupt controllers; the vCPUs are paused.
    ///
    /// # Errors
    /// When KVM refuses a part; it is named.
    pub fn save(vm: &VmFd) -> Result<Self, VmmError> {
        let mut irqchips = Vec::with_capacity(IRQCHIPS.len());
        for chip_id in IRQCHIPS {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            vm.get_irqchip(&mut chip)
                .step(|| format!("save interrupt controller {chip_id}"), "")?;
            irqchips.push(chip);
        }
        let clock = vm.get_clock().step(|| "save the clock".to_owned(), "")?;
        Ok(Self { clock, irqchips })
    }

    /// Sets clock and interrupt controllers. The clock goes on where it was saved: a
    /// guest whose clock jumped would first run thousands of instructions to catch up.
    ///
    /// # Errors
    /// When KVM refuses a part; it is named.
    pub fn restore(&self, vm: &VmFd) -> Result<(), VmmError> {
        let clock = kvm_clock_data { flags: 0, ..self.clock };
        vm.set_clock(&clock).step(|| "restore the clock".to_owned(), "")?;
        for chip in &self.irqchips {
            vm.set_irqchip(chip)
                .step(|| format!("restore interrupt controller {}", chip.chip_id), "")?;
        }
        Ok(())
    }
}
