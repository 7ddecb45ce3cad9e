//! Lines of a kernel's control socket.

use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};

use crate::runtime::Source;

/// Longest event: a large image.
const LINE_BYTES_MAX: usize = 256 << 20;

/// Bytes read at once.
const READ_BYTES: usize = 64 * 1024;

/// Reads whole lines.
pub struct Lines {
    source: Rc<Source>,
    buffer: BytesMut,
    /// How much of the buffer has no line end.
    searched: usize,
}

impl Lines {
    /// Reads lines of `source`.
    pub fn new(source: Rc<Source>) -> Self {
        Lines { source, buffer: BytesMut::new(), searched: 0 }
    }

    /// The next line, its end included; `None` at the end.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        loop {
            if let Some(index) = memchr::memchr(b'\n', &self.buffer[self.searched..]) {
                let line = self.buffer.split_to(self.searched + index + 1).freeze();
                self.searched = 0;
                return Poll::Ready(Ok(Some(line)));
            }
            self.searched = self.buffer.len();
            if self.buffer.len() > LINE_BYTES_MAX {
                return Poll::Ready(Err(io::ErrorKind::FileTooLarge.into()));
            }
            let start = self.buffer.len();
            self.buffer.resize(start + READ_BYTES, 0);
            let read = self.source.poll_read(cx, &mut self.buffer[start..]);
            let count = match &read {
                Poll::Ready(Ok(count)) => *count,
                Poll::Ready(Err(_)) | Poll::Pending => 0,
            };
            self.buffer.truncate(start + count);
            match read {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Ready(Ok(0)) => return Poll::Ready(Ok(None)),
                Poll::Ready(Ok(_)) => {}
            }
        }
    }
}
