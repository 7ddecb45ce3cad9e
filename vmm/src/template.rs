//! The template process, and the birth of clones by fork.
//!
//! ```text
//!  template: load files ─> wait ──spawn──> fork ─┐
//!                           ^────────────────────┤
//!                                                └─> clone: VM, vCPUs, devices, reply,
//!                                                    event loop, end of process
//! ```
//!
//! The template process has one thread, no KVM VM, and no open connection when it forks
//! but the one that asked. What a clone would inherit and must not use is closed in it
//! at once: the template's socket. Nothing else is shared but what is never written: the
//! sealed RAM image and the files of read-only disks.

use std::fs::File;
use std::io::BufReader;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use kvm_ioctls::Kvm;
use serde::Serialize;
use warren_vmm_api::{
    Reply, SaveReply, SpawnReply, SpawnRequest, SpawnTimings, TemplateStatus, TemplateVerb,
};

use crate::arch::backend;
use crate::checkpoint::Frozen;
use crate::control::{self, ControlListener, Incoming};
use crate::error::{Step, VmmError};
use crate::freeze::{self, MEMORY_FILE, PAGES_FILE, STATE_FILE};
use crate::log;
use crate::machine::{self, DiskFiles, Served};
use crate::microvm::{Microvm, VMM_LOG};
use crate::process::{self, Side, microseconds};
use crate::ram::TemplateRam;
use crate::state::MicrovmState;

/// Longest state file that is read.
const STATE_BYTES_MAX: u64 = 64 << 20;

/// A clone to be born in this process, which was forked for it.
struct Birth {
    request: SpawnRequest,
    stream: BufReader<UnixStream>,
    asked: Instant,
}

/// What came of a clone.
enum Life {
    /// It ended.
    Ended(ExitCode),
    /// This is the frozen process of a checkpoint of it, and listens here.
    Frozen(ControlListener),
}

/// A frozen microVM, ready to give birth.
pub struct Template {
    kvm: Kvm,
    state: MicrovmState,
    ram: TemplateRam,
    disks: DiskFiles,
    /// BLAKE3 of the state file: a snapshot belongs to one template.
    identity: [u8; 32],
    /// The moment is a clone's, not the template's own.
    is_checkpoint: bool,
    spawned: u64,
}

impl Template {
    /// Loads the files of a template.
    ///
    /// # Errors
    /// When a file is missing or damaged, was made on another back end, or memory is
    /// short.
    pub fn load(directory: &Path) -> Result<Self, VmmError> {
        let advice = "build the template again";
        let bytes = read_state(directory, advice)?;
        let identity = *blake3::hash(&bytes).as_bytes();
        let state = MicrovmState::decode(&bytes)?;
        let kvm = backend::open()?;
        let backend = backend::detect(&kvm)?;
        if backend != state.backend {
            return Err(VmmError::new(
                format!("use template {}", directory.display()),
                "build the template on this host",
                format!("it was made on {:?} KVM, this host has {backend:?} KVM", state.backend),
            ));
        }
        let path = directory.join(MEMORY_FILE);
        let ram = TemplateRam::load(&path, state.ram)
            .step(|| format!("load RAM image {}", path.display()), advice)?;
        let disks = DiskFiles::open(directory, &state.devices)?;
        Ok(Self { kvm, state, ram, disks, identity, is_checkpoint: false, spawned: 0 })
    }

    /// Serves `socket` until a client says stop. In a clone it comes back with the
    /// clone's exit code.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn serve(mut self, socket: &Path) -> Result<ExitCode, VmmError> {
        let mut listener = ControlListener::bind(socket)?;
        ignore_dead_children().step(|| "ignore the end of clones".to_owned(), "")?;
        // Each turn is the life of a template process and, in a clone, of the clone; a
        // clone of which a checkpoint was taken is a template in the frozen process.
        while let Some(birth) = self.wait(&listener) {
            drop(listener);
            listener = match self.live(birth) {
                Life::Ended(code) => return Ok(code),
                Life::Frozen(listener) => listener,
            };
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Serves a template's clients. Comes back in a clone, to be born, or at the end.
    fn wait(&mut self, listener: &ControlListener) -> Option<Birth> {
        loop {
            let stream = match listener.accept() {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::warn!(%error, "connection not accepted");
                    std::thread::sleep(std::time::Duration::from_millis(10));
                    continue;
                }
            };
            let mut stream = BufReader::with_capacity(4096, stream);
            match control::read_request(&mut stream) {
                Incoming::Verb(TemplateVerb::Status) => {
                    answer(&mut stream, &Reply::Ok(self.status()));
                }
                Incoming::Verb(TemplateVerb::Save { directory }) => {
                    let reply = match self.save(&directory) {
                        Ok(reply) => Reply::Ok(reply),
                        Err(error) => Reply::Error(error.reply()),
                    };
                    answer(&mut stream, &reply);
                }
                Incoming::Verb(TemplateVerb::Stop) => {
                    listener.unlink();
                    answer(&mut stream, &Reply::Ok(self.status()));
                    return None;
                }
                Incoming::Verb(TemplateVerb::Spawn(request)) => {
                    let asked = Instant::now();
                    match process::fork() {
                        Ok(Side::Parent(_)) => self.spawned += 1,
                        Ok(Side::Child) => return Some(Birth { request, stream, asked }),
                        Err(error) => {
                            let advice = "the host may be out of memory or processes";
                            let error = VmmError::new("fork a clone", advice, error);
                            answer(&mut stream, &Reply::<()>::Error(error.reply()));
                        }
                    }
                }
                Incoming::Refused(error) => answer(&mut stream, &Reply::<()>::Error(error)),
                Incoming::Closed => {}
            }
        }
    }

    fn save(&self, directory: &Path) -> Result<SaveReply, VmmError> {
        if !self.is_checkpoint {
            return Err(VmmError::new(
                "save a snapshot",
                "take a checkpoint of a clone and save that",
                "this is a template: its files are there already",
            ));
        }
        let began = Instant::now();
        let memory = self.ram.memory();
        let page_bytes = freeze::save_snapshot(&self.state, self.identity, memory, directory)?;
        Ok(SaveReply { page_bytes, save_us: microseconds(began) })
    }

    fn status(&self) -> TemplateStatus {
        TemplateStatus {
            pid: std::process::id(),
            spawned: self.spawned,
            vcpus: u8::try_from(self.state.vcpus.len()).expect("at most 32 vCPUs"),
            memory_bytes: self.state.ram.bytes(),
            image_bytes: self.ram.image_bytes(),
        }
    }

    /// Life of a clone, in its own process.
    fn live(&mut self, birth: Birth) -> Life {
        let Birth { request, mut stream, asked } = birth;
        let fork_us = microseconds(asked);
        log::redirect(request.directory.join(VMM_LOG));
        let (mut microvm, timings) = match self.birth(&request, asked) {
            Ok(born) => born,
            Err(error) => {
                answer(&mut stream, &Reply::<()>::Error(error.reply()));
                return Life::Ended(ExitCode::FAILURE);
            }
        };
        let timings = SpawnTimings { fork_us, total_us: microseconds(asked), ..timings };
        answer(&mut stream, &Reply::Ok(SpawnReply { pid: std::process::id(), timings }));
        drop(stream);
        match machine::serve(&mut microvm) {
            Served::Ended(code) => Life::Ended(code),
            Served::Frozen(frozen) => {
                // It is the clone's, not ours; what it would close is the clone's too.
                std::mem::forget(microvm);
                match self.freeze(*frozen) {
                    Ok(listener) => Life::Frozen(listener),
                    Err(error) => {
                        tracing::error!(%error, "the frozen process cannot go on");
                        Life::Ended(ExitCode::FAILURE)
                    }
                }
            }
        }
    }

    /// Makes this process, which was forked off a clone, the template of that moment.
    fn freeze(&mut self, frozen: Frozen) -> Result<ControlListener, VmmError> {
        log::redirect(frozen.directory.join(VMM_LOG));
        self.state = frozen.state;
        self.is_checkpoint = true;
        self.disks.set_layers(frozen.layers);
        self.spawned = 0;
        let mut keep = vec![
            self.kvm.as_raw_fd(),
            frozen.listener.as_fd().as_raw_fd(),
            frozen.ready.as_raw_fd(),
        ];
        keep.extend(self.disks.descriptors().map(|fd| fd.as_raw_fd()));
        // SAFETY: of this process's values only the template's own, whose descriptors are
        // all named, are used from here on: the clone's were forgotten.
        unsafe { process::close_all_but(&keep) }
            .step(|| "close the clone's descriptors".to_owned(), "")?;
        rustix::process::setsid().step(|| "start a session".to_owned(), "")?;
        frozen.listener.take_over().step(|| "listen as the frozen process".to_owned(), "")?;
        rustix::io::write(&frozen.ready, &[1]).step(|| "tell that it serves".to_owned(), "")?;
        Ok(frozen.listener)
    }

    /// Makes the moment of a snapshot this process's own, in which a clone is about to be
    /// born from it.
    fn go_to(&mut self, directory: &Path) -> Result<(), VmmError> {
        const ADVICE: &str = "resume the snapshot from the template that it was taken of";
        let step = || format!("resume the snapshot in {}", directory.display());
        if self.is_checkpoint {
            return Err(VmmError::new(step(), ADVICE, "this process is a checkpoint itself"));
        }
        let bytes = read_state(directory, "the snapshot is gone or damaged")?;
        let (state, diff) = MicrovmState::decode_snapshot(&bytes)?;
        if diff.template != self.identity {
            return Err(VmmError::new(step(), ADVICE, "it was taken of another template"));
        }
        let path = directory.join(PAGES_FILE);
        let step = || format!("load the pages {}", path.display());
        let file = File::open(&path).step(step, "the snapshot is gone or damaged")?;
        diff.load(self.ram.memory(), &file).step(step, "the snapshot is gone or damaged")?;
        self.state = state;
        Ok(())
    }

    fn birth(
        &mut self,
        request: &SpawnRequest,
        asked: Instant,
    ) -> Result<(Microvm, SpawnTimings), VmmError> {
        rustix::process::setsid().step(|| "start a session".to_owned(), "")?;
        if let Some(directory) = &request.snapshot {
            self.go_to(directory)?;
        }
        self.disks.use_layers(&request.layers)?;
        let began = microseconds(asked);
        let vm = machine::restore_vm(&self.kvm, &self.state, self.ram.memory())?;
        let vm_us = microseconds(asked) - began;
        let microvm = machine::restore_devices(vm, &self.state, &self.ram, &self.disks, request)?;
        let devices_us = microseconds(asked) - began - vm_us;
        Ok((microvm, SpawnTimings { vm_us, devices_us, ..Default::default() }))
    }
}

fn read_state(directory: &Path, advice: &'static str) -> Result<Vec<u8>, VmmError> {
    let path = directory.join(STATE_FILE);
    let step = || format!("read state file {}", path.display());
    let length = std::fs::metadata(&path).step(step, advice)?.len();
    if length > STATE_BYTES_MAX {
        let problem = format!("{length} bytes are too many");
        return Err(VmmError::new(step(), advice, problem));
    }
    std::fs::read(&path).step(step, advice)
}

/// Clones are reaped by the kernel; the node watches them by pidfd.
fn ignore_dead_children() -> std::io::Result<()> {
    // SAFETY: ignoring a signal installs no handler.
    match unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) } {
        libc::SIG_ERR => Err(std::io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn answer<T: Serialize>(stream: &mut BufReader<UnixStream>, reply: &Reply<T>) {
    if let Err(error) = control::write_reply(stream, reply) {
        tracing::debug!(%error, "client gone before its reply");
    }
}
