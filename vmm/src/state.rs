//! The saved state of a microVM: which sections the state file has, and what they hold.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use serde::{Deserialize, Serialize};
use vm_superio::serial::SerialState;
use warren_snapshot::{Architecture, SectionKind, Sections, SectionsBuilder};
use warren_virtio::transport::TransportState;

use crate::arch::Backend;
use crate::error::{Step, VmmError};
use crate::ram::{RamDiff, RamSize};
use crate::vcpu::VcpuState;
use crate::vm::VmStateV1;

const MACHINE: SectionKind = SectionKind(1);
const CPUID: SectionKind = SectionKind(2);
const VM: SectionKind = SectionKind(3);
const SERIAL: SectionKind = SectionKind(4);
const RAM_DIFF: SectionKind = SectionKind(5);
const VCPU: u16 = 0x100;
const TRANSPORT: u16 = 0x200;
const DEVICE: u16 = 0x300;

const ADVICE: &str = "build the template again on this host";

/// Shape of the machine, version 1.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct MachineV1 {
    vcpus: u8,
    memory_bytes: u64,
    backend: Backend,
    devices: Vec<DeviceKind>,
}

/// A device of the machine. Order and kind fix its address and interrupt line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceKind {
    /// virtio-blk over a file that is never written.
    ReadOnlyDisk(String),
    /// virtio-blk over a file that is written.
    WritableDisk(String),
    /// virtio-vsock.
    Vsock,
    /// virtio-rng.
    Rng,
    /// virtio-console.
    Console,
    /// virtio-balloon.
    Balloon,
    /// virtio-net over this TAP interface, with this address.
    Net {
        /// Interface.
        tap: String,
        /// Address.
        mac: [u8; 6],
    },
}

/// Saved serial console, version 1.
#[derive(Debug, Serialize, Deserialize)]
struct SerialV1 {
    baud_divisor: [u8; 2],
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    in_buffer: Vec<u8>,
}

/// A device with its saved state.
#[derive(Debug)]
pub struct DeviceRecord {
    /// What it is.
    pub kind: DeviceKind,
    /// Registers and queues.
    pub transport: TransportState,
    /// Version of the device's own state.
    pub version: u16,
    /// The device's own state.
    pub bytes: Vec<u8>,
}

/// A whole microVM without its RAM, decoded.
#[derive(Debug)]
pub struct MicrovmState {
    /// Back end on which it ran.
    pub backend: Backend,
    /// Size of RAM.
    pub ram: RamSize,
    /// CPUID before each vCPU's ids are filled in.
    pub cpuid: CpuId,
    /// Clock and interrupt controllers.
    pub vm: VmStateV1,
    /// Serial console.
    pub serial: SerialState,
    /// One per vCPU.
    pub vcpus: Vec<VcpuState>,
    /// In the order of their addresses.
    pub devices: Vec<DeviceRecord>,
}

/// Version of the machine's and the transports' sections.
const VERSION: u16 = 1;
/// Version of the vCPUs' sections.
const VCPU_VERSION: u16 = 2;

impl MicrovmState {
    /// As the bytes of a state file; with `diff`, of a snapshot's.
    ///
    /// # Errors
    /// When a part cannot be encoded.
    pub fn encode(&self, diff: Option<&RamDiff>) -> Result<Vec<u8>, VmmError> {
        let step = || "encode the state of the microVM".to_owned();
        let mut file = SectionsBuilder::new();
        self.add_sections(&mut file).step(step, "")?;
        if let Some(diff) = diff {
            file.add(RAM_DIFF, VERSION, diff).step(step, "")?;
        }
        Ok(file.finish(Architecture::X86_64))
    }

    fn add_sections(
        &self,
        file: &mut SectionsBuilder,
    ) -> Result<(), warren_snapshot::StateFileError> {
        let machine = MachineV1 {
            vcpus: u8::try_from(self.vcpus.len()).expect("at most 32 vCPUs"),
            memory_bytes: self.ram.bytes(),
            backend: self.backend,
            devices: self.devices.iter().map(|device| device.kind.clone()).collect(),
        };
        file.add(MACHINE, VERSION, &machine)?;
        file.add(CPUID, VERSION, &self.cpuid.as_slice().to_vec())?;
        file.add(VM, VERSION, &self.vm)?;
        file.add(SERIAL, VERSION, &SerialV1::from(&self.serial))?;
        for (number, vcpu) in (VCPU..).zip(&self.vcpus) {
            file.add(SectionKind(number), VCPU_VERSION, vcpu)?;
        }
        for (number, device) in (0u16..).zip(&self.devices) {
            file.add(SectionKind(TRANSPORT + number), VERSION, &device.transport)?;
            file.add_bytes(SectionKind(DEVICE + number), device.version, &device.bytes)?;
        }
        Ok(())
    }

    /// From the bytes of a template's state file.
    ///
    /// # Errors
    /// When any part is damaged, missing, unknown or of another version.
    pub fn decode(file: &[u8]) -> Result<Self, VmmError> {
        let mut sections = Sections::parse(file, Architecture::X86_64).step(decoding, ADVICE)?;
        let state = Self::take_sections(&mut sections)?;
        sections.finish().step(decoding, ADVICE)?;
        Ok(state)
    }

    /// From the bytes of a snapshot's state file.
    ///
    /// # Errors
    /// When any part is damaged, missing, unknown or of another version.
    pub fn decode_snapshot(file: &[u8]) -> Result<(Self, RamDiff), VmmError> {
        const ADVICE: &str = "the snapshot cannot be used";
        let mut sections = Sections::parse(file, Architecture::X86_64).step(decoding, ADVICE)?;
        let state = Self::take_sections(&mut sections)?;
        let diff = sections.take_version(RAM_DIFF, VERSION).step(decoding, ADVICE)?;
        sections.finish().step(decoding, ADVICE)?;
        Ok((state, diff))
    }

    fn take_sections(sections: &mut Sections<'_>) -> Result<Self, VmmError> {
        let step = decoding;
        let machine: MachineV1 = sections.take_version(MACHINE, VERSION).step(step, ADVICE)?;
        if !(1..=crate::microvm::VCPUS_MAX).contains(&machine.vcpus) {
            let problem = format!("{} vCPUs", machine.vcpus);
            return Err(VmmError::new(step(), ADVICE, problem));
        }
        let cpuid: Vec<kvm_cpuid_entry2> =
            sections.take_version(CPUID, VERSION).step(step, ADVICE)?;
        let cpuid = CpuId::from_entries(&cpuid)
            .map_err(|error| VmmError::new(step(), ADVICE, format!("CPUID: {error:?}")))?;
        let vm = sections.take_version(VM, VERSION).step(step, ADVICE)?;
        let serial: SerialV1 = sections.take_version(SERIAL, VERSION).step(step, ADVICE)?;
        let mut vcpus = Vec::with_capacity(machine.vcpus.into());
        for number in VCPU..VCPU + u16::from(machine.vcpus) {
            let kind = SectionKind(number);
            vcpus.push(sections.take_version(kind, VCPU_VERSION).step(step, ADVICE)?);
        }
        let mut devices = Vec::with_capacity(machine.devices.len());
        for (number, kind) in (0u16..).zip(machine.devices) {
            let transport = SectionKind(TRANSPORT.saturating_add(number));
            let transport = sections.take_version(transport, VERSION).step(step, ADVICE)?;
            let device = SectionKind(DEVICE.saturating_add(number));
            let (version, payload) = sections.take(device).step(step, ADVICE)?;
            let bytes = payload.to_vec();
            devices.push(DeviceRecord { kind, transport, version, bytes });
        }
        Ok(Self {
            backend: machine.backend,
            ram: RamSize::new(machine.memory_bytes).step(step, ADVICE)?,
            cpuid,
            vm,
            serial: serial.into(),
            vcpus,
            devices,
        })
    }
}

fn decoding() -> String {
    "decode the state of the microVM".to_owned()
}

impl From<&SerialState> for SerialV1 {
    fn from(state: &SerialState) -> Self {
        Self {
            baud_divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.in_buffer.clone(),
        }
    }
}

impl From<SerialV1> for SerialState {
    fn from(saved: SerialV1) -> Self {
        Self {
            baud_divisor_low: saved.baud_divisor[0],
            baud_divisor_high: saved.baud_divisor[1],
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line_control,
            line_status: saved.line_status,
            modem_control: saved.modem_control,
            modem_status: saved.modem_status,
            scratch: saved.scratch,
            in_buffer: saved.in_buffer,
        }
    }
}
