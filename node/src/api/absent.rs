//! Routes of E2B that this version does not serve. Each says so with status 501 and
//! `error_code` `not_supported`; 409 would mean "already paused" to clients, and 503
//! would make them repeat.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::extract::Segment;
use super::sandboxes::running;
use super::{ApiError, App};

fn of_sandbox(app: &App, id: &str, what: &str) -> ApiError {
    match running(app, id) {
        Ok(_) => ApiError::not_supported(what),
        Err(error) => error,
    }
}

pub async fn snapshot(State(app): State<Arc<App>>, Segment(id): Segment) -> ApiError {
    of_sandbox(&app, &id, "making a snapshot")
}

pub async fn network(State(app): State<Arc<App>>, Segment(id): Segment) -> ApiError {
    of_sandbox(&app, &id, "changing the network of a sandbox")
}

/// There are none.
pub async fn snapshots() -> Response {
    Json(json!([])).into_response()
}

pub async fn build() -> ApiError {
    ApiError::not_supported("building templates by this route (use POST /v1/templates)")
}

pub async fn volumes() -> ApiError {
    ApiError::not_supported("volumes")
}

pub async fn secrets() -> ApiError {
    ApiError::not_supported("secrets")
}
