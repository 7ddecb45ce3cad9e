//! Bodies of replies.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};

use super::App;
use crate::sandboxes::Sample;
use crate::store::{SandboxRecord, TemplateRecord};

/// Reply to create and connect.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxView {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: String,
    envd_version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<String>,
    envd_access_token: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic_access_token: Option<String>,
    domain: Option<String>,
}

/// An element of a list.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedView {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: String,
    envd_version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<String>,
    started_at: String,
    end_at: String,
    cpu_count: u8,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u32,
    state: &'static str,
    metadata: BTreeMap<String, String>,
}

pub fn sandbox(app: &App, record: &SandboxRecord) -> SandboxView {
    SandboxView {
        template_id: record.template.to_string(),
        sandbox_id: record.id.to_string(),
        client_id: app.config.node_id.as_str().to_owned(),
        envd_version: record.envd_version.clone(),
        alias: record.alias.clone(),
        envd_access_token: record.envd_access_token.clone(),
        traffic_access_token: record.traffic_access_token.clone(),
        domain: app.config.domain.clone(),
    }
}

pub fn listed(app: &App, record: &SandboxRecord) -> ListedView {
    ListedView {
        template_id: record.template.to_string(),
        sandbox_id: record.id.to_string(),
        client_id: app.config.node_id.as_str().to_owned(),
        envd_version: record.envd_version.clone(),
        alias: record.alias.clone(),
        started_at: time(record.started_at),
        end_at: time(record.end_at),
        cpu_count: record.vcpus,
        memory_mb: record.memory_mib,
        disk_size_mb: record.disk_mib,
        state: if record.paused_at.is_some() { "paused" } else { "running" },
        metadata: record.metadata.clone(),
    }
}

/// Reply to get.
pub fn detail(app: &App, record: &SandboxRecord) -> Value {
    let mut view = json!(listed(app, record));
    view["envdAccessToken"] = json!(record.envd_access_token);
    view["domain"] = json!(app.config.domain);
    view["lifecycle"] = json!({
        "autoResume": record.auto_resume,
        "onTimeout": if record.auto_pause { "pause" } else { "kill" },
    });
    if record.paused_at.is_some() {
        view["pauseMode"] = json!("full");
    }
    if let Some(allowed) = record.allow_internet_access {
        view["allowInternetAccess"] = json!(allowed);
    }
    if let Some(network) = &record.network {
        view["network"] = network.clone();
    }
    view
}

pub fn sample(vcpus: u8, sample: &Sample) -> Value {
    let metrics = &sample.metrics;
    json!({
        "timestamp": time(sample.at),
        "timestampUnix": sample.at.as_second(),
        "cpuCount": vcpus,
        "cpuUsedPct": metrics.cpu_used_pct,
        "memUsed": metrics.mem_used,
        "memTotal": metrics.mem_total,
        "memCache": metrics.mem_cache,
        "diskUsed": metrics.disk_used,
        "diskTotal": metrics.disk_total,
    })
}

/// E2B's view of a template.
pub fn template(record: &TemplateRecord, spawns: u64) -> Value {
    json!({
        "templateID": record.name,
        "buildID": record.build_id,
        "cpuCount": record.vcpus,
        "memoryMB": record.memory_mib,
        "diskSizeMB": record.disk_mib,
        "public": false,
        "aliases": record.aliases,
        "names": names(record),
        "createdAt": time(record.created_at),
        "updatedAt": time(record.created_at),
        "createdBy": null,
        "lastSpawnedAt": null,
        "spawnCount": spawns,
        "buildCount": 1,
        "envdVersion": record.envd_version,
        "buildStatus": "ready",
    })
}

/// `/v1`'s view of a template.
pub fn template_v1(record: &TemplateRecord, spawns: u64) -> Value {
    json!({
        "name": record.name,
        "aliases": record.aliases,
        "kind": record.kind,
        "buildId": record.build_id,
        "vcpus": record.vcpus,
        "memoryMib": record.memory_mib,
        "diskMib": record.disk_mib,
        "envdVersion": record.envd_version,
        "createdAt": time(record.created_at),
        "spawnCount": spawns,
    })
}

pub fn names(record: &TemplateRecord) -> Vec<String> {
    std::iter::once(&record.name).chain(&record.aliases).map(ToString::to_string).collect()
}

/// RFC 3339 with milliseconds.
pub fn time(at: Timestamp) -> String {
    format!("{at:.3}")
}
