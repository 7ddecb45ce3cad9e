//! The VMM's control sockets, spoken asynchronously. Same lines as the blocking
//! client of `warren-vmm-api`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use warren_vmm_api::{Envelope, ErrorReply, LINE_BYTES_MAX, PROTOCOL_VERSION, Reply};

use crate::kinds::KindError;

/// Pause between attempts while a listener's queue is full.
const BACKLOG_PAUSE: Duration = Duration::from_millis(2);

/// Why a control request got no good reply.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Nobody listens.
    #[error("connect to {path}")]
    Connect {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("talk to {path}")]
    Transfer {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} closed without a reply: the process ended")]
    Closed { path: PathBuf },
    #[error("read the reply of {path}")]
    Reply {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{}: {}", .0.step, .0.message)]
    Refused(ErrorReply),
    #[error("{path} did not answer within {seconds} s")]
    Timeout { path: PathBuf, seconds: u64 },
}

impl ControlError {
    /// Whether the process behind the socket is gone.
    pub fn is_dead(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Closed { .. } => true,
            Self::Transfer { .. }
            | Self::Reply { .. }
            | Self::Refused(_)
            | Self::Timeout { .. } => false,
        }
    }

    pub fn into_kind(self, step: &str) -> KindError {
        match self {
            Self::Refused(reply) => KindError::Refused {
                step: format!("{step}: {}", reply.step),
                message: reply.message,
                advice: reply.advice,
            },
            Self::Timeout { .. } => KindError::Timeout(step.to_owned()),
            Self::Connect { source, .. } | Self::Transfer { source, .. } => {
                KindError::Io { step: step.to_owned(), source }
            }
            other @ (Self::Closed { .. } | Self::Reply { .. }) => KindError::Refused {
                step: step.to_owned(),
                message: other.to_string(),
                advice: String::new(),
            },
        }
    }
}

/// Asks one verb on a connection of its own.
pub async fn ask<V: Serialize, T: DeserializeOwned>(
    path: &Path,
    verb: V,
    limit: Duration,
) -> Result<T, ControlError> {
    let timeout = || ControlError::Timeout { path: path.to_owned(), seconds: limit.as_secs() };
    tokio::time::timeout(limit, exchange(path, verb)).await.map_err(|_| timeout())?
}

async fn exchange<V: Serialize, T: DeserializeOwned>(
    path: &Path,
    verb: V,
) -> Result<T, ControlError> {
    let stream = connect(path)
        .await
        .map_err(|source| ControlError::Connect { path: path.to_owned(), source })?;
    let failed = |source| ControlError::Transfer { path: path.to_owned(), source };
    let unread = |source| ControlError::Reply { path: path.to_owned(), source };
    let mut stream = BufReader::new(stream);
    let mut line =
        serde_json::to_vec(&Envelope { version: PROTOCOL_VERSION, verb }).map_err(unread)?;
    line.push(b'\n');
    stream.get_mut().write_all(&line).await.map_err(failed)?;
    line.clear();
    let limit = u64::try_from(LINE_BYTES_MAX).unwrap_or(u64::MAX);
    if (&mut stream).take(limit).read_until(b'\n', &mut line).await.map_err(failed)? == 0 {
        return Err(ControlError::Closed { path: path.to_owned() });
    }
    match serde_json::from_slice(&line).map_err(unread)? {
        Reply::Ok(value) => Ok(value),
        Reply::Error(error) => Err(ControlError::Refused(error)),
    }
}

/// Connects; waits while the listener's queue is full, which a unix socket reports
/// as `WouldBlock`. The caller bounds the time.
pub async fn connect(path: &Path) -> std::io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                tokio::time::sleep(BACKLOG_PAUSE).await;
            }
            outcome => return outcome,
        }
    }
}
