//! running → killing → gone.
//!
//! The phase changes first, so no new request passes; then the streams are cut; then,
//! at once, the process ends, everything of it is removed from the host, and the
//! record is removed from the store.

use std::sync::Arc;
use std::time::Duration;

use super::{Phase, Sandbox, Sandboxes};
use crate::error::chain;
use crate::ids::SandboxId;
use crate::kinds::{Instance, Kind, KindError};
use crate::lifecycle::{EndCause, Event};
use crate::store::Change;

/// Removing may fail for a moment, as long as something holds a file.
const REMOVE_ATTEMPTS: u32 = 4;
const REMOVE_PAUSE: Duration = Duration::from_millis(50);

/// What ending meant for the one who asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It ends now, by this or an earlier request.
    Ending,
    /// There is no such sandbox any more.
    Gone,
}

impl Sandboxes {
    /// Ends a sandbox and waits until nothing of it is left. `false`: there was none.
    pub async fn kill(&self, id: &str, cause: EndCause) -> bool {
        loop {
            let Some(sandbox) = self.find(id) else { return false };
            match self.end(&sandbox, cause) {
                Ended::Ending => {
                    sandbox.gone().await;
                    return true;
                }
                // In a moment the table has what took its place.
                Ended::Gone if sandbox.phase() == Phase::Replaced => {
                    tokio::task::yield_now().await;
                }
                Ended::Gone => return false,
            }
        }
    }

    /// Ends every sandbox and waits for it. Returns how many there were.
    pub async fn kill_all(&self, cause: EndCause) -> usize {
        let all: Vec<Arc<Sandbox>> = self.table().values().cloned().collect();
        for sandbox in &all {
            self.end(sandbox, cause);
        }
        for sandbox in &all {
            sandbox.gone().await;
        }
        all.len()
    }

    /// Ends what serves templates. Sandboxes can still be made: it starts again for them.
    pub async fn retire_kinds(&self) {
        for kind in self.0.kinds.values() {
            if let Err(error) = kind.retire().await {
                tracing::error!(kind = %kind.name(), error = %chain(&error),
                    "something that serves templates still runs");
            }
        }
    }

    /// Begins to end a sandbox. The work is a task of its own.
    pub fn end(&self, sandbox: &Arc<Sandbox>, cause: EndCause) -> Ended {
        match sandbox.advance(Event::End(cause)) {
            Err(_) => Ended::Gone,
            Ok(before @ (Phase::Running | Phase::Paused)) => {
                if before == Phase::Paused {
                    self.one_awake();
                }
                sandbox.over().cancel();
                let this = self.clone();
                let sandbox = Arc::clone(sandbox);
                self.0.work.spawn(async move { this.finish(&sandbox, cause).await });
                Ended::Ending
            }
            Ok(Phase::Creating | Phase::Pausing) => {
                // The task that creates or pauses it removes it.
                sandbox.over().cancel();
                Ended::Ending
            }
            Ok(Phase::Killing(_) | Phase::Gone(_) | Phase::Failed | Phase::Replaced) => {
                Ended::Ending
            }
        }
    }

    /// Ends a sandbox whose process ended by itself.
    pub(super) fn watch(&self, sandbox: &Arc<Sandbox>) {
        let Some(live) = sandbox.live() else { return };
        let ended = live.instance.ended();
        let this = self.clone();
        let sandbox = Arc::clone(sandbox);
        self.0.background.spawn(async move {
            tokio::select! {
                biased;
                // A pause ends the process too, and first this.
                () = sandbox.ending() => {}
                () = ended => {
                    if this.end(&sandbox, EndCause::Died) == Ended::Ending {
                        tracing::warn!(sandbox_id = %sandbox.id(), "process of a sandbox ended");
                    }
                }
            }
        });
    }

    /// Ends sandboxes whose time is over, for ever.
    pub async fn enforce_deadlines(&self) {
        loop {
            for id in self.0.deadlines.expired().await {
                let Some(sandbox) = self.find(id.as_str()) else { continue };
                if sandbox.with_record(|record| record.auto_pause) {
                    let this = self.clone();
                    self.0.background.spawn(async move { this.pause_or_end(&sandbox).await });
                } else {
                    self.end(&sandbox, EndCause::Timeout);
                }
            }
        }
    }

    pub(super) async fn finish(&self, sandbox: &Arc<Sandbox>, cause: EndCause) {
        let begin = std::time::Instant::now();
        let (removed, ()) =
            tokio::join!(self.remove_from_host(sandbox), self.remove_record(sandbox));
        if let Err(error) = removed {
            tracing::error!(sandbox_id = %sandbox.id(), error = %chain(&error),
                "something of an ended sandbox is left");
        }
        self.forget(sandbox);
        self.0.metrics.end(cause);
        tracing::info!(sandbox_id = %sandbox.id(), cause = cause.label(),
            took_ms = begin.elapsed().as_millis(), "sandbox ended");
        let moved = sandbox.advance(Event::Cleaned);
        assert!(moved.is_ok(), "only this task moves a sandbox out of killing");
    }

    async fn remove_from_host(&self, sandbox: &Sandbox) -> Result<(), KindError> {
        let Some(kind) = self.kind(sandbox.with_record(|record| record.kind)) else {
            return Ok(());
        };
        let instance = sandbox.live().map(|live| live.instance.as_ref());
        remove(kind.as_ref(), sandbox.id(), instance).await
    }

    async fn remove_record(&self, sandbox: &Sandbox) {
        let _saving = sandbox.saving.lock().await;
        // A record that stays is dropped at the next start: it has no process.
        if let Err(error) = self.commit(vec![Change::RemoveSandbox(sandbox.id().clone())]).await {
            tracing::warn!(sandbox_id = %sandbox.id(), %error, "record not removed");
        }
    }
}

/// Ends the processes of a sandbox and removes all of it from the host.
pub(super) async fn remove(
    kind: &dyn Kind,
    id: &SandboxId,
    instance: Option<&dyn Instance>,
) -> Result<(), KindError> {
    let mut attempt = 1;
    loop {
        let stopped = match instance {
            Some(instance) => instance.stop().await,
            None => Ok(()),
        };
        let outcome = match stopped {
            Ok(()) => kind.clean(id.clone()).await,
            Err(error) => Err(error),
        };
        match outcome {
            Err(_) if attempt < REMOVE_ATTEMPTS => {
                tokio::time::sleep(REMOVE_PAUSE * attempt).await;
                attempt += 1;
            }
            outcome => return outcome,
        }
    }
}
