//! Building, listing and removing templates.
//!
//! A build answers with a stream of JSON lines, `{"step", "message"}` each. The last
//! line is `{"done": true, "template": {…}}` or `{"error": {"step", "message",
//! "console"?}}`. With `?wait=true` there is one JSON object instead, and an error has
//! a status of its own; so has, in both forms, an input that is refused at once.

use std::path::PathBuf;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, StatusCode, header};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::extract::{JsonBody, Params, Segment};
use super::{ApiError, App, view};
use crate::config::Config;
use crate::error::chain;
use crate::ids::TemplateName;
use crate::kinds::{BuildPlan, KindName, Progress, ProgressLine, Warmup};
use crate::store::TemplateRecord;
use crate::templates::TemplateError;

const ALIASES_MAX: usize = 16;
/// Lines that wait for a slow reader; further ones are dropped.
const LINES_MAX: usize = 1024;
/// The step in which bad input is found.
const FIRST_STEP: &str = "validate";

/// Body of a build.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct NewTemplate {
    name: String,
    #[serde(default)]
    aliases: Vec<String>,
    #[serde(default = "default_kind")]
    kind: KindName,
    rootfs: PathBuf,
    kernel: Option<PathBuf>,
    #[serde(default = "default_vcpus")]
    vcpus: u8,
    #[serde(default = "default_memory")]
    memory_mib: u32,
    #[serde(default = "default_disk")]
    disk_mib: u32,
    #[serde(default = "default_warmup")]
    warmup: bool,
}

fn default_kind() -> KindName {
    KindName::Microvm
}

fn default_vcpus() -> u8 {
    1
}

fn default_memory() -> u32 {
    512
}

fn default_disk() -> u32 {
    2048
}

fn default_warmup() -> bool {
    true
}

/// How the reply comes.
#[derive(Debug, Deserialize)]
pub struct BuildQuery {
    #[serde(default)]
    wait: bool,
}

enum Event {
    Line(ProgressLine),
    End(Result<Arc<TemplateRecord>, TemplateError>),
}

pub async fn build(
    State(app): State<Arc<App>>,
    Params(query): Params<BuildQuery>,
    JsonBody(body): JsonBody<NewTemplate>,
) -> Result<Response, ApiError> {
    let kind = body.kind;
    let plan = plan(&app, body)?;
    let (events, mut received) = mpsc::channel(LINES_MAX);
    let lines = events.clone();
    let progress: Progress = Arc::new(move |line| {
        tracing::info!(step = line.step, detail = line.message, "template build");
        // A full queue means a reader that is too slow.
        let _ = lines.try_send(Event::Line(line));
    });
    let templates = app.templates.clone();
    app.work.spawn(async move {
        let outcome = templates.build(kind, plan, progress).await;
        if let Err(error) = &outcome {
            tracing::warn!(error = %chain(error), "template not built");
        }
        let _ = events.send(Event::End(outcome)).await;
    });

    let mut early = Vec::new();
    loop {
        match received.recv().await {
            Some(Event::Line(line)) if query.wait || line.step == FIRST_STEP => early.push(line),
            Some(Event::Line(line)) => {
                early.push(line);
                return Ok(stream_reply(early, received));
            }
            Some(Event::End(Ok(record))) if query.wait => {
                let reply = view::template_v1(&record, 0);
                return Ok((StatusCode::CREATED, Json(reply)).into_response());
            }
            Some(Event::End(Ok(record))) => {
                let reply = json!({ "done": true, "template": view::template_v1(&record, 0) });
                return Ok(Json(reply).into_response());
            }
            Some(Event::End(Err(error))) => return Err(error.into()),
            None => {
                return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the node is stopping"));
            }
        }
    }
}

fn plan(app: &App, body: NewTemplate) -> Result<BuildPlan, ApiError> {
    let name = |text: &str| {
        TemplateName::parse(text).map_err(|error| ApiError::bad_request(error.to_string()))
    };
    if body.aliases.len() > ALIASES_MAX {
        return Err(ApiError::bad_request(format!("at most {ALIASES_MAX} aliases")));
    }
    let kernel = match body.kernel {
        Some(kernel) => kernel,
        None => default_kernel(&app.config, body.vcpus)?,
    };
    for (what, path) in [("rootfs", &body.rootfs), ("kernel", &kernel)] {
        if path.as_os_str().as_encoded_bytes().contains(&0) {
            return Err(ApiError::bad_request(format!("{what} contains a NUL")));
        }
        if !path.is_absolute() {
            return Err(ApiError::bad_request(format!("{what} is not an absolute path")));
        }
    }
    Ok(BuildPlan {
        name: name(&body.name)?,
        aliases: body.aliases.iter().map(|alias| name(alias)).collect::<Result<_, _>>()?,
        rootfs: body.rootfs,
        kernel,
        vcpus: body.vcpus,
        memory_mib: body.memory_mib,
        disk_mib: body.disk_mib,
        warmup: if body.warmup { Warmup::Full } else { Warmup::Skip },
    })
}

/// The node's kernel for this number of vCPUs.
fn default_kernel(config: &Config, vcpus: u8) -> Result<PathBuf, ApiError> {
    let (kernel, missing) = if vcpus > 1 {
        let missing = format!(
            "{vcpus} vCPUs need a kernel for several, and neither the request nor the node \
             (flag --kernel-smp) names one; guest-kernel/build --variant smp builds it"
        );
        (&config.kernel_smp, missing)
    } else {
        let missing = "no kernel given, and the node has no default (flag --kernel)";
        (&config.kernel, missing.to_owned())
    };
    kernel.clone().ok_or_else(|| ApiError::bad_request(missing))
}

fn stream_reply(early: Vec<ProgressLine>, rest: mpsc::Receiver<Event>) -> Response {
    let early = early.into_iter().map(|line| Ok(as_line(&json!(line))));
    let rest = stream::unfold(rest, |mut rest| async move {
        let event = rest.recv().await?;
        let value = match event {
            Event::Line(line) => json!(line),
            Event::End(outcome) => last_line(outcome),
        };
        Some((Ok::<_, std::convert::Infallible>(as_line(&value)), rest))
    });
    let lines = futures_util::StreamExt::chain(stream::iter(early), rest);
    let mut response = Response::new(Body::from_stream(lines));
    let format = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(header::CONTENT_TYPE, format);
    response
}

fn last_line(outcome: Result<Arc<TemplateRecord>, TemplateError>) -> Value {
    match outcome {
        Ok(record) => json!({ "done": true, "template": view::template_v1(&record, 0) }),
        Err(TemplateError::Build(error)) => json!({ "error": {
            "step": error.step, "message": error.message, "console": error.console,
        }}),
        Err(error) => json!({ "error": { "step": "record", "message": chain(&error) } }),
    }
}

fn as_line(value: &Value) -> Bytes {
    Bytes::from(format!("{value}\n"))
}

pub async fn list(State(app): State<Arc<App>>) -> Response {
    let views: Vec<Value> = app
        .templates
        .list()
        .iter()
        .map(|(record, spawns)| view::template_v1(record, *spawns))
        .collect();
    Json(views).into_response()
}

pub async fn detail(
    State(app): State<Arc<App>>,
    Segment(name): Segment,
) -> Result<Response, ApiError> {
    let (record, _) = app.templates.resolve(&name).ok_or_else(|| ApiError::no_template(&name))?;
    Ok(Json(view::template_v1(&record, 0)).into_response())
}

pub async fn remove(
    State(app): State<Arc<App>>,
    Segment(name): Segment,
) -> Result<Response, ApiError> {
    super::templates::remove(State(app), Segment(name)).await
}
