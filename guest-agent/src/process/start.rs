//! Starting a process: pipes or a terminal, then the program itself.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Instant;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use warren_base::spawn::{SpawnStep, Terminal};

use super::log::{Channel, OutputLog};
use super::messages::{Pty, Size, StartRequest};
use super::pump::{self, Output};
use super::table::{Process, Table};
use crate::agent::Agent;
use crate::children::{Program, StartError};
use crate::connect::{Code, ConnectError};
use crate::paths;
use crate::runtime::{Event, Lock, Source};
use crate::users::User;

/// Group that owns terminals, by custom.
const TTY_GROUP: u32 = 5;

/// Our ends and the child's ends.
struct Plumbing {
    outputs: Vec<Output>,
    input: Option<Rc<Source>>,
    terminal: Option<Rc<Source>>,
    stdio: [Option<OwnedFd>; 3],
}

/// Starts what a request asks for and the task that looks after it.
pub fn start(
    agent: &Rc<Agent>,
    table: &Rc<Table>,
    request: StartRequest,
    user: &User,
    deadline: Option<Instant>,
) -> Result<Rc<Process>, ConnectError> {
    let StartRequest { process: config, pty, tag, stdin } = request;
    if config.cmd.is_empty() {
        return Err(ConnectError::new(Code::InvalidArgument, "no command is given"));
    }
    let environment = agent.environment(user, &config.envs);
    let (directory, is_default) = directory(agent, user, config.cwd.as_deref())?;
    let plumbing = match &pty {
        Some(pty) => open_terminal(pty, user),
        None => open_pipes(stdin.unwrap_or(true)),
    };
    let Plumbing { outputs, input, terminal, stdio } = plumbing.map_err(|error| {
        let code = if is_exhaustion(&error) { Code::ResourceExhausted } else { Code::Internal };
        ConnectError::new(code, format!("open pipes for the process: {error}"))
    })?;
    // A terminal is all three of them.
    let [input_end, output_end, error_end] = &stdio;
    let output_end = if terminal.is_some() { input_end } else { output_end };
    let error_end = if terminal.is_some() { input_end } else { error_end };
    let child = agent
        .children
        .start(&Program {
            command: &config.cmd,
            arguments: &config.args,
            environment: &environment,
            directory: &directory,
            directory_is_default: is_default,
            identity: &user.identity,
            stdio: [input_end, output_end, error_end].map(|end| end.as_ref().map(AsFd::as_fd)),
            terminal: if terminal.is_some() { Terminal::Controlling } else { Terminal::None },
        })
        .map_err(|error| start_error(&error, &config.cmd, &directory))?;
    drop(stdio);
    let process = Rc::new(Process {
        child,
        config,
        tag,
        log: RefCellLog::default(),
        news: Event::default(),
        room: Event::default(),
        ended: Default::default(),
        timed_out: Default::default(),
        input: input.into(),
        input_lock: Lock::default(),
        terminal,
    });
    table.insert(&process);
    pump::spawn(table.clone(), process.clone(), outputs, deadline);
    Ok(process)
}

type RefCellLog = std::cell::RefCell<OutputLog>;

fn directory(
    agent: &Agent,
    user: &User,
    asked: Option<&str>,
) -> Result<(String, bool), ConnectError> {
    let workdir = agent.workdir();
    let asked = asked.filter(|path| !path.is_empty());
    let path = asked.or(workdir.as_deref()).unwrap_or(&user.home);
    let path = paths::resolve(path, user, workdir.as_deref())
        .map_err(|error| ConnectError::new(Code::InvalidArgument, error.to_string()))?;
    let path = path.into_os_string().into_string().expect("made from UTF-8");
    Ok((path, asked.is_none()))
}

fn open_pipes(with_input: bool) -> io::Result<Plumbing> {
    let (out, child_out) = pipe_from_child()?;
    let (err, child_err) = pipe_from_child()?;
    let (input, child_in) = if with_input {
        let (child_in, input) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        set_non_blocking(&input)?;
        (Some(Rc::new(Source::new(input))), Some(child_in))
    } else {
        (None, None)
    };
    let outputs = vec![
        Output::new(Channel::Stdout, Rc::new(Source::empty(out))),
        Output::new(Channel::Stderr, Rc::new(Source::empty(err))),
    ];
    let stdio = [child_in, Some(child_out), Some(child_err)];
    Ok(Plumbing { outputs, input, terminal: None, stdio })
}

fn pipe_from_child() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    set_non_blocking(&ours)?;
    Ok((ours, theirs))
}

/// The child's end stays as programs expect it; the flag belongs to an end.
fn set_non_blocking(fd: impl AsFd) -> io::Result<()> {
    Ok(rustix::fs::fcntl_setfl(fd, OFlags::NONBLOCK)?)
}

fn open_terminal(pty: &Pty, user: &User) -> io::Result<Plumbing> {
    // The type has no name for it, the kernel takes it: the flag as of `open`.
    let non_blocking = OpenptFlags::from_bits_retain(OFlags::NONBLOCK.bits());
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC | non_blocking;
    let ours = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&ours)?;
    let peer_flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let theirs = rustix::pty::ioctl_tiocgptpeer(&ours, peer_flags)?;
    if let Some(size) = &pty.size {
        rustix::termios::tcsetwinsize(&ours, window(size))?;
    }
    if rustix::process::geteuid().is_root() {
        let owner = rustix::fs::Uid::from_raw(user.identity.uid);
        let group = rustix::fs::Gid::from_raw(TTY_GROUP);
        rustix::fs::fchown(&theirs, Some(owner), Some(group))?;
    }
    let ours = Rc::new(Source::new(ours));
    Ok(Plumbing {
        outputs: vec![Output::new(Channel::Pty, ours.clone())],
        input: None,
        terminal: Some(ours),
        stdio: [Some(theirs), None, None],
    })
}

/// A size as the kernel keeps it.
pub(super) fn window(size: &Size) -> Winsize {
    let clamp = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
    Winsize { ws_row: clamp(size.rows), ws_col: clamp(size.cols), ws_xpixel: 0, ws_ypixel: 0 }
}

fn is_exhaustion(error: &io::Error) -> bool {
    let transient = [Errno::AGAIN, Errno::NOMEM, Errno::MFILE, Errno::NFILE, Errno::NOSPC];
    error.raw_os_error().is_some_and(|raw| transient.contains(&Errno::from_raw_os_error(raw)))
}

fn start_error(error: &StartError, command: &str, directory: &str) -> ConnectError {
    let Some((step, source)) = error.refusal() else {
        return ConnectError::new(Code::InvalidArgument, error.to_string());
    };
    if is_exhaustion(source) {
        let message = format!("start {command:?}: step {step:?}: {source}");
        return ConnectError::new(Code::ResourceExhausted, message);
    }
    match step {
        SpawnStep::Directory if source.kind() == io::ErrorKind::NotFound => {
            let message = format!("cwd '{directory}' does not exist");
            ConnectError::new(Code::InvalidArgument, message)
        }
        SpawnStep::Directory => {
            let message = format!("cwd '{directory}' cannot be entered: {source}");
            ConnectError::new(Code::InvalidArgument, message)
        }
        SpawnStep::Execute => {
            ConnectError::new(Code::InvalidArgument, format!("start {command:?}: {source}"))
        }
        SpawnStep::Clone
        | SpawnStep::Session
        | SpawnStep::Stdio
        | SpawnStep::Terminal
        | SpawnStep::Identity
        | SpawnStep::Signals => {
            ConnectError::new(Code::Internal, format!("start {command:?}: step {step:?}: {source}"))
        }
    }
}
