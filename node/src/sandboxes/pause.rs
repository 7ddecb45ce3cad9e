//! running → paused → running, and forks.
//!
//! ```text
//! pause:   running ▶ pausing (no request passes) ▶ kind: pause ▶ store ▶ paused
//! resume:  paused ▶ resumed; in its place a new `Sandbox`: creating ▶ kind: resume
//!          ▶ agent: /init ▶ store ▶ running, or paused again
//! ```
//!
//! Each incarnation of a sandbox is a [`Sandbox`] of its own under the same id, so that
//! whoever holds the old one sees it end. The work is a task that runs to its end even if
//! the client leaves.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::create::{CreateError, Failure, Undone, child_record};
use super::{Phase, Sandbox, Sandboxes};
use crate::error::chain;
use crate::ids::SandboxId;
use crate::kinds::{Birth, KindError};
use crate::lifecycle::{EndCause, Event};
use crate::store::{Change, StoreError};

/// Why a sandbox was not paused.
#[derive(Debug, thiserror::Error)]
pub enum PauseError {
    #[error("the sandbox was not found")]
    NotFound,
    #[error("the sandbox is paused already")]
    Paused,
    /// It runs on.
    #[error("pause the sandbox")]
    Kind(#[from] KindError),
    #[error("store that the sandbox is paused")]
    Store(#[from] StoreError),
    #[error("the sandbox ended while it was being paused")]
    Ended,
    #[error("the node is stopping")]
    Stopping,
}

/// What a request to connect found.
#[derive(Debug)]
pub enum Connected {
    Running(Arc<Sandbox>),
    Resumed(Arc<Sandbox>),
}

impl Sandboxes {
    /// Puts a running sandbox on disk; its processes are gone when this returns.
    ///
    /// # Errors
    /// See [`PauseError`].
    pub async fn pause(&self, id: &str) -> Result<(), PauseError> {
        let sandbox = self.find(id).ok_or(PauseError::NotFound)?;
        match sandbox.advance(Event::Pause) {
            Ok(_) => {}
            Err(_) if matches!(sandbox.phase(), Phase::Pausing | Phase::Paused) => {
                return Err(PauseError::Paused);
            }
            Err(_) => return Err(PauseError::NotFound),
        }
        let this = self.clone();
        let work = async move {
            this.put_to_sleep(&sandbox).await.inspect_err(|error| {
                tracing::error!(sandbox_id = %sandbox.id(), error = %chain(error), "pause failed");
            })
        };
        self.to_its_end(work, drop).await.unwrap_or(Err(PauseError::Stopping))
    }

    /// For a sandbox whose time is over and that asked for this: a pause that fails for
    /// lack of room or because the guest is stuck must not let it run for ever.
    pub(super) async fn pause_or_end(&self, sandbox: &Arc<Sandbox>) {
        match self.pause(sandbox.id().as_str()).await {
            Ok(()) | Err(PauseError::NotFound | PauseError::Paused | PauseError::Ended) => {}
            Err(PauseError::Stopping) => {}
            Err(PauseError::Kind(_) | PauseError::Store(_)) => {
                if let Some(sandbox) = self.running(sandbox.id().as_str()) {
                    tracing::warn!(sandbox_id = %sandbox.id(), "not paused at its timeout: it ends");
                    self.end(&sandbox, EndCause::Timeout);
                }
            }
        }
    }

    async fn put_to_sleep(&self, sandbox: &Arc<Sandbox>) -> Result<(), PauseError> {
        let begin = std::time::Instant::now();
        let _forking = sandbox.forking.lock().await;
        let (kind, end_at) = sandbox.with_record(|record| (record.kind, record.end_at));
        let Some(kind) = self.kind(kind) else { return Err(PauseError::NotFound) };
        // Requests under way would be cut off by the pause anyway.
        sandbox.over().cancel();
        if let Err(error) = kind.pause(sandbox.id().clone()).await {
            return Err(self.wake_again(sandbox, error).await);
        }
        self.0.deadlines.remove(sandbox.id(), end_at);
        let mut record = sandbox.record();
        record.paused_at = Some(Timestamp::now());
        let stored = {
            let _saving = sandbox.saving.lock().await;
            self.commit(vec![Change::PutSandbox(Box::new(record.clone()))]).await
        };
        // Not stored: the next start finds it on disk without a process, which is the same.
        sandbox.set_record(record);
        match sandbox.advance(Event::Asleep) {
            Ok(_) => {
                self.one_asleep();
                tracing::info!(sandbox_id = %sandbox.id(),
                    took_ms = begin.elapsed().as_millis(), "sandbox paused");
                Ok(stored?)
            }
            Err(_) => {
                self.finish(sandbox, EndCause::Request).await;
                Err(PauseError::Ended)
            }
        }
    }

    /// After a pause that failed: the sandbox goes on as a new incarnation, since the way
    /// to the old one was cut.
    async fn wake_again(&self, sandbox: &Arc<Sandbox>, error: KindError) -> PauseError {
        let Some(live) = sandbox.live() else { return PauseError::Ended };
        let again = Arc::new(Sandbox::new(sandbox.record(), Phase::Running));
        again.set_live(self.live(&again, Arc::clone(&live.instance)));
        if sandbox.advance(Event::Replaced).is_err() {
            self.finish(sandbox, EndCause::Request).await;
            return PauseError::Ended;
        }
        self.insert(&again);
        // Tells at once if the process has ended.
        self.watch(&again);
        PauseError::Kind(error)
    }

    /// A sandbox that runs; a paused one is resumed first, for `timeout` from now.
    /// `None`: there is no such sandbox.
    ///
    /// # Errors
    /// See [`CreateError`]; the sandbox is then still paused, unless it ended meanwhile.
    pub async fn connect(
        &self,
        id: &str,
        timeout: Duration,
    ) -> Option<Result<Connected, CreateError>> {
        loop {
            let sandbox = self.find(id)?;
            match sandbox.phase() {
                Phase::Running => return Some(Ok(Connected::Running(sandbox))),
                Phase::Paused => {
                    let Some(again) = self.reincarnate(&sandbox) else { continue };
                    return Some(self.wake(again, timeout).await.map(Connected::Resumed));
                }
                // Another request pauses or resumes it.
                Phase::Creating | Phase::Pausing => sandbox.settled().await,
                // In a moment the table has what took its place, or nothing.
                Phase::Replaced => tokio::task::yield_now().await,
                Phase::Killing(_) | Phase::Gone(_) | Phase::Failed => return None,
            }
        }
    }

    /// Puts a new incarnation in the place of a paused one; `None` if something else
    /// happened to it first.
    fn reincarnate(&self, paused: &Arc<Sandbox>) -> Option<Arc<Sandbox>> {
        let mut table = self.table();
        paused.advance(Event::Replaced).ok()?;
        let again = Arc::new(Sandbox::new(paused.record(), Phase::Creating));
        table.insert(again.id().clone(), Arc::clone(&again));
        drop(table);
        self.one_awake();
        Some(again)
    }

    async fn wake(
        &self,
        sandbox: Arc<Sandbox>,
        timeout: Duration,
    ) -> Result<Arc<Sandbox>, CreateError> {
        let this = self.clone();
        let work = async move {
            let outcome = this.wake_up(&sandbox, timeout).await.inspect_err(|error| {
                tracing::error!(sandbox_id = %sandbox.id(), error = %chain(error), "resume failed");
            });
            outcome.map(|()| sandbox)
        };
        self.to_its_end(work, drop).await.unwrap_or(Err(CreateError::Stopping))
    }

    async fn wake_up(&self, sandbox: &Arc<Sandbox>, timeout: Duration) -> Result<(), CreateError> {
        let begin = std::time::Instant::now();
        let (kind, template) = sandbox.with_record(|r| (r.kind, r.template.clone()));
        let Some(kind) = self.kind(kind) else { return Err(CreateError::Stopping) };
        let outcome = async {
            self.admit_one().map_err(|error| Undone::nothing(Failure::Admission(error)))?;
            let place = self.birth_place(sandbox).await.map_err(Undone::nothing)?;
            let birth = Birth { id: sandbox.id().clone(), template: template.clone() };
            let instance = kind.resume(birth).await;
            let instance = instance.map_err(|error| Undone::files(Failure::Birth(error)))?;
            self.settle_in(sandbox, instance, Some(place), 0, timeout, None).await
        }
        .await;
        let undone = match outcome {
            Ok(()) => {
                if let Err(error) = kind.resumed(sandbox.id().clone()).await {
                    tracing::warn!(sandbox_id = %sandbox.id(), error = %chain(&error),
                        "snapshot of a resumed sandbox not removed");
                }
                tracing::info!(sandbox_id = %sandbox.id(),
                    took_ms = begin.elapsed().as_millis(), "sandbox resumed");
                return Ok(());
            }
            Err(undone) => undone,
        };
        if let Err(error) = kind.give_up_resume(sandbox.id().clone()).await {
            tracing::error!(sandbox_id = %sandbox.id(), error = %chain(&error),
                "something of a failed resume is left");
        }
        self.sleep_on(sandbox).await;
        Err(undone.failure.into_error(&template, None))
    }

    /// After a resume that failed: the sandbox is paused again, or ends if that was asked.
    async fn sleep_on(&self, sandbox: &Arc<Sandbox>) {
        let mut record = sandbox.record();
        record.paused_at.get_or_insert_with(Timestamp::now);
        let _saving = sandbox.saving.lock().await;
        if sandbox.advance(Event::Replaced).is_err() {
            drop(_saving);
            self.finish(sandbox, EndCause::Request).await;
            return;
        }
        if let Err(error) = self.commit(vec![Change::PutSandbox(Box::new(record.clone()))]).await {
            tracing::warn!(sandbox_id = %sandbox.id(), %error, "record not stored");
        }
        self.one_asleep();
        self.insert(&Arc::new(Sandbox::new(record, Phase::Paused)));
    }

    /// Children of a running sandbox, for `timeout` from now, each with its outcome.
    ///
    /// # Errors
    /// When there is no child at all.
    pub async fn fork(
        &self,
        parent: &Arc<Sandbox>,
        count: usize,
        timeout: Duration,
    ) -> Result<Vec<Result<Arc<Sandbox>, CreateError>>, CreateError> {
        let (this, parent) = (self.clone(), Arc::clone(parent));
        let work = async move { this.bear(&parent, count, timeout).await };
        let this = self.clone();
        let unclaimed = move |outcome: Result<Vec<Result<Arc<Sandbox>, _>>, _>| {
            // Nobody could ever learn their ids.
            for child in outcome.into_iter().flatten().flatten() {
                this.end(&child, EndCause::Abandoned);
            }
        };
        self.to_its_end(work, unclaimed).await.unwrap_or(Err(CreateError::Stopping))
    }

    async fn bear(
        &self,
        parent: &Arc<Sandbox>,
        count: usize,
        timeout: Duration,
    ) -> Result<Vec<Result<Arc<Sandbox>, CreateError>>, CreateError> {
        let record = parent.record();
        let Some(kind) = self.kind(record.kind) else { return Err(CreateError::Stopping) };
        // One checkpoint at a time, and none while the record is being removed.
        let _forking = parent.forking.lock().await;
        if parent.phase() != Phase::Running {
            return Err(CreateError::Ended { cleanup: None });
        }
        let mut children = Vec::with_capacity(count);
        let mut outcomes: Vec<Option<Result<Arc<Sandbox>, CreateError>>> = Vec::new();
        for _ in 0..count {
            let id = SandboxId::random(&self.0.node_id);
            match self.reserve(child_record(id, &record)) {
                Ok(child) => {
                    children.push(child);
                    outcomes.push(None);
                }
                Err(error) => outcomes.push(Some(Err(error.into()))),
            }
        }
        let ids = children.iter().map(|child| child.id().clone()).collect();
        let born = kind.fork(parent.id().clone(), ids).await;
        let mut settled = match born {
            Ok(born) => {
                let settle =
                    children.iter().zip(born).zip(0u32..).map(|((child, born), index)| {
                        self.settle_child(child, born, index, timeout)
                    });
                futures_util::future::join_all(settle).await.into_iter()
            }
            Err(error) => {
                for child in &children {
                    self.forget(child);
                    let _ = child.advance(Event::CreateFailed);
                }
                return Err(Failure::Birth(error).into_error(&record.template, None));
            }
        };
        let outcomes = outcomes.into_iter();
        Ok(outcomes.filter_map(|known| known.or_else(|| settled.next())).collect())
    }
}
