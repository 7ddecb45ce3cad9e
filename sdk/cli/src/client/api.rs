//! The control plane: sandboxes by E2B's routes.

use std::collections::BTreeMap;
use std::time::Duration;

use http::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::http::finish;
use super::{Http, full};
use crate::error::CliError;

/// Sandboxes asked for at once when listing.
const PAGE_LIMIT: usize = 100;

/// A sandbox as lists and details show it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Sandbox {
    #[serde(rename = "sandboxID")]
    pub(crate) id: String,
    #[serde(rename = "templateID", default)]
    pub(crate) template: String,
    #[serde(default)]
    pub(crate) alias: Option<String>,
    #[serde(default)]
    pub(crate) state: String,
    #[serde(default)]
    pub(crate) started_at: String,
    #[serde(default)]
    pub(crate) end_at: String,
    #[serde(default)]
    pub(crate) cpu_count: u32,
    #[serde(rename = "memoryMB", default)]
    pub(crate) memory_mib: u64,
    #[serde(default)]
    pub(crate) metadata: Option<BTreeMap<String, String>>,
    /// What the agent wants to see; never printed.
    #[serde(default, skip_serializing)]
    pub(crate) envd_access_token: Option<String>,
}

/// One sample of what a sandbox uses.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Metrics {
    pub(crate) timestamp: String,
    pub(crate) cpu_count: u32,
    pub(crate) cpu_used_pct: f64,
    pub(crate) mem_used: u64,
    pub(crate) mem_total: u64,
    pub(crate) disk_used: u64,
    pub(crate) disk_total: u64,
}

/// The node as a whole.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Node {
    pub(crate) sandboxes: Places,
    pub(crate) memory: Memory,
}

/// Room for sandboxes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Places {
    pub(crate) running: usize,
    pub(crate) max: usize,
}

/// Memory of the host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Memory {
    pub(crate) total_bytes: u64,
    pub(crate) available_bytes: u64,
}

/// What a sandbox costs the host, as its kind counts it.
#[derive(Debug, Deserialize)]
pub(crate) struct Cost {
    #[serde(default)]
    pub(crate) stats: serde_json::Value,
}

/// What a sandbox's console said.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Logs {
    #[serde(rename = "logs")]
    pub(crate) lines: Vec<LogLine>,
}

/// One line of a log.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LogLine {
    #[serde(default)]
    pub(crate) timestamp: String,
    pub(crate) line: String,
}

/// What a new sandbox is like.
#[derive(Debug)]
pub(crate) struct NewSandbox<'a> {
    pub(crate) template: &'a str,
    pub(crate) timeout_seconds: u64,
    pub(crate) metadata: &'a [(String, String)],
    pub(crate) environment: &'a [(String, String)],
}

/// What came of one child of a fork.
#[derive(Debug, Deserialize)]
pub(crate) struct Child {
    pub(crate) sandbox: Option<ChildSandbox>,
    pub(crate) error: Option<ChildError>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ChildSandbox {
    #[serde(rename = "sandboxID")]
    pub(crate) id: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ChildError {
    pub(crate) code: u16,
    pub(crate) message: String,
    pub(crate) error_code: Option<String>,
}

/// Something that holds the port and is no daemon may never answer.
const HEALTH_PATIENCE: Duration = Duration::from_secs(5);

impl Sandbox {
    /// Whether it is not paused.
    pub(crate) fn runs(&self) -> bool {
        self.state != "paused"
    }
}

impl Http {
    /// Whether a daemon answers.
    pub(crate) async fn is_up(&self) -> bool {
        let Ok(request) = finish(self.bare_request(Method::GET, "/health"), full("")) else {
            return false;
        };
        let answer = tokio::time::timeout(HEALTH_PATIENCE, self.send(request)).await;
        answer.is_ok_and(|answer| answer.is_ok())
    }

    /// Asks the daemon to stop, with or without its sandboxes.
    pub(crate) async fn stop_node(&self, kill: bool) -> Result<(), CliError> {
        let body = json!({"sandboxes": if kill { "kill" } else { "keep" }});
        let request = self
            .request(Method::POST, "/v1/node/stop")
            .header(http::header::CONTENT_TYPE, "application/json");
        self.send(finish(request, full(body.to_string()))?).await.map(drop)
    }

    pub(crate) async fn node(&self) -> Result<Node, CliError> {
        self.json(finish(self.request(Method::GET, "/v1/node"), full(""))?).await
    }

    /// What a sandbox costs the host.
    pub(crate) async fn cost(&self, id: &str) -> Result<Cost, CliError> {
        let request = self.request(Method::GET, &format!("/v1/sandboxes/{}", segment(id)));
        self.json(finish(request, full(""))?).await
    }

    pub(crate) async fn create(&self, new: &NewSandbox<'_>) -> Result<Sandbox, CliError> {
        let map = |pairs: &[(String, String)]| pairs.iter().cloned().collect::<BTreeMap<_, _>>();
        let body = json!({
            "templateID": new.template,
            "timeout": new.timeout_seconds,
            "metadata": map(new.metadata),
            "envVars": map(new.environment),
        });
        let request = self
            .request(Method::POST, "/v2/sandboxes")
            .header(http::header::CONTENT_TYPE, "application/json");
        self.json(finish(request, full(body.to_string()))?).await
    }

    pub(crate) async fn sandbox(&self, id: &str) -> Result<Sandbox, CliError> {
        self.json(finish(
            self.request(Method::GET, &format!("/sandboxes/{}", segment(id))),
            full(""),
        )?)
        .await
    }

    /// All pages.
    pub(crate) async fn sandboxes(
        &self,
        metadata: &[(String, String)],
    ) -> Result<Vec<Sandbox>, CliError> {
        let filter: Vec<String> = metadata
            .iter()
            .map(|(key, value)| format!("{}={}", escape(key), escape(value)))
            .collect();
        let filter = if filter.is_empty() {
            String::new()
        } else {
            format!("&metadata={}", escape(&filter.join("&")))
        };
        let mut all = Vec::new();
        let mut token = String::new();
        loop {
            let path = format!("/v2/sandboxes?limit={PAGE_LIMIT}{filter}{token}");
            let response = self.send(finish(self.request(Method::GET, &path), full(""))?).await?;
            let next = response.headers().get("x-next-token").and_then(|value| value.to_str().ok());
            let next = next.filter(|token| !token.is_empty()).map(str::to_owned);
            let body = http_body_util::BodyExt::collect(response.into_body()).await?.to_bytes();
            let page: Vec<Sandbox> =
                serde_json::from_slice(&body).map_err(|source| CliError::Reply(path, source))?;
            all.extend(page);
            match next {
                Some(next) => token = format!("&nextToken={}", escape(&next)),
                None => return Ok(all),
            }
        }
    }

    pub(crate) async fn kill(&self, id: &str) -> Result<(), CliError> {
        let request = self.request(Method::DELETE, &format!("/sandboxes/{}", segment(id)));
        self.send(finish(request, full(""))?).await.map(drop)
    }

    pub(crate) async fn pause(&self, id: &str) -> Result<(), CliError> {
        let request = self.request(Method::POST, &format!("/sandboxes/{}/pause", segment(id)));
        self.send(finish(request, full(""))?).await.map(drop)
    }

    /// Resumes a sandbox if it is paused.
    pub(crate) async fn connect(&self, id: &str, seconds: u64) -> Result<(), CliError> {
        let request = self
            .request(Method::POST, &format!("/v2/sandboxes/{}/connect", segment(id)))
            .header(http::header::CONTENT_TYPE, "application/json");
        let body = json!({"timeout": seconds}).to_string();
        self.send(finish(request, full(body))?).await.map(drop)
    }

    pub(crate) async fn fork(
        &self,
        id: &str,
        count: u32,
        seconds: u64,
    ) -> Result<Vec<Child>, CliError> {
        let request = self
            .request(Method::POST, &format!("/sandboxes/{}/fork", segment(id)))
            .header(http::header::CONTENT_TYPE, "application/json");
        let body = json!({"timeout": seconds, "count": count}).to_string();
        self.json(finish(request, full(body))?).await
    }

    pub(crate) async fn logs(&self, id: &str) -> Result<Logs, CliError> {
        let request = self.request(Method::GET, &format!("/sandboxes/{}/logs", segment(id)));
        self.json(finish(request, full(""))?).await
    }

    /// Samples, the newest last.
    pub(crate) async fn metrics(&self, id: &str) -> Result<Vec<Metrics>, CliError> {
        let request = self.request(Method::GET, &format!("/sandboxes/{}/metrics", segment(id)));
        self.json(finish(request, full(""))?).await
    }
}

/// A path segment out of what a user typed.
pub(crate) fn segment(text: &str) -> String {
    escape(text)
}

/// Percent-encodes all but unreserved characters (RFC 3986, 2.3).
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_keeps_unreserved_characters_only() {
        assert_eq!(escape("a-b_c.d~e"), "a-b_c.d~e");
        assert_eq!(escape("a/b c=ä"), "a%2Fb%20c%3D%C3%A4");
    }
}
