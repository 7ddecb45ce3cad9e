//! Records, as they are stored: JSON, so that a later version may add fields.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ids::{SandboxId, TemplateName};
use crate::kinds::KindName;

/// An API key. The key itself is not stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiKeyRecord {
    /// Public name of the key.
    pub id: String,
    /// What it is for.
    pub name: String,
    /// SHA-256 of the key, hexadecimal.
    pub digest: String,
    /// First characters, to recognise it by.
    pub prefix: String,
    pub created_at: Timestamp,
}

/// A template that can be cloned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateRecord {
    pub name: TemplateName,
    pub aliases: Vec<TemplateName>,
    pub kind: KindName,
    pub build_id: String,
    pub vcpus: u8,
    pub memory_mib: u32,
    pub disk_mib: u32,
    pub envd_version: String,
    pub created_at: Timestamp,
}

/// A sandbox that shall run, or is paused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxRecord {
    pub id: SandboxId,
    pub kind: KindName,
    pub template: TemplateName,
    /// The alias it was asked for by, if any.
    pub alias: Option<String>,
    pub key_id: String,
    pub started_at: Timestamp,
    pub end_at: Timestamp,
    /// Since when it is on disk, if it is.
    #[serde(default)]
    pub paused_at: Option<Timestamp>,
    /// It is paused and not killed when its time is over.
    #[serde(default)]
    pub auto_pause: bool,
    /// A request to a port of the paused sandbox resumes it.
    #[serde(default)]
    pub auto_resume: bool,
    /// Seconds that an automatic resume gives it.
    #[serde(default)]
    pub timeout_seconds: u64,
    pub metadata: BTreeMap<String, String>,
    pub environment: BTreeMap<String, String>,
    pub envd_access_token: String,
    /// Demanded by the proxy for ports other than the agent's, if present.
    pub traffic_access_token: Option<String>,
    pub allow_internet_access: Option<bool>,
    /// As the client gave it.
    pub network: Option<serde_json::Value>,
    pub vcpus: u8,
    pub memory_mib: u32,
    pub disk_mib: u32,
    pub envd_version: String,
}

/// The reply to a create that carried an idempotency key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdempotencyRecord {
    /// API key id and idempotency key.
    pub key: String,
    /// SHA-256 of the request.
    pub request_digest: String,
    pub expires_at: Timestamp,
    /// The sandbox that was made, without its environment.
    pub sandbox: Box<SandboxRecord>,
}
