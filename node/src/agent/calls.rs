//! Calls that the node makes on its own behalf.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::Body;
use bytes::{Buf, BytesMut};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use super::channels::{ChannelError, Channels};
use crate::kinds::GuestPort;

/// An agent that cannot say "healthy" within this is not up.
const HEALTH_LIMIT: Duration = Duration::from_secs(10);
/// Setting clock, names and randomness takes an emulated guest kernel long.
const INIT_LIMIT: Duration = Duration::from_secs(60);
const METRICS_LIMIT: Duration = Duration::from_secs(10);
/// Replies of the agent to the node are small.
const REPLY_BYTES_MAX: usize = 1 << 20;

/// Why a call to the agent failed.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("connect to the agent")]
    Connect(#[source] std::io::Error),
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("ask the agent for {path}")]
    Transfer {
        path: &'static str,
        #[source]
        source: hyper::Error,
    },
    #[error("the agent answered {path} with {status}: {body}")]
    Status { path: &'static str, status: StatusCode, body: String },
    #[error("the agent did not answer {path} within {seconds} s")]
    Timeout { path: &'static str, seconds: u64 },
    #[error("read the agent's reply to {path}")]
    Reply {
        path: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error("the agent's reply to {path} ended early")]
    Incomplete { path: &'static str },
    #[error("the agent reports on {path}: {message}")]
    Failed { path: &'static str, message: String },
}

/// Body of `POST /init`.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InitRequest<'a> {
    pub timestamp: String,
    pub access_token: &'a str,
    pub env_vars: &'a BTreeMap<String, String>,
    pub default_user: &'a str,
    pub default_workdir: &'a str,
    pub identity: Identity<'a>,
}

/// What makes a clone differ from its siblings.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Identity<'a> {
    pub sandbox_id: &'a str,
    pub hostname: &'a str,
    pub machine_id: String,
    pub boot_id: String,
    pub fork_index: u32,
    pub seed: String,
    pub entropy: String,
}

/// Reply to `GET /metrics` of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct AgentMetrics {
    pub cpu_count: f64,
    pub cpu_used_pct: f64,
    pub mem_total: u64,
    pub mem_used: u64,
    pub mem_cache: u64,
    pub disk_total: u64,
    pub disk_used: u64,
}

/// Tells a clone who it is. No request may pass before this.
pub async fn initialise(channels: &Channels, request: &InitRequest<'_>) -> Result<(), AgentError> {
    const PATH: &str = "/init";
    let body =
        serde_json::to_vec(request).map_err(|source| AgentError::Reply { path: PATH, source })?;
    let request = post(PATH, Body::from(body));
    within(PATH, INIT_LIMIT, async {
        let response = channels.send(GuestPort::Envd.number(), request).await?;
        expect_success(PATH, response.map(Body::new)).await.map(|_| ())
    })
    .await
}

/// Counters of a sandbox.
pub async fn metrics(channels: &Channels, access_token: &str) -> Result<AgentMetrics, AgentError> {
    const PATH: &str = "/metrics";
    let mut request = post(PATH, Body::empty());
    *request.method_mut() = Method::GET;
    if let Ok(token) = access_token.parse() {
        request.headers_mut().insert("x-access-token", token);
    }
    within(PATH, METRICS_LIMIT, async {
        let response = channels.send(GuestPort::Envd.number(), request).await?;
        let body = expect_success(PATH, response.map(Body::new)).await?;
        serde_json::from_slice(&body).map_err(|source| AgentError::Reply { path: PATH, source })
    })
    .await
}

/// Asks on a fresh stream whether the agent is up.
pub async fn health(stream: UnixStream) -> Result<(), AgentError> {
    const PATH: &str = "/health";
    let mut request = post(PATH, Body::empty());
    *request.method_mut() = Method::GET;
    within(PATH, HEALTH_LIMIT, async {
        let (response, _driver) = send_once(PATH, stream, request).await?;
        expect_success(PATH, response.map(Body::new)).await.map(|_| ())
    })
    .await
}

/// Posts to one of the agent's own routes on a fresh stream; hands on each line of
/// the reply. A last line `{"error": …}` is a failure.
pub async fn stream_lines(
    stream: UnixStream,
    path: &'static str,
    limit: Duration,
    mut line: impl FnMut(String),
) -> Result<(), AgentError> {
    within(path, limit, async {
        let (response, _driver) = send_once(path, stream, post(path, Body::empty())).await?;
        if !response.status().is_success() {
            return expect_success(path, response.map(Body::new)).await.map(|_| ());
        }
        let mut body = response.into_body();
        let mut buffer = BytesMut::new();
        let mut last = String::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|source| AgentError::Transfer { path, source })?;
            let Ok(data) = frame.into_data() else { continue };
            buffer.extend_from_slice(&data);
            while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
                last = String::from_utf8_lossy(&buffer.split_to(end)).into_owned();
                buffer.advance(1);
                line(last.clone());
            }
            if buffer.len() > REPLY_BYTES_MAX {
                return Err(AgentError::Incomplete { path });
            }
        }
        #[derive(Deserialize)]
        struct Failure {
            error: String,
        }
        match serde_json::from_str::<Failure>(&last) {
            Ok(failure) => Err(AgentError::Failed { path, message: failure.error }),
            Err(_) => Ok(()),
        }
    })
    .await
}

/// A connection that ends with this value.
struct Driver(tokio::task::JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn send_once(
    path: &'static str,
    stream: UnixStream,
    request: Request<Body>,
) -> Result<(Response<Incoming>, Driver), AgentError> {
    let failed = |source| AgentError::Transfer { path, source };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
    let driver = Driver(tokio::spawn(async move {
        // The other half sees the error too.
        let _ = connection.await;
    }));
    let response = sender.send_request(request).await.map_err(failed)?;
    Ok((response, driver))
}

fn post(path: &'static str, body: Body) -> Request<Body> {
    let mut request = Request::new(body);
    *request.method_mut() = Method::POST;
    *request.uri_mut() = http::Uri::from_static(path);
    request.headers_mut().insert(header::HOST, header::HeaderValue::from_static("warren"));
    request
        .headers_mut()
        .insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    request
}

async fn expect_success(
    path: &'static str,
    response: Response<Body>,
) -> Result<bytes::Bytes, AgentError> {
    let status = response.status();
    let body = http_body_util::Limited::new(response.into_body(), REPLY_BYTES_MAX);
    let body = body.collect().await.map_err(|_| AgentError::Incomplete { path })?.to_bytes();
    if status.is_success() {
        Ok(body)
    } else {
        let body = String::from_utf8_lossy(&body).chars().take(500).collect();
        Err(AgentError::Status { path, status, body })
    }
}

async fn within<T>(
    path: &'static str,
    limit: Duration,
    call: impl Future<Output = Result<T, AgentError>>,
) -> Result<T, AgentError> {
    tokio::time::timeout(limit, call)
        .await
        .unwrap_or(Err(AgentError::Timeout { path, seconds: limit.as_secs() }))
}
