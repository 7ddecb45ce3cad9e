//! A checkpoint: one `fork(2)` of a paused clone keeps the moment as a frozen process.
//!
//! ```text
//!  clone    running ─> pause ─> rest, save ─> fork ─> running
//!                                              └────> frozen: a template process
//! ```
//!
//! The pause costs page tables, not pages: RAM is shared copy-on-write between the clone
//! and the frozen process. What the child of the fork would inherit and must not use are
//! the clone's KVM VM (it would outlive the clone), its sockets and its event loop: all
//! descriptors are closed but those that a template process needs, and the values that
//! own them are forgotten, not dropped.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::pipe::PipeFlags;
use warren_virtio::block::{BlockDevice, ImageFile};
use warren_virtio::transport::MmioTransport;
use warren_vmm_api::{CheckpointReply, CheckpointRequest, CheckpointTimings};

use crate::control::ControlListener;
use crate::error::{Step, VmmError};
use crate::freeze;
use crate::microvm::{CONTROL_SOCKET, Microvm, Parts};
use crate::process::{self, Side};
use crate::state::{DeviceKind, MicrovmState};

/// Files above the template's, oldest first, of each writable disk.
pub type Layers = BTreeMap<String, Vec<ImageFile>>;

/// What the child of a checkpoint's fork goes on with.
pub struct Frozen {
    /// State of the microVM without its RAM.
    pub state: MicrovmState,
    /// Its disks.
    pub layers: Layers,
    /// Where it answers.
    pub listener: ControlListener,
    /// Where its log goes.
    pub directory: PathBuf,
    /// By this the clone learns that the frozen process serves.
    pub ready: OwnedFd,
}

/// Longest that a frozen process takes to serve; a loaded host may be slow to run it.
const READY_TIMEOUT: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };

/// Where a checkpoint was taken.
pub enum Taken {
    /// In the clone, which runs on.
    Clone(CheckpointReply),
    /// In the frozen process.
    Frozen(Box<Frozen>),
}

/// Takes a checkpoint of a microVM.
///
/// # Errors
/// When it is no clone, a file is not named or a step fails; the microVM then goes on as
/// before.
pub fn take(microvm: &mut Microvm, request: CheckpointRequest) -> Result<Taken, VmmError> {
    check(microvm.parts(), &request)?;
    let listener = ControlListener::bind(&request.directory.join(CONTROL_SOCKET))?;
    let step = || "make a pipe to the frozen process".to_owned();
    let (serves, ready) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step(step, "")?;
    let began = Instant::now();
    let was = microvm.pause()?;
    let reply = match freeze_and_fork(microvm, request, (listener, ready), began) {
        Ok(Taken::Frozen(frozen)) => return Ok(Taken::Frozen(frozen)),
        Ok(Taken::Clone(reply)) => Ok(reply),
        Err(error) => Err(error),
    };
    // A microVM that a client had paused stays so.
    microvm.go_back_to(was)?;
    let mut reply = reply?;
    reply.timings.pause_us = process::microseconds(began);
    await_frozen(&serves)?;
    Ok(Taken::Clone(reply))
}

/// The frozen process must be the one that listens before anyone asks who does.
fn await_frozen(serves: &OwnedFd) -> Result<(), VmmError> {
    let step = || "wait for the frozen process".to_owned();
    let mut waiting = [PollFd::new(serves, PollFlags::IN)];
    let come = rustix::event::poll(&mut waiting, Some(&READY_TIMEOUT)).step(step, "")?;
    let told = match come {
        0 => 0,
        _ => rustix::io::read(serves, &mut [0]).step(step, "")?,
    };
    match told {
        0 => Err(VmmError::new(step(), "see vmm.log in its directory", "it does not serve")),
        _ => Ok(()),
    }
}

fn check(parts: &Parts, request: &CheckpointRequest) -> Result<(), VmmError> {
    let refuse = |problem: String, advice| Err(VmmError::new("take a checkpoint", advice, problem));
    if parts.build_ram.is_some() {
        return refuse("this microVM was booted".to_owned(), "freeze it into a template");
    }
    for kind in &parts.kinds {
        if let DeviceKind::WritableDisk(id) = kind
            && !request.disks.contains_key(id)
        {
            let problem = format!("no file is named for disk {id}");
            return refuse(problem, "name a file for each writable disk");
        }
    }
    Ok(())
}

fn freeze_and_fork(
    microvm: &mut Microvm,
    mut request: CheckpointRequest,
    (listener, ready): (ControlListener, OwnedFd),
    began: Instant,
) -> Result<Taken, VmmError> {
    let stop_us = process::microseconds(began);
    let vcpus = microvm.save_vcpus()?;
    let parts = microvm.parts();
    parts.devices.for_each(MmioTransport::quiesce);
    let layers = end_deltas(parts, &mut request.disks)?;
    let state = freeze::collect(parts, vcpus)?;
    let saved = process::microseconds(began);
    let side = process::fork().step(
        || "fork the frozen process".to_owned(),
        "the host may be out of memory or processes",
    )?;
    let pid = match side {
        Side::Child => {
            let directory = request.directory;
            let frozen = Frozen { state, layers, listener, directory, ready };
            return Ok(Taken::Frozen(Box::new(frozen)));
        }
        Side::Parent(pid) => pid,
    };
    let timings = CheckpointTimings {
        stop_us,
        save_us: saved - stop_us,
        fork_us: process::microseconds(began) - saved,
        ..CheckpointTimings::default()
    };
    let paths = |files: Vec<ImageFile>| files.iter().map(|file| file.path().to_owned()).collect();
    let layers = layers.into_iter().map(|(id, files)| (id, paths(files))).collect();
    Ok(Taken::Clone(CheckpointReply { pid, layers, timings }))
}

/// Ends the delta of every writable disk; tells of what the disks then consist.
fn end_deltas(parts: &Parts, next: &mut BTreeMap<String, PathBuf>) -> Result<Layers, VmmError> {
    let mut layers = Layers::new();
    let mut result = Ok(());
    let mut kinds = parts.kinds.iter();
    parts.devices.for_each(|transport| {
        let (Some(DeviceKind::WritableDisk(id)), Some(disk)) =
            (kinds.next(), transport.device::<BlockDevice>())
        else {
            return;
        };
        let Some(delta) = next.remove(id) else { return };
        match disk.end_delta(delta) {
            Ok(()) => drop(layers.insert(id.clone(), disk.layers())),
            Err(error) => {
                let advice = "look after the files of this sandbox";
                let error = VmmError::new(format!("end the delta of disk {id}"), advice, error);
                result = Err(error);
            }
        }
    });
    result.map(|()| layers)
}
