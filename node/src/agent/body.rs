//! The body of a guest's reply on its way to the client.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::channels::Lease;
use crate::server::Reset;

/// Streams a reply; gives the connection back at its end, and has the client's
/// connection reset if the guest ends in the middle.
#[derive(Debug)]
pub struct GuestBody {
    inner: Incoming,
    /// Given back at the end; dropped (which closes the connection) when the reply is
    /// left half-read.
    lease: Option<Lease>,
    reset: Option<Reset>,
}

impl GuestBody {
    pub(super) fn new(inner: Incoming, lease: Lease) -> Self {
        let mut body = Self { inner, lease: Some(lease), reset: None };
        if body.inner.is_end_stream() {
            body.give_back();
        }
        body
    }

    /// Names the client's connection.
    pub fn resetting(mut self, reset: Option<Reset>) -> Self {
        self.reset = reset;
        self
    }

    fn give_back(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.give_back();
        }
    }
}

impl Body for GuestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        match &polled {
            Poll::Ready(None) => self.give_back(),
            Poll::Ready(Some(Ok(_))) if self.inner.is_end_stream() => self.give_back(),
            Poll::Ready(Some(Err(_))) => {
                if let Some(reset) = &self.reset {
                    reset.request();
                }
            }
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
