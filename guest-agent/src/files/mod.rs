//! envd's `/files`: download and upload, streamed in both directions.

mod compose;
mod download;
mod encoding;
mod metadata;
mod multipart;
mod owner;
mod signature;
mod unfinished;
mod upload;

pub use compose::answer as answer_compose;
pub use metadata::read as read_metadata;
pub use owner::make_directories;
pub use unfinished::Purpose;

use std::rc::Rc;

use http::request::Parts;
use http::{HeaderMap, Method, StatusCode};

use crate::agent::Agent;
use crate::connect::ConnectError;
use crate::http::{self as web, Query, Reply, Request};
use crate::users::User;
use encoding::PlainBody;
use signature::Operation;

/// An error with the status that tells of it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct FileError {
    /// The status.
    pub status: StatusCode,
    /// What happened.
    pub message: String,
}

impl FileError {
    /// An error with a message.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        FileError { status, message: message.into() }
    }

    /// A mistake of the client.
    pub fn bad_request(message: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message.to_string())
    }

    /// An error of the operating system.
    pub fn from_io(what: impl std::fmt::Display, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as Kind;
        let status = match error.kind() {
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::StorageFull | Kind::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
            Kind::PermissionDenied => StatusCode::FORBIDDEN,
            Kind::InvalidInput
            | Kind::InvalidFilename
            | Kind::NotADirectory
            | Kind::IsADirectory => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let message = match status {
            StatusCode::INSUFFICIENT_STORAGE => {
                format!("{what}: not enough disk space available")
            }
            _ => format!("{what}: {error}"),
        };
        FileError { status, message }
    }

    fn reply(&self) -> Reply {
        web::error(self.status, &self.message)
    }
}

/// Answers `/files`.
pub async fn answer(agent: &Rc<Agent>, request: Request) -> Reply {
    let outcome = match *request.method() {
        Method::GET => download(agent, &request),
        Method::POST => {
            let (parts, body) = request.into_parts();
            let mut body = PlainBody::new(body);
            upload(agent, &parts, &mut body).await
        }
        _ => Err(FileError::new(StatusCode::METHOD_NOT_ALLOWED, "use GET or POST")),
    };
    outcome.unwrap_or_else(|error| error.reply())
}

fn download(agent: &Agent, request: &Request) -> Result<Reply, FileError> {
    let query = Query::parse(request.uri().query()).map_err(FileError::bad_request)?;
    signature::check(agent, request.headers(), &query, Operation::Read)?;
    let user = user(agent, request.headers(), &query)?;
    let path = query.value("path").unwrap_or_default();
    let path = crate::paths::resolve(path, &user, agent.workdir().as_deref())
        .map_err(FileError::bad_request)?;
    download::answer(&path, request.headers())
}

async fn upload(agent: &Agent, parts: &Parts, body: &mut PlainBody) -> Result<Reply, FileError> {
    let query = Query::parse(parts.uri.query()).map_err(FileError::bad_request)?;
    signature::check(agent, &parts.headers, &query, Operation::Write)?;
    let user = user(agent, &parts.headers, &query)?;
    upload::answer(agent, &parts.headers, body, &query, &user).await
}

fn user(agent: &Agent, headers: &HeaderMap, query: &Query) -> Result<Rc<User>, FileError> {
    let found = match query.value("username").filter(|name| !name.is_empty()) {
        Some(name) => agent.user(Some(name)),
        None => agent.user_of(headers),
    };
    let unauthorized =
        |error: ConnectError| FileError::new(StatusCode::UNAUTHORIZED, error.message);
    found.map_err(unauthorized)
}
