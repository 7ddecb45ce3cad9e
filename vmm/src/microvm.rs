//! One microVM: its parts, and the main thread that serves them.
//!
//! ```text
//!  boot ──┐              pause            freeze, of a booted one
//!         ├─> running ──────────> paused ────────> frozen (files) ─> process ends
//!  birth ─┘      ^ └── guest ends ──┐ │
//!                └───── resume ─────┼─┘
//!                                   └─> process ends
//! ```

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use kvm_ioctls::{VcpuFd, VmFd};
use warren_virtio::Readiness;
use warren_vmm_api::{CheckpointRequest, Reply, VmState, VmStats, VmStatus, VmVerb};

use crate::arch::Backend;
use crate::arch::cpuid::GuestCpuid;
use crate::checkpoint::{self, Frozen, Taken};
use crate::control::Connections;
use crate::devices::Devices;
use crate::error::VmmError;
use crate::events::{Source, Watch};
use crate::freeze;
use crate::ram::{BuildRam, RamSize};
use crate::state::DeviceKind;
use crate::stats::{self, KvmCounters};
use crate::vcpu::{GuestEnd, MsrIndices, PortLatch, RunContext, Vcpu, VcpuState};

/// Most vCPUs of a microVM.
pub const VCPUS_MAX: u8 = 32;

/// Name of the control socket in a microVM's directory.
pub const CONTROL_SOCKET: &str = "control.sock";
/// Name of the vsock socket in a microVM's directory.
pub const VSOCK_SOCKET: &str = "vsock.sock";
/// Name of the console's log in a microVM's directory.
pub const CONSOLE_LOG: &str = "console.log";
/// Name of the VMM's own log in a microVM's directory.
pub const VMM_LOG: &str = "vmm.log";

/// What a microVM is made of.
pub struct Parts {
    /// Name for logs.
    pub id: String,
    /// Where its sockets are.
    pub directory: PathBuf,
    /// The KVM VM.
    pub vm: Arc<VmFd>,
    /// Back end it runs on.
    pub backend: Backend,
    /// CPUID of the vCPUs.
    pub cpuid: GuestCpuid,
    /// MSRs that make up a vCPU's state.
    pub msr_indices: MsrIndices,
    /// Where descriptors are watched.
    pub watch: Watch,
    /// Its devices.
    pub devices: Arc<Devices>,
    /// What the devices are, in order.
    pub kinds: Vec<DeviceKind>,
    /// What the vCPU threads share.
    pub context: Arc<RunContext>,
    /// Guest RAM size.
    pub ram: RamSize,
    /// KVM's own counters of the vCPUs.
    pub kvm_stats: KvmCounters,
    /// RAM from which a template can be saved; a clone has none.
    pub build_ram: Option<BuildRam>,
}

/// A microVM whose vCPUs have started.
pub struct Microvm {
    parts: Parts,
    vcpus: Vec<Vcpu>,
    control: Connections,
    state: VmState,
    freezing: Option<Freezing>,
    /// A checkpoint to be taken when the events at hand are served.
    checkpoint: Option<(u32, CheckpointRequest)>,
}

/// A freeze that waits for the guest to fall idle.
struct Freezing {
    client: u32,
    directory: PathBuf,
    since: Instant,
    next_look: Instant,
}

/// How a microVM's process ends.
pub enum End {
    /// A client asked for it, or the template is saved.
    Asked,
    /// The guest did.
    Guest(GuestEnd),
    /// It does not: this is the frozen process of a checkpoint. The microVM belongs to the
    /// process that was forked, and must be forgotten here.
    Frozen(Box<Frozen>),
}

impl Microvm {
    /// Opens the control socket and lets the vCPUs run.
    ///
    /// # Errors
    /// When the socket or a thread cannot be had.
    pub fn start(parts: Parts, vcpus: Vec<(VcpuFd, PortLatch)>) -> Result<Self, VmmError> {
        let control = Connections::new(&parts.directory.join(CONTROL_SOCKET), &parts.watch)?;
        let mut started = Vec::with_capacity(vcpus.len());
        for (index, (vcpu, latch)) in (0u8..).zip(vcpus) {
            started.push(Vcpu::start(index, vcpu, latch, Arc::clone(&parts.context))?);
        }
        Ok(Self {
            parts,
            vcpus: started,
            control,
            state: VmState::Running,
            freezing: None,
            checkpoint: None,
        })
    }

    /// Serves devices and clients until the guest or a client ends it.
    ///
    /// # Errors
    /// When the event loop itself fails.
    pub fn serve(&mut self) -> io::Result<End> {
        let watch = self.parts.watch.clone();
        loop {
            let mut end = None;
            let timeout = self
                .freezing
                .as_ref()
                .map(|freezing| freezing.next_look.saturating_duration_since(Instant::now()));
            watch.wait(timeout, |source, readiness| {
                end = end.take().or(self.dispatch(source, readiness));
            })?;
            self.look_at_freezing();
            if let Some(frozen) = self.take_checkpoint() {
                return Ok(End::Frozen(frozen));
            }
            if self.state == VmState::Stopping {
                end = end.or(Some(End::Asked));
            }
            if let Some(end) = end {
                self.control.unlink();
                return Ok(end);
            }
        }
    }

    fn dispatch(&mut self, source: Source, readiness: Readiness) -> Option<End> {
        match source {
            Source::Device { device, token } => {
                self.parts.devices.event(device, token, readiness);
            }
            Source::Queue { device, queue } => self.parts.devices.queue_notified(device, queue),
            Source::GuestEnd => return self.parts.devices.end().map(End::Guest),
            Source::ControlListener => self.control.accept(&self.parts.watch),
            Source::ControlConnection(client) => {
                if let Some(verb) = self.control.read(client) {
                    self.obey(client, verb);
                }
            }
        }
        None
    }

    fn obey(&mut self, client: u32, verb: VmVerb) {
        let done = match verb {
            VmVerb::Status => Ok(()),
            VmVerb::Stats => {
                let reply = match self.open_kvm_stats() {
                    Ok(()) => Reply::Ok(self.stats()),
                    Err(error) => Reply::Error(error.reply()),
                };
                return self.control.reply(client, &reply);
            }
            VmVerb::Checkpoint(request) => match &self.checkpoint {
                None => {
                    self.checkpoint = Some((client, request));
                    return;
                }
                Some(_) => {
                    Err(VmmError::new("take a checkpoint", "try again", "one is being taken"))
                }
            },
            VmVerb::Pause => self.pause().map(drop),
            VmVerb::Resume => self.resume(),
            VmVerb::Stop => {
                self.state = VmState::Stopping;
                Ok(())
            }
            VmVerb::Freeze { directory } => match self.may_freeze() {
                Ok(()) => {
                    let now = Instant::now();
                    let freezing = Freezing { client, directory, since: now, next_look: now };
                    self.freezing = Some(freezing);
                    return;
                }
                Err(error) => Err(error),
            },
        };
        self.answer(client, done);
    }

    fn answer(&mut self, client: u32, done: Result<(), VmmError>) {
        let reply = match done {
            Ok(()) => Reply::Ok(self.status()),
            Err(error) => Reply::Error(error.reply()),
        };
        self.control.reply(client, &reply);
    }

    /// As a client sees it.
    #[must_use]
    pub fn status(&self) -> VmStatus {
        VmStatus {
            id: self.parts.id.clone(),
            pid: std::process::id(),
            state: self.state,
            vcpus: u8::try_from(self.vcpus.len()).expect("at most 32 vCPUs"),
            memory_bytes: self.parts.ram.bytes(),
        }
    }

    fn open_kvm_stats(&mut self) -> Result<(), VmmError> {
        if self.parts.kvm_stats.is_open() {
            return Ok(());
        }
        let was = self.pause()?;
        self.parts.kvm_stats.open();
        self.go_back_to(was)
    }

    fn stats(&self) -> VmStats {
        VmStats {
            exits: self.parts.context.counters().read(),
            kvm: self.parts.kvm_stats.read(),
            private_bytes: stats::private_bytes(self.parts.context.memory()),
            devices: self.parts.devices.stats().into_iter().collect(),
        }
    }

    /// What the microVM is made of.
    #[must_use]
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Stops the vCPUs; tells whether they ran before.
    ///
    /// # Errors
    /// When a vCPU does not stop.
    pub fn pause(&mut self) -> Result<VmState, VmmError> {
        let was = self.state;
        if was == VmState::Running {
            for vcpu in &self.vcpus {
                vcpu.pause()?;
            }
            self.state = VmState::Paused;
        }
        Ok(was)
    }

    /// Lets the vCPUs run again if they did before [`Self::pause`].
    ///
    /// # Errors
    /// When a vCPU has ended.
    pub fn go_back_to(&mut self, was: VmState) -> Result<(), VmmError> {
        if was == VmState::Running { self.resume() } else { Ok(()) }
    }

    /// State of the vCPUs, which are paused.
    ///
    /// # Errors
    /// When KVM refuses a part of it.
    pub fn save_vcpus(&self) -> Result<Vec<VcpuState>, VmmError> {
        self.vcpus.iter().map(|vcpu| vcpu.save(&self.parts.msr_indices)).collect()
    }

    /// Takes the checkpoint that was asked for; comes back with what it left in the frozen
    /// process only.
    fn take_checkpoint(&mut self) -> Option<Box<Frozen>> {
        let (client, request) = self.checkpoint.take()?;
        let reply = match checkpoint::take(self, request) {
            Ok(Taken::Frozen(frozen)) => return Some(frozen),
            Ok(Taken::Clone(reply)) => Reply::Ok(reply),
            Err(error) => Reply::Error(error.reply()),
        };
        self.control.reply(client, &reply);
        None
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        if self.state == VmState::Paused {
            for vcpu in &self.vcpus {
                vcpu.resume()?;
            }
            self.state = VmState::Running;
        }
        Ok(())
    }

    fn may_freeze(&self) -> Result<(), VmmError> {
        let problem = match (&self.parts.build_ram, &self.freezing) {
            (None, _) => "this microVM is a clone; only one that was booted becomes a template",
            (Some(_), Some(_)) => "it is being frozen already",
            (Some(_), None) => return Ok(()),
        };
        Err(VmmError::new("freeze the microVM", "", problem))
    }

    /// Freezes when the guest has fallen idle, or at the latest after
    /// [`freeze::PATIENCE`].
    fn look_at_freezing(&mut self) {
        let Some(freezing) = self.freezing.take_if(|freezing| freezing.next_look <= Instant::now())
        else {
            return;
        };
        match self.freeze_if_idle(&freezing) {
            Ok(true) => {
                self.state = VmState::Stopping;
                self.answer(freezing.client, Ok(()));
            }
            Ok(false) => {
                let next_look = Instant::now() + freeze::LOOK_INTERVAL;
                self.freezing = Some(Freezing { next_look, ..freezing });
            }
            Err(error) => self.answer(freezing.client, Err(error)),
        }
    }

    fn freeze_if_idle(&mut self, freezing: &Freezing) -> Result<bool, VmmError> {
        self.pause()?;
        let vcpus = self.save_vcpus()?;
        let patience_is_over = freezing.since.elapsed() >= freeze::PATIENCE;
        let saved = if freeze::is_idle(&vcpus) || patience_is_over {
            freeze::save(&self.parts, vcpus, &freezing.directory).map(|()| true)
        } else {
            Ok(false)
        };
        match saved {
            Ok(true) => Ok(true),
            Ok(false) | Err(_) => self.resume().and(saved),
        }
    }
}
