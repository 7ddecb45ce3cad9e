//! creating → running.
//!
//! ```text
//! admission ▶ kind: create ▶ agent: /init ▶ store: one record ▶ running
//! ```
//!
//! The work is a task of its own that runs to its end even if the client leaves. What
//! was made by a step that failed is removed again before the error is returned.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use tokio::sync::SemaphorePermit;

use super::sandbox::Live;
use super::{Sandbox, Sandboxes, deadline};
use crate::admission::AdmissionError;
use crate::agent::{self, AgentError, Channels, Identity, InitRequest};
use crate::idempotency::Ticket;
use crate::ids::{SandboxId, TemplateName};
use crate::kinds::{Birth, Instance, Kind, KindError};
use crate::lifecycle::{EndCause, Event};
use crate::metrics::CreateOutcome;
use crate::random;
use crate::store::{Change, SandboxRecord, StoreError, TemplateRecord};

const DEFAULT_USER: &str = "user";
const DEFAULT_WORKDIR: &str = "/home/user";
/// How long a create waits for its turn.
const TURN_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of an access token, shown in hexadecimal.
const TOKEN_BYTES: usize = 32;

/// What is asked for, checked.
#[derive(Debug)]
pub struct CreateRequest {
    pub template: Arc<TemplateRecord>,
    pub alias: Option<String>,
    pub key_id: String,
    pub timeout: Duration,
    pub metadata: BTreeMap<String, String>,
    pub environment: BTreeMap<String, String>,
    pub allow_internet_access: Option<bool>,
    pub network: Option<serde_json::Value>,
    pub traffic: Traffic,
    /// Paused and not killed when its time is over.
    pub auto_pause: bool,
    /// Resumed by a request to one of its ports.
    pub auto_resume: bool,
    /// Remembers the outcome under the client's idempotency key.
    pub ticket: Option<Ticket>,
}

/// Who may reach ports that are not the agent's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    Public,
    /// Only with a token.
    WithToken,
}

/// Why there is no sandbox. Nothing of it is left, unless `cleanup` says so.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error("make a sandbox of template {template}")]
    Birth {
        template: String,
        #[source]
        source: KindError,
        cleanup: Option<KindError>,
    },
    #[error("tell the sandbox who it is")]
    Init {
        #[source]
        source: AgentError,
        console: String,
        cleanup: Option<KindError>,
    },
    #[error("store the sandbox")]
    Store {
        #[source]
        source: StoreError,
        cleanup: Option<KindError>,
    },
    #[error("the sandbox ended while it was being made")]
    Ended { cleanup: Option<KindError> },
    #[error("the node is stopping")]
    Stopping,
}

impl Sandboxes {
    /// Makes a sandbox; it serves when this returns.
    ///
    /// # Errors
    /// See [`CreateError`].
    pub async fn create(&self, request: CreateRequest) -> Result<Arc<Sandbox>, CreateError> {
        let begin = Instant::now();
        let id = SandboxId::random(&self.0.node_id);
        let CreateRequest { template, ticket, timeout, .. } = &request;
        let keeps_without_client = ticket.is_some();
        let timeout = *timeout;
        let template = Arc::clone(template);
        let sandbox = match self.reserve(record(id, &request)) {
            Ok(sandbox) => sandbox,
            Err(error) => {
                self.0.metrics.create(CreateOutcome::Refused, begin.elapsed());
                return Err(error.into());
            }
        };
        let this = self.clone();
        let work = async move {
            let outcome = this.make(&sandbox, &template, timeout, request.ticket).await;
            let counted = match &outcome {
                Ok(()) => CreateOutcome::Created,
                Err(error) => {
                    tracing::error!(sandbox_id = %sandbox.id(), error = %crate::error::chain(error),
                        "create failed");
                    CreateOutcome::Failed
                }
            };
            this.0.metrics.create(counted, begin.elapsed());
            outcome.map(|()| sandbox)
        };
        let this = self.clone();
        let unclaimed = move |outcome: Result<Arc<Sandbox>, _>| {
            // Without an idempotency key nobody could ever learn the id.
            if let Ok(sandbox) = outcome
                && !keeps_without_client
            {
                this.end(&sandbox, EndCause::Abandoned);
            }
        };
        self.to_its_end(work, unclaimed).await.unwrap_or(Err(CreateError::Stopping))
    }

    async fn make(
        &self,
        sandbox: &Arc<Sandbox>,
        template: &TemplateRecord,
        timeout: Duration,
        ticket: Option<Ticket>,
    ) -> Result<(), CreateError> {
        let outcome = match self.kind(template.kind) {
            None => Err(Undone::nothing(Failure::Birth(KindError::Busy(format!(
                "kind {} is not available on this node",
                template.kind
            ))))),
            Some(kind) => self.bring_up(sandbox, template, timeout, ticket, kind.as_ref()).await,
        };
        match outcome {
            Ok(()) => Ok(()),
            Err(undone) => Err(self.fail(sandbox, undone).await),
        }
    }

    /// Removes a sandbox that could not be made.
    async fn fail(&self, sandbox: &Arc<Sandbox>, undone: Undone) -> CreateError {
        let cleanup = self.undo(sandbox, &undone).await;
        self.forget(sandbox);
        // Refused only if the sandbox is over already, which it cannot be before this.
        let _ = sandbox.advance(Event::CreateFailed);
        let template = sandbox.with_record(|record| record.template.clone());
        undone.failure.into_error(&template, cleanup)
    }

    /// Lets a child that a fork has made begin its own life.
    pub(super) async fn settle_child(
        &self,
        child: &Arc<Sandbox>,
        born: Result<Arc<dyn Instance>, KindError>,
        fork_index: u32,
        timeout: Duration,
    ) -> Result<Arc<Sandbox>, CreateError> {
        let outcome = match born {
            Ok(instance) => self.settle_in(child, instance, None, fork_index, timeout, None).await,
            Err(error) => Err(Undone::files(Failure::Birth(error))),
        };
        match outcome {
            Ok(()) => Ok(Arc::clone(child)),
            Err(undone) => Err(self.fail(child, undone).await),
        }
    }

    async fn bring_up(
        &self,
        sandbox: &Arc<Sandbox>,
        template: &TemplateRecord,
        timeout: Duration,
        ticket: Option<Ticket>,
        kind: &dyn Kind,
    ) -> Result<(), Undone> {
        let birth_place = self.birth_place(sandbox).await.map_err(Undone::nothing)?;
        let begin = Instant::now();
        let birth = Birth { id: sandbox.id().clone(), template: template.name.clone() };
        // Not given up half-way: a birth under way could not be found again.
        let instance =
            kind.create(birth).await.map_err(|error| Undone::files(Failure::Birth(error)))?;
        tracing::debug!(sandbox_id = %sandbox.id(), born_ms = begin.elapsed().as_millis(), "born");
        self.settle_in(sandbox, instance, Some(birth_place), 0, timeout, ticket).await
    }

    /// The way to a guest that runs.
    pub(super) fn live(&self, sandbox: &Sandbox, instance: Arc<dyn Instance>) -> Live {
        let over = sandbox.over().clone();
        let channels = Channels::new(Arc::clone(&instance), over, self.0.background.clone());
        Live { instance, channels }
    }

    /// From a process that runs to a sandbox that serves.
    pub(super) async fn settle_in(
        &self,
        sandbox: &Arc<Sandbox>,
        instance: Arc<dyn Instance>,
        birth_place: Option<SemaphorePermit<'_>>,
        fork_index: u32,
        timeout: Duration,
        ticket: Option<Ticket>,
    ) -> Result<(), Undone> {
        let begin = Instant::now();
        let live = self.live(sandbox, Arc::clone(&instance));
        let channels = live.channels.clone();
        sandbox.set_live(live);
        let born = |failure| Undone { failure, instance: Some(Arc::clone(&instance)), files: true };

        tokio::select! {
            biased;
            () = sandbox.ending() => return Err(born(Failure::Ended)),
            () = instance.ended() => {
                let console = console_tail(instance.as_ref()).await;
                let source = AgentError::Connect(std::io::ErrorKind::ConnectionReset.into());
                return Err(born(Failure::Init(source, console)));
            }
            outcome = introduce(sandbox, &channels, fork_index) => if let Err(error) = outcome {
                let console = console_tail(instance.as_ref()).await;
                return Err(born(Failure::Init(error, console)));
            },
        }

        drop(birth_place);
        let introduced_ms = begin.elapsed().as_millis();

        let now = Timestamp::now();
        let end_at = deadline(now, timeout);
        // A resumed sandbox is as old as it was.
        let started_at = sandbox.with_record(|record| match record.paused_at {
            Some(_) => record.started_at,
            None => now,
        });
        sandbox.set_times(started_at, end_at);
        let record = sandbox.record();
        let mut batch = Vec::new();
        if let Some(ticket) = &ticket {
            batch.extend(ticket.changes(&record));
        }
        batch.push(Change::PutSandbox(Box::new(record.clone())));
        let _saving = sandbox.saving.lock().await;
        self.commit(batch).await.map_err(|error| born(Failure::Store(error)))?;
        sandbox.advance(Event::Born).map_err(|_| born(Failure::Ended))?;
        self.0.deadlines.set(sandbox.id(), None, end_at);
        self.watch(sandbox);
        if let Some(ticket) = ticket {
            ticket.complete(record);
        }
        tracing::debug!(sandbox_id = %sandbox.id(), %end_at, introduced_ms, stored_ms = begin.elapsed().as_millis(), "sandbox runs");
        Ok(())
    }

    /// Waits for its turn to be born.
    pub(super) async fn birth_place(
        &self,
        sandbox: &Sandbox,
    ) -> Result<SemaphorePermit<'_>, Failure> {
        tokio::select! {
            biased;
            () = sandbox.ending() => Err(Failure::Ended),
            place = tokio::time::timeout(TURN_LIMIT, self.0.births.acquire()) => match place {
                Ok(Ok(place)) => Ok(place),
                Ok(Err(_)) | Err(_) => {
                    let seconds = TURN_LIMIT.as_secs();
                    Err(Failure::Birth(KindError::Busy(format!(
                        "the node had no time for this sandbox within {seconds} s; try again later"
                    ))))
                }
            },
        }
    }

    /// Removes what a failed create has made.
    async fn undo(&self, sandbox: &Arc<Sandbox>, undone: &Undone) -> Option<KindError> {
        sandbox.over().cancel();
        if !undone.files {
            return None;
        }
        let kind = self.kind(sandbox.with_record(|record| record.kind))?;
        let cleanup =
            super::end::remove(kind.as_ref(), sandbox.id(), undone.instance.as_deref()).await;
        if matches!(undone.failure, Failure::Ended | Failure::Store(_)) {
            let removal = vec![Change::RemoveSandbox(sandbox.id().clone())];
            if let Err(error) = self.commit(removal).await {
                tracing::warn!(sandbox_id = %sandbox.id(), %error, "record not removed");
            }
        }
        cleanup.err()
    }
}

/// A create that stopped, and what it had made.
pub(super) struct Undone {
    pub(super) failure: Failure,
    instance: Option<Arc<dyn Instance>>,
    files: bool,
}

pub(super) enum Failure {
    Admission(AdmissionError),
    Birth(KindError),
    Init(AgentError, String),
    Store(StoreError),
    Ended,
}

impl Undone {
    pub(super) fn nothing(failure: Failure) -> Self {
        Self { failure, instance: None, files: false }
    }

    pub(super) fn files(failure: Failure) -> Self {
        Self { failure, instance: None, files: true }
    }
}

impl Failure {
    pub(super) fn into_error(
        self,
        template: &TemplateName,
        cleanup: Option<KindError>,
    ) -> CreateError {
        match self {
            Self::Admission(error) => CreateError::Admission(error),
            Self::Birth(source) => {
                CreateError::Birth { template: template.to_string(), source, cleanup }
            }
            Self::Init(source, console) => CreateError::Init { source, console, cleanup },
            Self::Store(source) => CreateError::Store { source, cleanup },
            Self::Ended => CreateError::Ended { cleanup },
        }
    }
}

/// The agent's acknowledgement of its identity.
async fn introduce(
    sandbox: &Sandbox,
    channels: &Channels,
    fork_index: u32,
) -> Result<(), AgentError> {
    let record = sandbox.record();
    let id = sandbox.id().as_str();
    agent::initialise(
        channels,
        &InitRequest {
            timestamp: Timestamp::now().to_string(),
            access_token: &record.envd_access_token,
            env_vars: &record.environment,
            default_user: DEFAULT_USER,
            default_workdir: DEFAULT_WORKDIR,
            identity: Identity {
                sandbox_id: id,
                hostname: id,
                machine_id: random::hex::<16>(),
                boot_id: random::uuid(),
                fork_index,
                seed: random::hex::<32>(),
                entropy: STANDARD.encode(random::bytes::<64>()),
            },
        },
    )
    .await
}

async fn console_tail(instance: &dyn Instance) -> String {
    let bytes = instance.console(2048).await.unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The record of a child of the sandbox that this one is of.
pub(super) fn child_record(id: SandboxId, parent: &SandboxRecord) -> SandboxRecord {
    let token = || random::hex::<TOKEN_BYTES>();
    SandboxRecord {
        id,
        envd_access_token: token(),
        traffic_access_token: parent.traffic_access_token.as_ref().map(|_| token()),
        ..parent.clone()
    }
}

fn record(id: SandboxId, request: &CreateRequest) -> SandboxRecord {
    let template = &request.template;
    let token = || random::hex::<TOKEN_BYTES>();
    let now = Timestamp::now();
    SandboxRecord {
        id,
        kind: template.kind,
        template: template.name.clone(),
        alias: request.alias.clone(),
        key_id: request.key_id.clone(),
        started_at: now,
        end_at: now,
        paused_at: None,
        auto_pause: request.auto_pause,
        auto_resume: request.auto_resume,
        timeout_seconds: request.timeout.as_secs(),
        metadata: request.metadata.clone(),
        environment: request.environment.clone(),
        envd_access_token: token(),
        traffic_access_token: (request.traffic == Traffic::WithToken).then(token),
        allow_internet_access: request.allow_internet_access,
        network: request.network.clone(),
        vcpus: template.vcpus,
        memory_mib: template.memory_mib,
        disk_mib: template.disk_mib,
        envd_version: template.envd_version.clone(),
    }
}
