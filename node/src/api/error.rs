//! The one form of an error reply.

use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use crate::agent::AgentError;
use crate::error::chain;
use crate::kinds::{Blame, BuildError, KindError};
use crate::sandboxes::{CreateError, DeadlineError, PauseError};
use crate::store::StoreError;
use crate::templates::{RemoveError, TemplateError};

/// `{"code", "message", "error_code"?}` with the status of `code`.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    error_code: Option<&'static str>,
    retry_after: Option<Duration>,
}

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), error_code: None, retry_after: None }
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// Something that this version does not do.
    pub fn not_supported(what: &str) -> Self {
        let message = format!("{what} is not supported by this version of the node");
        Self::new(StatusCode::NOT_IMPLEMENTED, message).coded("not_supported")
    }

    pub fn no_sandbox(id: &str) -> Self {
        let id = crate::ids::shorten(id);
        Self::new(StatusCode::NOT_FOUND, format!("sandbox \"{id}\" doesn't exist"))
    }

    /// Clients take 404 for "does not run"; the message tells why.
    pub fn paused(id: &str) -> Self {
        let id = crate::ids::shorten(id);
        Self::new(StatusCode::NOT_FOUND, format!("sandbox \"{id}\" is paused; resume it first"))
    }

    pub fn no_template(name: &str) -> Self {
        let name = crate::ids::shorten(name);
        Self::new(StatusCode::NOT_FOUND, format!("template '{name}' not found"))
    }

    pub fn coded(mut self, code: &'static str) -> Self {
        self.error_code = Some(code);
        self
    }

    pub fn retry_after(mut self, pause: Duration) -> Self {
        self.retry_after = Some(pause);
        self
    }

    fn internal(error: &dyn std::error::Error) -> Self {
        let message = chain(error);
        // Clients repeat 503: only what may pass is one. A full disk does not.
        if message.contains("No space left on device") {
            let message = format!("the node's disk is full: {message}");
            return Self::new(StatusCode::INSUFFICIENT_STORAGE, message).coded("disk_full");
        }
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }
}

impl ApiError {
    /// The body that tells of it.
    pub fn body(&self) -> Value {
        let mut body = json!({ "code": self.status.as_u16(), "message": self.message });
        if let Some(code) = self.error_code {
            body["error_code"] = json!(code);
        }
        body
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.body();
        if self.status.is_server_error() && self.status != StatusCode::NOT_IMPLEMENTED {
            tracing::error!(status = self.status.as_u16(), reason = self.message, "request failed");
        }
        let mut response = (self.status, Json(body)).into_response();
        if let Some(pause) = self.retry_after
            && let Ok(value) = HeaderValue::from_str(&pause.as_secs().max(1).to_string())
        {
            response.headers_mut().insert(header::RETRY_AFTER, value);
        }
        response
    }
}

impl From<CreateError> for ApiError {
    fn from(error: CreateError) -> Self {
        let busy = |message: String| Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
        let (mut reply, cleanup) = match &error {
            CreateError::Admission(refusal) => {
                let status = match refusal {
                    crate::admission::AdmissionError::Full(_) => StatusCode::TOO_MANY_REQUESTS,
                    crate::admission::AdmissionError::Memory { .. } => {
                        StatusCode::SERVICE_UNAVAILABLE
                    }
                };
                (Self::new(status, error.to_string()).retry_after(refusal.retry_after()), None)
            }
            CreateError::Birth { source: KindError::Busy(why), cleanup, .. } => {
                (busy(why.clone()).retry_after(Duration::from_secs(1)), cleanup.as_ref())
            }
            CreateError::Birth { cleanup, .. } | CreateError::Store { cleanup, .. } => {
                (Self::internal(&error), cleanup.as_ref())
            }
            CreateError::Init { source, cleanup, console } => {
                let mut reply = match source {
                    // A node under load may have more time later.
                    AgentError::Timeout { .. } => {
                        Self::new(StatusCode::GATEWAY_TIMEOUT, chain(&error))
                    }
                    _ => Self::internal(&error),
                };
                if let Some(line) = console.lines().rfind(|line| !line.trim().is_empty()) {
                    reply.message = format!("{}; last line of the console: {line}", reply.message);
                }
                (reply, cleanup.as_ref())
            }
            CreateError::Ended { cleanup } => {
                (Self::new(StatusCode::CONFLICT, error.to_string()), cleanup.as_ref())
            }
            CreateError::Stopping => {
                (busy(error.to_string()).retry_after(Duration::from_secs(1)), None)
            }
        };
        if let Some(cleanup) = cleanup {
            reply.message =
                format!("{}; and cleaning up failed: {}", reply.message, chain(cleanup));
        }
        reply
    }
}

impl From<PauseError> for ApiError {
    fn from(error: PauseError) -> Self {
        match &error {
            PauseError::NotFound => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            PauseError::Paused | PauseError::Ended => {
                Self::new(StatusCode::CONFLICT, error.to_string())
            }
            PauseError::Kind(_) | PauseError::Store(_) => Self::internal(&error),
            PauseError::Stopping => Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
                .retry_after(Duration::from_secs(1)),
        }
    }
}

impl From<DeadlineError> for ApiError {
    fn from(error: DeadlineError) -> Self {
        match &error {
            DeadlineError::NotRunning => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            DeadlineError::Store(_) => Self::internal(&error),
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::internal(&error)
    }
}

impl From<RemoveError> for ApiError {
    fn from(error: RemoveError) -> Self {
        match &error {
            RemoveError::Needed(_) => Self::new(StatusCode::CONFLICT, error.to_string()),
            RemoveError::Store(_) | RemoveError::Discard(_) => Self::internal(&error),
        }
    }
}

impl From<crate::keys::KeyError> for ApiError {
    fn from(error: crate::keys::KeyError) -> Self {
        match &error {
            crate::keys::KeyError::Name => Self::bad_request(error.to_string()),
            crate::keys::KeyError::Store(_) | crate::keys::KeyError::Save { .. } => {
                Self::internal(&error)
            }
        }
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        match &error {
            TemplateError::Taken(_) => Self::new(StatusCode::CONFLICT, error.to_string()),
            TemplateError::UnderWay(_) => {
                Self::new(StatusCode::CONFLICT, error.to_string()).coded("being_built")
            }
            TemplateError::TooMany => Self::new(StatusCode::TOO_MANY_REQUESTS, error.to_string()),
            TemplateError::NoKind(_) => Self::bad_request(error.to_string()),
            TemplateError::Build(build) => Self::from_build(build),
            TemplateError::Store(_) => Self::internal(&error),
        }
    }
}

impl ApiError {
    fn from_build(error: &BuildError) -> Self {
        let mut message = format!("step {error}");
        if let Some(console) = &error.console {
            message = format!("{message}\nlast lines of the console:\n{console}");
        }
        match error.blame {
            Blame::Request => Self::bad_request(message),
            Blame::Node => Self::internal(&Text(message)),
            Blame::Later => Self::new(StatusCode::CONFLICT, message),
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Text(String);
