//! Connections to the ports of one sandbox: bounded, shared, cut at its end.
//!
//! ```text
//! send ── idle connection? ──▶ try; if it died before the request went out: next one
//!            │ none
//!            └─ connect: agent ports directly, others by the tunnel port's handshake
//! reply read to its end ──▶ idle again
//! ```
//!
//! Each connection is driven by a task that ends when the sandbox does, so that every
//! reply in flight breaks off at once.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Body;
use http::{Request, Response};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::body::GuestBody;
use crate::kinds::{GuestPort, Instance};

/// Requests at once to one sandbox; streams count while they last. Protects the guest
/// and the node's descriptors.
const CONNECTIONS_MAX: usize = 256;
/// How long a request waits for its turn.
const TURN_LIMIT: Duration = Duration::from_secs(30);
/// Idle connections kept per port: descriptors of the node, thousands of sandboxes long.
const IDLE_MAX: usize = 4;
/// The agent keeps its side open; a server of the user's may handle one connection
/// at a time, and must not be held for long by an idle one. Connections are closed
/// between one and two limits after their last use.
const IDLE_AGENT_LIMIT: Duration = Duration::from_secs(600);
const IDLE_TUNNEL_LIMIT: Duration = Duration::from_secs(2);
/// A connection is used again only if it becomes ready this soon after a reply.
const READY_LIMIT: Duration = Duration::from_secs(1);
/// A slow guest must accept and answer the handshake within this.
const TUNNEL_LIMIT: Duration = Duration::from_secs(30);
const TUNNEL_LINE_BYTES_MAX: usize = 256;

/// Why no reply came from a guest.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Nobody listens on the port.
    #[error("port {0} is not open")]
    PortClosed(u16),
    /// The sandbox has ended, or is about to.
    #[error("the sandbox has ended")]
    Gone,
    /// Too many requests are under way.
    #[error("{CONNECTIONS_MAX} requests to the sandbox are under way")]
    Busy,
    /// The guest did not take the connection in time.
    #[error("the guest did not accept a connection in time")]
    Timeout,
    /// The host side failed.
    #[error("connect to the guest")]
    Connect(#[source] io::Error),
    /// The connection broke.
    #[error("send a request to the guest")]
    Transfer(#[source] hyper::Error),
}

/// Connections to one sandbox.
#[derive(Debug, Clone)]
pub struct Channels(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    instance: Arc<dyn Instance>,
    over: CancellationToken,
    tracker: TaskTracker,
    turns: Arc<Semaphore>,
    idle: Mutex<IdleSet>,
}

#[derive(Debug, Default)]
struct IdleSet {
    by_port: HashMap<u16, Vec<Idle>>,
    /// Whether a task is there to close connections of each class.
    is_swept: [bool; 2],
}

#[derive(Debug)]
struct Idle {
    sender: SendRequest<Body>,
    since: Instant,
}

impl Channels {
    /// `over` cuts every connection when it is cancelled.
    pub fn new(instance: Arc<dyn Instance>, over: CancellationToken, tracker: TaskTracker) -> Self {
        Self(Arc::new(Shared {
            instance,
            over,
            tracker,
            turns: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            idle: Mutex::default(),
        }))
    }

    /// Sends a request to a port; returns when the head of the reply is there.
    pub async fn send(
        &self,
        port: u16,
        mut request: Request<Body>,
    ) -> Result<Response<GuestBody>, ChannelError> {
        let over = self.0.over.clone();
        let exchange = async {
            let turn = self.turn().await?;
            while let Some(sender) = self.0.take_idle(port) {
                let mut lease = Lease { channels: self.clone(), port, sender, _turn: None };
                match lease.sender.try_send_request(request).await {
                    Ok(response) => return Ok(lease.finish(turn, response)),
                    Err(mut error) => match error.take_message() {
                        // The connection ended while it was idle.
                        Some(unsent) => request = unsent,
                        None => return Err(ChannelError::Transfer(error.into_error())),
                    },
                }
            }
            let sender = self.open(port).await?;
            let mut lease = Lease { channels: self.clone(), port, sender, _turn: None };
            let response =
                lease.sender.send_request(request).await.map_err(ChannelError::Transfer)?;
            Ok(lease.finish(turn, response))
        };
        tokio::select! {
            biased;
            () = over.cancelled() => Err(ChannelError::Gone),
            outcome = exchange => outcome,
        }
    }

    async fn turn(&self) -> Result<OwnedSemaphorePermit, ChannelError> {
        let turn = Arc::clone(&self.0.turns).acquire_owned();
        match tokio::time::timeout(TURN_LIMIT, turn).await {
            Ok(Ok(turn)) => Ok(turn),
            Ok(Err(_)) => Err(ChannelError::Gone),
            Err(_) => Err(ChannelError::Busy),
        }
    }

    async fn open(&self, port: u16) -> Result<SendRequest<Body>, ChannelError> {
        let stream = match agent_port(port) {
            Some(agent_port) => self.connect(port, agent_port).await?,
            None => {
                let stream = self.connect(port, GuestPort::Tunnel).await?;
                tokio::time::timeout(TUNNEL_LIMIT, shake_hands(stream, port))
                    .await
                    .map_err(|_| ChannelError::Timeout)??
            }
        };
        let (sender, connection) = http1::Builder::new()
            .handshake(TokioIo::new(stream))
            .await
            .map_err(ChannelError::Transfer)?;
        let over = self.0.over.clone();
        self.0.tracker.spawn(async move {
            tokio::select! {
                biased;
                () = over.cancelled() => {}
                // Whoever waits for the reply sees the error too.
                _ = connection.with_upgrades() => {}
            }
        });
        Ok(sender)
    }

    async fn connect(&self, port: u16, by: GuestPort) -> Result<UnixStream, ChannelError> {
        self.0.instance.connect(by).await.map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => ChannelError::PortClosed(port),
            io::ErrorKind::NotFound => ChannelError::Gone,
            io::ErrorKind::TimedOut => ChannelError::Timeout,
            _ => ChannelError::Connect(error),
        })
    }
}

impl Shared {
    fn take_idle(&self, port: u16) -> Option<SendRequest<Body>> {
        let mut idle = self.idle();
        let list = idle.by_port.get_mut(&port)?;
        let limit = Class::of(port).idle_limit();
        list.retain(|entry| !entry.sender.is_closed() && entry.since.elapsed() < limit);
        let taken = list.pop();
        if list.is_empty() {
            idle.by_port.remove(&port);
        }
        taken.map(|entry| entry.sender)
    }

    fn keep(self: &Arc<Self>, port: u16, sender: SendRequest<Body>) {
        if self.over.is_cancelled() {
            return;
        }
        let class = Class::of(port);
        let mut idle = self.idle();
        let list = idle.by_port.entry(port).or_default();
        if list.len() < IDLE_MAX {
            list.push(Idle { sender, since: Instant::now() });
        }
        if !std::mem::replace(&mut idle.is_swept[class.index()], true) {
            let this = Arc::clone(self);
            self.tracker.spawn(async move { this.sweep(class).await });
        }
    }

    /// Closes connections of a class that were idle for too long, until none is left.
    async fn sweep(&self, class: Class) {
        loop {
            tokio::select! {
                () = self.over.cancelled() => return,
                () = tokio::time::sleep(class.idle_limit()) => {}
            }
            let mut idle = self.idle();
            for (_, list) in idle.by_port.iter_mut().filter(|(port, _)| Class::of(**port) == class)
            {
                list.retain(|entry| entry.since.elapsed() < class.idle_limit());
            }
            idle.by_port.retain(|_, list| !list.is_empty());
            if !idle.by_port.keys().any(|port| Class::of(*port) == class) {
                idle.is_swept[class.index()] = false;
                return;
            }
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, IdleSet> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whose server is on the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Agent,
    User,
}

impl Class {
    fn of(port: u16) -> Self {
        if agent_port(port).is_some() { Self::Agent } else { Self::User }
    }

    fn index(self) -> usize {
        match self {
            Self::Agent => 0,
            Self::User => 1,
        }
    }

    fn idle_limit(self) -> Duration {
        match self {
            Self::Agent => IDLE_AGENT_LIMIT,
            Self::User => IDLE_TUNNEL_LIMIT,
        }
    }
}

/// A connection in use. Dropped, it closes the connection.
#[derive(Debug)]
pub(super) struct Lease {
    channels: Channels,
    port: u16,
    sender: SendRequest<Body>,
    /// Given back with the connection.
    _turn: Option<OwnedSemaphorePermit>,
}

impl Lease {
    fn finish(
        mut self,
        turn: OwnedSemaphorePermit,
        response: Response<hyper::body::Incoming>,
    ) -> Response<GuestBody> {
        self._turn = Some(turn);
        response.map(|body| GuestBody::new(body, self))
    }

    /// The reply has been read to its end. The connection is kept once it is ready,
    /// which it is not while the request is still being sent.
    pub(super) fn give_back(self) {
        let Self { channels, port, mut sender, _turn } = self;
        let over = channels.0.over.clone();
        let tracker = channels.0.tracker.clone();
        tracker.spawn(async move {
            let _turn = _turn;
            tokio::select! {
                biased;
                () = over.cancelled() => {}
                ready = tokio::time::timeout(READY_LIMIT, sender.ready()) => {
                    if let Ok(Ok(())) = ready {
                        channels.0.keep(port, sender);
                    }
                }
            }
        });
    }
}

fn agent_port(port: u16) -> Option<GuestPort> {
    [GuestPort::Envd, GuestPort::CodeInterpreter].into_iter().find(|known| known.number() == port)
}

/// Asks the agent for a stream to a TCP port of the guest.
async fn shake_hands(mut stream: UnixStream, port: u16) -> Result<UnixStream, ChannelError> {
    stream.write_all(format!("{port}\n").as_bytes()).await.map_err(ChannelError::Connect)?;
    let mut line = Vec::new();
    loop {
        match stream.read_u8().await {
            Ok(b'\n') => break,
            Ok(byte) if line.len() < TUNNEL_LINE_BYTES_MAX => line.push(byte),
            Ok(_) => return Err(ChannelError::Connect(io::ErrorKind::InvalidData.into())),
            // A guest that closes without a word refuses too.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(ChannelError::PortClosed(port));
            }
            Err(error) => return Err(ChannelError::Connect(error)),
        }
    }
    if line == b"OK" { Ok(stream) } else { Err(ChannelError::PortClosed(port)) }
}
