//! Blocking clients, one per kind of control socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::message::{
    CheckpointReply, CheckpointRequest, Envelope, Reply, SaveReply, SpawnReply, SpawnRequest,
    TemplateStatus, TemplateVerb, VmStats, VmStatus, VmVerb,
};
use crate::{ErrorReply, LINE_BYTES_MAX, PROTOCOL_VERSION};

/// Why a control request got no good reply.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens there.
    #[error("connect to control socket {path}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The connection broke or timed out.
    #[error("talk to control socket {path}")]
    Transfer {
        /// The socket.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The peer closed the connection without a reply: it died.
    #[error("{path} closed without a reply")]
    Closed {
        /// The socket.
        path: PathBuf,
    },
    /// The reply is not what this version expects.
    #[error("reply of {path} cannot be read")]
    Reply {
        /// The socket.
        path: PathBuf,
        /// Cause.
        #[source]
        source: serde_json::Error,
    },
    /// The peer refused.
    #[error("{}: {}", .0.step, .0.message)]
    Refused(ErrorReply),
}

/// A connection to a microVM's control socket.
#[derive(Debug)]
pub struct VmClient {
    path: PathBuf,
    stream: BufReader<UnixStream>,
}

impl VmClient {
    /// Connects; each later request waits at most `timeout`.
    ///
    /// # Errors
    /// [`ClientError::Connect`] if nobody listens at `path`.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        Ok(Self { path: path.to_owned(), stream: connect(path, timeout)? })
    }

    /// State of the microVM.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn status(&mut self) -> Result<VmStatus, ClientError> {
        self.ask(VmVerb::Status)
    }

    /// Counters of the microVM.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn stats(&mut self) -> Result<VmStats, ClientError> {
        self.ask(VmVerb::Stats)
    }

    /// Keeps this moment as a process from which clones are born.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn checkpoint(
        &mut self,
        request: CheckpointRequest,
    ) -> Result<CheckpointReply, ClientError> {
        self.ask(VmVerb::Checkpoint(request))
    }

    /// Any verb that replies with a status.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn verb(&mut self, verb: VmVerb) -> Result<VmStatus, ClientError> {
        self.ask(verb)
    }

    fn ask<T: DeserializeOwned>(&mut self, verb: VmVerb) -> Result<T, ClientError> {
        ask(&self.path, &mut self.stream, verb)
    }
}

/// Requests to a template process; each makes its own connection.
#[derive(Debug, Clone)]
pub struct TemplateClient {
    path: PathBuf,
    timeout: Duration,
}

impl TemplateClient {
    /// A client for the template process that listens at `path`.
    #[must_use]
    pub fn new(path: &Path, timeout: Duration) -> Self {
        Self { path: path.to_owned(), timeout }
    }

    /// Gives birth to a clone, which runs when this returns.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn spawn(&self, request: SpawnRequest) -> Result<SpawnReply, ClientError> {
        self.ask(TemplateVerb::Spawn(request))
    }

    /// Writes the moment of a frozen process into `directory`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn save(&self, directory: PathBuf) -> Result<SaveReply, ClientError> {
        self.ask(TemplateVerb::Save { directory })
    }

    /// State of the template process.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn status(&self) -> Result<TemplateStatus, ClientError> {
        self.ask(TemplateVerb::Status)
    }

    /// Ends the template process.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn stop(&self) -> Result<TemplateStatus, ClientError> {
        self.ask(TemplateVerb::Stop)
    }

    fn ask<T: DeserializeOwned>(&self, verb: TemplateVerb) -> Result<T, ClientError> {
        ask(&self.path, &mut connect(&self.path, self.timeout)?, verb)
    }
}

fn connect(path: &Path, timeout: Duration) -> Result<BufReader<UnixStream>, ClientError> {
    let failed = |source| ClientError::Connect { path: path.to_owned(), source };
    let stream = UnixStream::connect(path).map_err(failed)?;
    stream.set_read_timeout(Some(timeout)).map_err(failed)?;
    stream.set_write_timeout(Some(timeout)).map_err(failed)?;
    Ok(BufReader::new(stream))
}

fn ask<V: Serialize, T: DeserializeOwned>(
    path: &Path,
    stream: &mut BufReader<UnixStream>,
    verb: V,
) -> Result<T, ClientError> {
    let failed = |source| ClientError::Transfer { path: path.to_owned(), source };
    let mut line = serde_json::to_vec(&Envelope { version: PROTOCOL_VERSION, verb })
        .map_err(|source| ClientError::Reply { path: path.to_owned(), source })?;
    line.push(b'\n');
    stream.get_mut().write_all(&line).map_err(failed)?;
    line.clear();
    let limit = u64::try_from(LINE_BYTES_MAX).unwrap_or(u64::MAX);
    if stream.take(limit).read_until(b'\n', &mut line).map_err(failed)? == 0 {
        return Err(ClientError::Closed { path: path.to_owned() });
    }
    match serde_json::from_slice(&line) {
        Ok(Reply::Ok(value)) => Ok(value),
        Ok(Reply::Error(error)) => Err(ClientError::Refused(error)),
        Err(source) => Err(ClientError::Reply { path: path.to_owned(), source }),
    }
}
