//! Files in a sandbox.

use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::{Value, json};

use super::api::escape;
use super::connect::Agent;
use super::http::finish;
use super::{Body, full};
use crate::error::CliError;

/// A file or directory in a sandbox.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) path: String,
    #[serde(rename = "type", default)]
    kind: String,
}

impl Entry {
    pub(crate) fn is_file(&self) -> bool {
        self.kind == "FILE_TYPE_FILE"
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.kind == "FILE_TYPE_DIRECTORY"
    }
}

#[derive(Debug, Deserialize)]
struct StatReply {
    entry: Entry,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ListReply {
    entries: Vec<Entry>,
}

/// The pieces of a file being read.
#[derive(Debug)]
pub(crate) struct Download {
    /// Whole length, if told.
    pub(crate) length: Option<u64>,
    body: Incoming,
}

impl Download {
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, CliError> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }
}

impl Agent {
    /// What is at a path; `None` if nothing.
    pub(crate) async fn stat(&self, path: &str) -> Result<Option<Entry>, CliError> {
        match self.unary::<StatReply>("/filesystem.Filesystem/Stat", &json!({"path": path})).await {
            Ok(reply) => Ok(Some(reply.entry)),
            Err(CliError::Rpc { code, .. }) if code == "not_found" => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What a directory holds, one level.
    pub(crate) async fn list(&self, path: &str) -> Result<Vec<Entry>, CliError> {
        let message = json!({"path": path, "depth": 1});
        Ok(self.unary::<ListReply>("/filesystem.Filesystem/ListDir", &message).await?.entries)
    }

    /// Makes a directory; one that is there is fine.
    pub(crate) async fn make_directory(&self, path: &str) -> Result<(), CliError> {
        match self.unary::<Value>("/filesystem.Filesystem/MakeDir", &json!({"path": path})).await {
            Ok(_) => Ok(()),
            Err(CliError::Rpc { code, .. }) if code == "already_exists" => Ok(()),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn download(&self, path: &str) -> Result<Download, CliError> {
        let request = self.request(Method::GET, &self.file_route(path));
        let response = self.http().send(finish(request, full(""))?).await?;
        let length = response
            .headers()
            .get(http::header::CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok()?.parse().ok());
        Ok(Download { length, body: response.into_body() })
    }

    pub(crate) async fn upload(
        &self,
        path: &str,
        length: Option<u64>,
        body: Body,
    ) -> Result<(), CliError> {
        let mut request = self
            .request(Method::POST, &self.file_route(path))
            .header(http::header::CONTENT_TYPE, "application/octet-stream");
        if let Some(length) = length {
            request = request.header(http::header::CONTENT_LENGTH, length);
        }
        let response = self.http().send(finish(request, body)?).await?;
        response.into_body().collect().await?;
        Ok(())
    }

    fn file_route(&self, path: &str) -> String {
        match self.user() {
            Some(user) => format!("/files?path={}&username={}", escape(path), escape(user)),
            None => format!("/files?path={}", escape(path)),
        }
    }
}
