//! Templates, by the node's own routes under `/v1`.

use std::path::PathBuf;
use std::time::Duration;

use bytes::BytesMut;
use http::Method;
use http_body_util::BodyExt;
use serde::{Deserialize, Serialize};

use super::api::segment;
use super::http::finish;
use super::{Http, full};
use crate::error::CliError;

/// A step that is silent for longer gets a line of our own.
const QUIET: Duration = Duration::from_secs(15);

/// A template to be made.
#[derive(Debug, Serialize)]
pub(crate) struct BuildRequest {
    pub(crate) name: String,
    pub(crate) aliases: Vec<String>,
    pub(crate) rootfs: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kernel: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vcpus: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory_mib: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) disk_mib: Option<u64>,
}

/// A template that can be cloned.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Template {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) aliases: Vec<String>,
    pub(crate) vcpus: u32,
    pub(crate) memory_mib: u64,
    pub(crate) disk_mib: u64,
}

/// One step of a build.
#[derive(Debug, Deserialize)]
pub(crate) struct Progress {
    pub(crate) step: String,
    #[serde(default)]
    pub(crate) message: String,
}

/// A line of the build's stream: progress, or how it ended.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Line {
    Failed {
        error: Failure,
    },
    Done {
        #[serde(rename = "done")]
        _done: bool,
    },
    Progress(Progress),
}

#[derive(Debug, Deserialize)]
struct Failure {
    #[serde(default)]
    step: String,
    message: String,
    #[serde(default)]
    console: Option<String>,
}

impl Http {
    pub(crate) async fn build_template(
        &self,
        build: &BuildRequest,
        mut progress: impl FnMut(&Progress),
    ) -> Result<(), CliError> {
        let path = "/v1/templates";
        let body = serde_json::to_string(build).expect("paths came in as text");
        let request =
            self.request(Method::POST, path).header(http::header::CONTENT_TYPE, "application/json");
        let mut body = self.send(finish(request, full(body))?).await?.into_body();
        let mut buffer = BytesMut::new();
        let mut step = String::new();
        loop {
            let Ok(frame) = tokio::time::timeout(QUIET, body.frame()).await else {
                progress(&Progress { step: step.clone(), message: "still at it".to_owned() });
                continue;
            };
            let frame = frame.transpose()?;
            let ended = frame.is_none();
            if let Some(Ok(data)) = frame.map(hyper::body::Frame::into_data) {
                buffer.extend_from_slice(&data);
            }
            while let Some(line) = next_line(&mut buffer, ended) {
                match serde_json::from_slice(&line) {
                    Ok(Line::Failed { error }) => return Err(failed(error)),
                    Ok(Line::Progress(line)) => {
                        progress(&line);
                        step = line.step;
                    }
                    Ok(Line::Done { .. }) => return Ok(()),
                    Err(source) => return Err(CliError::Reply(path.to_owned(), source)),
                }
            }
            if ended {
                return Err(CliError::said(
                    "the build's progress ended before the build did",
                    "see the daemon's log",
                ));
            }
        }
    }

    pub(crate) async fn templates(&self) -> Result<Vec<Template>, CliError> {
        self.json(finish(self.request(Method::GET, "/v1/templates"), full(""))?).await
    }

    pub(crate) async fn remove_template(&self, name: &str) -> Result<(), CliError> {
        let request = self.request(Method::DELETE, &format!("/v1/templates/{}", segment(name)));
        self.send(finish(request, full(""))?).await.map(drop)
    }
}

/// Cuts a line off; the last one may lack its end.
fn next_line(buffer: &mut BytesMut, ended: bool) -> Option<BytesMut> {
    match buffer.iter().position(|byte| *byte == b'\n') {
        Some(end) => Some(buffer.split_to(end + 1)),
        None if ended && !buffer.is_empty() => Some(buffer.split()),
        None => None,
    }
}

fn failed(failure: Failure) -> CliError {
    let advice = match failure.console {
        Some(console) => format!("the guest's console ended with:\n{console}"),
        None => "see the daemon's log".to_owned(),
    };
    CliError::said(format!("{}: {}", failure.step, failure.message), advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_line_waits_for_the_end_of_a_line() {
        let mut buffer = BytesMut::from(&b"one\ntwo"[..]);
        assert_eq!(next_line(&mut buffer, false).unwrap(), "one\n");
        assert_eq!(next_line(&mut buffer, false), None);
        assert_eq!(next_line(&mut buffer, true).unwrap(), "two");
        assert_eq!(next_line(&mut buffer, true), None);
    }

    #[test]
    fn line_tells_progress_failure_and_end_apart() {
        let parse = |text: &str| serde_json::from_str::<Line>(text).unwrap();
        assert!(matches!(parse(r#"{"step":"boot","message":"1 vCPU"}"#), Line::Progress(_)));
        assert!(matches!(parse(r#"{"done":true,"template":{}}"#), Line::Done { .. }));
        let failed = parse(r#"{"error":{"step":"boot","message":"no","console":null}}"#);
        assert!(matches!(failed, Line::Failed { .. }));
    }
}
