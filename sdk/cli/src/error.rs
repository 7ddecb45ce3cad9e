//! What can go wrong, and what the user may do about it.

use std::io;
use std::path::PathBuf;

/// Exit code when `warren exec` or `warren run` itself failed.
pub(crate) const EXIT_OWN_FAILURE: u8 = 125;

/// A failure of the command line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    #[error("start the async runtime")]
    Runtime(#[source] io::Error),
    #[error("connect to warrend at {address}")]
    Connect {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error("talk HTTP to warrend")]
    Http(#[from] hyper::Error),
    #[error("warrend answered {status}: {message}")]
    Api {
        status: u16,
        message: String,
        /// The reply's `error_code`, by which programs tell errors of one status apart.
        code: Option<String>,
    },
    #[error("{context}: {message} ({code})")]
    Rpc { context: &'static str, code: String, message: String },
    #[error("understand warrend's reply to {0}")]
    Reply(String, #[source] serde_json::Error),
    #[error("the stream of the command ended before the command did")]
    StreamEnded,
    #[error("the address {0:?} is not of the form http://host:port")]
    Url(String),
    #[error("{action} {path}")]
    File {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{action}")]
    Io {
        action: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{message}")]
    Said { message: String, advice: String },
}

impl CliError {
    pub(crate) fn said(message: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::Said { message: message.into(), advice: advice.into() }
    }

    /// Whether what was asked for is being done for somebody else.
    pub(crate) fn is_under_way(&self) -> bool {
        matches!(self, Self::Api { code: Some(code), .. } if code == "being_built")
    }

    pub(crate) fn file(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    pub(crate) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }

    /// What to do next, where we know it.
    pub(crate) fn advice(&self) -> Option<String> {
        let advice = match self {
            Self::Connect { .. } => {
                "start it with `warren up`, or name another by --url or WARREN_URL"
            }
            Self::Api { status: 401 | 403, .. } => {
                "set WARREN_API_KEY, or run as a user who may read the file api-key in the node's state directory; if that is not the default, name it by --state-dir or WARREN_STATE_DIR"
            }
            Self::Api { status: 404, message, .. } if message.contains("emplate") => {
                "`warren template ls` lists templates; `warren template build` makes one"
            }
            Self::Api { status: 404 | 502, .. } => {
                "`warren ls` lists the sandboxes; `warren resume` wakes one that is paused"
            }
            Self::Api { status: 507, .. } => {
                "free disk space under the state directory, or the sandbox's own disk"
            }
            Self::Api { status: 429 | 503, .. } => {
                "wait for sandboxes to end, or raise the node's limits"
            }
            Self::StreamEnded => {
                "the sandbox was killed or reached its time limit; `warren create --timeout` sets a longer one"
            }
            Self::Url(_) => "for example: --url http://127.0.0.1:3000",
            Self::Said { advice, .. } => {
                return Some(advice.clone()).filter(|text| !text.is_empty());
            }
            Self::Runtime(_)
            | Self::Http(_)
            | Self::Api { .. }
            | Self::Rpc { .. }
            | Self::Reply(..)
            | Self::File { .. }
            | Self::Io { .. } => return None,
        };
        Some(advice.to_owned())
    }
}
