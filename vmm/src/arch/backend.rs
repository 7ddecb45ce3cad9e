//! Which kind of KVM serves `/dev/kvm`.
//!
//! On hardware virtualization the guest's kernel runs on the CPU. Some back ends run
//! it through KVM's instruction emulator instead, which lacks instructions, cannot hide
//! CPUID bits from user code and cannot offset the TSC. The difference is found by
//! trying: a vCPU executes POPCNT at privilege level 0, which emulators lack and every
//! x86_64 CPU of the last decade has.

use kvm_bindings::{kvm_enable_cap, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VmFd};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::entry;
use crate::error::{Step, VmmError};

/// How KVM runs the guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backend {
    /// On the CPU (VT-x, AMD-V).
    Hardware,
    /// Through KVM's instruction emulator.
    Emulating,
}

const DEVICE: &str = "/dev/kvm";

/// Opens `/dev/kvm`.
///
/// # Errors
/// When it is absent, not permitted or of another API version.
pub fn open() -> Result<Kvm, VmmError> {
    let kvm = Kvm::new().step(
        || format!("open {DEVICE}"),
        "the host needs KVM: load kvm_intel or kvm_amd, and allow this user to open /dev/kvm",
    )?;
    match kvm.get_api_version() {
        12 => {}
        version => {
            let problem = format!("API version {version}, 12 is needed");
            return Err(VmmError::new(format!("use {DEVICE}"), "use a current kernel", problem));
        }
    }
    for (capability, name) in [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
        (Cap::Irqfd, "KVM_CAP_IRQFD"),
        (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
        (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
    ] {
        if !kvm.check_extension(capability) {
            return Err(VmmError::new(
                format!("use {DEVICE}"),
                "use a current kernel",
                format!("{name} is missing"),
            ));
        }
    }
    Ok(kvm)
}

/// Asks KVM to hand instructions that it cannot emulate to user space, with their
/// bytes. Kernels without this (before 5.14) answer with an error that is ignored: on
/// hardware nothing is emulated that could fail.
pub fn hand_back_instructions(vm: &VmFd) {
    const KVM_CAP_EXIT_ON_EMULATION_FAILURE: u32 = 204;
    let mut capability =
        kvm_enable_cap { cap: KVM_CAP_EXIT_ON_EMULATION_FAILURE, ..Default::default() };
    capability.args[0] = 1;
    if let Err(error) = vm.enable_cap(&capability) {
        tracing::debug!(%error, "instructions that fail to emulate are not handed back");
    }
}

/// Finds out how `kvm` runs a guest's kernel.
///
/// # Errors
/// When no VM can be made at all.
pub fn detect(kvm: &Kvm) -> Result<Backend, VmmError> {
    const RAM_BYTES: usize = 2 << 20;
    const CODE: u64 = 0x10_0000;
    /// popcnt %eax,%eax; then out %al,$0x80 until somebody listens.
    const PROBE: [u8; 8] = [0xf3, 0x0f, 0xb8, 0xc0, 0xe6, 0x80, 0xeb, 0xfc];
    let step = || format!("find out what kind of KVM serves {DEVICE}");
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), RAM_BYTES)])
        .step(step, "free some memory")?;
    memory.write_slice(&PROBE, GuestAddress(CODE)).step(step, "")?;
    let vm = kvm.create_vm().step(step, "free some memory")?;
    let address = memory.get_host_address(GuestAddress(0)).step(step, "")?;
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: RAM_BYTES as u64,
        userspace_addr: u64::try_from(address.addr()).expect("x86_64 addresses have 64 bits"),
    };
    // SAFETY: `memory` backs the slot and outlives `vm`, which is dropped before it.
    unsafe { vm.set_user_memory_region(region) }.step(step, "")?;
    hand_back_instructions(&vm);
    let mut vcpu = vm.create_vcpu(0).step(step, "")?;
    let cpuid = kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES).step(step, "")?;
    vcpu.set_cpuid2(&cpuid).step(step, "")?;
    entry::long_mode(&vcpu, &memory, CODE, 0).step(step, "")?;
    match vcpu.run().step(step, "")? {
        VcpuExit::IoOut(..) => Ok(Backend::Hardware),
        VcpuExit::InternalError => Ok(Backend::Emulating),
        other => {
            let problem = format!("the probe ended with {other:?}");
            Err(VmmError::new(step(), "report this kernel and CPU", problem))
        }
    }
}
