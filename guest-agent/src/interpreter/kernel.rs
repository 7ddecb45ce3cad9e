//! One kernel process: its control socket and its output.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal};
use serde::Deserialize;
use warren_base::spawn::SpawnStep;

use super::lines::Lines;
use crate::children::{Child, StartError};
use crate::runtime::{self, Either, Source};

/// Longest time from the start of a kernel to its first word. A cold start on a
/// slow machine takes seconds.
const START_LIMIT: Duration = Duration::from_secs(120);

/// Why there is no kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Sockets and pipes could not be made.
    #[error("open its sockets and pipes: {0}")]
    Plumbing(#[source] io::Error),
    /// Its programs could not be written.
    #[error("write its programs: {0}")]
    Install(#[source] io::Error),
    /// The image does not have the interpreter.
    #[error("this sandbox has no {0}; use a template whose image has it")]
    Missing(&'static str),
    /// The interpreter could not be started.
    #[error("start {program}: {source}")]
    Start {
        /// The interpreter.
        program: &'static str,
        /// What went wrong.
        #[source]
        source: StartError,
    },
    /// The zygote did not take the request.
    #[error("ask the zygote: {0}")]
    Zygote(#[source] io::Error),
    /// The working directory is not there.
    #[error("cwd '{0}' does not exist or cannot be entered")]
    Directory(String),
    /// It ended, or said nothing for too long.
    #[error("the kernel {0}")]
    NotReady(&'static str),
    /// There is nobody to run as.
    #[error("{0}")]
    User(String),
}

impl KernelError {
    /// Why `program` was not started.
    pub fn start(program: &'static str, source: StartError) -> Self {
        match source.refusal() {
            Some((SpawnStep::Execute, error)) if error.kind() == io::ErrorKind::NotFound => {
                KernelError::Missing(program)
            }
            _ => KernelError::Start { program, source },
        }
    }

    /// Whether another request could do better.
    pub fn is_callers_mistake(&self) -> bool {
        match self {
            KernelError::Directory(_) | KernelError::Missing(_) => true,
            KernelError::Start { source, .. } => {
                source.refusal().is_some_and(|(_, error)| error.kind() == io::ErrorKind::NotFound)
            }
            KernelError::Plumbing(_)
            | KernelError::Install(_)
            | KernelError::Zygote(_)
            | KernelError::NotReady(_)
            | KernelError::User(_) => false,
        }
    }
}

/// Our ends of a kernel's socket and pipes.
pub struct Ends {
    pub control: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

/// Makes a socket and two pipes: our ends, then the kernel's.
pub fn plumbing() -> Result<(Ends, Ends), KernelError> {
    let make = || -> io::Result<(Ends, Ends)> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let (stdout, child_out) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr, child_err) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        for fd in [&ours, &stdout, &stderr] {
            rustix::fs::fcntl_setfl(fd, OFlags::NONBLOCK)?;
        }
        let ours = Ends { control: ours, stdout, stderr };
        Ok((ours, Ends { control: theirs, stdout: child_out, stderr: child_err }))
    };
    make().map_err(KernelError::Plumbing)
}

/// A running kernel.
pub struct Kernel {
    /// Requests go in here.
    pub control: Rc<Source>,
    /// Events come out here.
    pub lines: RefCell<Lines>,
    pub stdout: Source,
    pub stderr: Source,
    pid: Cell<Option<Pid>>,
    cells: Cell<u64>,
    /// Set when it is our own child and not the zygote's.
    child: Option<Child>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct FirstEvent {
    #[serde(rename = "type")]
    kind: String,
    pid: Option<i32>,
}

impl Kernel {
    /// A kernel behind our ends.
    pub fn new(ends: Ends, child: Option<Child>) -> Self {
        let control = Rc::new(Source::new(ends.control));
        Kernel {
            lines: RefCell::new(Lines::new(control.clone())),
            control,
            stdout: Source::empty(ends.stdout),
            stderr: Source::empty(ends.stderr),
            pid: Cell::new(child.as_ref().map(|child| child.pid)),
            cells: Cell::new(0),
            child,
        }
    }

    /// Number of the next cell.
    pub fn next_cell(&self) -> u64 {
        self.cells.set(self.cells.get() + 1);
        self.cells.get()
    }

    /// Waits for its first word.
    pub async fn ready(&self, cwd: &str) -> Result<(), KernelError> {
        let next = std::future::poll_fn(|cx| self.lines.borrow_mut().poll_next(cx));
        let limit = runtime::sleep_until(Instant::now() + START_LIMIT);
        let line = match runtime::either(next, limit).await {
            Either::First(Ok(Some(line))) => line,
            Either::First(Ok(None) | Err(_)) => {
                return Err(KernelError::NotReady("ended before it was ready"));
            }
            Either::Second(()) => {
                self.kill();
                return Err(KernelError::NotReady("was not ready in time"));
            }
        };
        let event: FirstEvent = serde_json::from_slice(&line).unwrap_or_default();
        if event.kind != "ready" {
            return Err(KernelError::Directory(cwd.to_owned()));
        }
        if let Some(pid) = event.pid.and_then(Pid::from_raw) {
            self.pid.set(Some(pid));
        }
        // Now, so that a clone's first cell need not.
        for source in [&*self.control, &self.stdout, &self.stderr] {
            source.prepare().map_err(KernelError::Plumbing)?;
        }
        Ok(())
    }

    /// Interrupts what it runs, as Ctrl+C does.
    pub fn interrupt(&self) {
        self.signal(Signal::INT);
    }

    /// Ends it and what it has started.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        match (&self.child, self.pid.get()) {
            (Some(child), _) => drop(child.signal_group(signal)),
            // The number is the kernel's as long as its socket is open, and
            // this is dropped when it closes.
            (None, Some(pid)) => drop(rustix::process::kill_process_group(pid, signal)),
            (None, None) => {}
        }
    }

    /// How a child of ours ended, if it has.
    pub fn end(&self) -> Option<String> {
        let status = self.child.as_ref()?.exit.status()?;
        Some(match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, signal) => format!("signal {}", signal.unwrap_or_default()),
        })
    }
}

/// Borrowed descriptors of the kernel's ends, to pass on.
pub fn borrowed(ends: &Ends) -> [std::os::fd::BorrowedFd<'_>; 3] {
    [ends.control.as_fd(), ends.stdout.as_fd(), ends.stderr.as_fd()]
}
