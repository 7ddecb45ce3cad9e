//! System calls of the guest agent that have no safe wrapper elsewhere:
//! signals as a descriptor, vsock listeners, the kernel's random pool, the
//! loopback interface and the allocator's thresholds.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Blocks `signals` and `SIGPIPE` for this process, gives them their default
/// actions back (whoever started us may have ignored some, and programs started
/// later would inherit that), and returns a non-blocking descriptor from which
/// `signals` are read.
pub fn signal_descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: `set` and `blocked` are live locals that the calls initialise;
    // SIG_DFL is a valid disposition; the descriptor returned by signalfd is
    // new and owned by nobody else.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut set);
        let mut blocked = set;
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
            libc::sigaddset(&raw mut blocked, *signal);
        }
        libc::sigaddset(&raw mut blocked, libc::SIGPIPE);
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut()) < 0 {
            return Err(io::Error::last_os_error());
        }
        for signal in signals.iter().chain([&libc::SIGPIPE]) {
            libc::signal(*signal, libc::SIG_DFL);
        }
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        owned(libc::signalfd(-1, &raw const set, flags))
    }
}

/// Size of one record read from a signal descriptor.
pub const SIGNAL_RECORD_BYTES: usize = size_of::<libc::signalfd_siginfo>();

/// Numbers of the signals in `bytes`, as read from a signal descriptor.
pub fn signals_in(bytes: &[u8]) -> impl Iterator<Item = i32> + '_ {
    bytes.chunks_exact(SIGNAL_RECORD_BYTES).map(|record| {
        let number = record.first_chunk::<4>().expect("a record is longer than four bytes");
        i32::from_ne_bytes(*number)
    })
}

/// A listening, non-blocking vsock socket on `port` for every CID.
pub fn listen_vsock(port: u32, backlog: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain integers in, a new descriptor out; `address` is a live
    // local of the length given.
    unsafe {
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let socket = owned(libc::socket(libc::AF_VSOCK, kind, 0))?;
        let mut address = std::mem::zeroed::<libc::sockaddr_vm>();
        address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).expect("a small constant");
        address.svm_port = port;
        address.svm_cid = libc::VMADDR_CID_ANY;
        let length = libc::socklen_t::try_from(size_of_val(&address)).expect("a small constant");
        let fd = socket.as_raw_fd();
        check(libc::bind(fd, (&raw const address).cast(), length))?;
        check(libc::listen(fd, backlog))?;
        Ok(socket)
    }
}

/// `_IOW('R', 3, int[2])` of linux/random.h.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;

/// `_IO('R', 7)` of linux/random.h.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Credits `bytes` to the kernel's random pool through `random`, an open
/// `/dev/urandom`. Needs `CAP_SYS_ADMIN`.
pub fn add_entropy(random: impl AsFd, bytes: &[u8]) -> io::Result<()> {
    const ENTROPY_BYTES_MAX: usize = 256;
    #[repr(C)]
    struct PoolInfo {
        entropy_bits: libc::c_int,
        bytes: libc::c_int,
        data: [u8; ENTROPY_BYTES_MAX],
    }
    if bytes.len() > ENTROPY_BYTES_MAX {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let length = libc::c_int::try_from(bytes.len()).expect("bounded above");
    let mut info =
        PoolInfo { entropy_bits: length * 8, bytes: length, data: [0; ENTROPY_BYTES_MAX] };
    info.data[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: RNDADDENTROPY reads a rand_pool_info of `bytes` bytes, which
    // `info` holds.
    check(unsafe { libc::ioctl(random.as_fd().as_raw_fd(), RNDADDENTROPY, &raw const info) })
}

/// Makes the kernel draw a new key for its generator at once. Needs
/// `CAP_SYS_ADMIN`.
pub fn reseed_random(random: impl AsFd) -> io::Result<()> {
    // SAFETY: RNDRESEEDCRNG takes no argument.
    check(unsafe { libc::ioctl(random.as_fd().as_raw_fd(), RNDRESEEDCRNG) })
}

/// Sets the loopback interface up.
pub fn raise_loopback() -> io::Result<()> {
    // SAFETY: `request` is a live local; SIOCGIFFLAGS and SIOCSIFFLAGS read a
    // null-terminated name and read or write the flags member of the union.
    unsafe {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
        let socket = owned(libc::socket(libc::AF_INET, kind, 0))?;
        let mut request = std::mem::zeroed::<libc::ifreq>();
        for (slot, byte) in request.ifr_name.iter_mut().zip(*b"lo") {
            *slot = libc::c_char::try_from(byte).expect("ASCII");
        }
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request))?;
        let up = libc::IFF_UP | libc::IFF_RUNNING;
        request.ifr_ifru.ifru_flags |= libc::c_short::try_from(up).expect("two low flags");
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request))
    }
}

/// Tells the allocator to keep what it has: nothing is returned to the kernel
/// and nothing below `map_bytes` is mapped apart, so that memory touched once
/// does not fault again.
pub fn keep_heap(map_bytes: i32) {
    const TOP_PAD_BYTES: i32 = 1 << 20;
    // SAFETY: mallopt takes two integers and is called before other threads
    // could exist.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_MMAP_THRESHOLD, map_bytes);
        libc::mallopt(libc::M_TOP_PAD, TOP_PAD_BYTES);
    }
}

/// Marks every descriptor above standard error close-on-exec, so that programs
/// started later inherit none of them.
pub fn close_inherited_on_exec() -> io::Result<()> {
    let flags = libc::CLOSE_RANGE_CLOEXEC;
    // SAFETY: close_range with this flag closes nothing; it takes integers.
    let result = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, flags) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn owned(fd: i32) -> io::Result<OwnedFd> {
    check(fd)?;
    // SAFETY: only called with the result of a call that creates a
    // descriptor, and just checked to be one.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
