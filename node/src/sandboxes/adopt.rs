//! Finding sandboxes again after a start.
//!
//! | record | process | then |
//! |---|---|---|
//! | yes | yes | adopted; ends at once if its time is over |
//! | paused | any | a process of an unanswered resume is ended; stays paused |
//! | yes | no, but a snapshot | paused: the daemon was killed at the end of a pause |
//! | yes | no | removed: it ended while no daemon ran |
//! | no | yes | stopped: its create was never answered, or its kill had begun |
//! | no | no, but files | files removed |

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream;
use jiff::Timestamp;

use super::{Phase, Sandbox, Sandboxes};
use crate::error::chain;
use crate::ids::{SandboxId, TemplateName};
use crate::kinds::{Found, Kind, KindError, Recorded};
use crate::store::{Change, SandboxRecord};

/// Sandboxes looked at at once.
const AT_ONCE: usize = 64;

/// Why the host could not be brought into a known state.
#[derive(Debug, thiserror::Error)]
#[error("find what runs on this node")]
pub struct AdoptError(#[from] KindError);

impl Sandboxes {
    /// Compares records with the host and makes both agree.
    pub async fn adopt(
        &self,
        records: Vec<SandboxRecord>,
        templates: Vec<TemplateName>,
    ) -> Result<(), AdoptError> {
        let recorded: Vec<SandboxId> = records.iter().map(|record| record.id.clone()).collect();
        for kind in self.0.kinds.values() {
            kind.settle(templates.clone()).await?;
        }
        stream::iter(records).for_each_concurrent(AT_ONCE, |record| self.adopt_one(record)).await;
        let adopted = self.count();
        if !recorded.is_empty() {
            tracing::info!(adopted, recorded = recorded.len(), "compared records with what runs");
        }
        for kind in self.0.kinds.values() {
            let strays = kind.strays(recorded.clone()).await?;
            stream::iter(strays)
                .for_each_concurrent(AT_ONCE, |id| clean_stray(kind.as_ref(), id))
                .await;
        }
        Ok(())
    }

    async fn adopt_one(&self, record: SandboxRecord) {
        let id = record.id.clone();
        let Some(kind) = self.kind(record.kind) else {
            tracing::error!(sandbox_id = %id, kind = %record.kind, "kind is not available here");
            return;
        };
        let recorded = match record.paused_at {
            Some(_) => Recorded::Paused,
            None => Recorded::Running,
        };
        match kind.adopt(id.clone(), recorded).await {
            Ok(Found::Running(instance)) => {
                let end_at = record.end_at;
                let sandbox = Arc::new(Sandbox::new(record, Phase::Running));
                sandbox.set_live(self.live(&sandbox, instance));
                self.insert(&sandbox);
                self.0.deadlines.set(&id, None, end_at);
                self.watch(&sandbox);
                self.0.metrics.adopted();
                tracing::debug!(sandbox_id = %id, %end_at, "sandbox adopted");
            }
            Ok(Found::Paused) => {
                let mut record = record;
                if record.paused_at.is_none() {
                    // The daemon was killed between the end of its process and the record.
                    record.paused_at = Some(Timestamp::now());
                    let change = Change::PutSandbox(Box::new(record.clone()));
                    if let Err(error) = self.commit(vec![change]).await {
                        tracing::warn!(sandbox_id = %id, %error, "record not stored");
                    }
                }
                self.one_asleep();
                self.insert(&Arc::new(Sandbox::new(record, Phase::Paused)));
                tracing::debug!(sandbox_id = %id, "paused sandbox found");
            }
            Ok(Found::Nothing) => {
                tracing::warn!(sandbox_id = %id, "sandbox ended while no daemon ran");
                clean_stray(kind.as_ref(), id.clone()).await;
                if let Err(error) = self.commit(vec![Change::RemoveSandbox(id.clone())]).await {
                    tracing::warn!(sandbox_id = %id, %error, "record not removed");
                }
            }
            // Neither lost nor killed: the next start tries again.
            Err(error) => {
                tracing::error!(sandbox_id = %id, error = %chain(&error), "sandbox not adopted");
            }
        }
    }
}

async fn clean_stray(kind: &dyn Kind, id: SandboxId) {
    tracing::info!(sandbox_id = %id, "removing what is left of a sandbox");
    if let Err(error) = super::end::remove(kind, &id, None).await {
        tracing::error!(sandbox_id = %id, error = %chain(&error), "something is left");
    }
}
