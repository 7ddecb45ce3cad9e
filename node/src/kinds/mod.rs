//! Kinds of sandbox behind one interface.
//!
//! A kind knows how sandboxes of its sort come to life, are found again, are reached
//! and are removed. It keeps no list of sandboxes: that is [`crate::sandboxes`]. Nothing
//! outside this folder asks which kind a sandbox is.

pub mod microvm;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::ids::{SandboxId, TemplateName};
use crate::store::TemplateRecord;

/// Sort of a sandbox, as stored and shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KindName {
    /// A microVM forked from a template process.
    Microvm,
}

impl fmt::Display for KindName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Microvm => "microvm",
        })
    }
}

/// A port of the guest that the agent listens on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GuestPort {
    /// envd's protocol, HTTP/1.1.
    Envd,
    /// Code interpreter, HTTP/1.1.
    CodeInterpreter,
    /// A line with a TCP port, then a stream to it.
    Tunnel,
}

impl GuestPort {
    pub const fn number(self) -> u16 {
        match self {
            Self::Envd => 49983,
            Self::CodeInterpreter => 49999,
            Self::Tunnel => 49982,
        }
    }
}

/// A step of a kind that failed.
#[derive(Debug, thiserror::Error)]
pub enum KindError {
    /// The host refused something.
    #[error("{step}")]
    Io {
        step: String,
        #[source]
        source: io::Error,
    },
    /// A process of ours refused something.
    #[error("{step}: {message}")]
    Refused {
        step: String,
        message: String,
        /// What the reader can do; may be empty.
        advice: String,
    },
    /// Too much is under way; asking again later makes sense.
    #[error("{0}")]
    Busy(String),
    /// A process did not answer in time.
    #[error("{0} took too long")]
    Timeout(String),
}

impl KindError {
    pub fn io(step: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let step = step.into();
        move |source| Self::Io { step, source }
    }
}

/// A sandbox to be born.
#[derive(Debug, Clone)]
pub struct Birth {
    pub id: SandboxId,
    pub template: TemplateName,
}

/// What came of a fork: for each child, in order.
pub type Children = Result<Vec<Result<Arc<dyn Instance>, KindError>>, KindError>;

/// What the store says of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    Running,
    Paused,
}

/// What the host has of a sandbox. A pause or a resume that was under way when a daemon
/// was killed counts as not begun, unless there is no process any more.
#[derive(Debug)]
pub enum Found {
    Running(Arc<dyn Instance>),
    Paused,
    Nothing,
}

/// A template to be made.
#[derive(Debug, Clone)]
pub struct BuildPlan {
    pub name: TemplateName,
    pub aliases: Vec<TemplateName>,
    pub rootfs: PathBuf,
    pub kernel: PathBuf,
    pub vcpus: u8,
    pub memory_mib: u32,
    pub disk_mib: u32,
    pub warmup: Warmup,
}

/// Whether the agent warms up before the freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warmup {
    Full,
    Skip,
}

/// A build that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {message}")]
pub struct BuildError {
    /// The step, as in the progress lines.
    pub step: &'static str,
    /// Whose fault it is.
    pub blame: Blame,
    pub message: String,
    /// Last lines of the guest's console, if it came that far.
    pub console: Option<String>,
}

/// Who can mend a failed build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// Whoever asked: bad input.
    Request,
    /// The node.
    Node,
    /// Time.
    Later,
}

/// One line of a build's progress.
#[derive(Debug, Clone, Serialize)]
pub struct ProgressLine {
    pub step: &'static str,
    pub message: String,
    /// What the guest says about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<serde_json::Value>,
}

/// Where progress goes. Never blocks the build: lines are dropped if nobody reads.
pub type Progress = Arc<dyn Fn(ProgressLine) + Send + Sync>;

/// One kind of sandbox.
pub trait Kind: Send + Sync {
    fn name(&self) -> KindName;

    /// Called first after a start of the daemon. When this returns, nothing is left of
    /// builds that were under way and of templates that are not `known`.
    fn settle(&self, known: Vec<TemplateName>) -> BoxFuture<'_, Result<(), KindError>>;

    /// Gives life. On failure nothing of the sandbox runs, but files may be left for
    /// [`Kind::clean`].
    fn create(&self, birth: Birth) -> BoxFuture<'_, Result<Arc<dyn Instance>, KindError>>;

    /// Puts a running sandbox on disk; its processes are gone when this returns. On
    /// failure it runs on, unless [`Instance::ended`] says otherwise.
    fn pause(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>>;

    /// Brings a paused sandbox back. On failure it stays paused; then
    /// [`Kind::give_up_resume`] is called.
    fn resume(&self, birth: Birth) -> BoxFuture<'_, Result<Arc<dyn Instance>, KindError>>;

    /// A resumed sandbox is recorded as running: what was kept of the pause may go.
    fn resumed(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>>;

    /// Ends whatever a failed resume has started. The sandbox stays paused. Idempotent.
    fn give_up_resume(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>>;

    /// Children of a running sandbox, each with memory, processes and disk as they are
    /// now. Fails as a whole, or for single children, of which files may be left for
    /// [`Kind::clean`]. The parent runs on.
    fn fork(&self, parent: SandboxId, children: Vec<SandboxId>) -> BoxFuture<'_, Children>;

    /// Finds a sandbox that was there before the daemon started.
    fn adopt(&self, id: SandboxId, recorded: Recorded) -> BoxFuture<'_, Result<Found, KindError>>;

    /// Called after the last adoption, before the first create. Ends processes that
    /// belong to none of the `known` sandboxes and cannot be named, and returns the
    /// other sandboxes of which anything is left on the host.
    fn strays(&self, known: Vec<SandboxId>) -> BoxFuture<'_, Result<Vec<SandboxId>, KindError>>;

    /// Removes everything of a sandbox whose process has ended. Idempotent.
    fn clean(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>>;

    /// Makes a template ready for births. A failed build leaves nothing behind.
    fn build(
        &self,
        plan: BuildPlan,
        progress: Progress,
    ) -> BoxFuture<'_, Result<TemplateRecord, BuildError>>;

    /// Ends what serves templates. Their files stay; a birth starts it again.
    fn retire(&self) -> BoxFuture<'_, Result<(), KindError>>;

    /// Ends what serves a template and removes its files. Sandboxes live on.
    fn discard(&self, template: TemplateName) -> BoxFuture<'_, Result<(), KindError>>;
}

/// A sandbox that lives.
pub trait Instance: fmt::Debug + Send + Sync {
    /// A fresh stream to a port of the guest. `ConnectionRefused`: nobody listens.
    fn connect(&self, port: GuestPort) -> BoxFuture<'_, io::Result<UnixStream>>;

    /// Whatever the kind counts.
    fn stats(&self) -> BoxFuture<'_, Result<serde_json::Value, KindError>>;

    /// The last `bytes_max` bytes of the console.
    fn console(&self, bytes_max: u64) -> BoxFuture<'_, io::Result<Vec<u8>>>;

    /// Ends the processes at once; they are gone when this returns. Idempotent.
    fn stop(&self) -> BoxFuture<'_, Result<(), KindError>>;

    /// Resolves when the processes are gone, for whatever reason.
    fn ended(&self) -> BoxFuture<'static, ()>;
}
