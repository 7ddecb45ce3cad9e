//! A sandbox under test.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use crate::connect;
use crate::http::{Client, Reply};

/// A running sandbox, reached through the node's proxy.
#[derive(Debug, Clone)]
pub struct Sandbox {
    /// Its id.
    pub id: String,
    agent: Client,
    interpreter: Client,
}

/// A command that has ended.
#[derive(Debug, Clone)]
pub struct Finished {
    /// Its own, or -1 when a signal ended it.
    pub exit_code: i64,
    /// All it wrote.
    pub stdout: Vec<u8>,
    /// All it wrote to standard error.
    pub stderr: Vec<u8>,
}

impl Finished {
    /// Standard output as text without the last newline.
    ///
    /// # Panics
    /// If the command failed.
    #[must_use]
    pub fn text(&self) -> String {
        let stdout = String::from_utf8_lossy(&self.stdout).trim_end().to_owned();
        let stderr = String::from_utf8_lossy(&self.stderr);
        assert_eq!(self.exit_code, 0, "the command failed: {stdout}\n{stderr}");
        stdout
    }
}

impl Sandbox {
    /// Out of the reply to a create.
    pub(crate) fn of(address: &str, created: &Value) -> Self {
        let id = created["sandboxID"].as_str().expect("sandboxID is text").to_owned();
        let token = created["envdAccessToken"].as_str().expect("envdAccessToken is text");
        let port = |port: &str| {
            Client::new(address)
                .with_header("e2b-sandbox-id", &id)
                .with_header("e2b-sandbox-port", port)
                .with_header("x-access-token", token)
        };
        Self { agent: port("49983"), interpreter: port("49999"), id }
    }

    /// Whether its agent answers through the proxy.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.agent.send("GET", "/health", &[], b"").is_ok_and(|reply| reply.status == 204)
    }

    /// Runs a program to its end.
    ///
    /// # Panics
    /// If the stream does not end properly.
    #[must_use]
    pub fn run(&self, program: &str, arguments: &[&str]) -> Finished {
        let message = json!({"process": {"cmd": program, "args": arguments}});
        let reply = self
            .agent
            .send(
                "POST",
                "/process.Process/Start",
                &[("content-type", "application/connect+json"), ("connect-protocol-version", "1")],
                &connect::envelope(&message),
            )
            .expect("an answer to Start")
            .expect(200);
        finished(&connect::messages(&reply.body))
    }

    /// A shell command, by the cheapest shell there is.
    #[must_use]
    pub fn shell(&self, script: &str) -> Finished {
        self.run("/bin/dash", &["-c", script])
    }

    /// Reads a file.
    #[must_use]
    pub fn read(&self, path: &str) -> Reply {
        self.agent.get(&format!("/files?path={path}"))
    }

    /// Writes a file.
    ///
    /// # Panics
    /// If there is no answer.
    #[must_use]
    pub fn write(&self, path: &str, content: &[u8]) -> Reply {
        self.agent
            .send(
                "POST",
                &format!("/files?path={path}"),
                &[("content-type", "application/octet-stream")],
                content,
            )
            .expect("an answer to a write")
    }

    /// Runs a cell in the warm interpreter and returns what it printed.
    ///
    /// # Panics
    /// If the cell failed.
    #[must_use]
    pub fn cell(&self, code: &str) -> String {
        let reply = self.interpreter.post("/execute", &json!({"code": code})).expect(200);
        let mut printed = String::new();
        for line in reply.text().lines() {
            let event: Value = serde_json::from_str(line).expect("events are JSON");
            match event["type"].as_str() {
                Some("stdout") => printed.push_str(event["text"].as_str().unwrap_or("")),
                Some("error") => panic!("the cell failed: {event}"),
                Some(_) | None => {}
            }
        }
        printed.trim_end().to_owned()
    }

    /// The agent's HTTP, for requests that no client would send.
    #[must_use]
    pub fn agent(&self) -> &Client {
        &self.agent
    }
}

fn finished(messages: &[Value]) -> Finished {
    let mut result = Finished { exit_code: -2, stdout: Vec::new(), stderr: Vec::new() };
    let mut ended = false;
    for message in messages {
        assert!(message["error"].is_null(), "the command could not run: {message}");
        let event = &message["event"];
        let bytes = |name: &str| {
            let text = event["data"][name].as_str().unwrap_or("");
            BASE64.decode(text).expect("output is base64")
        };
        result.stdout.extend(bytes("stdout"));
        result.stderr.extend(bytes("stderr"));
        if let Some(end) = event.get("end") {
            // proto3 JSON leaves zeros out.
            result.exit_code = end["exitCode"].as_i64().unwrap_or(0);
            ended = true;
        }
    }
    assert!(ended, "the stream ended before the command: {messages:?}");
    result
}
