//! Metrics and logs of sandboxes.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream;
use http::StatusCode;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use super::extract::{Params, Segment};
use super::sandboxes::{lasting, running};
use super::{ApiError, App, view};
use crate::error::chain;

/// Sandboxes asked for at once in one request.
const MANY_MAX: usize = 100;
/// Guests woken at once for one request.
const MANY_AT_ONCE: usize = 8;
/// What is read of a console.
const CONSOLE_BYTES_MAX: u64 = 256 * 1024;
const LOG_LINES_DEFAULT: usize = 1000;

/// Seconds since 1970.
#[derive(Debug, Deserialize)]
pub struct Range {
    start: Option<i64>,
    end: Option<i64>,
}

pub async fn metrics(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    Params(range): Params<Range>,
) -> Result<Response, ApiError> {
    let sandbox = lasting(&app, &id)?;
    let time = |second: i64| {
        Timestamp::from_second(second).map_err(|_| {
            ApiError::bad_request(format!("{second} is no time in seconds since 1970"))
        })
    };
    let start = range.start.map_or(Ok(Timestamp::MIN), time)?;
    // Clients cut the fraction off: the whole second is meant.
    let end = match range.end {
        Some(second) => time(second.saturating_add(1))?,
        None => Timestamp::MAX,
    };
    if end < start {
        return Err(ApiError::bad_request("start is after end"));
    }
    let vcpus = sandbox.with_record(|record| record.vcpus);
    let samples = sandbox.usage_between(start, end).await.map_err(|error| {
        let text = format!("sandbox {id} does not tell its metrics: {}", chain(&error));
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, text)
    })?;
    let views: Vec<Value> = samples.iter().map(|sample| view::sample(vcpus, sample)).collect();
    Ok(Json(views).into_response())
}

/// A comma-separated list.
#[derive(Debug, Deserialize)]
pub struct Many {
    sandbox_ids: String,
}

/// The last sample of each; those that do not run are left out.
pub async fn metrics_of_many(
    State(app): State<Arc<App>>,
    Params(many): Params<Many>,
) -> Result<Response, ApiError> {
    let ids: Vec<&str> = many.sandbox_ids.split(',').filter(|id| !id.is_empty()).collect();
    if ids.len() > MANY_MAX {
        return Err(ApiError::bad_request(format!("at most {MANY_MAX} sandboxes at once")));
    }
    let sandboxes: Vec<_> = ids.into_iter().filter_map(|id| app.sandboxes.running(id)).collect();
    let found: BTreeMap<String, Value> = stream::iter(sandboxes)
        .map(|sandbox| async move {
            let sample = sandbox.usage_now().await?;
            let vcpus = sandbox.with_record(|record| record.vcpus);
            Some((sandbox.id().to_string(), view::sample(vcpus, &sample)))
        })
        .buffer_unordered(MANY_AT_ONCE)
        .filter_map(std::future::ready)
        .collect()
        .await;
    Ok(Json(json!({ "sandboxes": found })).into_response())
}

/// Which part of a log is wanted.
#[derive(Debug, Deserialize)]
pub struct LogQuery {
    limit: Option<usize>,
    search: Option<String>,
    direction: Option<String>,
}

/// Lines of the console; it carries no times, so all have the sandbox's start.
async fn lines(app: &App, id: &str, query: LogQuery) -> Result<(String, Vec<String>), ApiError> {
    let sandbox = running(app, id)?;
    let live = sandbox.live().ok_or_else(|| ApiError::no_sandbox(id))?;
    let bytes = live.instance.console(CONSOLE_BYTES_MAX).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let wanted = |line: &&str| {
        !line.is_empty() && query.search.as_ref().is_none_or(|text| line.contains(text.as_str()))
    };
    let mut lines: Vec<String> =
        text.lines().map(str::trim_end).filter(wanted).map(str::to_owned).collect();
    let limit = query.limit.unwrap_or(LOG_LINES_DEFAULT).min(LOG_LINES_DEFAULT);
    lines.drain(..lines.len().saturating_sub(limit));
    if query.direction.as_deref() == Some("backward") {
        lines.reverse();
    }
    Ok((sandbox.with_record(|record| view::time(record.started_at)), lines))
}

fn entry(timestamp: &str, message: &str) -> Value {
    json!({ "timestamp": timestamp, "message": message, "level": "info", "fields": {} })
}

pub async fn logs_v1(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    Params(query): Params<LogQuery>,
) -> Result<Response, ApiError> {
    let (timestamp, lines) = lines(&app, &id, query).await?;
    let plain: Vec<Value> =
        lines.iter().map(|line| json!({ "timestamp": timestamp, "line": line })).collect();
    let entries: Vec<Value> = lines.iter().map(|line| entry(&timestamp, line)).collect();
    Ok(Json(json!({ "logs": plain, "logEntries": entries })).into_response())
}

pub async fn logs_v2(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    Params(query): Params<LogQuery>,
) -> Result<Response, ApiError> {
    let (timestamp, lines) = lines(&app, &id, query).await?;
    let entries: Vec<Value> = lines.iter().map(|line| entry(&timestamp, line)).collect();
    Ok(Json(json!({ "logs": entries })).into_response())
}
