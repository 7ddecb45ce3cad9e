//! All sandboxes of the node: the table, and every step of their lives.
//!
//! | file | step |
//! |---|---|
//! | `create.rs` | creating → running, or failed |
//! | `end.rs` | killing → gone |
//! | `pause.rs` | running → paused → running, and forks |
//! | `deadlines.rs` | when time is over |
//! | `adopt.rs` | finding them again after a start |
//! | `usage.rs` | what they use |
//!
//! Locks: `table` and the record's lock are held for a few instructions and never
//! together; `Sandbox::saving` is held across a write to the store and is taken first.

mod adopt;
mod create;
mod deadlines;
mod end;
mod pause;
mod sandbox;
mod usage;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use tokio::sync::{Semaphore, oneshot};
use tokio_util::task::TaskTracker;

pub use self::adopt::AdoptError;
pub use self::create::{CreateError, CreateRequest, Traffic};
use self::deadlines::Deadlines;
pub use self::pause::{Connected, PauseError};
pub use self::sandbox::Sandbox;
pub use self::usage::Sample;
use crate::admission::{self, AdmissionError, Limits, Load};
use crate::ids::{NodeId, SandboxId};
use crate::kinds::{Kind, KindName};
use crate::lifecycle::Phase;
use crate::metrics::Metrics;
use crate::store::{Change, SandboxRecord, Store, StoreError};

/// See [`births_max`].
const BIRTHS_PER_PROCESSOR: usize = 2;
/// `/proc/meminfo` is read at most this often.
const MEMORY_FRESH_FOR: Duration = Duration::from_millis(100);

/// All sandboxes of the node; cheap to clone.
#[derive(Clone)]
pub struct Sandboxes(Arc<Shared>);

struct Shared {
    node_id: NodeId,
    limits: Limits,
    store: Arc<dyn Store>,
    kinds: BTreeMap<KindName, Arc<dyn Kind>>,
    metrics: Metrics,
    work: TaskTracker,
    background: TaskTracker,
    table: Mutex<HashMap<SandboxId, Arc<Sandbox>>>,
    /// Sandboxes of the table that are paused: they take no place.
    paused: AtomicUsize,
    deadlines: Deadlines,
    memory: Mutex<Option<(Instant, Memory)>>,
    /// Places for births under way, each of which takes a processor for a while.
    births: Semaphore,
}

/// What the sandboxes are built on.
pub struct Parts {
    pub node_id: NodeId,
    pub limits: Limits,
    pub store: Arc<dyn Store>,
    pub kinds: Vec<Arc<dyn Kind>>,
    pub metrics: Metrics,
    /// Tasks that a stop of the daemon waits for.
    pub work: TaskTracker,
    /// Tasks that end with the daemon.
    pub background: TaskTracker,
}

/// Memory of the node in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Memory {
    pub total: Option<u64>,
    pub available: Option<u64>,
}

/// Whether a new deadline may come before the present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deadline {
    /// `timeout`: as asked.
    Set,
    /// `connect`: only ever later.
    Extend,
}

/// Why a deadline was not moved.
#[derive(Debug, thiserror::Error)]
pub enum DeadlineError {
    #[error("the sandbox is not running")]
    NotRunning,
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Sandboxes {
    pub fn new(parts: Parts) -> Self {
        Self(Arc::new(Shared {
            node_id: parts.node_id,
            limits: parts.limits,
            store: parts.store,
            kinds: parts.kinds.into_iter().map(|kind| (kind.name(), kind)).collect(),
            metrics: parts.metrics,
            work: parts.work,
            background: parts.background,
            table: Mutex::default(),
            paused: AtomicUsize::new(0),
            deadlines: Deadlines::default(),
            memory: Mutex::default(),
            births: Semaphore::new(births_max()),
        }))
    }

    /// A running sandbox.
    pub fn running(&self, id: &str) -> Option<Arc<Sandbox>> {
        self.find(id).filter(|sandbox| sandbox.phase() == Phase::Running)
    }

    /// All running sandboxes, in no order.
    pub fn all_running(&self) -> Vec<Arc<Sandbox>> {
        let table = self.table();
        table.values().filter(|sandbox| sandbox.phase() == Phase::Running).cloned().collect()
    }

    /// All running and paused sandboxes, in no order.
    pub fn all_lasting(&self) -> Vec<Arc<Sandbox>> {
        self.table().values().filter(|sandbox| sandbox.phase().lasts()).cloned().collect()
    }

    /// A running sandbox, or one that is or is being paused.
    pub fn lasting(&self, id: &str) -> Option<Arc<Sandbox>> {
        self.find(id).filter(|sandbox| sandbox.phase().lasts())
    }

    /// Sandboxes alive or in transition; paused ones do not count.
    pub fn count(&self) -> usize {
        self.table().len().saturating_sub(self.paused())
    }

    /// One more is paused.
    fn one_asleep(&self) {
        self.0.paused.fetch_add(1, Ordering::Relaxed);
        self.publish();
    }

    /// One that was paused is not any more.
    fn one_awake(&self) {
        self.0.paused.fetch_sub(1, Ordering::Relaxed);
        self.publish();
    }

    fn publish(&self) {
        self.0.metrics.sandboxes(self.count(), self.paused());
    }

    pub fn paused(&self) -> usize {
        self.0.paused.load(Ordering::Relaxed)
    }

    pub fn limits(&self) -> Limits {
        self.0.limits
    }

    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Memory of the node, at most 100 ms old.
    pub fn memory(&self) -> Memory {
        let mut cached = self.0.memory.lock().unwrap_or_else(PoisonError::into_inner);
        match *cached {
            Some((at, memory)) if at.elapsed() < MEMORY_FRESH_FOR => memory,
            Some(_) | None => {
                let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
                let (total, available) = admission::parse_meminfo(&text);
                let memory = Memory { total, available };
                *cached = Some((Instant::now(), memory));
                memory
            }
        }
    }

    /// Moves a running sandbox's deadline to `timeout` from now; stored when this
    /// returns. Returns the record as it is then.
    pub async fn set_deadline(
        &self,
        sandbox: &Arc<Sandbox>,
        timeout: Duration,
        how: Deadline,
    ) -> Result<(), DeadlineError> {
        let _saving = sandbox.saving.lock().await;
        let end_at = deadline(Timestamp::now(), timeout);
        let before = sandbox.with_record(|record| record.end_at);
        if sandbox.phase() != Phase::Running {
            return Err(DeadlineError::NotRunning);
        }
        if how == Deadline::Extend && end_at <= before {
            return Ok(());
        }
        let mut record = sandbox.record();
        record.end_at = end_at;
        self.commit(vec![Change::PutSandbox(Box::new(record))]).await?;
        sandbox.set_times(sandbox.with_record(|record| record.started_at), end_at);
        self.0.deadlines.set(sandbox.id(), Some(before), end_at);
        Ok(())
    }

    /// Does `work` to its end even if whoever asked for it leaves; its outcome is then given
    /// to `unclaimed`. `None`: the node is stopping.
    async fn to_its_end<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        unclaimed: impl FnOnce(T) + Send + 'static,
    ) -> Option<T> {
        let (done, outcome) = oneshot::channel();
        self.0.work.spawn(async move {
            if let Err(outcome) = done.send(work.await) {
                unclaimed(outcome);
            }
        });
        outcome.await.ok()
    }

    async fn commit(&self, batch: Vec<Change>) -> Result<(), StoreError> {
        let outcome = self.0.store.commit(batch).await;
        if outcome.is_err() {
            self.0.metrics.store_failure();
        }
        outcome
    }

    fn find(&self, id: &str) -> Option<Arc<Sandbox>> {
        self.table().get(id).cloned()
    }

    fn kind(&self, name: KindName) -> Option<Arc<dyn Kind>> {
        self.0.kinds.get(&name).cloned()
    }

    /// Takes a place in the table, if there is one.
    fn reserve(&self, record: SandboxRecord) -> Result<Arc<Sandbox>, AdmissionError> {
        let memory_available_bytes = self.memory().available;
        let sandbox = Arc::new(Sandbox::new(record, Phase::Creating));
        {
            let mut table = self.table();
            let sandboxes = table.len().saturating_sub(self.paused());
            let load = Load { sandboxes, memory_available_bytes };
            admission::admit(self.0.limits, load)?;
            table.insert(sandbox.id().clone(), Arc::clone(&sandbox));
        }
        self.publish();
        Ok(sandbox)
    }

    /// Whether there is room for a sandbox that has its place in the table already.
    fn admit_one(&self) -> Result<(), AdmissionError> {
        let sandboxes = self.count().saturating_sub(1);
        let memory_available_bytes = self.memory().available;
        admission::admit(self.0.limits, Load { sandboxes, memory_available_bytes })
    }

    fn insert(&self, sandbox: &Arc<Sandbox>) {
        self.table().insert(sandbox.id().clone(), Arc::clone(sandbox));
        self.publish();
    }

    fn forget(&self, sandbox: &Sandbox) {
        self.table().remove(sandbox.id());
        self.publish();
        self.0.deadlines.remove(sandbox.id(), sandbox.with_record(|record| record.end_at));
    }

    fn table(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, Arc<Sandbox>>> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A birth takes a processor for a while; more at once than there are processors help
/// only while some wait, and guests that share one too thinly get nowhere.
fn births_max() -> usize {
    BIRTHS_PER_PROCESSOR * std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// `timeout` after `from`; far in the future if that does not fit.
fn deadline(from: Timestamp, timeout: Duration) -> Timestamp {
    SignedDuration::try_from(timeout)
        .ok()
        .and_then(|timeout| from.checked_add(timeout).ok())
        .unwrap_or(Timestamp::MAX)
}
