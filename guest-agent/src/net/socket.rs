//! A connected stream socket, as hyper and the tunnel use it.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use hyper::rt::ReadBufCursor;

use crate::runtime::Source;

/// Bytes read at once. One buffer serves every connection, so it is touched
/// once for the whole life of the agent.
const READ_BYTES: usize = 64 * 1024;

/// Slices passed to one write; hyper makes fewer.
const WRITE_SLICES: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0x5a; READ_BYTES]);
}

/// A connected stream socket.
#[derive(Clone)]
pub struct Socket(Rc<Source>);

impl Socket {
    /// Takes a connected, non-blocking socket.
    pub fn new(fd: OwnedFd) -> Self {
        Socket(Rc::new(Source::new(fd)))
    }

    /// The descriptor underneath.
    pub fn source(&self) -> &Source {
        &self.0
    }

    /// Tells the peer that nothing more will be written.
    pub fn finish(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Write)?)
    }
}

impl hyper::rt::Read for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let room = buffer.remaining().min(scratch.len());
            let Poll::Ready(count) = self.0.poll_read(cx, &mut scratch[..room])? else {
                return Poll::Pending;
            };
            buffer.put_slice(&scratch[..count]);
            Poll::Ready(Ok(()))
        })
    }
}

impl hyper::rt::Write for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_write(cx, &[IoSlice::new(bytes)])
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The last handle is about to be dropped, which closes the socket; a
        // shutdown before it would be a system call for nothing.
        Poll::Ready(Ok(()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_write(cx, &slices[..slices.len().min(WRITE_SLICES)])
    }
}
