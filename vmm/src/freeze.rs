//! From a booted microVM to the files of a template, and from a frozen process to those of
//! a snapshot.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use vm_memory::GuestMemoryMmap;
use warren_virtio::transport::MmioTransport;

use crate::error::{Step, VmmError};
use crate::microvm::Parts;
use crate::ram::RamDiff;
use crate::state::{DeviceRecord, MicrovmState};
use crate::vcpu::VcpuState;
use crate::vm::VmStateV1;

/// Name of the state file in a template's directory.
pub const STATE_FILE: &str = "state";
/// Name of the RAM image in a template's directory.
pub const MEMORY_FILE: &str = "memory";

/// Name of the file with a snapshot's pages.
pub const PAGES_FILE: &str = "pages";

const DISK_ADVICE: &str = "check that the directory exists and that the disk has room";

/// How often the guest is looked at while it is not idle yet.
pub const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// After this long a busy guest is frozen all the same: its clones then begin with
/// what it was doing, which is slower but right.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A guest is idle when its next timer is at least this many TSC ticks away: a
/// fifth of a second or more on any CPU of the last decade.
const QUIET_TICKS: u64 = 1_000_000_000;

/// All vCPUs wait, and no timer is about to fire.
#[must_use]
pub fn is_idle(vcpus: &[VcpuState]) -> bool {
    vcpus.iter().all(|vcpu| {
        let quiet = match (vcpu.tsc_deadline(), vcpu.tsc()) {
            (None, _) => true,
            (Some(deadline), Some(now)) => deadline.saturating_sub(now) >= QUIET_TICKS,
            (Some(_), None) => false,
        };
        vcpu.is_waiting() && quiet
    })
}

/// All state of a paused microVM but its RAM. Its devices are at rest.
///
/// # Errors
/// When a part cannot be saved.
pub fn collect(parts: &Parts, vcpus: Vec<VcpuState>) -> Result<MicrovmState, VmmError> {
    let mut devices = Vec::with_capacity(parts.kinds.len());
    let mut kinds = parts.kinds.iter();
    parts.devices.for_each(|transport| {
        let (version, bytes) = transport.save_device();
        let kind = kinds.next().expect("one kind per device").clone();
        devices.push(DeviceRecord { kind, transport: transport.save(), version, bytes });
    });
    Ok(MicrovmState {
        backend: parts.backend,
        ram: parts.ram,
        cpuid: parts.cpuid.entries().clone(),
        // After the devices: quiescing may raise interrupts.
        vm: VmStateV1::save(&parts.vm)?,
        serial: parts.devices.with_serial(|serial| serial.state()),
        vcpus,
        devices,
    })
}

/// Writes state and RAM of a paused microVM into `directory`.
///
/// # Errors
/// When a part cannot be saved or a file not be written.
pub fn save(parts: &Parts, vcpus: Vec<VcpuState>, directory: &Path) -> Result<(), VmmError> {
    let Some(ram) = &parts.build_ram else {
        return Err(VmmError::new("save a template", "", "this microVM is a clone"));
    };
    parts.devices.for_each(MmioTransport::quiesce);
    let state = collect(parts, vcpus)?;
    let path = directory.join(MEMORY_FILE);
    let step = || format!("write RAM image {}", path.display());
    let file = File::create(&path).step(step, DISK_ADVICE)?;
    ram.save(&file).step(step, DISK_ADVICE)?;
    file.sync_all().step(step, DISK_ADVICE)?;

    write_state(directory, &state.encode(None)?)
}

/// Writes the moment of a frozen process: state, and the pages that are not its
/// template's. Returns the bytes of the pages.
///
/// # Errors
/// When a file cannot be written.
pub fn save_snapshot(
    state: &MicrovmState,
    template: [u8; 32],
    memory: &GuestMemoryMmap,
    directory: &Path,
) -> Result<u64, VmmError> {
    let path = directory.join(PAGES_FILE);
    let step = || format!("write pages {}", path.display());
    let file = File::create(&path).step(step, DISK_ADVICE)?;
    let diff = RamDiff::save(template, memory, &file).step(step, DISK_ADVICE)?;
    file.sync_all().step(step, DISK_ADVICE)?;
    write_state(directory, &state.encode(Some(&diff))?)?;
    let step = || format!("make directory {} durable", directory.display());
    let made = File::open(directory).and_then(|directory| directory.sync_all());
    made.step(step, DISK_ADVICE)?;
    Ok(diff.bytes())
}

fn write_state(directory: &Path, bytes: &[u8]) -> Result<(), VmmError> {
    let path = directory.join(STATE_FILE);
    let step = || format!("write state file {}", path.display());
    let mut file = File::create(&path).step(step, DISK_ADVICE)?;
    file.write_all(bytes).step(step, DISK_ADVICE)?;
    file.sync_all().step(step, DISK_ADVICE)
}
