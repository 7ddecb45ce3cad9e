//! Putting a microVM together: cold from a configuration, or as a clone from a
//! template's state.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;
use warren_balloon::BalloonDevice;
use warren_virtio::VirtioDevice;
use warren_virtio::block::{
    BlockConfig, BlockDevice, DiskConfig, FlushPolicy, ImageAccess, ImageFile,
};
use warren_virtio::console::{ConsoleDevice, ConsoleLog};
use warren_virtio::net::{NetConfig, NetDevice, TapSource};
use warren_virtio::rng::RngDevice;
use warren_virtio::transport::{MmioTransport, TransportState};
use warren_virtio::vsock::{VsockConfig, VsockDevice};
use warren_vmm_api::{BootConfig, DiskMode, SpawnRequest};

use crate::arch::boot::Boot;
use crate::arch::cpuid::GuestCpuid;
use crate::arch::{Backend, backend};
use crate::checkpoint::{Frozen, Layers};
use crate::command_line;
use crate::devices::{self, Devices, Line};
use crate::error::{Step, VmmError};
use crate::events::Watch;
use crate::layout::DEVICE_LINES;
use crate::microvm::{CONSOLE_LOG, End, Microvm, Parts, VCPUS_MAX, VSOCK_SOCKET};
use crate::ram::{BuildRam, RamSize, TemplateRam};
use crate::reclaim::{DropPages, PunchHoles};
use crate::state::{DeviceKind, DeviceRecord, MicrovmState};
use crate::stats::KvmCounters;
use crate::vcpu::{GuestEnd, MsrIndices, PortLatch, RunContext, VcpuState};
use crate::vm;

/// Name of virtio-console's log in a microVM's directory.
const VIRTIO_CONSOLE_LOG: &str = "hvc0.log";
/// Most bytes of that log.
const VIRTIO_CONSOLE_LOG_BYTES_MAX: u64 = 1 << 20;

/// Runs a cold microVM to its end.
///
/// # Errors
/// The first step that failed.
pub fn boot(config: &Path) -> Result<ExitCode, VmmError> {
    let step = || format!("read configuration {}", config.display());
    let text = std::fs::read(config).step(step, "check the path")?;
    let config: BootConfig =
        serde_json::from_slice(&text).step(step, "see BootConfig in vmm/api for the fields")?;
    match serve(&mut assemble(&config)?) {
        Served::Ended(code) => Ok(code),
        Served::Frozen(_) => unreachable!("a booted microVM refuses checkpoints"),
    }
}

/// What came of serving a microVM.
pub enum Served {
    /// Its process ends with this code.
    Ended(ExitCode),
    /// This is the frozen process of a checkpoint; see [`End::Frozen`].
    Frozen(Box<Frozen>),
}

/// Serves a microVM until it ends.
pub fn serve(microvm: &mut Microvm) -> Served {
    Served::Ended(match microvm.serve() {
        Ok(End::Frozen(frozen)) => return Served::Frozen(frozen),
        Ok(End::Asked | End::Guest(GuestEnd::Asked(0))) => ExitCode::SUCCESS,
        Ok(End::Guest(GuestEnd::Asked(code))) => ExitCode::from(code),
        Ok(End::Guest(GuestEnd::Reset)) => {
            tracing::warn!("the guest reset its machine");
            ExitCode::SUCCESS
        }
        Ok(End::Guest(GuestEnd::Broken(problem))) => {
            tracing::error!(problem, "the microVM cannot go on");
            ExitCode::FAILURE
        }
        Err(error) => {
            tracing::error!(%error, "the event loop cannot go on");
            ExitCode::FAILURE
        }
    })
}

fn assemble(config: &BootConfig) -> Result<Microvm, VmmError> {
    let (ram, kinds) = check(config)?;
    let kvm = backend::open()?;
    let backend = backend::detect(&kvm)?;
    let build_ram = BuildRam::new(ram)
        .step(|| format!("get {} MiB of guest RAM", ram.bytes() >> 20), "free some memory")?;
    let memory = build_ram.memory().clone();
    let vm = Arc::new(vm::create(&kvm, &memory, backend)?);
    let cpuid = GuestCpuid::new(&kvm, backend, config.cpu_profile, config.vcpus)?;
    let vcpus = create_vcpus(&kvm, &vm, &cpuid, config.vcpus)?;
    let msr_indices = MsrIndices::readable(&kvm, &vcpus[0])?;
    let command_line = command_line::compose(backend, kinds.len(), &config.command_line);
    Boot {
        kernel: &config.kernel,
        command_line: &command_line,
        protocol: config.boot_protocol,
        ram,
        vcpus: config.vcpus,
    }
    .prepare(&memory, &vcpus[0])?;

    let watch = Watch::new().step(|| "make the event loop".to_owned(), "")?;
    let mut transports = Vec::with_capacity(kinds.len());
    for (index, kind) in (0u16..).zip(&kinds) {
        let device = new_device(kind, config, &build_ram)?;
        let transport = Placement::new(&vm, &watch, index).transport(device, &memory, None)?;
        transports.push(transport);
    }
    let serial = devices::serial(Arc::clone(&vm), &config.directory.join(CONSOLE_LOG));
    let parts =
        Assembly { vm, backend, ram, cpuid, msr_indices, watch, kinds, memory, vcpus: &vcpus }
            .finish(&config.id, &config.directory, transports, serial, Some(build_ram))?;
    let vcpus = vcpus.into_iter().map(|vcpu| (vcpu, PortLatch::default())).collect();
    Microvm::start(parts, vcpus)
}

/// Checks what `serde` cannot, and lists the devices.
fn check(config: &BootConfig) -> Result<(RamSize, Vec<DeviceKind>), VmmError> {
    let step = || "check the configuration".to_owned();
    let refuse = |problem: String, advice| Err(VmmError::new(step(), advice, problem));
    if !(1..=VCPUS_MAX).contains(&config.vcpus) {
        return refuse(format!("{} vCPUs", config.vcpus), "give 1 to 32 vCPUs");
    }
    let ram = RamSize::new(config.memory_bytes).step(step, "give memory in that range")?;
    if !config.directory.is_dir() {
        let problem = format!("{} is not a directory", config.directory.display());
        return refuse(problem, "make it first");
    }
    let mut kinds = Vec::new();
    for disk in &config.disks {
        let id_is_good = (1..=20).contains(&disk.id.len())
            && disk.id.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'));
        if !id_is_good {
            return refuse(
                format!("disk id {:?}", disk.id),
                "use 1 to 20 of a–z, 0–9 and - as a disk's id",
            );
        }
        let kind = match disk.mode {
            DiskMode::ReadOnly => DeviceKind::ReadOnlyDisk(disk.id.clone()),
            DiskMode::Writable => DeviceKind::WritableDisk(disk.id.clone()),
        };
        if kinds.contains(&kind) {
            return refuse(format!("disk id {:?} occurs twice", disk.id), "name each disk once");
        }
        kinds.push(kind);
    }
    kinds.extend([DeviceKind::Vsock, DeviceKind::Balloon, DeviceKind::Rng, DeviceKind::Console]);
    if let Some(net) = &config.net {
        kinds.push(DeviceKind::Net { tap: net.tap.clone(), mac: net.mac });
    }
    if kinds.len() > DEVICE_LINES.len() {
        let problem = format!("{} devices; there are {} lines", kinds.len(), DEVICE_LINES.len());
        return refuse(problem, "use fewer disks");
    }
    Ok((ram, kinds))
}

fn create_vcpus(
    kvm: &Kvm,
    vm: &VmFd,
    cpuid: &GuestCpuid,
    count: u8,
) -> Result<Vec<VcpuFd>, VmmError> {
    let run_bytes =
        kvm.get_vcpu_mmap_size().step(|| "ask for the size of a vCPU".to_owned(), "")?;
    (0..count)
        .map(|index| {
            let step = || format!("create vCPU {index}");
            let mut vcpu = vm.create_vcpu(index.into()).step(step, "")?;
            keep_from_forks(&mut vcpu, run_bytes).step(step, "")?;
            vcpu.set_cpuid2(&cpuid.of_vcpu(index)).step(step, "")?;
            Ok(vcpu)
        })
        .collect()
}

/// A frozen process must not inherit the mapping of a vCPU: it would keep the VM alive.
fn keep_from_forks(vcpu: &mut VcpuFd, run_bytes: usize) -> std::io::Result<()> {
    let run: *mut kvm_bindings::kvm_run = vcpu.get_kvm_run();
    // SAFETY: the range is the vCPU's own mapping; the advice changes what a fork copies
    // and nothing in this process.
    unsafe { Ok(rustix::mm::madvise(run.cast(), run_bytes, rustix::mm::Advice::LinuxDontFork)?) }
}

/// Where a device sits.
struct Placement<'a> {
    vm: &'a Arc<VmFd>,
    watch: &'a Watch,
    index: u16,
}

impl<'a> Placement<'a> {
    fn new(vm: &'a Arc<VmFd>, watch: &'a Watch, index: u16) -> Self {
        Self { vm, watch, index }
    }

    fn transport(
        &self,
        device: Box<dyn VirtioDevice>,
        memory: &GuestMemoryMmap,
        saved: Option<&TransportState>,
    ) -> Result<MmioTransport, VmmError> {
        let name = device.name().to_owned();
        let line = DEVICE_LINES[usize::from(self.index)];
        let line = Arc::new(Line::new(Arc::clone(self.vm), line));
        let events = Arc::new(self.watch.of_device(self.index));
        let memory = memory.clone();
        match saved {
            None => MmioTransport::new(device, memory, line, events),
            Some(state) => MmioTransport::restore(device, memory, line, events, state),
        }
        .step(|| format!("attach device {name}"), "")
    }
}

fn new_device(
    kind: &DeviceKind,
    config: &BootConfig,
    ram: &BuildRam,
) -> Result<Box<dyn VirtioDevice>, VmmError> {
    let step = || format!("make device {kind:?}");
    Ok(match kind {
        DeviceKind::ReadOnlyDisk(id) | DeviceKind::WritableDisk(id) => {
            let disk = config.disks.iter().find(|disk| disk.id == *id);
            let path = &disk.expect("kinds come from the configuration").path;
            let advice = "check the path and the size of the image";
            let disk = match kind {
                DeviceKind::WritableDisk(_) => DiskConfig::ReadWrite(
                    ImageFile::open(path, ImageAccess::ReadWrite).step(step, advice)?,
                ),
                _ => DiskConfig::ReadOnly(
                    ImageFile::open(path, ImageAccess::ReadOnly).step(step, advice)?,
                ),
            };
            let config = block_config(id, disk, FlushPolicy::Durable);
            Box::new(BlockDevice::new(config).step(step, advice)?)
        }
        DeviceKind::Vsock => {
            let config = vsock_config(&config.directory);
            let advice = "the directory must hold no such socket yet";
            Box::new(VsockDevice::new(config).step(step, advice)?)
        }
        DeviceKind::Rng => Box::new(RngDevice::new()),
        DeviceKind::Console => Box::new(ConsoleDevice::new(virtio_console_log(&config.directory))),
        DeviceKind::Balloon => {
            let puncher = ram.hole_puncher().step(step, "")?;
            Box::new(BalloonDevice::new(Box::new(PunchHoles(puncher))))
        }
        DeviceKind::Net { tap, mac } => {
            let advice = "make the TAP interface first: ip tuntap add NAME mode tap vnet_hdr";
            Box::new(NetDevice::new(net_config(tap, *mac)).step(step, advice)?)
        }
    })
}

fn restore_device(
    record: &DeviceRecord,
    memory: &GuestMemoryMmap,
    disks: &DiskFiles,
    request: &SpawnRequest,
) -> Result<Box<dyn VirtioDevice>, VmmError> {
    let step = || format!("restore device {:?}", record.kind);
    let advice = "build the template again";
    let (version, bytes) = (record.version, &record.bytes[..]);
    Ok(match &record.kind {
        DeviceKind::ReadOnlyDisk(id) => {
            let disk = DiskConfig::ReadOnly(disks.get(id)?);
            let config = block_config(id, disk, FlushPolicy::Acknowledge);
            Box::new(BlockDevice::restore(config, version, bytes).step(step, advice)?)
        }
        DeviceKind::WritableDisk(id) => {
            let layers = disks.layers(id);
            let delta = request.disks.get(id).ok_or("the request names no file for it");
            let delta = delta.step(step, "name a file for each writable disk")?.clone();
            let base = disks.get(id)?;
            let disk = DiskConfig::CopyOnWrite { base, layers, delta, bytes: None };
            let config = block_config(id, disk, FlushPolicy::Acknowledge);
            Box::new(BlockDevice::restore(config, version, bytes).step(step, advice)?)
        }
        DeviceKind::Vsock => {
            let config = vsock_config(&request.directory);
            Box::new(VsockDevice::restore(config, version, bytes).step(step, advice)?)
        }
        DeviceKind::Rng => Box::new(RngDevice::restore(version, bytes).step(step, advice)?),
        DeviceKind::Console => {
            let log = virtio_console_log(&request.directory);
            Box::new(ConsoleDevice::restore(log, version, bytes).step(step, advice)?)
        }
        DeviceKind::Balloon => {
            let reclaim = Box::new(DropPages(memory.clone()));
            Box::new(BalloonDevice::restore(reclaim, version, bytes).step(step, advice)?)
        }
        DeviceKind::Net { tap, mac } => {
            let config = net_config(tap, *mac);
            Box::new(NetDevice::restore(config, version, bytes).step(step, advice)?)
        }
    })
}

fn block_config(id: &str, disk: DiskConfig, flush: FlushPolicy) -> BlockConfig {
    BlockConfig { name: format!("block-{id}"), id: id.to_owned(), disk, flush }
}

fn vsock_config(directory: &Path) -> VsockConfig {
    VsockConfig::new(directory.join(VSOCK_SOCKET))
}

fn net_config(tap: &str, mac: [u8; 6]) -> NetConfig {
    NetConfig { name: "net".to_owned(), tap: TapSource::Name(tap.to_owned()), mac, mtu: None }
}

fn virtio_console_log(directory: &Path) -> Box<ConsoleLog> {
    let path = directory.join(VIRTIO_CONSOLE_LOG);
    Box::new(ConsoleLog::new(&path, VIRTIO_CONSOLE_LOG_BYTES_MAX))
}

/// Files of a template's disks, opened once for reading and shared by its clones.
#[derive(Debug)]
pub struct DiskFiles {
    bases: BTreeMap<String, ImageFile>,
    layers: Layers,
}

impl DiskFiles {
    /// Opens the file of each disk in `directory`.
    ///
    /// # Errors
    /// When one is missing or empty.
    pub fn open(directory: &Path, devices: &[DeviceRecord]) -> Result<Self, VmmError> {
        let mut files = BTreeMap::new();
        for record in devices {
            if let DeviceKind::ReadOnlyDisk(id) | DeviceKind::WritableDisk(id) = &record.kind {
                let path = directory.join(id);
                let step = || format!("open disk {}", path.display());
                let file = ImageFile::open(&path, ImageAccess::ReadOnly)
                    .step(step, "build the template again")?;
                files.insert(id.clone(), file);
            }
        }
        Ok(Self { bases: files, layers: Layers::new() })
    }

    fn get(&self, id: &str) -> Result<ImageFile, VmmError> {
        let file = self.bases.get(id).ok_or("no such file was opened");
        file.step(|| format!("use disk {id}"), "build the template again").cloned()
    }
}

impl DiskFiles {
    /// From now on the writable disks consist of these files above their bases.
    pub fn set_layers(&mut self, layers: Layers) {
        self.layers = layers;
    }

    /// Opens the layers that are named by their paths.
    ///
    /// # Errors
    /// When one is missing or empty.
    pub fn use_layers(&mut self, paths: &BTreeMap<String, Vec<PathBuf>>) -> Result<(), VmmError> {
        for (id, paths) in paths {
            let open = |path: &PathBuf| {
                let step = || format!("open disk layer {}", path.display());
                ImageFile::open(path, ImageAccess::ReadOnly)
                    .step(step, "the snapshot is gone or damaged")
            };
            let files = paths.iter().map(open).collect::<Result<_, _>>()?;
            self.layers.insert(id.clone(), files);
        }
        Ok(())
    }

    /// Every descriptor.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.bases.values().chain(self.layers.values().flatten()).map(AsFd::as_fd)
    }

    fn layers(&self, id: &str) -> Vec<ImageFile> {
        self.layers.get(id).cloned().unwrap_or_default()
    }
}

/// A clone's VM with its vCPUs as they were saved.
pub struct RestoredVm {
    vm: Arc<VmFd>,
    vcpus: Vec<VcpuFd>,
    cpuid: GuestCpuid,
}

/// First half of a birth: the VM and its vCPUs.
///
/// # Errors
/// When KVM refuses a step; it is named.
pub fn restore_vm(
    kvm: &Kvm,
    state: &MicrovmState,
    memory: &GuestMemoryMmap,
) -> Result<RestoredVm, VmmError> {
    let vm = Arc::new(vm::create(kvm, memory, state.backend)?);
    let count = u8::try_from(state.vcpus.len()).expect("at most 32 vCPUs");
    let cpuid = GuestCpuid::restore(state.cpuid.clone(), count);
    let vcpus = create_vcpus(kvm, &vm, &cpuid, count)?;
    for (vcpu, saved) in vcpus.iter().zip(&state.vcpus) {
        saved.restore_registers(vcpu)?;
    }
    state.vm.restore(&vm)?;
    for (vcpu, saved) in vcpus.iter().zip(&state.vcpus) {
        saved.restore_timers(vcpu, state.backend)?;
    }
    Ok(RestoredVm { vm, vcpus, cpuid })
}

/// Second half of a birth: devices and sockets; the vCPUs run when it returns.
///
/// # Errors
/// When a device's state is refused or a socket cannot be made.
pub fn restore_devices(
    restored: RestoredVm,
    state: &MicrovmState,
    ram: &TemplateRam,
    disks: &DiskFiles,
    request: &SpawnRequest,
) -> Result<Microvm, VmmError> {
    let RestoredVm { vm, vcpus, cpuid } = restored;
    let memory = ram.memory().clone();
    let watch = Watch::new().step(|| "make the event loop".to_owned(), "")?;
    let mut transports = Vec::with_capacity(state.devices.len());
    for (index, record) in (0u16..).zip(&state.devices) {
        let device = restore_device(record, &memory, disks, request)?;
        let placement = Placement::new(&vm, &watch, index);
        transports.push(placement.transport(device, &memory, Some(&record.transport))?);
    }
    let log = request.directory.join(CONSOLE_LOG);
    let serial = devices::restore_serial(Arc::clone(&vm), &log, &state.serial)?;
    let msr_indices = state.vcpus[0].msr_indices();
    let kinds = state.devices.iter().map(|record| record.kind.clone()).collect();
    let (backend, ram) = (state.backend, state.ram);
    let parts =
        Assembly { vm, backend, ram, cpuid, msr_indices, watch, kinds, memory, vcpus: &vcpus }
            .finish(&request.id, &request.directory, transports, serial, None)?;
    let latches = state.vcpus.iter().map(VcpuState::latch);
    Microvm::start(parts, vcpus.into_iter().zip(latches).collect())
}

/// What both ways have in common at their end.
struct Assembly<'a> {
    vm: Arc<VmFd>,
    backend: Backend,
    ram: RamSize,
    cpuid: GuestCpuid,
    msr_indices: MsrIndices,
    watch: Watch,
    kinds: Vec<DeviceKind>,
    memory: GuestMemoryMmap,
    vcpus: &'a [VcpuFd],
}

impl Assembly<'_> {
    fn finish(
        self,
        id: &str,
        directory: &Path,
        transports: Vec<MmioTransport>,
        serial: devices::SerialPort,
        build_ram: Option<BuildRam>,
    ) -> Result<Parts, VmmError> {
        let devices = Devices::new(Arc::clone(&self.vm), self.watch.clone(), transports, serial)
            .step(|| "attach the devices".to_owned(), "")?;
        let devices = Arc::new(devices);
        let ports = Box::new(Arc::clone(&devices));
        Ok(Parts {
            id: id.to_owned(),
            directory: directory.to_owned(),
            vm: self.vm,
            backend: self.backend,
            cpuid: self.cpuid,
            msr_indices: self.msr_indices,
            watch: self.watch,
            devices,
            kinds: self.kinds,
            context: Arc::new(RunContext::new(self.memory, ports)),
            ram: self.ram,
            kvm_stats: KvmCounters::of(self.vcpus),
            build_ram,
        })
    }
}
