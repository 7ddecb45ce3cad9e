//! The system calls that safe wrappers do not offer: vectored I/O whose buffers
//! are guest memory. No reference to guest memory is ever made.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

/// One piece of guest memory as the kernel wants it.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct IoVector(libc::iovec);

// SAFETY: the pointer is only ever handed to the kernel, never dereferenced
// here, so it may move between threads like the integer it is.
unsafe impl Send for IoVector {}

impl IoVector {
    /// The bytes of `slice`.
    pub fn from_slice<B: BitmapSlice>(slice: &VolatileSlice<'_, B>) -> Self {
        let guard = slice.ptr_guard_mut();
        Self(libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: slice.len() })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Drops the first `bytes` bytes, at most all of them.
    fn advance(&mut self, bytes: usize) -> usize {
        let bytes = bytes.min(self.0.iov_len);
        self.0.iov_base = self.0.iov_base.cast::<u8>().wrapping_add(bytes).cast();
        self.0.iov_len -= bytes;
        bytes
    }
}

/// Drops the first `bytes` bytes of `vectors`.
pub fn advance(vectors: &mut Vec<IoVector>, bytes: usize) {
    let mut left = bytes;
    let mut whole = 0;
    for vector in vectors.iter_mut() {
        left -= vector.advance(left);
        if vector.len() > 0 {
            break;
        }
        whole += 1;
    }
    vectors.drain(..whole);
}

/// The kernel's view of `vectors`: a pointer, and their number capped at what one
/// call takes (a shorter transfer is then completed by the caller's next call).
pub fn raw(vectors: &[IoVector]) -> (*const libc::iovec, u32) {
    const VECTORS_MAX: usize = 1024;
    let count = u32::try_from(vectors.len().min(VECTORS_MAX)).expect("capped above");
    (vectors.as_ptr().cast(), count)
}

fn checked(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn count(vectors: u32) -> i32 {
    i32::try_from(vectors).expect("capped by raw")
}

fn file_offset(offset: u64) -> io::Result<i64> {
    i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// `preadv2` with RWF_NOWAIT: only what is in the page cache.
pub fn read_cached(file: BorrowedFd<'_>, vectors: &[IoVector], offset: u64) -> io::Result<usize> {
    let (pointer, number) = raw(vectors);
    let offset = file_offset(offset)?;
    // SAFETY: `pointer` and `number` describe `vectors`, which outlives the call;
    // each entry lies in guest memory that the caller keeps mapped.
    checked(unsafe {
        libc::preadv2(file.as_raw_fd(), pointer, count(number), offset, libc::RWF_NOWAIT)
    })
}

/// `preadv`.
pub fn read_at(file: BorrowedFd<'_>, vectors: &[IoVector], offset: u64) -> io::Result<usize> {
    let (pointer, number) = raw(vectors);
    let offset = file_offset(offset)?;
    // SAFETY: as in `read_cached`.
    checked(unsafe { libc::preadv(file.as_raw_fd(), pointer, count(number), offset) })
}

/// `readv`, for descriptors without a position.
pub fn read(file: BorrowedFd<'_>, vectors: &[IoVector]) -> io::Result<usize> {
    let (pointer, number) = raw(vectors);
    // SAFETY: as in `read_cached`.
    checked(unsafe { libc::readv(file.as_raw_fd(), pointer, count(number)) })
}

/// `writev`, for descriptors without a position.
pub fn write(file: BorrowedFd<'_>, vectors: &[IoVector]) -> io::Result<usize> {
    let (pointer, number) = raw(vectors);
    // SAFETY: as in `read_cached`; the kernel only reads the buffers.
    checked(unsafe { libc::writev(file.as_raw_fd(), pointer, count(number)) })
}

/// `sendmsg` that neither waits nor raises SIGPIPE.
pub fn send(socket: BorrowedFd<'_>, vectors: &[IoVector]) -> io::Result<usize> {
    let (pointer, number) = raw(vectors);
    // SAFETY: all-zero is a valid `msghdr`: no name, no control data, no vectors.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pointer.cast_mut();
    message.msg_iovlen = usize::try_from(number).expect("usize holds 32 bits");
    // SAFETY: `message` describes `vectors`, both outlive the call; each entry
    // lies in guest memory that the caller keeps mapped.
    checked(unsafe {
        libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    })
}

/// `pwritev`.
pub fn write_at(file: BorrowedFd<'_>, vectors: &[IoVector], offset: u64) -> io::Result<usize> {
    let (pointer, number) = raw(vectors);
    let offset = file_offset(offset)?;
    // SAFETY: as in `read_cached`; the kernel only reads the buffers.
    checked(unsafe { libc::pwritev(file.as_raw_fd(), pointer, count(number), offset) })
}
