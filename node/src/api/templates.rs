//! E2B's view of templates: what a plain client asks before or after a create.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::{Value, json};

use super::extract::Segment;
use super::{ApiError, App, view};
use crate::sandboxes::Sandbox;
use crate::templates::RemoveError;

pub async fn list(State(app): State<Arc<App>>) -> Response {
    let views: Vec<Value> = app
        .templates
        .list()
        .iter()
        .map(|(record, spawns)| view::template(record, *spawns))
        .collect();
    Json(views).into_response()
}

pub async fn detail(
    State(app): State<Arc<App>>,
    Segment(name): Segment,
) -> Result<Response, ApiError> {
    let (record, _) = app.templates.resolve(&name).ok_or_else(|| ApiError::no_template(&name))?;
    let created_at = view::time(record.created_at);
    let build = json!({
        "buildID": record.build_id,
        "status": "ready",
        "createdAt": created_at,
        "updatedAt": created_at,
        "finishedAt": created_at,
        "cpuCount": record.vcpus,
        "memoryMB": record.memory_mib,
        "diskSizeMB": record.disk_mib,
        "envdVersion": record.envd_version,
    });
    let reply = json!({
        "templateID": record.name,
        "public": false,
        "aliases": record.aliases,
        "names": view::names(&record),
        "createdAt": created_at,
        "updatedAt": created_at,
        "lastSpawnedAt": null,
        "spawnCount": 0,
        "builds": [build],
    });
    Ok(Json(reply).into_response())
}

pub async fn alias(
    State(app): State<Arc<App>>,
    Segment(alias): Segment,
) -> Result<Response, ApiError> {
    let (record, _) = app.templates.resolve(&alias).ok_or_else(|| ApiError::no_template(&alias))?;
    Ok(Json(json!({ "templateID": record.name, "public": false })).into_response())
}

/// Also what clients call to delete a snapshot.
pub async fn remove(
    State(app): State<Arc<App>>,
    Segment(name): Segment,
) -> Result<Response, ApiError> {
    if let Some((record, _)) = app.templates.resolve(&name) {
        let of_template = |sandbox: &&Arc<Sandbox>| {
            sandbox.with_record(|known| known.paused_at.is_some() && known.template == record.name)
        };
        let needing = app.sandboxes.all_lasting().iter().filter(of_template).count();
        if needing > 0 {
            return Err(RemoveError::Needed(needing).into());
        }
    }
    if app.templates.remove(&name).await? {
        Ok(StatusCode::NO_CONTENT.into_response())
    } else {
        Err(ApiError::no_template(&name))
    }
}
