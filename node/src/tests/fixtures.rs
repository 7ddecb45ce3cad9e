//! Values that tests build on.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::ids::{SandboxId, TemplateName};
use crate::kinds::KindName;
use crate::store::{Change, SandboxRecord, Store, StoreError, TemplateRecord};

/// A store that keeps changes in memory, and can be told to fail.
#[derive(Debug, Default)]
pub struct MemoryStore {
    pub changes: Mutex<Vec<Change>>,
    pub fails: std::sync::atomic::AtomicBool,
}

impl Store for MemoryStore {
    fn commit(&self, batch: Vec<Change>) -> BoxFuture<'_, Result<(), StoreError>> {
        let outcome = if self.fails.load(std::sync::atomic::Ordering::Relaxed) {
            Err(StoreError::Write("No space left on device (os error 28)".to_owned()))
        } else {
            self.changes.lock().unwrap_or_else(PoisonError::into_inner).extend(batch);
            Ok(())
        };
        Box::pin(std::future::ready(outcome))
    }
}

pub fn sandbox_record(id: &str) -> SandboxRecord {
    SandboxRecord {
        id: SandboxId::parse(id).unwrap(),
        kind: KindName::Microvm,
        template: TemplateName::parse("base").unwrap(),
        alias: None,
        key_id: "k".to_owned(),
        started_at: Timestamp::UNIX_EPOCH,
        end_at: Timestamp::UNIX_EPOCH,
        paused_at: None,
        auto_pause: false,
        auto_resume: false,
        timeout_seconds: 300,
        metadata: BTreeMap::new(),
        environment: BTreeMap::from([("A".to_owned(), "b".to_owned())]),
        envd_access_token: "token".to_owned(),
        traffic_access_token: None,
        allow_internet_access: None,
        network: None,
        vcpus: 1,
        memory_mib: 128,
        disk_mib: 64,
        envd_version: "0.6.4".to_owned(),
    }
}

pub fn template_record(name: &str) -> TemplateRecord {
    TemplateRecord {
        name: TemplateName::parse(name).unwrap(),
        aliases: vec![TemplateName::parse("code-interpreter-v1").unwrap()],
        kind: KindName::Microvm,
        build_id: "b".to_owned(),
        vcpus: 1,
        memory_mib: 128,
        disk_mib: 64,
        envd_version: "0.6.4".to_owned(),
        created_at: Timestamp::UNIX_EPOCH,
    }
}
