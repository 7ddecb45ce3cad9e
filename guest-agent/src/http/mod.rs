//! HTTP/1.1 on a socket: bodies, replies and the connection itself. Routes are
//! elsewhere.

mod body;
mod query;
mod request_body;

pub use body::{Body, ChunkStream, Chunks};
pub use query::{Query, percent_decode};
pub use request_body::RequestBody;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::convert::Infallible;
use std::rc::Rc;
use std::task::Waker;

use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use hyper::body::Incoming;
use serde::Serialize;

use crate::net::Socket;

/// A request as it comes from the wire.
pub type Request = http::Request<RequestBody>;

/// A reply with any of our bodies.
pub type Reply = http::Response<Body>;

/// A route table.
pub trait Service: 'static {
    /// Answers one request.
    fn answer(self: Rc<Self>, request: Request) -> impl Future<Output = Reply>;
}

thread_local! {
    static CONNECTIONS: Connections = Connections::default();
}

/// Open connections, to tell them to close.
#[derive(Default)]
struct Connections {
    wakers: RefCell<HashMap<u64, Waker>>,
    last: Cell<u64>,
    /// How often all were told to close.
    closings: Cell<u64>,
}

/// Forgets a connection when it is over.
struct Counted(u64);

impl Drop for Counted {
    fn drop(&mut self) {
        let _ = CONNECTIONS.try_with(|c| c.wakers.borrow_mut().remove(&self.0));
    }
}

/// Closes every connection that is idle, and the others after their reply.
pub fn close_idle_connections() {
    CONNECTIONS.with(|connections| {
        connections.closings.set(connections.closings.get() + 1);
        connections.wakers.take().into_values().for_each(Waker::wake);
    });
}

/// Serves one connection until it closes.
pub async fn serve<S: Service>(service: Rc<S>, socket: Socket) {
    let handler = hyper::service::service_fn(move |request: http::Request<Incoming>| {
        let service = service.clone();
        async move { Ok::<_, Infallible>(service.answer(request.map(RequestBody::new)).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .auto_date_header(false)
        .serve_connection(socket, handler);
    let mut connection = std::pin::pin!(connection);
    let (counted, born) = CONNECTIONS.with(|connections| {
        connections.last.set(connections.last.get() + 1);
        (Counted(connections.last.get()), connections.closings.get())
    });
    let mut closing = false;
    std::future::poll_fn(|cx| {
        if !closing {
            closing = CONNECTIONS.with(|connections| {
                connections.wakers.borrow_mut().insert(counted.0, cx.waker().clone());
                connections.closings.get() != born
            });
            if closing {
                connection.as_mut().graceful_shutdown();
            }
        }
        // A client that goes away in the middle is its own business: whatever
        // waited on the reply's body sees it dropped.
        connection.as_mut().poll(cx).map(drop)
    })
    .await;
}

/// A reply without a body.
pub fn empty(status: StatusCode) -> Reply {
    let mut reply = Reply::new(Body::Empty);
    *reply.status_mut() = status;
    reply
}

/// A JSON reply.
pub fn json(status: StatusCode, value: &impl Serialize) -> Reply {
    let bytes = serde_json::to_vec(value).expect("our replies have string keys");
    bytes_reply(status, "application/json", bytes.into())
}

/// A reply of known bytes.
pub fn bytes_reply(status: StatusCode, kind: &'static str, bytes: Bytes) -> Reply {
    let mut reply = Reply::new(Body::full(bytes));
    *reply.status_mut() = status;
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    reply
}

/// The error form of the plain HTTP routes.
pub fn error(status: StatusCode, message: impl std::fmt::Display) -> Reply {
    let value = serde_json::json!({ "code": status.as_u16(), "message": message.to_string() });
    json(status, &value)
}

/// Why a body could not be taken whole.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// It is longer than this route takes.
    #[error("the request body is larger than {0} bytes")]
    TooLarge(usize),
    /// The client went away.
    #[error("read the request body")]
    Read(#[source] hyper::Error),
}

/// Reads a whole body of at most `limit` bytes.
pub async fn collect(mut body: RequestBody, limit: usize) -> Result<Bytes, BodyError> {
    let mut whole = Bytes::new();
    let mut parts = Vec::new();
    while let Some(chunk) = body.next().await {
        let chunk = chunk.map_err(BodyError::Read)?;
        if whole.len() + parts.len() + chunk.len() > limit {
            return Err(BodyError::TooLarge(limit));
        }
        if whole.is_empty() && parts.is_empty() {
            whole = chunk;
        } else {
            parts.extend_from_slice(&std::mem::take(&mut whole));
            parts.extend_from_slice(&chunk);
        }
    }
    Ok(if parts.is_empty() { whole } else { parts.into() })
}
