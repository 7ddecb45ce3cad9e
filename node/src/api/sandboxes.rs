//! Create, get, kill, timeout and connect.
//!
//! Versions 1 and 2 differ in the time limit that applies when none is given, and in
//! whether connect needs one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::auth::KeyId;
use super::extract::{IdempotencyKey, JsonBody, Segment};
use super::{ApiError, App, view};
use crate::idempotency::{Begin, Ticket};
use crate::lifecycle::EndCause;
use crate::random::encode_hex;
use crate::sandboxes::{Connected, CreateRequest, Deadline, PauseError, Sandbox, Traffic};

const TIMEOUT_SECONDS_V1: i64 = 15;
const TIMEOUT_SECONDS_V2: i64 = 300;
/// The environment of a process has to fit the guest's limit for arguments.
const ENVIRONMENT_BYTES_MAX: usize = 64 * 1024;
/// Half of what the agent accepts as arguments and variables of one command.
const ENVIRONMENT_VARIABLES_MAX: usize = 4096;
const NETWORK_BYTES_MAX: usize = 64 * 1024;
/// Children of one fork.
const FORKS_MAX: usize = 100;
/// Sandboxes that one request may wait for another with the same key.
const SAME_KEY_WAITS_MAX: usize = 64;

/// Body of create, version 1 and 2.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    timeout: Option<i64>,
    auto_pause: Option<bool>,
    auto_resume: Option<AutoResume>,
    #[serde(rename = "allow_internet_access")]
    allow_internet_access: Option<bool>,
    network: Option<Value>,
    metadata: Option<BTreeMap<String, String>>,
    env_vars: Option<BTreeMap<String, String>>,
    mcp: Option<Value>,
    iam: Option<Value>,
    volume_mounts: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize, Serialize)]
struct AutoResume {
    enabled: bool,
}

/// Body of connect.
#[derive(Debug, Deserialize)]
pub struct Connect {
    timeout: Option<i64>,
}

/// Body of timeout.
#[derive(Debug, Deserialize)]
pub struct SetTimeout {
    timeout: i64,
}

/// Body of refreshes.
#[derive(Debug, Deserialize)]
pub struct Refresh {
    duration: Option<i64>,
}

type Reply = Result<Response, ApiError>;

pub async fn create_v1(
    State(app): State<Arc<App>>,
    key_id: KeyId,
    idempotency: Option<IdempotencyKey>,
    JsonBody(body): JsonBody<NewSandbox>,
) -> Reply {
    create(&app, key_id, idempotency, body, TIMEOUT_SECONDS_V1).await
}

pub async fn create_v2(
    State(app): State<Arc<App>>,
    key_id: KeyId,
    idempotency: Option<IdempotencyKey>,
    JsonBody(body): JsonBody<NewSandbox>,
) -> Reply {
    create(&app, key_id, idempotency, body, TIMEOUT_SECONDS_V2).await
}

async fn create(
    app: &Arc<App>,
    KeyId(key_id): KeyId,
    idempotency: Option<IdempotencyKey>,
    mut body: NewSandbox,
    default_timeout: i64,
) -> Reply {
    body.timeout.get_or_insert(default_timeout);
    let ticket = match idempotency {
        None => None,
        Some(IdempotencyKey(key)) => match ticket(app, &key_id, &key, &body).await? {
            Started::New(ticket) => Some(ticket),
            Started::Replay(reply) => return Ok(reply),
        },
    };
    let request = check(app, key_id, body, ticket)?;
    let template = request.template.name.clone();
    let sandbox = app.sandboxes.create(request).await?;
    app.templates.count_spawn(&template);
    let reply = sandbox.with_record(|record| view::sandbox(app, record));
    Ok((StatusCode::CREATED, Json(reply)).into_response())
}

enum Started {
    New(Ticket),
    Replay(Response),
}

async fn ticket(
    app: &App,
    key_id: &str,
    key: &str,
    body: &NewSandbox,
) -> Result<Started, ApiError> {
    let text =
        serde_json::to_vec(body).map_err(|error| ApiError::bad_request(error.to_string()))?;
    let digest = encode_hex(&Sha256::digest(text));
    for _ in 0..SAME_KEY_WAITS_MAX {
        match app.idempotency.begin(key_id, key, digest.clone()) {
            Begin::New(ticket) => return Ok(Started::New(ticket)),
            Begin::Replay(record) => {
                let reply = (StatusCode::CREATED, Json(view::sandbox(app, &record)));
                return Ok(Started::Replay(reply.into_response()));
            }
            Begin::Mismatch => {
                let message = "the Idempotency-Key was used for another request";
                return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, message));
            }
            // Ends with an error when the other request's ticket is dropped.
            Begin::UnderWay(mut end) => {
                let _ = end.changed().await;
            }
        }
    }
    let message = "requests with this Idempotency-Key keep failing";
    Err(ApiError::new(StatusCode::CONFLICT, message))
}

fn check(
    app: &App,
    key_id: String,
    body: NewSandbox,
    ticket: Option<Ticket>,
) -> Result<CreateRequest, ApiError> {
    if body.mcp.is_some_and(|mcp| !mcp.is_null()) {
        return Err(ApiError::not_supported("an MCP gateway"));
    }
    if body.iam.is_some_and(|iam| iam.get("tokens").is_some_and(|tokens| !is_empty(tokens))) {
        return Err(ApiError::not_supported("workload identity"));
    }
    if body.volume_mounts.is_some_and(|mounts| !mounts.is_empty()) {
        return Err(ApiError::not_supported("mounting volumes"));
    }
    let timeout = seconds(app, body.timeout.unwrap_or_default())?;
    let metadata = body.metadata.unwrap_or_default();
    check_size("metadata", &metadata, app.config.metadata_bytes_max)?;
    let environment = body.env_vars.unwrap_or_default();
    check_size("envVars", &environment, ENVIRONMENT_BYTES_MAX)?;
    if environment.len() > ENVIRONMENT_VARIABLES_MAX {
        let count = environment.len();
        return Err(ApiError::bad_request(format!(
            "envVars has {count} variables; the most is {ENVIRONMENT_VARIABLES_MAX}"
        )));
    }
    check_environment(&environment)?;
    let network = body.network.filter(|network| !network.is_null());
    if let Some(network) = &network {
        if !network.is_object() {
            return Err(ApiError::bad_request("network is not an object"));
        }
        if network.to_string().len() > NETWORK_BYTES_MAX {
            return Err(ApiError::bad_request("network is too long"));
        }
    }
    let is_private = network
        .as_ref()
        .is_some_and(|network| network.get("allowPublicTraffic") == Some(&Value::Bool(false)));
    let (template, alias) = app
        .templates
        .resolve(&body.template_id)
        .ok_or_else(|| ApiError::no_template(&body.template_id))?;
    Ok(CreateRequest {
        template,
        alias,
        key_id,
        timeout,
        metadata,
        environment,
        allow_internet_access: body.allow_internet_access,
        network,
        traffic: if is_private { Traffic::WithToken } else { Traffic::Public },
        auto_pause: body.auto_pause == Some(true),
        auto_resume: body.auto_resume.is_some_and(|resume| resume.enabled),
        ticket,
    })
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(serde_json::Map::is_empty)
}

fn check_size(
    name: &str,
    map: &BTreeMap<String, String>,
    bytes_max: usize,
) -> Result<(), ApiError> {
    let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > bytes_max {
        let message = format!(
            "{name} has {bytes} bytes, keys and values together; at most {bytes_max} are allowed"
        );
        return Err(ApiError::bad_request(message));
    }
    Ok(())
}

fn check_environment(environment: &BTreeMap<String, String>) -> Result<(), ApiError> {
    for (name, value) in environment {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            let name = name.escape_debug().take(80).collect::<String>();
            return Err(ApiError::bad_request(format!(
                "environment variable \"{name}\" has no name, or contains '=' in its name or a NUL"
            )));
        }
    }
    Ok(())
}

fn seconds(app: &App, timeout: i64) -> Result<Duration, ApiError> {
    let seconds = u64::try_from(timeout)
        .map_err(|_| ApiError::bad_request(format!("timeout {timeout} is negative")))?;
    let timeout = Duration::from_secs(seconds);
    if timeout > app.config.timeout_max {
        let max = app.config.timeout_max.as_secs();
        let message = format!("timeout {seconds} s is longer than the longest allowed, {max} s");
        return Err(ApiError::bad_request(message));
    }
    Ok(timeout)
}

pub fn running(app: &App, id: &str) -> Result<Arc<Sandbox>, ApiError> {
    app.sandboxes.running(id).ok_or_else(|| match app.sandboxes.lasting(id) {
        Some(_) => ApiError::paused(id),
        None => ApiError::no_sandbox(id),
    })
}

/// One that runs or is paused.
pub fn lasting(app: &App, id: &str) -> Result<Arc<Sandbox>, ApiError> {
    app.sandboxes.lasting(id).ok_or_else(|| ApiError::no_sandbox(id))
}

pub async fn detail(State(app): State<Arc<App>>, Segment(id): Segment) -> Reply {
    let sandbox = lasting(&app, &id)?;
    Ok(Json(sandbox.with_record(|record| view::detail(&app, record))).into_response())
}

pub async fn kill(State(app): State<Arc<App>>, Segment(id): Segment) -> Reply {
    if app.sandboxes.kill(&id, EndCause::Request).await {
        Ok(StatusCode::NO_CONTENT.into_response())
    } else {
        Err(ApiError::no_sandbox(&id))
    }
}

pub async fn set_timeout(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    JsonBody(body): JsonBody<SetTimeout>,
) -> Reply {
    let timeout = seconds(&app, body.timeout)?;
    let sandbox = running(&app, &id)?;
    app.sandboxes.set_deadline(&sandbox, timeout, Deadline::Set).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub async fn refresh(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    JsonBody(body): JsonBody<Refresh>,
) -> Reply {
    let timeout = seconds(&app, body.duration.unwrap_or(TIMEOUT_SECONDS_V1))?;
    let sandbox = running(&app, &id)?;
    app.sandboxes.set_deadline(&sandbox, timeout, Deadline::Extend).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub async fn connect_v1(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    JsonBody(body): JsonBody<Connect>,
) -> Reply {
    let timeout = body.timeout.ok_or_else(|| ApiError::bad_request("timeout is missing"))?;
    connect(&app, &id, timeout).await
}

pub async fn connect_v2(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    JsonBody(body): JsonBody<Connect>,
) -> Reply {
    connect(&app, &id, body.timeout.unwrap_or(TIMEOUT_SECONDS_V2)).await
}

/// A running sandbox's deadline is only ever moved later; a paused one is resumed.
async fn connect(app: &App, id: &str, timeout: i64) -> Reply {
    let timeout = seconds(app, timeout)?;
    let connected = app.sandboxes.connect(id, timeout).await;
    let (status, sandbox) = match connected.ok_or_else(|| ApiError::no_sandbox(id))?? {
        Connected::Running(sandbox) => {
            app.sandboxes.set_deadline(&sandbox, timeout, Deadline::Extend).await?;
            (StatusCode::OK, sandbox)
        }
        Connected::Resumed(sandbox) => (StatusCode::CREATED, sandbox),
    };
    Ok((status, Json(sandbox.with_record(|record| view::sandbox(app, record)))).into_response())
}

/// The route of older clients, for paused sandboxes only.
pub async fn resume(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    JsonBody(body): JsonBody<Connect>,
) -> Reply {
    if app.sandboxes.running(&id).is_some() {
        let id = crate::ids::shorten(&id);
        let message = format!("sandbox \"{id}\" is already running");
        return Err(ApiError::new(StatusCode::CONFLICT, message));
    }
    connect(&app, &id, body.timeout.unwrap_or(TIMEOUT_SECONDS_V1)).await
}

/// Body of pause.
#[derive(Debug, Deserialize)]
pub struct Pause {
    memory: Option<bool>,
}

pub async fn pause(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    JsonBody(body): JsonBody<Pause>,
) -> Reply {
    if body.memory == Some(false) {
        return Err(ApiError::not_supported("a pause that keeps the files only"));
    }
    app.sandboxes.pause(&id).await.map_err(|error| match error {
        PauseError::NotFound => ApiError::no_sandbox(&id),
        other => ApiError::from(other),
    })?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Body of fork.
#[derive(Debug, Deserialize)]
pub struct Fork {
    timeout: Option<i64>,
    count: Option<usize>,
}

/// One outcome for each child; the parent runs on.
pub async fn fork(
    State(app): State<Arc<App>>,
    Segment(id): Segment,
    JsonBody(body): JsonBody<Fork>,
) -> Reply {
    let timeout = seconds(&app, body.timeout.unwrap_or(TIMEOUT_SECONDS_V2))?;
    let count = body.count.unwrap_or(1);
    if !(1..=FORKS_MAX).contains(&count) {
        let message = format!("count {count} is not a number from 1 to {FORKS_MAX}");
        return Err(ApiError::bad_request(message));
    }
    let parent = running(&app, &id)?;
    let outcomes = app.sandboxes.fork(&parent, count, timeout).await?;
    let views: Vec<Value> = outcomes
        .into_iter()
        .map(|outcome| match outcome {
            Ok(child) => {
                json!({ "sandbox": child.with_record(|record| view::sandbox(&app, record)) })
            }
            Err(error) => json!({ "error": ApiError::from(error).body() }),
        })
        .collect();
    Ok((StatusCode::CREATED, Json(views)).into_response())
}
