//! Uploads: one file as the whole body, or several as a form.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use rustix::fs::OFlags;
use serde::Serialize;

use super::encoding::PlainBody;
use super::multipart::Multipart;
use super::unfinished::{Unfinished, Unkept};
use super::{FileError, metadata, owner};
use crate::agent::Agent;
use crate::http::{self as web, Query, Reply};
use crate::paths;
use crate::users::User;

/// A file as it was stored.
#[derive(Debug, Serialize)]
struct Stored {
    path: String,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

/// Stores what the request brings.
pub async fn answer(
    agent: &Agent,
    headers: &HeaderMap,
    body: &mut PlainBody,
    query: &Query,
    user: &User,
) -> Result<Reply, FileError> {
    let metadata = metadata::from_headers(headers)?;
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = kind.unwrap_or_default().to_owned();
    let media = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let workdir = agent.workdir();
    let resolve =
        |path: &str| paths::resolve(path, user, workdir.as_deref()).map_err(FileError::bad_request);
    body.decode(headers)?;
    let mut stored = Vec::new();
    if media == "application/octet-stream" {
        let path = query.value("path").ok_or_else(|| {
            FileError::bad_request("an octet-stream upload needs the path query parameter")
        })?;
        let mut writer = Writer::create(&resolve(path)?, user).await?;
        while let Some(chunk) = body.next().await? {
            writer.write(&chunk)?;
        }
        stored.push(writer.finish(&metadata)?);
    } else if media == "multipart/form-data" {
        let mut form = Multipart::new(&kind, body)?;
        while let Some(part) = form.next_part().await? {
            if part.name != "file" {
                continue;
            }
            let path = query.value("path").or(part.file_name.as_deref()).ok_or_else(|| {
                FileError::bad_request("a part has no file name and the query names no path")
            })?;
            let path = resolve(path)?;
            if stored.iter().any(|file: &Stored| Path::new(&file.path) == path) {
                let message = format!("'{}' is uploaded twice in one request", path.display());
                return Err(FileError::bad_request(message));
            }
            let mut writer = Writer::create(&path, user).await?;
            while let Some(chunk) = form.next_chunk().await? {
                writer.write(&chunk)?;
            }
            stored.push(writer.finish(&metadata)?);
        }
    } else {
        let message =
            format!("content type {kind:?} is not multipart/form-data or application/octet-stream");
        return Err(FileError::bad_request(message));
    }
    Ok(web::json(StatusCode::OK, &stored))
}

/// A file being written.
struct Writer {
    /// As the client named it.
    path: PathBuf,
    target: Target,
}

/// Where the bytes go until all are there. An upload that breaks off leaves nothing of
/// itself, and what was there before.
enum Target {
    /// There was nothing: the file itself.
    New(File, Unkept),
    /// There was a file.
    Replacement(Unfinished),
}

impl Writer {
    /// Opens the file anew, its missing directories included.
    async fn create(path: &Path, user: &User) -> Result<Self, FileError> {
        let shown = path.display();
        let failed = |error: io::Error| FileError::from_io(format_args!("open '{shown}'"), &error);
        let target = match std::fs::metadata(path) {
            Ok(meta) if meta.is_file() => {
                Target::Replacement(Unfinished::beside(path).map_err(failed)?)
            }
            Ok(meta) if meta.is_dir() => {
                return Err(FileError::bad_request(format_args!("path '{shown}' is a directory")));
            }
            Ok(_) => {
                let message = format_args!("path '{shown}' is not a regular file");
                return Err(FileError::bad_request(message));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let parent = path.parent().unwrap_or(path);
                owner::make_directories(parent, user).await.map_err(|error| {
                    FileError::from_io(format_args!("make '{}'", parent.display()), &error)
                })?;
                Target::New(open_new(path).map_err(failed)?, Unkept::new(path.to_owned()))
            }
            Err(error) => return Err(failed(error)),
        };
        let writer = Writer { path: path.to_owned(), target };
        owner::give(writer.file(), user).map_err(|error| {
            FileError::from_io(format_args!("give '{shown}' to {}", user.name), &error)
        })?;
        Ok(writer)
    }

    fn file(&self) -> &File {
        match &self.target {
            Target::New(file, _) => file,
            Target::Replacement(unfinished) => &unfinished.file,
        }
    }

    fn write(&mut self, bytes: &Bytes) -> Result<(), FileError> {
        self.file().write_all(bytes).map_err(|error| {
            FileError::from_io(format_args!("write '{}'", self.path.display()), &error)
        })
    }

    fn finish(self, metadata: &BTreeMap<String, String>) -> Result<Stored, FileError> {
        metadata::replace(self.file(), metadata)?;
        match self.target {
            Target::New(_, unkept) => unkept.keep(),
            Target::Replacement(unfinished) => unfinished.finish().map_err(|error| {
                FileError::from_io(format_args!("replace '{}'", self.path.display()), &error)
            })?,
        }
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let path = self.path.to_string_lossy().into_owned();
        Ok(Stored { path, name, kind: "file", metadata: metadata.clone() })
    }
}

fn open_new(path: &Path) -> io::Result<File> {
    // Without the flag, opening a FIFO that just appeared would wait for a reader.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).expect("a small constant");
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o666).custom_flags(flags).open(path)
}
