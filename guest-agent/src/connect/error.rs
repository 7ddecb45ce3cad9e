//! Connect's error codes and their two forms on the wire.

use http::StatusCode;
use serde_json::{Value, json};

use crate::http::{self as web, Reply};

/// A Connect error code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Code {
    Canceled,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

impl Code {
    /// The name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Code::Canceled => "canceled",
            Code::InvalidArgument => "invalid_argument",
            Code::DeadlineExceeded => "deadline_exceeded",
            Code::NotFound => "not_found",
            Code::AlreadyExists => "already_exists",
            Code::PermissionDenied => "permission_denied",
            Code::ResourceExhausted => "resource_exhausted",
            Code::FailedPrecondition => "failed_precondition",
            Code::Unimplemented => "unimplemented",
            Code::Internal => "internal",
            Code::Unavailable => "unavailable",
            Code::DataLoss => "data_loss",
            Code::Unauthenticated => "unauthenticated",
        }
    }

    /// The HTTP status of a unary reply.
    pub fn status(self) -> StatusCode {
        match self {
            Code::Canceled => StatusCode::from_u16(499).expect("499 is in range"),
            Code::InvalidArgument | Code::FailedPrecondition => StatusCode::BAD_REQUEST,
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::AlreadyExists => StatusCode::CONFLICT,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Code::Internal | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
            Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        }
    }
}

/// An error as a client sees it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", code.name())]
pub struct ConnectError {
    /// What kind of error.
    pub code: Code,
    /// What happened.
    pub message: String,
}

impl ConnectError {
    /// An error with a message.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        ConnectError { code, message: message.into() }
    }

    /// An error of the operating system, with the code that fits it.
    pub fn from_io(what: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as Kind;
        let code = match error.kind() {
            Kind::NotFound => Code::NotFound,
            Kind::PermissionDenied => Code::PermissionDenied,
            Kind::AlreadyExists => Code::AlreadyExists,
            // "Exhausted" is what clients are told to try again after.
            Kind::StorageFull | Kind::QuotaExceeded => Code::FailedPrecondition,
            Kind::OutOfMemory => Code::ResourceExhausted,
            Kind::InvalidInput
            | Kind::InvalidFilename
            | Kind::NotADirectory
            | Kind::IsADirectory => Code::InvalidArgument,
            _ => Code::Internal,
        };
        ConnectError::new(code, format!("{what}: {error}"))
    }

    /// The JSON form.
    pub fn to_json(&self) -> Value {
        json!({ "code": self.code.name(), "message": self.message })
    }

    /// The reply of a unary call.
    pub fn unary_reply(&self) -> Reply {
        web::json(self.code.status(), &self.to_json())
    }
}
