//! This process: settings that keep a microVM small and let it grow, and its fork.

use std::io;
use std::os::fd::RawFd;
use std::time::Instant;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Call once, before the first thread.
pub fn prepare() {
    use_one_heap();
    allow_all_descriptors();
}

/// One heap for all threads. A heap of its own costs each vCPU thread an address range of
/// 128 MiB and several pages, for a few small allocations in its life.
fn use_one_heap() {
    // SAFETY: the call changes a setting of the allocator and touches no memory of ours.
    let accepted = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    if accepted == 0 {
        tracing::debug!("the allocator keeps a heap per thread");
    }
}

/// Connections of the guest are descriptors: take as many as the host allows.
fn allow_all_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!(%error, "limit of descriptors stays as it is");
    }
}

/// Which process came back from [`fork`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one that forked, with the child's process id.
    Parent(u32),
    /// The new one.
    Child,
}

/// Forks this process. Other threads must be parked, holding no lock: they do not exist
/// in the child.
///
/// # Errors
/// When the host is short of memory or processes.
pub fn fork() -> io::Result<Side> {
    // SAFETY: a template process has one thread; a clone forks while its vCPU threads wait
    // for a command and hold no lock, and the C library keeps the allocator's own locks
    // consistent. So the child may go on using both.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Side::Child),
        child => Ok(Side::Parent(child.unsigned_abs())),
    }
}

/// Closes every descriptor but standard input, output and error and those of `keep`.
///
/// # Errors
/// When the kernel refuses.
///
/// # Safety
/// No value that owns a descriptor not in `keep` may be used or dropped afterwards.
pub unsafe fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
    const FIRST: u32 = 3;
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).collect();
    keep.sort_unstable();
    let mut from = FIRST;
    for fd in keep.into_iter().filter(|fd| *fd >= FIRST) {
        if fd > from {
            close_range(from, fd - 1)?;
        }
        from = fd + 1;
    }
    close_range(from, u32::MAX)
}

fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the caller of `close_all_but` promises that nobody uses these descriptors.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Time since `since`.
#[must_use]
pub fn microseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
