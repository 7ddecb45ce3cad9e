//! Request bodies, which are always taken to their end.
//!
//! Closing a socket that holds unread bytes resets the connection, and a reset
//! makes the client lose what it has not read of the reply. So a body that its
//! handler leaves early is read on and dropped, beside the reply.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body as _, Frame};
use hyper::body::Incoming;

use crate::runtime;

/// Longest time for the rest of a body that nobody wants.
const LEFTOVER_LIMIT: Duration = Duration::from_secs(60);

/// The body of a request.
pub struct RequestBody(Option<Incoming>);

impl RequestBody {
    /// Takes a body as hyper gives it.
    pub fn new(body: Incoming) -> Self {
        RequestBody(Some(body))
    }

    /// The next piece.
    pub async fn next(&mut self) -> Option<Result<Bytes, hyper::Error>> {
        next_of(self.0.as_mut()?).await
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let Some(mut body) = self.0.take().filter(|body| !body.is_end_stream()) else { return };
        runtime::spawn(async move {
            let limit = runtime::sleep_until(Instant::now() + LEFTOVER_LIMIT);
            let rest = async { while let Some(Ok(_)) = next_of(&mut body).await {} };
            runtime::either(rest, limit).await;
        })
        .detach();
    }
}

async fn next_of(body: &mut Incoming) -> Option<Result<Bytes, hyper::Error>> {
    loop {
        let frame = std::future::poll_fn(|cx| poll_frame(body, cx)).await?;
        match frame.map(Frame::into_data) {
            Ok(Ok(data)) if !data.is_empty() => return Some(Ok(data)),
            // Trailers and empty frames carry nothing for us.
            Ok(_) => {}
            Err(error) => return Some(Err(error)),
        }
    }
}

fn poll_frame(
    body: &mut Incoming,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
    Pin::new(body).poll_frame(cx)
}
