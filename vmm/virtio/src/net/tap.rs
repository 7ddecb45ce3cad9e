//! A TAP interface of the host.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

use super::{HEADER_BYTES, NetError};
use crate::sys::{self, IoVector};

/// Where the TAP comes from.
#[derive(Debug, Clone)]
pub enum TapSource {
    /// An interface to attach to, when the driver runs.
    Name(String),
    /// A descriptor of an attached TAP, non-blocking, with IFF_VNET_HDR.
    Descriptor(Arc<OwnedFd>),
}

/// Offloads the guest can receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offloads {
    /// Frames without checksums.
    pub checksum: bool,
    /// TCP segments over IPv4 larger than the MTU.
    pub tso4: bool,
    /// The same over IPv6.
    pub tso6: bool,
}

/// An attached TAP.
#[derive(Debug)]
pub struct Tap {
    descriptor: Arc<OwnedFd>,
}

impl Tap {
    /// Attaches to `source` and tells it what the guest can receive.
    pub fn open(source: &TapSource, offloads: Offloads) -> Result<Self, NetError> {
        let descriptor = match source {
            TapSource::Name(name) => Arc::new(attach(name)?),
            TapSource::Descriptor(descriptor) => descriptor.clone(),
        };
        set_header_size(descriptor.as_fd()).map_err(NetError::Configure)?;
        set_offloads(descriptor.as_fd(), offloads).map_err(NetError::Configure)?;
        Ok(Self { descriptor })
    }

    /// Reads one frame with its header.
    pub fn read(&self, vectors: &[IoVector]) -> io::Result<usize> {
        sys::read(self.descriptor.as_fd(), vectors)
    }

    /// Writes one frame with its header.
    pub fn write(&self, vectors: &[IoVector]) -> io::Result<usize> {
        sys::write(self.descriptor.as_fd(), vectors)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Attaches to the interface `name`, making it if it does not exist.
fn attach(name: &str) -> Result<OwnedFd, NetError> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")
        .map_err(NetError::Open)?;
    // SAFETY: all-zero is a valid `ifreq`: an empty name and no flags.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let illegal = name.is_empty()
        || name.len() >= request.ifr_name.len()
        || !name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/' && byte != b'%');
    if illegal {
        return Err(NetError::Name(name.to_owned()));
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = i16::try_from(flags).expect("the flags fit 15 bits");
    // SAFETY: TUNSETIFF reads and writes an `ifreq`, which `request` is.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if result < 0 {
        let source = io::Error::last_os_error();
        return Err(NetError::Attach { name: name.to_owned(), source });
    }
    Ok(device.into())
}

fn set_header_size(tap: BorrowedFd<'_>) -> io::Result<()> {
    let bytes = libc::c_int::try_from(HEADER_BYTES).expect("12");
    // SAFETY: TUNSETVNETHDRSZ reads an `int`, which `bytes` is.
    match unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_offloads(tap: BorrowedFd<'_>, offloads: Offloads) -> io::Result<()> {
    let Offloads { checksum, tso4, tso6 } = offloads;
    let mut flags = 0;
    if checksum {
        flags |= libc::TUN_F_CSUM;
        // Segmentation implies checksums.
        flags |= if tso4 { libc::TUN_F_TSO4 } else { 0 };
        flags |= if tso6 { libc::TUN_F_TSO6 } else { 0 };
    }
    let flags = libc::c_ulong::from(flags);
    // SAFETY: TUNSETOFFLOAD takes its flags by value.
    match unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD, flags) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
