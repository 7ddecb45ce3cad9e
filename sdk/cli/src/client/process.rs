//! Commands in a sandbox.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use serde_json::{Value, json};

use super::connect::{Agent, Messages};
use crate::error::CliError;
use crate::terminal::Size;

/// What to start.
#[derive(Debug)]
pub(crate) struct Start<'a> {
    pub(crate) command: &'a [String],
    pub(crate) cwd: Option<&'a str>,
    pub(crate) environment: &'a [(String, String)],
    pub(crate) stdin: Stdin,
    pub(crate) terminal: Option<Size>,
}

/// Whether the command reads what we send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stdin {
    Open,
    Closed,
}

/// A signal that the agent passes on.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Signal {
    Terminate,
    Kill,
}

/// What a command does, one after the other.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    Terminal(Vec<u8>),
    End { exit_code: u8 },
}

/// A running command.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) input: Input,
    messages: Messages,
}

/// The way into a running command.
#[derive(Debug, Clone)]
pub(crate) struct Input {
    agent: Agent,
    pid: u32,
    terminal: bool,
}

#[derive(Debug, Deserialize)]
struct Reply {
    event: RawEvent,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawEvent {
    start: Option<RawStart>,
    data: Option<RawData>,
    end: Option<RawEnd>,
}

#[derive(Debug, Deserialize)]
struct RawStart {
    pid: u32,
}

#[derive(Debug, Deserialize)]
struct RawData {
    stdout: Option<String>,
    stderr: Option<String>,
    pty: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawEnd {
    exit_code: i32,
    status: String,
    error: Option<String>,
}

impl Process {
    pub(crate) async fn start(agent: &Agent, start: &Start<'_>) -> Result<Self, CliError> {
        let message = start_message(start)?;
        let mut messages = agent.stream("/process.Process/Start", &message).await?;
        let first: Option<Reply> = messages.next().await?;
        let pid = first.and_then(|reply| reply.event.start).ok_or(CliError::StreamEnded)?.pid;
        let input = Input { agent: agent.clone(), pid, terminal: start.terminal.is_some() };
        Ok(Self { input, messages })
    }

    /// The next thing it does.
    pub(crate) async fn next(&mut self) -> Result<Event, CliError> {
        loop {
            let reply: Option<Reply> = self.messages.next().await?;
            if let Some(event) = event_of(reply.ok_or(CliError::StreamEnded)?.event)? {
                return Ok(event);
            }
        }
    }
}

impl Input {
    pub(crate) async fn write(&self, bytes: &[u8]) -> Result<(), CliError> {
        let field = if self.terminal { "pty" } else { "stdin" };
        let message = json!({"process": {"pid": self.pid}, "input": {field: BASE64.encode(bytes)}});
        self.agent.unary::<Value>("/process.Process/SendInput", &message).await.map(drop)
    }

    pub(crate) async fn close(&self) -> Result<(), CliError> {
        let message = json!({"process": {"pid": self.pid}});
        self.agent.unary::<Value>("/process.Process/CloseStdin", &message).await.map(drop)
    }

    pub(crate) async fn resize(&self, size: Size) -> Result<(), CliError> {
        let message = json!({"process": {"pid": self.pid}, "pty": {"size": size.to_json()}});
        self.agent.unary::<Value>("/process.Process/Update", &message).await.map(drop)
    }

    pub(crate) async fn signal(&self, signal: Signal) -> Result<(), CliError> {
        let name = match signal {
            Signal::Terminate => "SIGNAL_SIGTERM",
            Signal::Kill => "SIGNAL_SIGKILL",
        };
        let message = json!({"process": {"pid": self.pid}, "signal": name});
        self.agent.unary::<Value>("/process.Process/SendSignal", &message).await.map(drop)
    }
}

fn start_message(start: &Start<'_>) -> Result<Value, CliError> {
    let (program, arguments) = start
        .command
        .split_first()
        .ok_or_else(|| CliError::said("no command", "write it after `--`"))?;
    let environment: serde_json::Map<String, Value> = start
        .environment
        .iter()
        .map(|(key, value)| (key.clone(), Value::String(value.clone())))
        .collect();
    let mut process = json!({"cmd": program, "args": arguments, "envs": environment});
    if let Some(cwd) = start.cwd {
        process["cwd"] = json!(cwd);
    }
    let mut message = json!({"process": process, "stdin": start.stdin == Stdin::Open});
    if let Some(size) = start.terminal {
        message["pty"] = json!({"size": size.to_json()});
    }
    Ok(message)
}

fn event_of(raw: RawEvent) -> Result<Option<Event>, CliError> {
    let decode = |text: String| {
        BASE64
            .decode(text)
            .map_err(|_| CliError::said("the agent sent output that is not base64", ""))
    };
    if let Some(end) = raw.end {
        return Ok(Some(Event::End { exit_code: exit_code(&end) }));
    }
    let Some(data) = raw.data else { return Ok(None) };
    if let Some(text) = data.stdout {
        return Ok(Some(Event::Stdout(decode(text)?)));
    }
    if let Some(text) = data.stderr {
        return Ok(Some(Event::Stderr(decode(text)?)));
    }
    Ok(data.pty.map(decode).transpose()?.map(Event::Terminal))
}

/// The exit code as a shell would give it: 128 + the signal's number for a
/// command that a signal ended.
fn exit_code(end: &RawEnd) -> u8 {
    const SIGNALS: [(&str, u8); 12] = [
        ("hangup", 1),
        ("interrupt", 2),
        ("quit", 3),
        ("illegal instruction", 4),
        ("trap", 5),
        ("aborted", 6),
        ("bus error", 7),
        ("floating point exception", 8),
        ("killed", 9),
        ("segmentation fault", 11),
        ("broken pipe", 13),
        ("terminated", 15),
    ];
    let text = end.error.as_deref().unwrap_or(&end.status);
    let signal = text.strip_prefix("signal: ").or_else(|| end.status.strip_prefix("signal: "));
    if let Some(name) = signal {
        let name = name.trim_end_matches(" (core dumped)");
        let number = SIGNALS.iter().find(|(known, _)| name.eq_ignore_ascii_case(known));
        return 128 + number.map_or(0, |(_, number)| *number);
    }
    u8::try_from(end.exit_code & 0xff).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(exit_code: i32, status: &str) -> RawEnd {
        RawEnd { exit_code, status: status.to_owned(), error: None }
    }

    #[test]
    fn exit_code_is_the_commands_own() {
        assert_eq!(exit_code(&end(42, "exit status 42")), 42);
        assert_eq!(exit_code(&end(0, "exit status 0")), 0);
    }

    #[test]
    fn exit_code_of_a_signal_is_128_and_its_number() {
        assert_eq!(exit_code(&end(-1, "signal: killed")), 137);
        assert_eq!(exit_code(&end(-1, "signal: terminated")), 143);
        assert_eq!(exit_code(&end(-1, "signal: segmentation fault (core dumped)")), 139);
    }

    #[test]
    fn event_of_keepalive_is_none() {
        assert_eq!(event_of(RawEvent::default()).unwrap(), None);
    }

    #[test]
    fn start_message_without_command_is_refused() {
        let start = Start {
            command: &[],
            cwd: None,
            environment: &[],
            stdin: Stdin::Closed,
            terminal: None,
        };
        assert!(start_message(&start).is_err());
    }
}
