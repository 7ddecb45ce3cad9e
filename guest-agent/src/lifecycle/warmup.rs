//! `POST /warmup`: runs every common path once before a template is frozen, so
//! that its clones find the code, the files and the interpreters in memory.
//!
//! Progress goes out as NDJSON: `{"step":…}` lines, a `"error"` in one that
//! failed, and `{"done":true}` at the end. A step that fails does not end the
//! others: an image may have no Python, and is warm without.

use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderValue, header};
use serde_json::{Value, json};

use super::hot_files::{self, Amount};
use super::own_request::{OwnClient, pair};
use crate::connect;
use crate::envd::Envd;
use crate::http::{Body, Chunks, Reply};
use crate::interpreter::Interpreter;
use crate::net::Socket;
use crate::runtime::{self, Sender, Source};
use crate::tunnel;

/// Progress of the file step is told so often.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

/// Commands as clients send them, each by the full path of a request.
const COMMANDS: [&[&str]; 7] = [
    &["/bin/true"],
    &["/bin/sh", "-c", "echo warm"],
    &["/bin/dash", "-c", "ls / | cat"],
    &["/bin/bash", "-c", "echo warm"],
    &["/bin/bash", "-l", "-c", "echo $(id -u) > /dev/null; cat /etc/passwd > /dev/null"],
    &["/usr/bin/python3", "-c", "import json, re, subprocess; print(1)"],
    &["/usr/bin/git", "--version"],
];

/// A cell that prints, fails, shows and starts a program.
const CELL: &str = "import subprocess\nprint(subprocess.run(['true']).returncode)\n\
                    try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    print(error)\n[1, 2, 3]";

/// Starts to warm up; the reply ends when all is done.
pub fn warm_up(envd: Rc<Envd>, interpreter: Rc<Interpreter>) -> Reply {
    let (sender, receiver) = runtime::channel(16);
    let warmup = Warmup { envd, interpreter, progress: sender };
    runtime::spawn(warmup.run()).detach();
    let mut reply = Reply::new(Body::stream(Chunks(receiver)));
    let kind = HeaderValue::from_static("application/x-ndjson");
    reply.headers_mut().insert(header::CONTENT_TYPE, kind);
    reply
}

struct Warmup {
    envd: Rc<Envd>,
    interpreter: Rc<Interpreter>,
    progress: Sender<Bytes>,
}

impl Warmup {
    async fn run(self) {
        self.read_files().await;
        self.tell("loopback", self.loopback().await.map_err(|error| error.to_string())).await;
        for command in COMMANDS {
            if std::fs::metadata(command[0]).is_ok() {
                self.tell(&command.join(" "), self.command(command).await).await;
            }
        }
        for (name, result) in [
            ("files", self.files().await),
            ("filesystem", self.filesystem().await),
            ("metrics", self.get("/metrics").await),
            ("interpreter", self.interpreter.warm_up().await),
        ] {
            self.tell(name, result).await;
        }
        self.tell("cell", self.cell().await).await;
        self.send(&json!({ "done": true })).await;
    }

    async fn read_files(&self) {
        let mut told = Instant::now();
        let read = hot_files::read(hot_files::budget(), async |read| {
            if told.elapsed() >= PROGRESS_INTERVAL {
                told = Instant::now();
                self.tell_amount(read).await;
            }
        });
        let read = read.await;
        self.tell_amount(read).await;
    }

    async fn tell_amount(&self, read: Amount) {
        let Amount { files, bytes } = read;
        self.send(&json!({ "step": "hot files", "files": files, "bytes": bytes })).await;
        // Reading never waits; this lets the line go out.
        runtime::yield_now().await;
    }

    /// The first TCP connection of a kernel costs more than all later ones; it
    /// goes through the tunnel, as a client's will.
    async fn loopback(&self) -> io::Result<()> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let (ours, theirs) = pair()?;
        let client = Source::new(ours);
        let _server = runtime::spawn(tunnel::serve(Socket::new(theirs)));
        client.write_all(format!("{port}\n").as_bytes()).await?;
        let mut reply = [0; 16];
        let count = client.read(&mut reply).await?;
        if &reply[..count] != b"OK\n" {
            return Err(io::Error::other(String::from_utf8_lossy(&reply[..count]).into_owned()));
        }
        let (mut peer, _) = listener.accept()?;
        io::Write::write_all(&mut peer, b"warm")?;
        client.read(&mut reply).await.map(drop)
    }

    async fn command(&self, command: &[&str]) -> Result<(), String> {
        let message = json!({
            "process": { "cmd": command[0], "args": command[1..] },
            "stdin": false,
        });
        let body = connect::frame_json(&message);
        let client = self.client()?;
        let reply = client
            .request("POST", "/process.Process/Start", "application/connect+json", &body)
            .await
            .map_err(|error| error.to_string())?;
        match reply.contains(r#""exitCode":0"#) {
            true => Ok(()),
            false => Err(last_line(&reply)),
        }
    }

    async fn files(&self) -> Result<(), String> {
        let path = "/files?path=/tmp/.warren-warmup&username=root";
        let kind = "application/octet-stream";
        self.expect(self.client()?.request("POST", path, kind, b"warm").await)?;
        self.get(path).await?;
        std::fs::remove_file("/tmp/.warren-warmup").map_err(|error| error.to_string())
    }

    async fn filesystem(&self) -> Result<(), String> {
        for (method, body) in [("Stat", r#"{"path":"/"}"#), ("ListDir", r#"{"path":"/"}"#)] {
            let path = format!("/filesystem.Filesystem/{method}");
            let request =
                self.client()?.request("POST", &path, "application/json", body.as_bytes());
            self.expect(request.await)?;
        }
        Ok(())
    }

    async fn get(&self, path: &str) -> Result<(), String> {
        self.expect(self.client()?.request("GET", path, "text/plain", b"").await)
    }

    /// In a context of its own: the first cell of a client is to be number one.
    async fn cell(&self) -> Result<(), String> {
        let service = self.interpreter.clone();
        let connect = || {
            OwnClient::connect(service.clone(), self.envd.token())
                .map_err(|error| error.to_string())
        };
        let reply = connect()?.request("POST", "/contexts", "application/json", b"{}").await;
        let reply = reply.map_err(|error| error.to_string())?;
        let id = reply.rsplit("\r\n\r\n").next().and_then(|body| {
            let value: Value = serde_json::from_str(body).ok()?;
            Some(value["id"].as_str()?.to_owned())
        });
        let id = id.ok_or_else(|| last_line(&reply))?;
        let body = json!({ "code": CELL, "context_id": id }).to_string();
        let reply =
            connect()?.request("POST", "/execute", "application/json", body.as_bytes()).await;
        let reply = reply.map_err(|error| error.to_string())?;
        let path = format!("/contexts/{id}");
        self.expect(connect()?.request("DELETE", &path, "application/json", b"").await)?;
        match reply.contains(r#""type":"result""#) {
            true => Ok(()),
            false => Err(last_line(&reply)),
        }
    }

    fn client(&self) -> Result<OwnClient, String> {
        OwnClient::connect(self.envd.clone(), self.envd.token()).map_err(|error| error.to_string())
    }

    fn expect(&self, reply: io::Result<String>) -> Result<(), String> {
        let reply = reply.map_err(|error| error.to_string())?;
        match reply.starts_with("HTTP/1.1 20") {
            true => Ok(()),
            false => Err(last_line(&reply)),
        }
    }

    async fn tell(&self, step: &str, result: Result<(), String>) {
        let line = match result {
            Ok(()) => json!({ "step": step }),
            Err(error) => json!({ "step": step, "error": error }),
        };
        self.send(&line).await;
    }

    /// Nobody who listens is no reason to stop.
    async fn send(&self, value: &Value) {
        let _ = self.progress.send(Bytes::from(format!("{value}\n"))).await;
    }
}

fn last_line(reply: &str) -> String {
    reply.trim_end().lines().last().unwrap_or("no reply").to_owned()
}
