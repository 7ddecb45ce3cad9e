//! `/v1`: the node, its keys, and details of sandboxes.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use super::extract::{JsonBody, Segment};
use super::sandboxes::lasting;
use super::{ApiError, App, view};
use crate::error::chain;
use crate::lifecycle::EndCause;
use crate::store::ApiKeyRecord;

/// Capacity, counts and memory.
pub async fn node(State(app): State<Arc<App>>) -> Response {
    let memory = app.sandboxes.memory();
    let limits = app.sandboxes.limits();
    let running = app.sandboxes.all_running().len();
    Json(json!({
        "nodeId": app.config.node_id.as_str(),
        "version": env!("CARGO_PKG_VERSION"),
        "startedAt": view::time(app.started_at),
        "uptimeSeconds": Timestamp::now().duration_since(app.started_at).as_secs(),
        "sandboxes": {
            "running": running,
            "paused": app.sandboxes.paused(),
            "inTransition": app.sandboxes.count().saturating_sub(running),
            "max": limits.sandboxes_max,
        },
        "templates": app.templates.names(),
        "memory": {
            "totalBytes": memory.total,
            "availableBytes": memory.available,
            "floorBytes": limits.memory_floor_bytes,
        },
        "cpus": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
    }))
    .into_response()
}

/// What a stop does to sandboxes.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxesAtStop {
    Keep,
    Kill,
}

/// Body of stop.
#[derive(Debug, Deserialize)]
pub struct Stop {
    sandboxes: SandboxesAtStop,
}

/// Asks the daemon to stop; it answers before it does.
pub async fn stop(State(app): State<Arc<App>>, JsonBody(body): JsonBody<Stop>) -> StatusCode {
    match body.sandboxes {
        SandboxesAtStop::Keep => {}
        SandboxesAtStop::Kill => app.stop.kill.cancel(),
    }
    app.stop.asked.cancel();
    StatusCode::ACCEPTED
}

/// Ends every sandbox of the node; nothing is left of them when this answers.
pub async fn kill_all(State(app): State<Arc<App>>) -> Response {
    let killed = app.sandboxes.kill_all(EndCause::Request).await;
    Json(json!({ "killed": killed })).into_response()
}

/// Everything that is known of a sandbox, with the counters of its kind.
pub async fn sandbox(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
) -> Result<Response, ApiError> {
    let sandbox = lasting(&app, &id)?;
    let record = sandbox.record();
    let stats = match sandbox.live() {
        Some(live) if record.paused_at.is_none() => match live.instance.stats().await {
            Ok(stats) => stats,
            Err(error) => json!({ "error": chain(&error) }),
        },
        Some(_) | None => Value::Null,
    };
    Ok(Json(json!({
        "id": record.id,
        "kind": record.kind,
        "template": record.template,
        "keyId": record.key_id,
        "startedAt": view::time(record.started_at),
        "endAt": view::time(record.end_at),
        "pausedAt": record.paused_at.map(view::time),
        "metadata": record.metadata,
        "vcpus": record.vcpus,
        "memoryMib": record.memory_mib,
        "diskMib": record.disk_mib,
        "stats": stats,
    }))
    .into_response())
}

fn key_view(record: &ApiKeyRecord) -> Value {
    json!({
        "id": record.id,
        "name": record.name,
        "prefix": record.prefix,
        "createdAt": view::time(record.created_at),
    })
}

pub async fn keys(State(app): State<Arc<App>>) -> Response {
    Json(app.keys.list().iter().map(key_view).collect::<Vec<Value>>()).into_response()
}

/// Body of a new key.
#[derive(Debug, Deserialize)]
pub struct NewKey {
    name: String,
}

/// The reply is the only place where the key itself appears.
pub async fn add_key(
    State(app): State<Arc<App>>,
    JsonBody(body): JsonBody<NewKey>,
) -> Result<Response, ApiError> {
    let (record, key) = app.keys.add(&body.name).await?;
    let mut reply = key_view(&record);
    reply["key"] = json!(key);
    Ok((StatusCode::CREATED, Json(reply)).into_response())
}

pub async fn remove_key(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
) -> Result<Response, ApiError> {
    if app.keys.remove(&id).await? {
        Ok(StatusCode::NO_CONTENT.into_response())
    } else {
        Err(ApiError::new(StatusCode::NOT_FOUND, "there is no such key"))
    }
}
