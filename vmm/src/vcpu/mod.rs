//! A vCPU and the thread that runs it.
//!
//! ```text
//!            start                     pause
//!  created ────────> running ────────────────────> paused
//!                      ^ │                          │ ^ │
//!                      │ └── guest ends ──> ended   │ │ └─ save ─┐
//!                      └────────── resume ──────────┘ └──────────┘
//! ```
//!
//! Other threads ask through [`Vcpu`]; the thread alone touches the vCPU. A request that
//! finds it inside `KVM_RUN` interrupts it by a signal whose handler sets
//! `immediate_exit`, so that no kick is lost between the check and the entry.

mod kick;
mod run;
mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_ioctls::VcpuFd;

use crate::error::{Step, VmmError};

pub use run::{GuestEnd, GuestPorts, PortLatch, RunContext};
pub use state::{MsrIndices, VcpuState};

/// What the thread should do next. Written by others, read by the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Intent {
    Run = 0,
    Pause = 1,
}

/// Shared between the thread and its owner.
#[derive(Debug, Default)]
struct Signal(AtomicU8);

impl Signal {
    fn set(&self, intent: Intent) {
        self.0.store(intent as u8, Ordering::Release);
    }

    fn wants_pause(&self) -> bool {
        self.0.load(Ordering::Acquire) == Intent::Pause as u8
    }
}

enum Command {
    Save(MsrIndices),
    Resume,
}

enum Answer {
    Paused,
    Saved(Box<Result<VcpuState, VmmError>>),
}

/// Handle to a running vCPU.
#[derive(Debug)]
pub struct Vcpu {
    index: u8,
    signal: Arc<Signal>,
    commands: SyncSender<Command>,
    answers: Receiver<Answer>,
    thread: JoinHandle<()>,
}

/// How long a vCPU may take to leave the guest. Emulating back ends finish the
/// instruction at hand first; a loaded host may be slow to schedule the thread.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(30);
/// A signal that came too early is sent again after this time.
const KICK_INTERVAL: Duration = Duration::from_millis(10);

/// Stack of a vCPU thread. Only touched pages cost memory.
const STACK_BYTES: usize = 256 << 10;

impl Vcpu {
    /// Starts the thread, which enters the guest at once.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(
        index: u8,
        vcpu: VcpuFd,
        latch: PortLatch,
        context: Arc<RunContext>,
    ) -> Result<Self, VmmError> {
        kick::install().step(|| "install the signal handler of vCPU threads".to_owned(), "")?;
        let signal = Arc::new(Signal::default());
        let (commands, inbox) = sync_channel(1);
        let (outbox, answers) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name(format!("vcpu{index}"))
            .stack_size(STACK_BYTES)
            .spawn({
                let signal = Arc::clone(&signal);
                move || live(vcpu, latch, &context, &signal, &inbox, &outbox)
            })
            .step(|| format!("start the thread of vCPU {index}"), "raise the limit of threads")?;
        Ok(Self { index, signal, commands, answers, thread })
    }

    /// Stops the vCPU at a safe point, with no exit left to complete.
    ///
    /// # Errors
    /// When the vCPU does not leave the guest in time, or has ended.
    pub fn pause(&self) -> Result<(), VmmError> {
        self.signal.set(Intent::Pause);
        let mut waited = Duration::ZERO;
        loop {
            kick::send(&self.thread);
            match self.answers.recv_timeout(KICK_INTERVAL) {
                Ok(Answer::Paused) => return Ok(()),
                Ok(Answer::Saved(_)) => unreachable!("a vCPU saves only when asked"),
                Err(RecvTimeoutError::Timeout) if waited < PAUSE_TIMEOUT => waited += KICK_INTERVAL,
                Err(error) => return Err(self.silent("pause", error)),
            }
        }
    }

    /// Lets a paused vCPU run again.
    ///
    /// # Errors
    /// When the vCPU has ended.
    pub fn resume(&self) -> Result<(), VmmError> {
        self.signal.set(Intent::Run);
        self.commands.send(Command::Resume).map_err(|error| self.silent("resume", error))
    }

    /// Reads the state of a paused vCPU.
    ///
    /// # Errors
    /// When KVM refuses a part of it, or the vCPU has ended.
    pub fn save(&self, indices: &MsrIndices) -> Result<VcpuState, VmmError> {
        self.commands
            .send(Command::Save(indices.clone()))
            .map_err(|error| self.silent("save", error))?;
        match self.answers.recv_timeout(PAUSE_TIMEOUT) {
            Ok(Answer::Saved(state)) => *state,
            Ok(Answer::Paused) => unreachable!("a paused vCPU does not pause again"),
            Err(error) => Err(self.silent("save", error)),
        }
    }

    fn silent(
        &self,
        verb: &str,
        error: impl std::error::Error + Send + Sync + 'static,
    ) -> VmmError {
        let advice = "see the log of this microVM for the reason";
        VmmError::new(format!("{verb} vCPU {}", self.index), advice, error)
    }
}

/// Life of the thread.
fn live(
    mut vcpu: VcpuFd,
    mut latch: PortLatch,
    context: &RunContext,
    signal: &Signal,
    inbox: &Receiver<Command>,
    outbox: &SyncSender<Answer>,
) {
    kick::enter(&mut vcpu);
    loop {
        let end = run::until(&mut vcpu, context, &mut latch, || signal.wants_pause());
        match end {
            run::Stop::Asked => run::finish_exit(&mut vcpu),
            run::Stop::Ended(end) => {
                context.guest_ended(end);
                break;
            }
        }
        if outbox.send(Answer::Paused).is_err() || !paused(&vcpu, latch, inbox, outbox) {
            break;
        }
    }
    kick::leave();
}

/// Serves a paused vCPU; false when its owner is gone.
fn paused(
    vcpu: &VcpuFd,
    latch: PortLatch,
    inbox: &Receiver<Command>,
    outbox: &SyncSender<Answer>,
) -> bool {
    loop {
        match inbox.recv() {
            Ok(Command::Resume) => return true,
            Ok(Command::Save(indices)) => {
                let state = Box::new(VcpuState::save(vcpu, &indices, latch));
                if outbox.send(Answer::Saved(state)).is_err() {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
}
