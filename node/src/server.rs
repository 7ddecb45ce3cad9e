//! Accepts connections and serves HTTP/1.1 on them.
//!
//! Own loop rather than a framework's: a connection must be resettable (a client that
//! reads from a killed sandbox has to see an error, not an end), and must be counted.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Open connections; each takes a descriptor, and one more towards the guest.
const CONNECTIONS_MAX: usize = 16_384;
/// Clients keep idle connections for up to five minutes; closing earlier than they do
/// would make them lose requests.
const IDLE_LIMIT: Duration = Duration::from_secs(620);
/// Requests that are under way get this long after a stop was asked for.
const GRACE: Duration = Duration::from_secs(5);
/// After `accept` fails, usually for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Asks for a connection to be reset instead of closed.
#[derive(Debug, Clone, Default)]
pub struct Reset(Arc<AtomicBool>);

impl Reset {
    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Where a request came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Over TCP.
    Network,
    /// Over the local socket, which only the node's owner can open.
    Local,
}

/// A listening socket.
pub enum Listener {
    Network(TcpListener),
    Local(UnixListener),
}

enum Stream {
    Network(TcpStream),
    Local(UnixStream),
}

impl Listener {
    async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Network(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok(Stream::Network(stream))
            }
            Self::Local(listener) => Ok(Stream::Local(listener.accept().await?.0)),
        }
    }
}

/// Answers requests; called with [`Origin`] and [`Reset`] in the request's extensions.
pub type Handler = Arc<
    dyn Fn(Request<Body>) -> futures_util::future::BoxFuture<'static, Response<Body>> + Send + Sync,
>;

/// Serves until `stop`, then lets requests under way end within a grace period.
///
/// Returns the listener, which accepts no more: as long as it is kept, whoever connects
/// waits, and learns that the daemon has gone when it has.
pub async fn serve(listener: Listener, handler: Handler, stop: CancellationToken) -> Listener {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let connections = TaskTracker::new();
    let cut = CancellationToken::new();
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(stream) => {
                let connection = serve_connection(stream, Arc::clone(&handler), stop.clone());
                let cut = cut.clone();
                connections.spawn(async move {
                    tokio::select! {
                        () = cut.cancelled() => {}
                        () = connection => {}
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "connection not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections.close();
    if tokio::time::timeout(GRACE, connections.wait()).await.is_err() {
        cut.cancel();
        connections.wait().await;
    }
    listener
}

async fn serve_connection(stream: Stream, handler: Handler, stop: CancellationToken) {
    let reset = Reset::default();
    let origin = match &stream {
        Stream::Network(_) => Origin::Network,
        Stream::Local(_) => Origin::Local,
    };
    let peer = Peer { stream, reset: reset.clone() };
    let service = hyper::service::service_fn(move |request: Request<hyper::body::Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(origin);
        request.extensions_mut().insert(reset.clone());
        let reply = handler(request);
        async move { Ok::<_, std::convert::Infallible>(reply.await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_LIMIT)
        .serve_connection(TokioIo::new(peer), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    // Errors are the client's: it left, or spoke something else than HTTP.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

/// A client's connection.
struct Peer {
    stream: Stream,
    reset: Reset,
}

impl Peer {
    fn prepare_close(&self) {
        if self.reset.is_requested()
            && let Stream::Network(stream) = &self.stream
        {
            // Closing then sends RST; a failure leaves an ordinary close.
            let _ = stream.set_zero_linger();
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.prepare_close();
    }
}

impl AsyncRead for Peer {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Network(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Local(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Peer {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Network(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Local(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Network(stream) => Pin::new(stream).poll_write_vectored(context, slices),
            Stream::Local(stream) => Pin::new(stream).poll_write_vectored(context, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Network(stream) => Pin::new(stream).poll_flush(context),
            Stream::Local(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.prepare_close();
        if self.reset.is_requested() {
            return Poll::Ready(Ok(()));
        }
        match &mut self.stream {
            Stream::Network(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Local(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
