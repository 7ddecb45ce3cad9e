//! State of a vCPU: what is saved, and the order in which it is set again.
//!
//! ```text
//! CPUID → system registers → registers → XCR0 → extended state
//!   → (VM: clock, interrupt controllers) → local APIC → MSRs → events → debug → MP state
//! ```
//!
//! MSRs come after the local APIC, because the TSC deadline (0x6e0) is armed only in an
//! APIC timer of that mode, and it is the last of them, because KVM compares it with
//! the TSC.

use kvm_bindings::{
    KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_UNINITIALIZED, Msrs,
    kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::run::PortLatch;
use crate::arch::Backend;
use crate::error::{Step, VmmError};

/// IA32_TIME_STAMP_COUNTER.
const MSR_TSC: u32 = 0x10;
/// IA32_TSC_DEADLINE.
pub const MSR_TSC_DEADLINE: u32 = 0x6e0;

/// Most MSRs that one call to KVM carries.
const MSRS_MAX: usize = 256;

/// Saved vCPU, version 2.
#[derive(Debug, Serialize, Deserialize)]
pub struct VcpuState {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xcrs: kvm_xcrs,
    xsave: kvm_xsave,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    debug_regs: kvm_debugregs,
    /// Index and value; the TSC deadline last.
    msrs: Vec<(u32, u64)>,
    latch: PortLatch,
}

/// Indices of the MSRs that make up a vCPU's state on this host.
#[derive(Debug, Clone)]
pub struct MsrIndices(Vec<u32>);

impl MsrIndices {
    /// Those of KVM's list that this vCPU can read.
    ///
    /// # Errors
    /// When KVM does not give its list.
    pub fn readable(kvm: &Kvm, vcpu: &VcpuFd) -> Result<Self, VmmError> {
        let list = kvm.get_msr_index_list().step(|| "list MSRs".to_owned(), "")?;
        let mut indices = Vec::new();
        for index in list.as_slice().iter().copied() {
            let mut one = msrs(&[(index, 0)])?;
            if index != MSR_TSC_DEADLINE && vcpu.get_msrs(&mut one).is_ok_and(|read| read == 1) {
                indices.push(index);
            }
        }
        indices.push(MSR_TSC_DEADLINE);
        Ok(Self(indices))
    }
}

impl VcpuState {
    /// Reads the state of a vCPU that does not run and has no exit to complete.
    ///
    /// # Errors
    /// When KVM refuses one part; it is named.
    pub(super) fn save(
        vcpu: &VcpuFd,
        indices: &MsrIndices,
        latch: PortLatch,
    ) -> Result<Self, VmmError> {
        let step = |part: &'static str| move || format!("save {part} of a vCPU");
        let mp_state = vcpu.get_mp_state().step(step("MP state"), "")?;
        let mut values = Vec::with_capacity(indices.0.len());
        for chunk in indices.0.chunks(MSRS_MAX) {
            let wanted: Vec<(u32, u64)> = chunk.iter().map(|index| (*index, 0)).collect();
            let mut batch = msrs(&wanted)?;
            let read = vcpu.get_msrs(&mut batch).step(step("MSRs"), "")?;
            if read != chunk.len() {
                let problem = format!("MSR {:#x} cannot be read", chunk[read]);
                return Err(VmmError::new("save MSRs of a vCPU", "", problem));
            }
            values.extend(batch.as_slice().iter().map(|entry| (entry.index, entry.data)));
        }
        Ok(Self {
            mp_state,
            regs: vcpu.get_regs().step(step("registers"), "")?,
            sregs: vcpu.get_sregs().step(step("system registers"), "")?,
            xcrs: vcpu.get_xcrs().step(step("XCR0"), "")?,
            xsave: vcpu.get_xsave().step(step("extended state"), "")?,
            lapic: vcpu.get_lapic().step(step("local APIC"), "")?,
            events: vcpu.get_vcpu_events().step(step("events"), "")?,
            debug_regs: vcpu.get_debug_regs().step(step("debug registers"), "")?,
            msrs: values,
            latch,
        })
    }

    /// First half of restoring: what does not depend on the VM's clock.
    ///
    /// # Errors
    /// When KVM refuses one part; it is named.
    pub fn restore_registers(&self, vcpu: &VcpuFd) -> Result<(), VmmError> {
        let step = |part: &'static str| move || format!("restore {part} of a vCPU");
        vcpu.set_sregs(&self.sregs).step(step("system registers"), "")?;
        vcpu.set_regs(&self.regs).step(step("registers"), "")?;
        vcpu.set_xcrs(&self.xcrs).step(step("XCR0"), "")?;
        // SAFETY: components beyond 4 KiB are masked in every CPUID profile, so the
        // kernel reads no more than this structure.
        unsafe { vcpu.set_xsave(&self.xsave) }.step(step("extended state"), "")
    }

    /// Second half, after the VM's clock and interrupt controllers.
    ///
    /// # Errors
    /// When KVM refuses one part; it is named.
    pub fn restore_timers(&self, vcpu: &VcpuFd, backend: Backend) -> Result<(), VmmError> {
        let step = |part: &'static str| move || format!("restore {part} of a vCPU");
        vcpu.set_lapic(&self.lapic).step(step("local APIC"), "")?;
        let wanted: Vec<(u32, u64)> = self
            .msrs
            .iter()
            .copied()
            // User code reads the host's TSC there; it cannot be moved.
            .filter(|(index, _)| *index != MSR_TSC || backend == Backend::Hardware)
            .collect();
        for chunk in wanted.chunks(MSRS_MAX) {
            let written = vcpu.set_msrs(&msrs(chunk)?).step(step("MSRs"), "")?;
            if written != chunk.len() {
                let problem = format!("MSR {:#x} cannot be written", chunk[written].0);
                return Err(VmmError::new("restore MSRs of a vCPU", "", problem));
            }
        }
        vcpu.set_vcpu_events(&self.events).step(step("events"), "")?;
        vcpu.set_debug_regs(&self.debug_regs).step(step("debug registers"), "")?;
        vcpu.set_mp_state(self.mp_state).step(step("MP state"), "")
    }

    /// The MSRs that this state holds.
    #[must_use]
    pub fn msr_indices(&self) -> MsrIndices {
        MsrIndices(self.msrs.iter().map(|(index, _)| *index).collect())
    }

    /// What the vCPU's port writes have left behind.
    #[must_use]
    pub fn latch(&self) -> PortLatch {
        self.latch
    }

    /// Halted until an interrupt comes, or never started by the guest.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        matches!(
            self.mp_state.mp_state,
            KVM_MP_STATE_HALTED | KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED
        )
    }

    /// TSC value at which the guest's next timer fires; `None` if none is armed.
    #[must_use]
    pub fn tsc_deadline(&self) -> Option<u64> {
        let (_, deadline) = self.msrs.iter().find(|(index, _)| *index == MSR_TSC_DEADLINE)?;
        (*deadline != 0).then_some(*deadline)
    }

    /// TSC when the state was saved.
    #[must_use]
    pub fn tsc(&self) -> Option<u64> {
        self.msrs.iter().find(|(index, _)| *index == MSR_TSC).map(|(_, value)| *value)
    }
}

fn msrs(values: &[(u32, u64)]) -> Result<Msrs, VmmError> {
    let entries: Vec<kvm_msr_entry> = values
        .iter()
        .map(|(index, data)| kvm_msr_entry { index: *index, data: *data, ..Default::default() })
        .collect();
    Msrs::from_entries(&entries)
        .map_err(|error| VmmError::new("list MSRs", "", format!("{error:?}")))
}
