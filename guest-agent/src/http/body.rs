//! Reply bodies.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};

use crate::runtime::Receiver;

/// A body that is made while it is sent. It is asked for more only when the
/// client has taken what came before, and dropped when the client goes away.
pub trait ChunkStream {
    /// The next piece.
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>>;

    /// The whole length, if it is known.
    fn length(&self) -> Option<u64> {
        None
    }
}

/// A reply's body.
pub enum Body {
    /// Nothing.
    Empty,
    /// Known bytes.
    Full(Bytes),
    /// Made while it is sent.
    Stream(Box<dyn ChunkStream>),
}

impl Body {
    /// A body of known bytes.
    pub fn full(bytes: Bytes) -> Self {
        if bytes.is_empty() { Body::Empty } else { Body::Full(bytes) }
    }

    /// A body made while it is sent.
    pub fn stream(stream: impl ChunkStream + 'static) -> Self {
        Body::Stream(Box::new(stream))
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut *self {
            Body::Empty => Poll::Ready(None),
            Body::Full(bytes) => {
                let bytes = std::mem::take(bytes);
                *self = Body::Empty;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Body::Stream(stream) => {
                stream.poll_chunk(cx).map(|chunk| chunk.map(|chunk| chunk.map(Frame::data)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Body::Empty)
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Empty => SizeHint::with_exact(0),
            Body::Full(bytes) => {
                SizeHint::with_exact(u64::try_from(bytes.len()).expect("lengths fit in 64 bits"))
            }
            Body::Stream(stream) => {
                stream.length().map_or_else(SizeHint::new, SizeHint::with_exact)
            }
        }
    }
}

/// A body fed by a task through a bounded queue.
pub struct Chunks(pub Receiver<Bytes>);

impl ChunkStream for Chunks {
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        self.0.poll_next(cx).map(|chunk| chunk.map(Ok))
    }
}
