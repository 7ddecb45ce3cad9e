//! `POST /files/compose`: several files become one.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::rc::Rc;

use http::StatusCode;
use serde::Deserialize;

use super::unfinished::Unfinished;
use super::{FileError, owner};
use crate::agent::Agent;
use crate::http::{self as web, Reply, Request};
use crate::{paths, runtime};

/// A list of paths is not longer than this.
const BODY_BYTES_MAX: usize = 4 << 20;

/// Bytes copied before other requests have their turn.
const STEP_BYTES: u64 = 8 << 20;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Compose {
    source_paths: Vec<String>,
    destination: String,
    username: Option<String>,
}

/// Answers the request.
pub async fn answer(agent: &Rc<Agent>, request: Request) -> Reply {
    compose(agent, request).await.unwrap_or_else(|error| error.reply())
}

async fn compose(agent: &Agent, request: Request) -> Result<Reply, FileError> {
    let (parts, body) = request.into_parts();
    let body = web::collect(body, BODY_BYTES_MAX).await.map_err(FileError::bad_request)?;
    let message: Compose = serde_json::from_slice(&body)
        .map_err(|error| FileError::bad_request(format_args!("invalid request body: {error}")))?;
    if message.source_paths.is_empty() || message.destination.is_empty() {
        return Err(FileError::bad_request("source_paths and destination must not be empty"));
    }
    let user = match message.username.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => agent.user(Some(name)),
        None => agent.user_of(&parts.headers),
    };
    let user = user.map_err(|error| FileError::new(StatusCode::UNAUTHORIZED, error.message))?;
    let workdir = agent.workdir();
    let resolve = |path: &str| {
        paths::resolve(path, &user, workdir.as_deref()).map_err(FileError::bad_request)
    };
    let destination = resolve(&message.destination)?;
    let mut sources = Vec::new();
    for path in &message.source_paths {
        let source = resolve(path)?;
        if source == destination {
            let message = format_args!("source path '{path}' is also the destination");
            return Err(FileError::bad_request(message));
        }
        match std::fs::metadata(&source) {
            Ok(meta) if meta.is_file() => sources.push(source),
            Ok(_) => {
                let message = format_args!("source path '{path}' is not a regular file");
                return Err(FileError::bad_request(message));
            }
            Err(error) => {
                return Err(FileError::from_io(format_args!("source file '{path}'"), &error));
            }
        }
    }
    let failed = |error: io::Error| {
        FileError::from_io(format_args!("write '{}'", destination.display()), &error)
    };
    let parent = destination.parent().unwrap_or(&destination);
    owner::make_directories(parent, &user).await.map_err(failed)?;
    let unfinished = Unfinished::beside(&destination).map_err(failed)?;
    join(&sources, &unfinished).await.map_err(failed)?;
    owner::give(&unfinished.file, &user).map_err(failed)?;
    unfinished.finish().map_err(failed)?;
    for source in &sources {
        std::fs::remove_file(source).map_err(failed)?;
    }
    let name = destination.file_name().unwrap_or_default().to_string_lossy();
    let path = destination.to_string_lossy();
    let value = serde_json::json!({ "path": path, "name": name, "type": "file" });
    Ok(web::json(StatusCode::OK, &value))
}

async fn join(sources: &[PathBuf], target: &Unfinished) -> io::Result<()> {
    for source in sources {
        let mut source = File::open(source)?;
        while io::copy(&mut (&mut source).take(STEP_BYTES), &mut &target.file)? > 0 {
            runtime::yield_now().await;
        }
    }
    Ok(())
}
