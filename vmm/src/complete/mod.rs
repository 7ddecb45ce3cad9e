//! Completing instructions that a KVM back end cannot emulate.
//!
//! Some back ends run the guest's kernel through KVM's instruction emulator and hand
//! back what it lacks: `KVM_EXIT_INTERNAL_ERROR`, suberror 1, with the bytes of the
//! instruction (`KVM_CAP_EXIT_ON_EMULATION_FAILURE`, Linux 5.14). User code of the guest
//! runs on the real CPU and uses AVX, so the kernel must switch the whole extended
//! state: the XSAVE family has to work.
//!
//! Completed here, for 64-bit kernel code: XSAVE and XRSTOR in the standard form, XGETBV,
//! LDMXCSR and STMXCSR, FWAIT and EMMS, FNSTSW, STAC and CLAC, RDTSCP, POPCNT, CLWB,
//! VERW, INT3. The compacted forms are masked in CPUID.

mod decode;
mod walk;
mod xstate;

use std::arch::x86_64::_rdtsc;

use kvm_bindings::{kvm_regs, kvm_sregs, kvm_xsave};
use kvm_ioctls::VcpuFd;
use vm_memory::GuestMemoryMmap;

use decode::{Instruction, Operation};
use walk::{Access, PageFault};
use xstate::{AREA_BYTES_MAX, Layout, XstateImage};

/// Why a vCPU cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum CompletionError {
    /// Nobody knows this instruction.
    #[error("instruction {bytes:02x?} at {rip:#x} can neither be emulated nor completed")]
    Unknown {
        /// Where.
        rip: u64,
        /// What.
        bytes: [u8; 15],
    },
    /// KVM gave no instruction bytes.
    #[error("internal error {0} of KVM")]
    NoInstruction(u32),
    /// A register could not be read or written.
    #[error("{operation} of a vCPU")]
    Register {
        /// What was tried.
        operation: &'static str,
        /// Cause.
        #[source]
        source: kvm_ioctls::Error,
    },
}

/// What the guest sees instead of the next instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exception {
    Breakpoint,
    GeneralProtection,
    PageFault { address: u64, error: u32 },
}

/// A vCPU that stopped at an instruction.
struct Stopped<'a> {
    vcpu: &'a VcpuFd,
    memory: &'a GuestMemoryMmap,
    regs: kvm_regs,
    sregs: kvm_sregs,
}

/// Completes the instruction at which `vcpu` stopped.
///
/// # Errors
/// When the instruction is not one of those listed above.
pub fn complete(vcpu: &mut VcpuFd, memory: &GuestMemoryMmap) -> Result<(), CompletionError> {
    let bytes = instruction_bytes(vcpu)?;
    let regs = vcpu.get_regs().map_err(failed("read registers"))?;
    let unknown = CompletionError::Unknown { rip: regs.rip, bytes };
    let instruction = decode::decode(&bytes).ok_or(unknown)?;
    let sregs = vcpu.get_sregs().map_err(failed("read system registers"))?;
    let mut stopped = Stopped { vcpu, memory, regs, sregs };
    match stopped.execute(&instruction)? {
        Ok(()) => {
            stopped.regs.rip = stopped.regs.rip.wrapping_add(instruction.length);
            vcpu.set_regs(&stopped.regs).map_err(failed("write registers"))
        }
        Err(exception) => stopped.raise(exception, instruction.length),
    }
}

/// The 15 bytes at the instruction pointer, as KVM gave them.
fn instruction_bytes(vcpu: &mut VcpuFd) -> Result<[u8; 15], CompletionError> {
    let run = vcpu.get_kvm_run();
    // SAFETY: the exit reason is KVM_EXIT_INTERNAL_ERROR, for which the kernel filled
    // the `internal` part of the union; all of its fields are plain integers.
    let internal = unsafe { run.__bindgen_anon_1.internal };
    if internal.suberror != kvm_bindings::KVM_INTERNAL_ERROR_EMULATION || internal.ndata < 1 {
        return Err(CompletionError::NoInstruction(internal.suberror));
    }
    // SAFETY: for this suberror the kernel laid the same bytes out as
    // `emulation_failure`; all of its fields are plain integers.
    let failure = unsafe { run.__bindgen_anon_1.emulation_failure };
    let has_bytes = u64::from(kvm_bindings::KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES);
    if failure.flags & has_bytes == 0 {
        return Err(CompletionError::NoInstruction(internal.suberror));
    }
    // SAFETY: the flag says that the union holds instruction bytes.
    Ok(unsafe { failure.__bindgen_anon_1.__bindgen_anon_1.insn_bytes })
}

fn failed(operation: &'static str) -> impl Fn(kvm_ioctls::Error) -> CompletionError {
    move |source| CompletionError::Register { operation, source }
}

impl Stopped<'_> {
    /// Does what the CPU would; the inner error is an exception for the guest.
    fn execute(
        &mut self,
        instruction: &Instruction,
    ) -> Result<Result<(), Exception>, CompletionError> {
        let address = instruction.address(&self.regs, &self.sregs);
        match instruction.operation {
            Operation::Nothing => {}
            Operation::Breakpoint => return Ok(Err(Exception::Breakpoint)),
            Operation::Xsave => return self.xsave(address),
            Operation::Xrstor => return self.xrstor(address),
            Operation::Xgetbv => return self.xgetbv(),
            Operation::LoadMxcsr => return self.load_mxcsr(address),
            Operation::StoreMxcsr => return self.store_mxcsr(address),
            Operation::StoreStatusWord => {
                let fpu = self.vcpu.get_fpu().map_err(failed("read x87 state"))?;
                self.regs.rax = (self.regs.rax & !0xffff) | u64::from(fpu.fsw);
            }
            Operation::SetAlignmentCheck => self.regs.rflags |= RFLAGS_AC,
            Operation::ClearAlignmentCheck => self.regs.rflags &= !RFLAGS_AC,
            Operation::VerifyForWriting => self.regs.rflags |= RFLAGS_ZF,
            Operation::ReadTimestamp => {
                // SAFETY: every x86_64 CPU has RDTSC, and user space may execute it here.
                let now = unsafe { _rdtsc() };
                (self.regs.rax, self.regs.rdx) = halves(now);
                self.regs.rcx = 0;
            }
            Operation::PopulationCount { destination, source, wide } => {
                let value = *decode::register(&mut self.regs, source);
                let value = if wide { value } else { value & 0xffff_ffff };
                *decode::register(&mut self.regs, destination) = value.count_ones().into();
                self.regs.rflags &= !RFLAGS_ARITHMETIC;
                if value == 0 {
                    self.regs.rflags |= RFLAGS_ZF;
                }
            }
        }
        Ok(Ok(()))
    }

    fn xgetbv(&mut self) -> Result<Result<(), Exception>, CompletionError> {
        let xcr0 = self.xcr0()?;
        let value = match self.regs.rcx & 0xffff_ffff {
            0 => xcr0,
            1 => xcr0 & xstate::in_use(&self.xstate()?),
            _ => return Ok(Err(Exception::GeneralProtection)),
        };
        (self.regs.rax, self.regs.rdx) = halves(value);
        Ok(Ok(()))
    }

    fn xsave(&self, address: u64) -> Result<Result<(), Exception>, CompletionError> {
        if !address.is_multiple_of(64) {
            return Ok(Err(Exception::GeneralProtection));
        }
        let requested = self.xcr0()? & self.requested_components();
        let layout = Layout::of_cpu();
        let length = layout.area_length(requested);
        let mut area = [0; AREA_BYTES_MAX];
        // Parts that are not requested stay as they are in memory.
        if let Err(fault) = self.read(address, &mut area[..length], Access::Write) {
            return Ok(Err(fault.into()));
        }
        xstate::save(layout, &self.xstate()?, requested, &mut area);
        Ok(self.write(address, &area[..length]).map_err(Exception::from))
    }

    fn xrstor(&self, address: u64) -> Result<Result<(), Exception>, CompletionError> {
        if !address.is_multiple_of(64) {
            return Ok(Err(Exception::GeneralProtection));
        }
        let xcr0 = self.xcr0()?;
        let requested = xcr0 & self.requested_components();
        let layout = Layout::of_cpu();
        let length = layout.area_length(requested);
        let mut area = [0; AREA_BYTES_MAX];
        if let Err(fault) = self.read(address, &mut area[..length], Access::Read) {
            return Ok(Err(fault.into()));
        }
        let mut state = self.xstate()?;
        if xstate::restore(layout, &mut state, requested, xcr0, &area).is_err() {
            return Ok(Err(Exception::GeneralProtection));
        }
        self.set_xstate(&state)?;
        Ok(Ok(()))
    }

    fn load_mxcsr(&self, address: u64) -> Result<Result<(), Exception>, CompletionError> {
        let mut bytes = [0; 4];
        if let Err(fault) = self.read(address, &mut bytes, Access::Read) {
            return Ok(Err(fault.into()));
        }
        let mut state = self.xstate()?;
        if xstate::set_mxcsr(&mut state, u32::from_le_bytes(bytes)).is_err() {
            return Ok(Err(Exception::GeneralProtection));
        }
        self.set_xstate(&state)?;
        Ok(Ok(()))
    }

    fn store_mxcsr(&self, address: u64) -> Result<Result<(), Exception>, CompletionError> {
        let bytes = xstate::mxcsr(&self.xstate()?).to_le_bytes();
        Ok(self.write(address, &bytes).map_err(Exception::from))
    }

    /// Makes the guest see an exception at this instruction.
    fn raise(&mut self, exception: Exception, length: u64) -> Result<(), CompletionError> {
        let (vector, error) = match exception {
            Exception::Breakpoint => {
                // A trap: the saved instruction pointer is behind the instruction.
                self.regs.rip = self.regs.rip.wrapping_add(length);
                self.vcpu.set_regs(&self.regs).map_err(failed("write registers"))?;
                (3, None)
            }
            Exception::GeneralProtection => (13, Some(0)),
            Exception::PageFault { address, error } => {
                self.sregs.cr2 = address;
                self.vcpu.set_sregs(&self.sregs).map_err(failed("write system registers"))?;
                (14, Some(error))
            }
        };
        let mut events = self.vcpu.get_vcpu_events().map_err(failed("read events"))?;
        events.exception.injected = 1;
        events.exception.pending = 0;
        events.exception.nr = vector;
        events.exception.has_error_code = u8::from(error.is_some());
        events.exception.error_code = error.unwrap_or(0);
        self.vcpu.set_vcpu_events(&events).map_err(failed("inject an exception"))
    }

    fn requested_components(&self) -> u64 {
        (self.regs.rax & 0xffff_ffff) | (self.regs.rdx << 32)
    }

    fn xcr0(&self) -> Result<u64, CompletionError> {
        let xcrs = self.vcpu.get_xcrs().map_err(failed("read XCR0"))?;
        Ok(xcrs.xcrs[0].value)
    }

    fn xstate(&self) -> Result<XstateImage, CompletionError> {
        let xsave = self.vcpu.get_xsave().map_err(failed("read extended state"))?;
        Ok(XstateImage::from_words(&xsave.region))
    }

    fn set_xstate(&self, state: &XstateImage) -> Result<(), CompletionError> {
        let xsave = kvm_xsave { region: state.to_words(), ..Default::default() };
        // SAFETY: components beyond 4 KiB are masked in every CPUID profile, so the
        // kernel reads no more than this structure.
        unsafe { self.vcpu.set_xsave(&xsave) }.map_err(failed("write extended state"))
    }

    fn read(&self, address: u64, bytes: &mut [u8], access: Access) -> Result<(), PageFault> {
        walk::read(self.memory, &self.sregs, address, bytes, access)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), PageFault> {
        walk::write(self.memory, &self.sregs, address, bytes)
    }
}

impl From<PageFault> for Exception {
    fn from(fault: PageFault) -> Self {
        Self::PageFault { address: fault.address, error: fault.error }
    }
}

const RFLAGS_ZF: u64 = 1 << 6;
const RFLAGS_AC: u64 = 1 << 18;
/// OF, SF, ZF, AF, PF, CF.
const RFLAGS_ARITHMETIC: u64 = 0x8d5;

/// Low and high 32 bits, as instructions return them in EAX and EDX.
fn halves(value: u64) -> (u64, u64) {
    (value & 0xffff_ffff, value >> 32)
}
