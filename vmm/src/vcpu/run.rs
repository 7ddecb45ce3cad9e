//! Running the guest, and serving what it stops for.

use std::sync::atomic::{AtomicU64, Ordering};

use kvm_ioctls::{VcpuExit, VcpuFd};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use warren_vmm_api::ExitStats;

use crate::complete;
use crate::layout::{
    COPY_DESTINATION_PORT, COPY_SOURCE_PORT, END_PORT, KEYBOARD_COMMAND_PORT, PAGE_BYTES,
    SERIAL_PORTS, ZERO_PAGE_PORT,
};

/// Bytes of a guest page.
const PAGE: usize = PAGE_BYTES as usize;
/// "Pulse the reset line" of the keyboard controller.
const KEYBOARD_RESET: u8 = 0xfe;

/// Why the guest ran its last instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestEnd {
    /// The guest asked for it, with this code.
    Asked(u8),
    /// The guest reset the machine or its CPU shut down.
    Reset,
    /// KVM or the VMM cannot go on.
    Broken(String),
}

/// Devices as the vCPU threads see them.
pub trait GuestPorts: Send + Sync {
    /// The guest reads device registers.
    fn mmio_read(&self, address: u64, data: &mut [u8]);
    /// The guest writes device registers.
    fn mmio_write(&self, address: u64, data: &[u8]);
    /// The guest reads a register (0–7) of the serial console.
    fn serial_read(&self, register: u8) -> u8;
    /// The guest writes a register (0–7) of the serial console.
    fn serial_write(&self, register: u8, value: u8);
    /// A vCPU ended; called once per vCPU at the most.
    fn guest_ended(&self, end: GuestEnd);
}

/// Exits to user space, by cause.
#[derive(Debug, Default)]
pub struct Counters {
    serial: AtomicU64,
    page_operations: AtomicU64,
    port: AtomicU64,
    mmio: AtomicU64,
    completed_instructions: AtomicU64,
    interrupted: AtomicU64,
    other: AtomicU64,
}

impl Counters {
    /// Values at this moment.
    #[must_use]
    pub fn read(&self) -> ExitStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ExitStats {
            serial: get(&self.serial),
            page_operations: get(&self.page_operations),
            port: get(&self.port),
            mmio: get(&self.mmio),
            completed_instructions: get(&self.completed_instructions),
            interrupted: get(&self.interrupted),
            other: get(&self.other),
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What all vCPU threads of a microVM share.
pub struct RunContext {
    memory: GuestMemoryMmap,
    ports: Box<dyn GuestPorts>,
    counters: Counters,
}

/// What one vCPU's port writes leave behind. Part of its state: a snapshot may fall
/// between the two writes that copy a page.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct PortLatch {
    copy_source: u32,
}

/// Why [`until`] came back.
pub(super) enum Stop {
    Asked,
    Ended(GuestEnd),
}

impl RunContext {
    /// For a microVM with this RAM and these devices.
    #[must_use]
    pub fn new(memory: GuestMemoryMmap, ports: Box<dyn GuestPorts>) -> Self {
        Self { memory, ports, counters: Counters::default() }
    }

    /// Guest RAM.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Exits so far.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(super) fn guest_ended(&self, end: GuestEnd) {
        self.ports.guest_ended(end);
    }

    fn port_write(&self, latch: &mut PortLatch, port: u16, data: &[u8]) -> Option<GuestEnd> {
        match (port, data) {
            (ZERO_PAGE_PORT, &[a, b, c, d]) => {
                count(&self.counters.page_operations);
                self.zero_page(u32::from_le_bytes([a, b, c, d]));
            }
            (COPY_SOURCE_PORT, &[a, b, c, d]) => {
                count(&self.counters.page_operations);
                latch.copy_source = u32::from_le_bytes([a, b, c, d]);
            }
            (COPY_DESTINATION_PORT, &[a, b, c, d]) => {
                count(&self.counters.page_operations);
                self.copy_page(latch.copy_source, u32::from_le_bytes([a, b, c, d]));
            }
            (END_PORT, &[code]) => return Some(GuestEnd::Asked(code)),
            (KEYBOARD_COMMAND_PORT, &[KEYBOARD_RESET]) => return Some(GuestEnd::Reset),
            (port, data) if SERIAL_PORTS.contains(&port) => {
                count(&self.counters.serial);
                let register = serial_register(port);
                data.iter().for_each(|byte| self.ports.serial_write(register, *byte));
            }
            _ => count(&self.counters.port),
        }
        None
    }

    fn port_read(&self, port: u16, data: &mut [u8]) {
        if SERIAL_PORTS.contains(&port) {
            count(&self.counters.serial);
            let register = serial_register(port);
            data.iter_mut().for_each(|byte| *byte = self.ports.serial_read(register));
            return;
        }
        count(&self.counters.port);
        // Nothing is there; the keyboard controller alone is always ready.
        data.fill(if port == KEYBOARD_COMMAND_PORT { 0 } else { 0xff });
    }

    /// A frame that is not RAM is ignored: the guest only harms itself.
    fn zero_page(&self, frame: u32) {
        let at = GuestAddress(u64::from(frame) * PAGE_BYTES);
        if let Err(error) = self.memory.write_slice(&[0; PAGE], at) {
            tracing::debug!(%error, frame, "page not zeroed");
        }
    }

    fn copy_page(&self, source: u32, destination: u32) {
        let from = GuestAddress(u64::from(source) * PAGE_BYTES);
        let to = GuestAddress(u64::from(destination) * PAGE_BYTES);
        let mut page = [0; PAGE];
        let copied = self
            .memory
            .read_slice(&mut page, from)
            .and_then(|()| self.memory.write_slice(&page, to));
        if let Err(error) = copied {
            tracing::debug!(%error, destination, "page not copied");
        }
    }
}

fn serial_register(port: u16) -> u8 {
    u8::try_from(port - SERIAL_PORTS.start).expect("the range has eight ports")
}

/// Runs the guest until it ends or `asked` is true.
pub(super) fn until(
    vcpu: &mut VcpuFd,
    context: &RunContext,
    latch: &mut PortLatch,
    asked: impl Fn() -> bool,
) -> Stop {
    let counters = &context.counters;
    while !asked() {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(port, data)) => {
                if let Some(end) = context.port_write(latch, port, data) {
                    return Stop::Ended(end);
                }
            }
            Ok(VcpuExit::IoIn(port, data)) => context.port_read(port, data),
            Ok(VcpuExit::MmioRead(address, data)) => {
                count(&counters.mmio);
                context.ports.mmio_read(address, data);
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                count(&counters.mmio);
                context.ports.mmio_write(address, data);
            }
            Ok(VcpuExit::InternalError) => {
                count(&counters.completed_instructions);
                if let Err(error) = complete::complete(vcpu, &context.memory) {
                    return Stop::Ended(GuestEnd::Broken(error.to_string()));
                }
            }
            Ok(VcpuExit::Intr) => interrupted(vcpu, counters),
            Ok(VcpuExit::Shutdown | VcpuExit::SystemEvent(..)) => {
                return Stop::Ended(GuestEnd::Reset);
            }
            Ok(VcpuExit::Hlt | VcpuExit::IrqWindowOpen | VcpuExit::IoapicEoi(_)) => {
                count(&counters.other);
            }
            Ok(other) => return Stop::Ended(GuestEnd::Broken(format!("vCPU stopped: {other:?}"))),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                interrupted(vcpu, counters);
            }
            Err(error) => return Stop::Ended(GuestEnd::Broken(format!("run vCPU: {error}"))),
        }
    }
    Stop::Asked
}

fn interrupted(vcpu: &mut VcpuFd, counters: &Counters) {
    vcpu.set_kvm_immediate_exit(0);
    count(&counters.interrupted);
}

/// Lets KVM finish a port or MMIO exit whose data we have given, without entering the
/// guest: state saved before that would repeat the access.
pub(super) fn finish_exit(vcpu: &mut VcpuFd) {
    vcpu.set_kvm_immediate_exit(1);
    match vcpu.run() {
        Err(error) if error.errno() == libc::EINTR => {}
        other => tracing::warn!(?other, "vCPU ran when it should only finish an exit"),
    }
    vcpu.set_kvm_immediate_exit(0);
}
