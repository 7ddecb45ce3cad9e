//! What CPUID shows to the guest.
//!
//! A profile cuts down what KVM supports, so that a template made on one node runs on
//! another. On a back end that emulates the guest's kernel, user code runs natively and sees
//! the host's CPUID or, where the host can trap it, this one. Bits are cut so that the
//! *kernel* uses only what the emulator has or what [`crate::complete`] completes; where
//! the kernel's own switch drops a feature, user code keeps it.

use std::arch::x86_64::__cpuid;

use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2,
};
use kvm_ioctls::Kvm;
use warren_vmm_api::CpuProfile;

use super::Backend;
use crate::error::{Step, VmmError};

/// Extended state that is saved in 4 KiB: x87, SSE, AVX, AVX-512, PKRU. AMX is not.
const XCR0_SAVED: u32 = 0x2e7;
/// Extended state whose XSAVE is completed in user space where the kernel is emulated.
const XCR0_COMPLETED: u32 = 0x2e7;
const XCR0_V3: u32 = 0x7;
const XCR0_V2: u32 = 0x3;

mod leaf1 {
    pub const ECX_MONITOR: u32 = 1 << 3;
    pub const ECX_FMA: u32 = 1 << 12;
    pub const ECX_X2APIC: u32 = 1 << 21;
    pub const ECX_MOVBE: u32 = 1 << 22;
    pub const ECX_TSC_DEADLINE: u32 = 1 << 24;
    pub const ECX_XSAVE: u32 = 1 << 26;
    pub const ECX_OSXSAVE: u32 = 1 << 27;
    pub const ECX_AVX: u32 = 1 << 28;
    pub const ECX_F16C: u32 = 1 << 29;
    pub const ECX_HYPERVISOR: u32 = 1 << 31;
}

mod leaf7 {
    pub const EBX_BMI1: u32 = 1 << 3;
    pub const EBX_AVX2: u32 = 1 << 5;
    pub const EBX_BMI2: u32 = 1 << 8;
    /// AVX512 F, DQ, IFMA, PF, ER, CD, BW, VL.
    pub const EBX_AVX512: u32 =
        (1 << 16) | (1 << 17) | (1 << 21) | (0b11111 << 26) & !(1 << 29) | (1 << 31);
    pub const ECX_WAITPKG: u32 = 1 << 5;
    pub const ECX_RDPID: u32 = 1 << 22;
    /// AVX512 VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ.
    pub const ECX_AVX512: u32 = (1 << 1) | (1 << 6) | (1 << 11) | (1 << 12) | (1 << 14);
    /// AMX BF16, TILE, INT8; AVX512 4VNNIW, 4FMAPS, VP2INTERSECT, FP16.
    pub const EDX_AMX: u32 = (1 << 22) | (1 << 24) | (1 << 25);
    pub const EDX_AVX512: u32 = (1 << 2) | (1 << 3) | (1 << 8) | (1 << 23);
    pub const EDX_ARCH_CAPABILITIES: u32 = 1 << 29;
}

mod kvm_leaf {
    /// kvm-clock (old and new MSRs), no I/O delay, extended destination ids, stable clock.
    pub const EAX_CLOCK_ONLY: u32 = 1 | (1 << 1) | (1 << 3) | (1 << 15) | (1 << 24);
}

mod extended1 {
    /// LZCNT, by AMD's name ABM.
    pub const ECX_LZCNT: u32 = 1 << 5;
    /// SVM, LWP, performance counters (core, north bridge, L3).
    pub const ECX_MASKED: u32 = (1 << 2) | (1 << 15) | (1 << 23) | (1 << 24) | (1 << 28);
}

/// CPUID of a guest, the same for all its vCPUs but for their ids.
#[derive(Debug, Clone)]
pub struct GuestCpuid {
    template: CpuId,
    vcpus: u8,
}

impl GuestCpuid {
    /// Computes what a guest with `vcpus` vCPUs sees.
    ///
    /// # Errors
    /// When KVM does not tell what it supports.
    pub fn new(
        kvm: &Kvm,
        backend: Backend,
        profile: CpuProfile,
        vcpus: u8,
    ) -> Result<Self, VmmError> {
        let mut template = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .step(|| "read the CPUID that KVM supports".to_owned(), "")?;
        for entry in template.as_mut_slice() {
            mask_unsaveable(entry);
            mask_for_profile(entry, profile);
            match backend {
                Backend::Emulating => {
                    mask_for_emulation(entry);
                    show_native(entry, profile);
                }
                Backend::Hardware => {}
            }
        }
        if vcpus > 1 {
            add_topology(&mut template)
                .step(|| "describe the processors in CPUID".to_owned(), "")?;
        }
        Ok(Self { template, vcpus })
    }

    /// From saved state.
    #[must_use]
    pub fn restore(template: CpuId, vcpus: u8) -> Self {
        Self { template, vcpus }
    }

    /// For saved state.
    #[must_use]
    pub fn entries(&self) -> &CpuId {
        &self.template
    }

    /// As vCPU `index` sees it.
    #[must_use]
    pub fn of_vcpu(&self, index: u8) -> CpuId {
        let mut cpuid = self.template.clone();
        let id = u32::from(index);
        let count = u32::from(self.vcpus);
        for entry in cpuid.as_mut_slice() {
            match entry.function {
                1 => {
                    entry.ebx = (entry.ebx & 0xffff) | (count << 16) | (id << 24);
                    let several = u32::from(self.vcpus > 1) << 28;
                    entry.edx = (entry.edx & !(1 << 28)) | several;
                }
                // One socket, one thread per core.
                0xb | 0x1f => {
                    (entry.eax, entry.ebx, entry.ecx) = match entry.index {
                        0 => (0, 1, 0x100),
                        1 => (count.next_power_of_two().ilog2().max(1), count, 0x201),
                        index => (0, 0, index),
                    };
                    entry.edx = id;
                }
                // AMD: extended APIC id, core id.
                0x8000_001e => (entry.eax, entry.ebx) = (id, id),
                _ => {}
            }
        }
        cpuid
    }
}

/// KVM reports only the first part of the topology leaf, which says that there is no
/// topology; [`GuestCpuid::of_vcpu`] fills in what is added here.
fn add_topology(template: &mut CpuId) -> Result<(), vmm_sys_util::fam::Error> {
    let leaf = |entry: &kvm_cpuid_entry2, index| (entry.function, entry.index) == (0xb, index);
    if !template.as_slice().iter().any(|entry| leaf(entry, 0)) {
        return Ok(());
    }
    for index in [1, 2] {
        if !template.as_slice().iter().any(|entry| leaf(entry, index)) {
            template.push(kvm_cpuid_entry2 {
                function: 0xb,
                index,
                flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
                ..Default::default()
            })?;
        }
    }
    Ok(())
}

fn mask_unsaveable(entry: &mut kvm_cpuid_entry2) {
    match (entry.function, entry.index) {
        (1, _) => {
            entry.ecx |= leaf1::ECX_HYPERVISOR | leaf1::ECX_TSC_DEADLINE | leaf1::ECX_X2APIC;
            entry.ecx &= !(leaf1::ECX_MONITOR | leaf1::ECX_OSXSAVE);
        }
        (7, 0) => {
            entry.ecx &= !leaf7::ECX_WAITPKG;
            entry.edx &= !leaf7::EDX_AMX;
        }
        (0xd, 0) => {
            entry.eax &= XCR0_SAVED;
            entry.edx = 0;
        }
        // Supervisor state (IA32_XSS) is not saved; state above bit 9 is not offered.
        (0xd, 1) => {
            entry.ecx = 0;
            entry.edx = 0;
        }
        (0xd, component) if component > 9 => {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
        }
        // Performance counters hold host state.
        (0xa, _) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        (0x8000_0001, _) => entry.ecx &= !extended1::ECX_MASKED,
        _ => {}
    }
}

fn mask_for_profile(entry: &mut kvm_cpuid_entry2, profile: CpuProfile) {
    let below_v4 = match profile {
        CpuProfile::Host => return,
        CpuProfile::V2 | CpuProfile::V3 => true,
    };
    let below_v3 = profile == CpuProfile::V2;
    match (entry.function, entry.index) {
        (1, _) if below_v3 => {
            entry.ecx &= !(leaf1::ECX_AVX | leaf1::ECX_FMA | leaf1::ECX_F16C | leaf1::ECX_MOVBE);
        }
        (7, 0) if below_v4 => {
            entry.ebx &= !leaf7::EBX_AVX512;
            entry.ecx &= !leaf7::ECX_AVX512;
            entry.edx &= !leaf7::EDX_AVX512;
            if below_v3 {
                entry.ebx &= !(leaf7::EBX_AVX2 | leaf7::EBX_BMI1 | leaf7::EBX_BMI2);
            }
        }
        (0xd, 0) => entry.eax &= if below_v3 { XCR0_V2 } else { XCR0_V3 },
        (0x8000_0001, _) if below_v3 => entry.ecx &= !extended1::ECX_LZCNT,
        _ => {}
    }
}

/// Such a back end leaves out what it cannot emulate, yet user code runs natively, and
/// programs look in CPUID for the whole of x86-64-v3. A guest kernel does not use LZCNT.
fn show_native(entry: &mut kvm_cpuid_entry2, profile: CpuProfile) {
    if entry.function == 0x8000_0001 && profile != CpuProfile::V2 {
        entry.ecx |= __cpuid(0x8000_0001).ecx & extended1::ECX_LZCNT;
    }
}

fn mask_for_emulation(entry: &mut kvm_cpuid_entry2) {
    match (entry.function, entry.index) {
        (1, _) => {
            // User code sees XSAVE and AVX natively: the kernel has to switch them.
            entry.ecx |= leaf1::ECX_XSAVE | leaf1::ECX_AVX;
        }
        (7, 0) => {
            entry.ecx &= !leaf7::ECX_RDPID;
            entry.edx &= !leaf7::EDX_ARCH_CAPABILITIES;
        }
        (0xd, 0) => {
            entry.eax &= XCR0_COMPLETED;
            entry.edx = 0;
        }
        // Only plain XSAVE: no XSAVEOPT, XSAVEC, XGETBV1, XSAVES.
        (0xd, 1) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        // Paravirtual features that make hypercalls loop in such back ends.
        (0x4000_0001, _) => {
            entry.eax &= kvm_leaf::EAX_CLOCK_ONLY;
            entry.edx = 0;
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            eax: u32::MAX,
            ebx: u32::MAX,
            ecx: u32::MAX,
            edx: u32::MAX,
            ..Default::default()
        }
    }

    #[test]
    fn v2_has_no_avx() {
        let mut leaf = entry(1, 0);
        mask_for_profile(&mut leaf, CpuProfile::V2);
        assert_eq!(leaf.ecx & leaf1::ECX_AVX, 0);
        let mut leaf = entry(0xd, 0);
        mask_for_profile(&mut leaf, CpuProfile::V2);
        assert_eq!(leaf.eax, 3);
    }

    #[test]
    fn v3_has_avx2_but_no_avx512() {
        let mut leaf = entry(7, 0);
        mask_for_profile(&mut leaf, CpuProfile::V3);
        assert_ne!(leaf.ebx & leaf7::EBX_AVX2, 0);
        assert_eq!(leaf.ebx & (1 << 16), 0);
        assert_ne!(leaf.ebx & (1 << 29), 0, "SHA is not AVX-512");
    }

    #[test]
    fn amx_is_never_offered() {
        let mut leaf = entry(0xd, 0);
        mask_unsaveable(&mut leaf);
        assert_eq!(leaf.eax & (3 << 17), 0);
    }

    #[test]
    fn several_vcpus_are_cores_of_one_socket() {
        let mut template = CpuId::from_entries(&[entry(1, 0), entry(0xb, 0)]).unwrap();
        add_topology(&mut template).unwrap();
        add_topology(&mut template).unwrap();
        let cpuid = GuestCpuid::restore(template, 3).of_vcpu(2);
        let [_, threads, cores, end] = cpuid.as_slice() else { panic!("{cpuid:?}") };
        assert_eq!((threads.eax, threads.ebx, threads.ecx), (0, 1, 0x100));
        assert_eq!((cores.eax, cores.ebx, cores.ecx, cores.edx), (2, 3, 0x201, 2));
        assert_eq!((end.eax, end.ebx, end.ecx), (0, 0, 2));
    }

    #[test]
    fn vcpus_differ_in_their_ids_only() {
        let template = CpuId::from_entries(&[entry(1, 0), entry(0xb, 1)]).unwrap();
        let cpuid = GuestCpuid::restore(template, 4);
        let third = cpuid.of_vcpu(2);
        assert_eq!(third.as_slice()[0].ebx >> 24, 2);
        assert_eq!((third.as_slice()[0].ebx >> 16) & 0xff, 4);
        assert_eq!(third.as_slice()[1].edx, 2);
        assert_eq!(third.as_slice()[1].eax, 2);
    }
}
