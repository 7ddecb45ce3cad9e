//! Starting a program without forking the caller.
//!
//! `fork` copies page tables, which is the most expensive thing a small guest
//! can be asked to do. [`Spawn::start`] uses `clone(CLONE_VM | CLONE_VFORK)`
//! on a stack that exists already: the child borrows the caller's memory,
//! makes a fixed list of system calls and executes. Nothing is allocated and
//! no lock is taken between the two, and a failed step is reported by its
//! name with its `errno`.
//!
//! The caller must be the only thread of its process: it is stopped while the
//! child runs in its memory, its other threads would not be.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::process::Pid;

/// Bytes of stack the child gets. It calls a handful of thin wrappers, and the
/// dynamic part of their frames is small; measured use is under 1 KiB.
const STACK_BYTES: usize = 32 * 1024;

/// Memory the child runs on. Keep one and use it again: its pages are touched
/// once and never fault afterwards.
pub struct SpawnStack(Box<[u8]>);

impl SpawnStack {
    /// A stack with every page touched.
    pub fn new() -> Self {
        SpawnStack(vec![0xa5; STACK_BYTES].into_boxed_slice())
    }
}

impl Default for SpawnStack {
    fn default() -> Self {
        Self::new()
    }
}

/// Whom the child runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Whether standard input is to become the controlling terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Terminal {
    /// Standard input is a pipe or a file.
    None,
    /// Standard input is a terminal and becomes the session's.
    Controlling,
}

/// A program to start, in a session of its own.
#[derive(Debug)]
pub struct Spawn<'a> {
    /// Paths to try in order; the first that can be executed wins.
    pub programs: &'a [CString],
    /// Argument vector, the program's own name first.
    pub arguments: &'a [CString],
    /// Environment, each entry `NAME=value`.
    pub environment: &'a [CString],
    /// Working directory.
    pub directory: &'a CStr,
    /// Used when `directory` cannot be entered.
    pub fallback_directory: Option<&'a CStr>,
    /// Standard input, output and error. Each must be above 2 and
    /// close-on-exec, as is every other descriptor of the caller.
    pub stdio: [BorrowedFd<'a>; 3],
    /// Whether the child gets a terminal.
    pub terminal: Terminal,
    /// Whom to become; `None` keeps the caller's identity.
    pub identity: Option<&'a Identity>,
}

/// A step of the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum SpawnStep {
    /// Creating the child.
    Clone = 1,
    /// Starting a session.
    Session,
    /// Placing standard input, output and error.
    Stdio,
    /// Taking the controlling terminal.
    Terminal,
    /// Becoming the user.
    Identity,
    /// Entering the working directory.
    Directory,
    /// Clearing the signal mask.
    Signals,
    /// Executing the program.
    Execute,
}

/// Why a program did not start.
#[derive(Debug, thiserror::Error)]
#[error("start a program: step {step:?}")]
pub struct SpawnError {
    /// The step that failed.
    pub step: SpawnStep,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}

struct Plan {
    programs: *const *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    directory: *const c_char,
    fallback_directory: *const c_char,
    stdio: [RawFd; 3],
    controlling: bool,
    identity: Option<(u32, u32, *const u32, usize)>,
    failed_step: i32,
    failed_errno: i32,
}

impl Spawn<'_> {
    /// Starts the program and returns its process id, which is also its
    /// session's and process group's. When the program cannot be executed
    /// there is no child left to wait for.
    pub fn start(&self, stack: &mut SpawnStack) -> Result<Pid, SpawnError> {
        let programs = pointers(self.programs);
        let arguments = pointers(self.arguments);
        let environment = pointers(self.environment);
        let mut plan = Plan {
            programs: programs.as_ptr(),
            arguments: arguments.as_ptr(),
            environment: environment.as_ptr(),
            directory: self.directory.as_ptr(),
            fallback_directory: self.fallback_directory.map_or(std::ptr::null(), CStr::as_ptr),
            stdio: self.stdio.map(|fd| fd.as_raw_fd()),
            controlling: self.terminal == Terminal::Controlling,
            identity: self.identity.map(|id| (id.uid, id.gid, id.groups.as_ptr(), id.groups.len())),
            failed_step: 0,
            failed_errno: 0,
        };
        let top = stack.0.as_mut_ptr().wrapping_add(STACK_BYTES);
        let top = top.map_addr(|address| address & !15).cast::<c_void>();
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: `top` is the aligned end of a live, exclusively borrowed
        // buffer of STACK_BYTES. CLONE_VFORK suspends this thread, the only
        // one, until the child has executed or exited, so the child is the
        // sole user of this memory meanwhile; `plan` and everything it points
        // to outlive the call. `child` only makes system calls.
        let pid = unsafe { libc::clone(child, top, flags, (&raw mut plan).cast()) };
        if pid < 0 {
            return Err(SpawnError { step: SpawnStep::Clone, source: io::Error::last_os_error() });
        }
        // SAFETY: `plan` is a live local; the read is volatile because the
        // child wrote to it behind the compiler's back.
        let (step, errno) = unsafe {
            let plan = &raw const plan;
            (
                (&raw const (*plan).failed_step).read_volatile(),
                (&raw const (*plan).failed_errno).read_volatile(),
            )
        };
        let pid = Pid::from_raw(pid).expect("clone returned a positive process id");
        match step_of(step) {
            None => Ok(pid),
            Some(step) => {
                // The child has exited already, this does not block.
                let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
                Err(SpawnError { step, source: io::Error::from_raw_os_error(errno) })
            }
        }
    }
}

fn step_of(number: i32) -> Option<SpawnStep> {
    use SpawnStep::*;
    [Clone, Session, Stdio, Terminal, Identity, Directory, Signals, Execute]
        .into_iter()
        .find(|step| *step as i32 == number)
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    let mut list: Vec<_> = strings.iter().map(|s| s.as_ptr()).collect();
    list.push(std::ptr::null());
    list
}

/// Runs in the child, on its own stack but in the parent's memory.
extern "C" fn child(plan: *mut c_void) -> c_int {
    let plan = plan.cast::<Plan>();
    // SAFETY: `plan` is the parent's live local; the parent is suspended, so
    // this is the only reference.
    let plan = unsafe { &mut *plan };
    // SAFETY: see `child_steps`.
    let step = unsafe { child_steps(plan) };
    // SAFETY: reads this thread's errno.
    plan.failed_errno = unsafe { *libc::__errno_location() };
    plan.failed_step = step as i32;
    // SAFETY: ends the child without running exit handlers, which are the
    // parent's.
    unsafe { libc::_exit(127) }
}

/// Everything up to `execve`; returns only with the step that failed.
///
/// # Safety
/// Must run in a vfork child, with `plan` holding null-terminated arrays of
/// null-terminated strings that live until the program is executed.
unsafe fn child_steps(plan: &mut Plan) -> SpawnStep {
    // The identity calls are made directly: the C library's wrappers want to
    // tell other threads of a process that is not ours.
    // SAFETY: every call below takes plain integers or pointers that the
    // caller vouches for, and none allocates or locks.
    unsafe {
        if libc::setsid() < 0 {
            return SpawnStep::Session;
        }
        for (target, source) in (0..).zip(plan.stdio) {
            if libc::dup2(source, target) < 0 {
                return SpawnStep::Stdio;
            }
        }
        if plan.controlling && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return SpawnStep::Terminal;
        }
        if let Some((uid, gid, groups, count)) = plan.identity {
            let failed = libc::syscall(libc::SYS_setgroups, count, groups) < 0
                || libc::syscall(libc::SYS_setgid, gid) < 0
                || libc::syscall(libc::SYS_setuid, uid) < 0;
            if failed {
                return SpawnStep::Identity;
            }
        }
        let entered = libc::chdir(plan.directory) == 0
            || (!plan.fallback_directory.is_null() && libc::chdir(plan.fallback_directory) == 0);
        if !entered {
            return SpawnStep::Directory;
        }
        let empty: u64 = 0;
        let null = std::ptr::null::<u64>();
        if libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const empty, null, 8) < 0
        {
            return SpawnStep::Signals;
        }
        let mut program = plan.programs;
        let mut refused = libc::ENOENT;
        while !(*program).is_null() {
            libc::execve(*program, plan.arguments, plan.environment);
            let errno = *libc::__errno_location();
            // As a shell does: a file that may not be run is a better answer
            // than the absence of one further down the path.
            if errno != libc::ENOENT && errno != libc::ENOTDIR {
                refused = errno;
            }
            program = program.add(1);
        }
        *libc::__errno_location() = refused;
        SpawnStep::Execute
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    fn strings(list: &[&str]) -> Vec<CString> {
        list.iter().map(|s| CString::new(*s).unwrap()).collect()
    }

    fn run(program: &str, directory: &CStr) -> (Result<Pid, SpawnError>, String) {
        let (mut reader, writer) = io::pipe().unwrap();
        let null = File::open("/dev/null").unwrap();
        let result = Spawn {
            programs: &strings(&["/nonexistent/sh", program]),
            arguments: &strings(&[
                "sh",
                "-c",
                "echo $X; pwd; ps -o sid= -p $$ | tr -d ' '; echo $$",
            ]),
            environment: &strings(&["X=y", "PATH=/usr/bin:/bin"]),
            directory,
            fallback_directory: None,
            stdio: [null.as_fd(), writer.as_fd(), writer.as_fd()],
            terminal: Terminal::None,
            identity: None,
        }
        .start(&mut SpawnStack::new());
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        if let Ok(pid) = &result {
            rustix::process::waitpid(Some(*pid), rustix::process::WaitOptions::empty()).unwrap();
        }
        (result, text)
    }

    #[test]
    fn start_shell_runs_in_its_own_session() {
        let (pid, text) = run("/bin/sh", c"/tmp");
        let pid = pid.unwrap().as_raw_nonzero();
        assert_eq!(text, format!("y\n/tmp\n{pid}\n{pid}\n"));
    }

    #[test]
    fn start_missing_program_names_the_step() {
        let error = run("/bin/nothing-here", c"/tmp").0.unwrap_err();
        assert_eq!(error.step, SpawnStep::Execute);
        assert_eq!(error.source.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn start_missing_directory_names_the_step() {
        let error = run("/bin/sh", c"/no/such/place").0.unwrap_err();
        assert_eq!(error.step, SpawnStep::Directory);
    }
}
