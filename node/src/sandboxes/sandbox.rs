//! One sandbox: its record, its phase, and the way to its guest.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use jiff::Timestamp;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::usage::Usage;
use crate::agent::Channels;
use crate::ids::SandboxId;
use crate::kinds::Instance;
use crate::lifecycle::{self, Event, Phase, Refused};
use crate::store::SandboxRecord;

/// A sandbox that lives, is being made or is being removed.
#[derive(Debug)]
pub struct Sandbox {
    id: SandboxId,
    record: Mutex<SandboxRecord>,
    phase: watch::Sender<Phase>,
    /// Cancelled as soon as it begins to end or to pause: streams break, waiting stops.
    over: CancellationToken,
    live: OnceLock<Live>,
    /// Held while the record is written or removed, so that the store sees the
    /// changes in order.
    pub(super) saving: tokio::sync::Mutex<()>,
    /// Held while a checkpoint of it is taken.
    pub(super) forking: tokio::sync::Mutex<()>,
    pub(super) usage: Usage,
}

/// What a sandbox has once it was born.
#[derive(Debug, Clone)]
pub struct Live {
    pub instance: Arc<dyn Instance>,
    pub channels: Channels,
}

impl Sandbox {
    pub(super) fn new(record: SandboxRecord, phase: Phase) -> Self {
        Self {
            id: record.id.clone(),
            record: Mutex::new(record),
            phase: watch::Sender::new(phase),
            over: CancellationToken::new(),
            live: OnceLock::new(),
            saving: tokio::sync::Mutex::new(()),
            forking: tokio::sync::Mutex::new(()),
            usage: Usage::default(),
        }
    }

    pub fn id(&self) -> &SandboxId {
        &self.id
    }

    /// A copy of the record as it is now.
    pub fn record(&self) -> SandboxRecord {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Looks at the record without a copy.
    pub fn with_record<T>(&self, look: impl FnOnce(&SandboxRecord) -> T) -> T {
        look(&self.record.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set_times(&self, started_at: Timestamp, end_at: Timestamp) {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        record.started_at = started_at;
        record.end_at = end_at;
        record.paused_at = None;
    }

    pub(super) fn set_record(&self, record: SandboxRecord) {
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = record;
    }

    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// The one place that moves the phase. Returns the phase before.
    pub(super) fn advance(&self, event: Event) -> Result<Phase, Refused> {
        let mut outcome = Ok(Phase::Failed);
        self.phase.send_if_modified(|phase| {
            let before = *phase;
            match lifecycle::step(before, event) {
                Ok(next) => {
                    outcome = Ok(before);
                    *phase = next;
                    before != next
                }
                Err(refused) => {
                    outcome = Err(refused);
                    false
                }
            }
        });
        outcome
    }

    pub(super) fn over(&self) -> &CancellationToken {
        &self.over
    }

    /// Resolves when nothing of the sandbox is left.
    pub async fn gone(&self) {
        // The sender lives as long as `self`.
        let _ = self.phase.subscribe().wait_for(|phase| phase.is_over()).await;
    }

    /// Resolves when nothing is under way with the sandbox.
    pub async fn settled(&self) {
        // The sender lives as long as `self`.
        let _ = self.phase.subscribe().wait_for(|phase| !phase.is_passing()).await;
    }

    /// Resolves when the sandbox begins to end.
    pub async fn ending(&self) {
        self.over.cancelled().await;
    }

    pub(super) fn set_live(&self, live: Live) {
        let fresh = self.live.set(live).is_ok();
        assert!(fresh, "a sandbox is born once");
    }

    /// The way to the guest, if the sandbox was born.
    pub fn live(&self) -> Option<&Live> {
        self.live.get()
    }
}
