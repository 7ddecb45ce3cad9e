//! The server side of control sockets: lines of JSON in, lines of JSON out.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use warren_virtio::Interest;
use warren_vmm_api::{Envelope, ErrorReply, LINE_BYTES_MAX, PROTOCOL_VERSION, Reply};

use crate::error::{Step, VmmError};
use crate::events::{Source, Watch};

/// Connections at once. The node keeps one or two.
const CONNECTIONS_MAX: usize = 16;

/// How long a peer may take to send the rest of a line or to take a reply.
const PEER_TIMEOUT: Duration = Duration::from_secs(2);

/// A socket that is removed with its listener.
#[derive(Debug)]
pub struct ControlListener {
    listener: UnixListener,
    path: PathBuf,
}

impl ControlListener {
    /// Listens at `path`, where nothing may be yet.
    ///
    /// # Errors
    /// When the path is taken or too long, or its directory is missing.
    pub fn bind(path: &Path) -> Result<Self, VmmError> {
        let listener = UnixListener::bind(path).step(
            || format!("listen on control socket {}", path.display()),
            "the directory must exist, hold no such socket yet, and its path be under 100 bytes",
        )?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// Takes the next connection.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.listener.accept()?;
        stream.set_read_timeout(Some(PEER_TIMEOUT))?;
        stream.set_write_timeout(Some(PEER_TIMEOUT))?;
        Ok(stream)
    }

    /// After a fork: makes this process the one that clients find behind the socket
    /// (`SO_PEERCRED`). Connections that wait stay.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn take_over(&self) -> io::Result<()> {
        Ok(rustix::net::listen(&self.listener, BACKLOG)?)
    }

    /// Removes the socket's name; a clone never does this to its template's.
    pub fn unlink(&self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "control socket not removed");
        }
    }
}

impl AsFd for ControlListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// As many connections may wait as the standard library's listeners have.
const BACKLOG: i32 = 128;

/// One line from the peer.
#[derive(Debug)]
pub enum Incoming<V> {
    /// A request of our version.
    Verb(V),
    /// Something that gets this answer and nothing else.
    Refused(ErrorReply),
    /// The peer is gone.
    Closed,
}

/// Reads one request.
pub fn read_request<V: DeserializeOwned>(stream: &mut BufReader<UnixStream>) -> Incoming<V> {
    let mut line = Vec::new();
    let limit = u64::try_from(LINE_BYTES_MAX).unwrap_or(u64::MAX);
    match stream.take(limit).read_until(b'\n', &mut line) {
        Ok(0) | Err(_) => return Incoming::Closed,
        Ok(_) => {}
    }
    let version = serde_json::from_slice::<Envelope<serde_json::Value>>(&line);
    match version.map(|envelope| envelope.version) {
        Ok(PROTOCOL_VERSION) => {}
        Ok(other) => {
            return Incoming::Refused(ErrorReply {
                step: "read a control request".to_owned(),
                message: format!(
                    "protocol version {other}; this program speaks {PROTOCOL_VERSION}"
                ),
                advice: "use binaries of one release".to_owned(),
            });
        }
        Err(error) => return Incoming::Refused(unreadable(&error)),
    }
    match serde_json::from_slice::<Envelope<V>>(&line) {
        Ok(envelope) => Incoming::Verb(envelope.verb),
        Err(error) => Incoming::Refused(unreadable(&error)),
    }
}

fn unreadable(error: &serde_json::Error) -> ErrorReply {
    ErrorReply {
        step: "read a control request".to_owned(),
        message: error.to_string(),
        advice: String::new(),
    }
}

/// Writes one reply.
///
/// # Errors
/// When the peer does not take it.
pub fn write_reply<T: Serialize>(
    stream: &mut BufReader<UnixStream>,
    reply: &Reply<T>,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    stream.get_mut().write_all(&line)
}

/// Control connections of a microVM.
#[derive(Debug)]
pub struct Connections {
    listener: ControlListener,
    open: BTreeMap<u32, BufReader<UnixStream>>,
    next: u32,
}

impl Connections {
    /// Listens at `path` and has `watch` tell of connections.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn new(path: &Path, watch: &Watch) -> Result<Self, VmmError> {
        let listener = ControlListener::bind(path)?;
        watch
            .add(listener.listener.as_fd(), Source::ControlListener, Interest::Readable)
            .step(|| "watch the control socket".to_owned(), "")?;
        Ok(Self { listener, open: BTreeMap::new(), next: 0 })
    }

    /// Takes a connection that waits.
    pub fn accept(&mut self, watch: &Watch) {
        let stream = match self.listener.accept() {
            Ok(stream) => stream,
            Err(error) => return tracing::warn!(%error, "control connection not accepted"),
        };
        if self.open.len() >= CONNECTIONS_MAX {
            return tracing::warn!("control connection refused: {CONNECTIONS_MAX} are open");
        }
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        match watch.add(stream.as_fd(), Source::ControlConnection(number), Interest::Readable) {
            Ok(()) => drop(self.open.insert(number, BufReader::with_capacity(512, stream))),
            Err(error) => tracing::warn!(%error, "control connection not watched"),
        }
    }

    /// Reads the request that waits on a connection; what is no request is answered
    /// here. Closing a connection ends the watching.
    pub fn read<V: DeserializeOwned>(&mut self, number: u32) -> Option<V> {
        let stream = self.open.get_mut(&number)?;
        match read_request(stream) {
            Incoming::Verb(verb) => return Some(verb),
            Incoming::Refused(error) => self.reply(number, &Reply::<()>::Error(error)),
            Incoming::Closed => drop(self.open.remove(&number)),
        }
        None
    }

    /// Answers on a connection, if it is still there.
    pub fn reply<T: Serialize>(&mut self, number: u32, reply: &Reply<T>) {
        let Some(stream) = self.open.get_mut(&number) else { return };
        if let Err(error) = write_reply(stream, reply) {
            tracing::debug!(%error, "control connection lost");
            self.open.remove(&number);
        }
    }

    /// Removes the socket's name.
    pub fn unlink(&self) {
        self.listener.unlink();
    }
}
