//! What a node must remember, behind a small trait.
//!
//! The daemon keeps everything in memory and reads the store once, at its start.
//! Afterwards the store is only written, in batches:
//!
//! | written | when | before |
//! |---|---|---|
//! | sandbox and its idempotency record | the agent has acknowledged its identity | the 201 of create |
//! | sandbox (new deadline) | timeout, connect | the reply |
//! | sandbox removed | it begins to end | the reply of kill |
//! | template, API key | made or removed | the reply |
//! | expired idempotency records removed | with any later batch | – |
//!
//! Every batch is durable (fsync) when [`Store::commit`] returns; batches that come
//! while one is being written share the next fsync.
//!
//! *Intent and observed*: a record means "shall run". A process without record is
//! stopped and a record without process is dropped at the next start, so a crash
//! between any two steps leaves nothing behind.

mod record;
mod redb;

use futures_util::future::BoxFuture;

pub use record::{ApiKeyRecord, IdempotencyRecord, SandboxRecord, TemplateRecord};
pub use redb::RedbStore;

use crate::ids::{SandboxId, TemplateName};

/// Everything the store holds.
#[derive(Debug, Default)]
pub struct Contents {
    pub keys: Vec<ApiKeyRecord>,
    pub templates: Vec<TemplateRecord>,
    pub sandboxes: Vec<SandboxRecord>,
    pub idempotency: Vec<IdempotencyRecord>,
}

/// One change. A batch of them is applied whole or not at all.
#[derive(Debug, Clone)]
pub enum Change {
    PutKey(ApiKeyRecord),
    RemoveKey(String),
    PutTemplate(TemplateRecord),
    RemoveTemplate(TemplateName),
    PutSandbox(Box<SandboxRecord>),
    RemoveSandbox(SandboxId),
    PutIdempotency(Box<IdempotencyRecord>),
    RemoveIdempotency(String),
}

/// Why the store failed. Nothing of the batch is in it.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be opened.
    #[error("open store {path}")]
    Open {
        path: std::path::PathBuf,
        #[source]
        source: Box<::redb::Error>,
    },
    /// Made by a newer version.
    #[error("store {path} has schema version {found}, this program knows {known}")]
    Schema { path: std::path::PathBuf, found: u64, known: u64 },
    /// A record cannot be read.
    #[error("decode record {key} of table {table}")]
    Decode {
        table: &'static str,
        key: String,
        #[source]
        source: serde_json::Error,
    },
    /// A record cannot be written.
    #[error("encode a record")]
    Encode(#[source] serde_json::Error),
    /// Reading failed.
    #[error("read store")]
    Read(#[source] Box<::redb::Error>),
    /// Writing failed; often the disk is full.
    #[error("write store: {0}")]
    Write(String),
    /// The writer has ended.
    #[error("store is closed")]
    Closed,
}

/// Something that remembers.
pub trait Store: Send + Sync {
    /// Writes a batch; durable when this returns.
    fn commit(&self, batch: Vec<Change>) -> BoxFuture<'_, Result<(), StoreError>>;
}
