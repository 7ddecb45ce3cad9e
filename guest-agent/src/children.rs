//! Starting processes and reaping them, every orphan of PID 1 included.
//!
//! There is one reaper, so an exit status cannot be taken by anyone else, and a
//! process id stays ours until the reaper has told of it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use warren_base::guest::{SIGNAL_RECORD_BYTES, signal_descriptor, signals_in};
use warren_base::spawn::{Identity, Spawn, SpawnError, SpawnStack, SpawnStep, Terminal};

use crate::runtime::{Event, Source};

/// Records of the signal descriptor read at once. Signals of one number merge,
/// and we listen to few numbers.
const SIGNALS_PER_READ: usize = 8;

/// Arguments and variables of one program. The kernel takes far more, but copies them one
/// by one while the agent waits for it.
const STRINGS_MAX: usize = 8192;

/// Signals that end the agent.
const ENDING: [Signal; 3] = [Signal::TERM, Signal::INT, Signal::QUIT];

/// Signals that the agent passes on to its children.
const FORWARDED: [Signal; 3] = [Signal::HUP, Signal::USR1, Signal::USR2];

/// Where the end of a child will be found.
#[derive(Default)]
pub struct Exit {
    status: Cell<Option<WaitStatus>>,
    /// Told when the status is there.
    pub happened: Event,
}

impl Exit {
    /// How the child ended, once it has.
    pub fn status(&self) -> Option<WaitStatus> {
        self.status.get()
    }

    /// Waits for the end.
    pub async fn wait(&self) -> WaitStatus {
        self.happened.wait_for(|| self.status.get()).await
    }
}

/// A child that was started.
#[derive(Clone)]
pub struct Child {
    /// Its process id, session id and process group id.
    pub pid: Pid,
    /// Its end.
    pub exit: Rc<Exit>,
}

impl Child {
    /// Signals the child's process group. `false` when it has ended.
    pub fn signal_group(&self, signal: Signal) -> bool {
        self.exit.status().is_none()
            && rustix::process::kill_process_group(self.pid, signal).is_ok()
    }
}

/// What to start.
pub struct Program<'a> {
    /// A path, or a name looked up along `PATH` of `environment`.
    pub command: &'a str,
    /// Arguments after the name.
    pub arguments: &'a [String],
    /// The whole environment.
    pub environment: &'a BTreeMap<String, String>,
    /// Working directory.
    pub directory: &'a str,
    /// Whether `/` will do when `directory` cannot be entered.
    pub directory_is_default: bool,
    /// Whom to run as.
    pub identity: &'a Identity,
    /// Standard input, output and error; `None` is `/dev/null`.
    pub stdio: [Option<BorrowedFd<'a>>; 3],
    /// Whether standard input is a terminal to control.
    pub terminal: Terminal,
}

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A string holds a NUL byte.
    #[error("{0} holds a NUL byte")]
    Nul(&'static str),
    /// The name of an environment variable is empty or holds `=`.
    #[error("{0:?} cannot be the name of an environment variable")]
    VariableName(String),
    /// There are too many strings.
    #[error(
        "the command has {0} arguments and variables, more than {STRINGS_MAX}; put them into a file"
    )]
    TooMany(usize),
    /// The kernel refused.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
}

impl StartError {
    /// The step and the reason, when the kernel refused.
    pub fn refusal(&self) -> Option<(SpawnStep, &io::Error)> {
        match self {
            StartError::Spawn(error) => Some((error.step, &error.source)),
            StartError::Nul(_) | StartError::VariableName(_) | StartError::TooMany(_) => None,
        }
    }
}

/// All children of the agent.
pub struct Children {
    signals: Source,
    null: OwnedFd,
    stack: RefCell<SpawnStack>,
    waiting: RefCell<HashMap<Pid, Rc<Exit>>>,
    own: (u32, u32),
}

impl Children {
    /// Takes over the signals of this process. Call once, first.
    pub fn new() -> io::Result<Rc<Self>> {
        let listened = [&[Signal::CHILD][..], &ENDING, &FORWARDED].concat();
        let listened: Vec<_> = listened.into_iter().map(Signal::as_raw).collect();
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Rc::new(Children {
            signals: Source::one_at_a_time(signal_descriptor(&listened)?),
            null,
            stack: RefCell::new(SpawnStack::new()),
            waiting: RefCell::default(),
            own: (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw()),
        }))
    }

    /// Starts a program in a session of its own.
    pub fn start(&self, program: &Program<'_>) -> Result<Child, StartError> {
        let strings = program.arguments.len() + program.environment.len();
        if strings > STRINGS_MAX {
            return Err(StartError::TooMany(strings));
        }
        let c_string = |what, text: &str| CString::new(text).map_err(|_| StartError::Nul(what));
        let mut environment = Vec::with_capacity(program.environment.len());
        for (name, value) in program.environment {
            if name.is_empty() || name.contains('=') {
                return Err(StartError::VariableName(name.clone()));
            }
            environment.push(c_string("the environment", &format!("{name}={value}"))?);
        }
        let mut arguments = vec![c_string("the command", program.command)?];
        for argument in program.arguments {
            arguments.push(c_string("an argument", argument)?);
        }
        let programs: Vec<_> = if program.command.contains('/') {
            vec![arguments[0].clone()]
        } else {
            let path = program.environment.get("PATH").map_or("", String::as_str);
            let places = path.split(':').filter(|place| !place.is_empty());
            places
                .map(|place| c_string("the command", &format!("{place}/{}", program.command)))
                .collect::<Result<_, _>>()?
        };
        let directory = c_string("the working directory", program.directory)?;
        // A process that is no superuser cannot change identity, nor need it
        // when it is to start programs as itself.
        let same = self.own == (program.identity.uid, program.identity.gid) && self.own.0 != 0;
        let null = self.null.as_fd();
        let pid = Spawn {
            programs: &programs,
            arguments: &arguments,
            environment: &environment,
            directory: &directory,
            fallback_directory: program.directory_is_default.then_some(c"/"),
            stdio: program.stdio.map(|fd| fd.unwrap_or(null)),
            terminal: program.terminal,
            identity: Some(program.identity).filter(|_| !same),
        }
        .start(&mut self.stack.borrow_mut())?;
        let exit = Rc::new(Exit::default());
        self.waiting.borrow_mut().insert(pid, exit.clone());
        Ok(Child { pid, exit })
    }

    /// Reaps until a signal asks for the agent's end, and returns it.
    pub async fn reap_until_told_to_end(&self) -> Signal {
        let mut records = [0; SIGNALS_PER_READ * SIGNAL_RECORD_BYTES];
        loop {
            let count = self.signals.input(|fd| rustix::io::read(fd, &mut records[..])).await;
            let count = match count {
                Ok(count) => count,
                Err(error) => {
                    crate::console::error(format_args!("read signals: {error}"));
                    continue;
                }
            };
            let signals: Vec<_> =
                signals_in(&records[..count]).filter_map(Signal::from_named_raw).collect();
            if signals.contains(&Signal::CHILD) {
                self.reap();
            }
            for signal in signals {
                if ENDING.contains(&signal) {
                    return signal;
                }
                if FORWARDED.contains(&signal) {
                    self.forward(signal);
                }
            }
        }
    }

    /// Sends a signal to the process group of every child.
    pub fn forward(&self, signal: Signal) {
        for pid in self.waiting.borrow().keys() {
            let _ = rustix::process::kill_process_group(*pid, signal);
        }
    }

    /// How many started children have not ended.
    pub fn running(&self) -> usize {
        self.waiting.borrow().len()
    }

    fn reap(&self) {
        // Signals merge, so there may be more ends than signals.
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let exit = self.waiting.borrow_mut().remove(&pid);
            if let Some(exit) = exit {
                exit.status.set(Some(status));
                exit.happened.notify();
            }
        }
    }
}
