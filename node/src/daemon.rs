//! The daemon from its start to its stop.
//!
//! ```text
//! locks ▶ listen ▶ store ▶ adopt ▶ first key ▶ serve … stop ▶ finish work
//! ```

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use rustix::process::{Resource, Rlimit};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::{self, App, StopRequest};
use crate::config::Config;
use crate::flags::OnStop;
use crate::idempotency::Idempotency;
use crate::keys::{ApiKeys, KeyError};
use crate::kinds::Kind;
use crate::kinds::microvm::Microvms;
use crate::lifecycle::EndCause;
use crate::lock::{DirectoryLock, LockError, keep_run_directory};
use crate::logs;
use crate::metrics::Metrics;
use crate::sandboxes::{AdoptError, Parts, Sandboxes};
use crate::server::{self, Listener};
use crate::store::{RedbStore, Store, StoreError};
use crate::templates::Templates;

/// Creates, kills and builds that are under way at a stop get this long.
const WORK_LIMIT: Duration = Duration::from_secs(60);
/// Backlog of the TCP listener is the kernel's; of the local socket it is this file's.
const LOCAL_SOCKET_MODE: u32 = 0o600;

/// Why the daemon does not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Another daemon, or no directory.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The address is taken or not ours.
    #[error("listen on {address}")]
    Listen {
        /// The address or path.
        address: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// The store is unusable.
    #[error("use the store: {0}")]
    Store(String),
    /// The directories cannot be made.
    #[error("make the directories of the node")]
    Directories(#[source] io::Error),
    /// The host is in an unknown state.
    #[error("adopt what runs on this node: {0}")]
    Adopt(String),
    /// The first key cannot be made.
    #[error("make the first API key: {0}")]
    Key(String),
    /// Signals cannot be received.
    #[error("receive signals")]
    Signal(#[source] io::Error),
}

impl From<StoreError> for RunError {
    fn from(error: StoreError) -> Self {
        Self::Store(crate::error::chain(&error))
    }
}

impl From<AdoptError> for RunError {
    fn from(error: AdoptError) -> Self {
        Self::Adopt(crate::error::chain(&error))
    }
}

impl From<KeyError> for RunError {
    fn from(error: KeyError) -> Self {
        Self::Key(crate::error::chain(&error))
    }
}

/// Serves until SIGTERM, SIGINT or a request to stop.
///
/// # Errors
/// [`RunError`] if the daemon cannot start.
pub async fn run(config: Config) -> Result<(), RunError> {
    logs::start(config.log_format, config.log_level);
    let _state_lock = DirectoryLock::take(&config.state_directory)?;
    keep_run_directory(&config.state_directory, &config.run_directory)?;
    let _run_lock = DirectoryLock::take(&config.run_directory)?;
    raise_descriptor_limit();
    let stop = StopRequest::default();
    watch_signals(&stop, config.on_stop)?;
    let network = listen_network(&config).await?;
    let local = listen_local(&config)?;

    let work = TaskTracker::new();
    let background = TaskTracker::new();
    let (store, contents) = RedbStore::open(&config.state_directory)?;
    let store: Arc<dyn Store> = Arc::new(store);
    let microvms = Microvms::new(&config, background.clone()).map_err(RunError::Directories)?;
    let kinds: Vec<Arc<dyn Kind>> = vec![Arc::new(microvms)];
    let metrics = Metrics::new();
    let templates = Templates::new(Arc::clone(&store), &kinds, contents.templates);
    let sandboxes = Sandboxes::new(Parts {
        node_id: config.node_id.clone(),
        limits: config.limits,
        store: Arc::clone(&store),
        kinds,
        metrics: metrics.clone(),
        work: work.clone(),
        background: background.clone(),
    });
    sandboxes.adopt(contents.sandboxes, templates.names()).await?;
    let keys = ApiKeys::new(Arc::clone(&store), contents.keys);
    if keys.ensure_first(&config.key_file()).await? {
        eprintln!("made the first API key: {}", config.key_file().display());
    }

    let app = Arc::new(App {
        sandboxes: sandboxes.clone(),
        templates,
        keys,
        idempotency: Idempotency::load(contents.idempotency),
        metrics,
        work: work.clone(),
        background: background.clone(),
        stop: stop.clone(),
        started_at: Timestamp::now(),
        config,
    });
    warn_of_missing(&app.config);
    tracing::info!(listen = %app.config.listen, node_id = app.config.node_id.as_str(),
        sandboxes = sandboxes.count(), "serving");
    let handler = api::handler(Arc::clone(&app));
    let deadlines = sandboxes.clone();
    background.spawn(async move { deadlines.enforce_deadlines().await });
    let _listeners = tokio::join!(
        server::serve(Listener::Network(network), Arc::clone(&handler), stop.asked.clone()),
        server::serve(Listener::Local(local), handler, stop.asked.clone()),
    );
    finish(&app, &work, &stop.kill).await;
    let _ = std::fs::remove_file(app.config.admin_socket());
    Ok(())
}

/// Ends sandboxes if that was asked for, and lets work under way come to its end.
async fn finish(app: &App, work: &TaskTracker, kill: &CancellationToken) {
    work.close();
    if tokio::time::timeout(WORK_LIMIT, work.wait()).await.is_err() {
        tracing::warn!(tasks = work.len(), "stopping with work under way");
    }
    if kill.is_cancelled() {
        let killed = app.sandboxes.kill_all(EndCause::NodeStop).await;
        app.sandboxes.retire_kinds().await;
        tracing::info!(killed, "ended all sandboxes");
    }
    tracing::info!(sandboxes = app.sandboxes.count(), "stopped");
}

fn watch_signals(stop: &StopRequest, on_stop: OnStop) -> Result<(), RunError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(RunError::Signal)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(RunError::Signal)?;
    let stop = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = stop.asked.cancelled() => return,
        }
        match on_stop {
            OnStop::Keep => {}
            OnStop::Kill => stop.kill.cancel(),
        }
        stop.asked.cancel();
    });
    Ok(())
}

async fn listen_network(config: &Config) -> Result<TcpListener, RunError> {
    TcpListener::bind(config.listen)
        .await
        .map_err(|source| RunError::Listen { address: config.listen.to_string(), source })
}

/// The run directory is locked, so a socket that is there has no owner.
fn listen_local(config: &Config) -> Result<UnixListener, RunError> {
    let path = config.admin_socket();
    let failed = |source| RunError::Listen { address: path.display().to_string(), source };
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).map_err(failed)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(LOCAL_SOCKET_MODE))
        .map_err(failed)?;
    Ok(listener)
}

/// A sandbox takes a few descriptors.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "limit of descriptors not raised");
    }
}

/// What is missing does not keep the daemon from serving what runs.
fn warn_of_missing(config: &Config) {
    if !config.vmm.exists() {
        tracing::warn!(path = %config.vmm.display(), "warren-vmm is not there; no sandbox can be made");
    }
    if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        tracing::warn!(%error, "cannot open /dev/kvm; no microVM can be made");
    }
}
