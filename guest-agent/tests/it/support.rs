//! Starting the binary and speaking to it, blocking and without a library.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// Longest wait for anything in these tests.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A running agent; it ends with the test.
pub struct Agent {
    child: Child,
    directory: tempfile::TempDir,
}

impl Agent {
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| format!("unix:{}", directory.path().join(name).display());
        let child = Command::new(env!("CARGO_BIN_EXE_warren-agent"))
            .args(["--envd", &at("envd"), "--interpreter", &at("interpreter")])
            .args(["--tunnel", &at("tunnel")])
            // The interpreter's programs are unpacked there.
            .env("TMPDIR", directory.path())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let agent = Agent { child, directory };
        for name in ["envd", "interpreter", "tunnel"] {
            wait_until("the agent listens", || UnixStream::connect(agent.socket(name)).is_ok());
        }
        agent
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A path for the test's own files.
    pub fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    pub fn connect(&self, name: &str) -> UnixStream {
        let stream = UnixStream::connect(self.socket(name)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub fn request(&self, method: &str, target: &str, headers: &[&str], body: &[u8]) -> Reply {
        Reply::read(self.open("envd", method, target, headers, body))
    }

    pub fn open(
        &self,
        service: &str,
        method: &str,
        target: &str,
        headers: &[&str],
        body: &[u8],
    ) -> BufReader<UnixStream> {
        let mut stream = self.connect(service);
        let mut head = format!("{method} {target} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
        head.push_str(&format!("content-length: {}\r\n", body.len()));
        for header in headers {
            head.push_str(&format!("{header}\r\n"));
        }
        head.push_str("\r\n");
        stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
        BufReader::new(stream)
    }

    /// A unary Connect call: status and message.
    pub fn call(&self, method: &str, message: &Value) -> (u16, Value) {
        let user = user_header();
        let headers = ["content-type: application/json", &user];
        let reply = self.request("POST", method, &headers, message.to_string().as_bytes());
        (reply.status, serde_json::from_slice(&reply.body).unwrap_or_default())
    }

    /// A streaming Connect call, its messages as they come.
    pub fn stream(&self, method: &str, message: &Value, headers: &[&str]) -> Stream {
        let user = user_header();
        let mut all = vec!["content-type: application/connect+json", &user];
        all.extend(headers);
        let body = envelope(message);
        let mut reader = self.open("envd", "POST", method, &all, &body);
        let (status, headers) = read_head(&mut reader);
        assert_eq!(status, 200);
        let chunks = match header(&headers, "content-length") {
            // The stream failed before it began.
            Some(length) => Chunked { reader, left: length.parse().unwrap(), last: true },
            None => Chunked { reader, left: 0, last: false },
        };
        Stream { chunks, buffer: Vec::new() }
    }

    /// Starts a shell command.
    pub fn shell(&self, command: &str) -> Stream {
        self.shell_with(command, &[])
    }

    pub fn shell_with(&self, command: &str, headers: &[&str]) -> Stream {
        let message = serde_json::json!({
            "process": { "cmd": "/bin/sh", "args": ["-c", command] }, "stdin": false,
        });
        self.stream("/process.Process/Start", &message, headers)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    fn read(mut reader: BufReader<UnixStream>) -> Self {
        let (status, headers) = read_head(&mut reader);
        let mut body = Vec::new();
        if header(&headers, "transfer-encoding") == Some("chunked") {
            Chunked { reader, left: 0, last: false }.read_to_end(&mut body).unwrap();
        } else if let Some(length) = header(&headers, "content-length") {
            body.resize(length.parse().unwrap(), 0);
            reader.read_exact(&mut body).unwrap();
        }
        Reply { status, headers, body }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

fn read_head(reader: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap().parse().unwrap();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.push((name.to_lowercase(), value.trim().to_owned()));
    }
    (status, headers)
}

fn header<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

/// A chunked body.
pub struct Chunked {
    reader: BufReader<UnixStream>,
    /// Bytes left of the current chunk.
    left: usize,
    /// No chunk follows.
    last: bool,
}

impl Chunked {
    pub fn new(mut reader: BufReader<UnixStream>) -> Self {
        let (status, _) = read_head(&mut reader);
        assert_eq!(status, 200);
        Chunked { reader, left: 0, last: false }
    }

    pub fn close(&self) {
        self.reader.get_ref().shutdown(Shutdown::Both).unwrap();
    }
}

impl Read for Chunked {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.left == 0 && !self.last {
            let mut line = String::new();
            self.reader.read_line(&mut line)?;
            self.left = usize::from_str_radix(line.trim(), 16)
                .map_err(|_| std::io::Error::from(std::io::ErrorKind::UnexpectedEof))?;
            self.last = self.left == 0;
        }
        if self.left == 0 {
            return Ok(0);
        }
        let room = self.left.min(buffer.len());
        let count = self.reader.read(&mut buffer[..room])?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= count;
        if self.left == 0 && !self.last {
            self.reader.read_line(&mut String::new())?;
        }
        Ok(count)
    }
}

/// Messages of a Connect stream.
pub struct Stream {
    chunks: Chunked,
    buffer: Vec<u8>,
}

impl Stream {
    /// The next message and whether it is the last.
    pub fn next(&mut self) -> (bool, Value) {
        loop {
            if let Some([flags, length @ ..]) = self.buffer.first_chunk::<5>().copied() {
                let end = 5 + usize::try_from(u32::from_be_bytes(length)).unwrap();
                if self.buffer.len() >= end {
                    let value = serde_json::from_slice(&self.buffer[5..end]).unwrap();
                    self.buffer.drain(..end);
                    return (flags & 2 != 0, value);
                }
            }
            let mut piece = vec![0; 64 * 1024];
            let count = self.chunks.read(&mut piece).unwrap();
            assert!(count > 0, "the stream ended without a last message");
            self.buffer.extend_from_slice(&piece[..count]);
        }
    }

    /// The process id of the start event.
    pub fn pid(&mut self) -> i64 {
        let (_, message) = self.next();
        message["event"]["start"]["pid"].as_i64().unwrap_or_else(|| panic!("no start: {message}"))
    }

    /// Everything to the end.
    pub fn finish(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        loop {
            let (last, message) = self.next();
            if last {
                outcome.error = message["error"].clone();
                return outcome;
            }
            let event = &message["event"];
            for (name, output) in [
                ("stdout", &mut outcome.stdout),
                ("stderr", &mut outcome.stderr),
                ("pty", &mut outcome.pty),
            ] {
                if let Some(text) = event["data"][name].as_str() {
                    output.extend(STANDARD.decode(text).unwrap());
                }
            }
            if event.get("end").is_some() {
                outcome.end = event["end"].clone();
            }
            if event.get("keepalive").is_some() {
                outcome.keepalives += 1;
            }
        }
    }

    /// Goes away in the middle.
    pub fn disconnect(self) {
        self.chunks.close();
    }
}

#[derive(Debug, Default)]
pub struct Outcome {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub pty: Vec<u8>,
    pub end: Value,
    pub error: Value,
    pub keepalives: u32,
}

pub fn envelope(message: &Value) -> Vec<u8> {
    let text = message.to_string();
    let length = u32::try_from(text.len()).unwrap().to_be_bytes();
    [&[0], &length[..], text.as_bytes()].concat()
}

/// Names the user that runs the test, whom the agent may always become.
pub fn user_header() -> String {
    format!("authorization: Basic {}", STANDARD.encode(format!("{}:", user_name())))
}

pub fn user_name() -> String {
    let uid = rustix::process::getuid().as_raw().to_string();
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap();
    let line = passwd.lines().find(|line| line.split(':').nth(2) == Some(&uid)).unwrap();
    line.split(':').next().unwrap().to_owned()
}

pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < limit, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
