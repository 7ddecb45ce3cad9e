//! One cell: from the request to the last event.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context as TaskContext, Poll};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;

use super::context::Context;
use super::kernel::{Kernel, KernelError};
use super::language::Language;
use super::text::TextDecoder;
use crate::runtime::{self, Either, Sender, Sleep, Source};

/// A quiet cell says that it lives.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// How long an interrupted cell may take to end before its kernel is killed.
const INTERRUPT_GRACE: Duration = Duration::from_secs(5);

/// Bytes of output read at once.
const READ_BYTES: usize = 64 * 1024;

/// What every kernel writes when the cell of this number is over. The number keeps apart
/// the end of this cell and what else user code may write to the kernel's socket.
fn end_line(cell: u64) -> String {
    format!(r#"{{"type":"end_of_execution","cell":{cell}}}"#)
}

/// What of an event is looked at.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
}

/// Whether a kernel's line is an event for the client: whatever user code manages to
/// write there must not break the client's parser, nor end the cell for it.
fn is_event(line: &[u8]) -> bool {
    let event = serde_json::from_slice::<Event<'_>>(line);
    event.is_ok_and(|event| !event.kind.ends_with("end_of_execution"))
}

/// Runs a cell and sends its events. When the client goes away the cell is
/// interrupted; the context stays.
pub async fn run(
    context: Rc<Context>,
    code: String,
    env_vars: BTreeMap<String, String>,
    client: Sender<Bytes>,
) {
    let turn = match runtime::either(context.turn.acquire(), client.closed()).await {
        Either::First(turn) => turn,
        Either::Second(()) => return,
    };
    let (kernel, number) = match begin(&context, &code, &env_vars).await {
        Ok(begun) => begun,
        Err(error) => {
            let _ = client.send(error_event("KernelError", &error.to_string())).await;
            let _ = client.send(line(&json!({ "type": "end_of_execution" }))).await;
            return;
        }
    };
    let mut cell = Cell::new(kernel.clone(), number);
    let outcome = cell.forward(&client).await;
    match outcome {
        Outcome::Ended => {}
        Outcome::Abandoned => {
            kernel.interrupt();
            let limit = runtime::sleep_until(Instant::now() + INTERRUPT_GRACE);
            match runtime::either(cell.discard(), limit).await {
                Either::First(Outcome::Ended) => {}
                Either::First(Outcome::Died | Outcome::Abandoned) => context.lost(&kernel),
                Either::Second(()) => {
                    kernel.kill();
                    context.lost(&kernel);
                }
            }
        }
        Outcome::Died => {
            context.lost(&kernel);
            kernel.kill();
            let how = kernel.end().map(|end| format!(" ({end})")).unwrap_or_default();
            let value = format!(
                "the kernel process ended{how}; its variables are lost, the next cell starts a new one"
            );
            let _ = client.send(error_event("KernelDied", &value)).await;
            let end = json!({ "type": "unexpected_end_of_execution" });
            let _ = client.send(line(&end)).await;
        }
    }
    drop(turn);
}

/// Hands the cell to the context's kernel.
async fn begin(
    context: &Rc<Context>,
    code: &str,
    env_vars: &BTreeMap<String, String>,
) -> Result<(Rc<Kernel>, u64), KernelError> {
    // A kernel may have died since its last cell: once more with a new one.
    for _ in 0..2 {
        let kernel = context.kernel().await?;
        let number = kernel.next_cell();
        let request = request(context, number, code, env_vars)?;
        if kernel.control.write_all(&request).await.is_ok() {
            return Ok((kernel, number));
        }
        context.lost(&kernel);
    }
    Err(KernelError::NotReady("ends as soon as it is started"))
}

fn request(
    context: &Context,
    number: u64,
    code: &str,
    env_vars: &BTreeMap<String, String>,
) -> Result<Bytes, KernelError> {
    let contexts = context.owner()?;
    let (environment, seed) = context.news(contexts.agent());
    match context.language {
        Language::Python | Language::JavaScript => Ok(line(&json!({
            "cell": number, "code": code, "env_vars": env_vars, "environment": environment, "seed": seed,
        }))),
        Language::Bash => {
            let environment = environment.unwrap_or_default();
            let cell = shell_cell(code, &environment, env_vars);
            let directory = contexts.scratch().map_err(KernelError::Install)?;
            let path = directory.join(format!("cell-{}.sh", context.id));
            let write = || -> std::io::Result<()> {
                use std::os::unix::fs::{OpenOptionsExt, chown};
                let _ = std::fs::remove_file(&path);
                let mut options = std::fs::File::options();
                let mut file = options.write(true).create_new(true).mode(0o600).open(&path)?;
                std::io::Write::write_all(&mut file, cell.as_bytes())?;
                if rustix::process::geteuid().is_root()
                    && let Ok(user) = contexts.agent().user(None)
                {
                    chown(&path, Some(user.identity.uid), Some(user.identity.gid))?;
                }
                Ok(())
            };
            write().map_err(KernelError::Install)?;
            Ok(Bytes::from(format!("{number} {}\n", path.display())))
        }
    }
}

/// A cell for the shell: what the environment gained, then the code, with
/// variables of this cell alone around it.
fn shell_cell(
    code: &str,
    environment: &BTreeMap<String, String>,
    env_vars: &BTreeMap<String, String>,
) -> String {
    let quote = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let valid = |name: &str| {
        name.bytes().enumerate().all(|(index, byte)| {
            byte == b'_' || byte.is_ascii_alphabetic() || (index > 0 && byte.is_ascii_digit())
        }) && !name.is_empty()
    };
    let mut head = String::new();
    for (name, value) in environment.iter().filter(|(name, _)| valid(name)) {
        head.push_str(&format!("export {name}={};", quote(value)));
    }
    if env_vars.is_empty() {
        return format!("{head}{code}\n");
    }
    let names: Vec<_> = env_vars.keys().filter(|name| valid(name)).cloned().collect();
    // Functions have local variables; the code runs in one and defines globally
    // what it assigns, as it would without.
    head.push_str("__warren_run() { local -x");
    for name in &names {
        head.push_str(&format!(" {name}={}", quote(&env_vars[name])));
    }
    format!("{head}; eval {}; }}; __warren_run\n", quote(code))
}

enum Outcome {
    /// The cell is over.
    Ended,
    /// The client went away.
    Abandoned,
    /// The kernel is gone.
    Died,
}

enum Step {
    Text(Stream, Bytes),
    Line(Bytes),
    Quiet,
    Abandoned,
    Died,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Stdout,
    Stderr,
}

struct Cell {
    kernel: Rc<Kernel>,
    end_line: String,
    stdout: TextDecoder,
    stderr: TextDecoder,
    closed: (bool, bool),
    keepalive: Option<Sleep>,
    buffer: Vec<u8>,
}

impl Cell {
    fn new(kernel: Rc<Kernel>, number: u64) -> Self {
        Cell {
            kernel,
            end_line: end_line(number),
            stdout: TextDecoder::default(),
            stderr: TextDecoder::default(),
            closed: (false, false),
            keepalive: None,
            buffer: vec![0; READ_BYTES],
        }
    }

    fn is_end(&self, event: &[u8]) -> bool {
        event.trim_ascii_end() == self.end_line.as_bytes()
    }

    /// Sends events until the cell is over or the client is gone.
    async fn forward(&mut self, client: &Sender<Bytes>) -> Outcome {
        loop {
            let step = std::future::poll_fn(|cx| self.poll_step(cx, Some(client))).await;
            let (events, outcome) = match step {
                Step::Text(stream, bytes) => (self.text(stream, &bytes), None),
                Step::Line(event) if self.is_end(&event) => {
                    for event in self.rest() {
                        let _ = client.send(event).await;
                    }
                    (Some(line(&json!({ "type": "end_of_execution" }))), Some(Outcome::Ended))
                }
                Step::Line(event) => (is_event(&event).then_some(event), None),
                Step::Quiet => (Some(line(&json!({ "type": "keepalive" }))), None),
                Step::Abandoned => return Outcome::Abandoned,
                Step::Died => {
                    for event in self.rest() {
                        let _ = client.send(event).await;
                    }
                    return Outcome::Died;
                }
            };
            let sent = match events {
                Some(event) => client.send(event).await.is_ok(),
                None => true,
            };
            match outcome {
                Some(outcome) => return outcome,
                None if !sent => return Outcome::Abandoned,
                None => {}
            }
        }
    }

    /// Reads and drops until the cell is over.
    async fn discard(&mut self) -> Outcome {
        loop {
            match std::future::poll_fn(|cx| self.poll_step(cx, None)).await {
                Step::Line(event) if self.is_end(&event) => {
                    drop(self.rest());
                    return Outcome::Ended;
                }
                Step::Died => return Outcome::Died,
                Step::Text(..) | Step::Line(_) | Step::Quiet | Step::Abandoned => {}
            }
        }
    }

    fn poll_step(
        &mut self,
        cx: &mut TaskContext<'_>,
        client: Option<&Sender<Bytes>>,
    ) -> Poll<Step> {
        if client.is_some_and(|client| client.poll_closed(cx).is_ready()) {
            return Poll::Ready(Step::Abandoned);
        }
        // Output first: what a cell printed before a result comes before it.
        for stream in [Stream::Stdout, Stream::Stderr] {
            if let Poll::Ready(bytes) = self.poll_output(cx, stream) {
                self.keepalive = None;
                return Poll::Ready(Step::Text(stream, bytes));
            }
        }
        match self.kernel.lines.borrow_mut().poll_next(cx) {
            Poll::Ready(Ok(Some(line))) => {
                self.keepalive = None;
                return Poll::Ready(Step::Line(line));
            }
            Poll::Ready(Ok(None) | Err(_)) => return Poll::Ready(Step::Died),
            Poll::Pending => {}
        }
        let next = Instant::now() + KEEPALIVE;
        let timer = self.keepalive.get_or_insert_with(|| runtime::sleep_until(next));
        if Pin::new(timer).poll(cx).is_ready() {
            self.keepalive = None;
            return Poll::Ready(Step::Quiet);
        }
        Poll::Pending
    }

    fn poll_output(&mut self, cx: &mut TaskContext<'_>, stream: Stream) -> Poll<Bytes> {
        let kernel = self.kernel.clone();
        let (source, closed): (&Source, _) = match stream {
            Stream::Stdout => (&kernel.stdout, &mut self.closed.0),
            Stream::Stderr => (&kernel.stderr, &mut self.closed.1),
        };
        if *closed {
            return Poll::Pending;
        }
        match source.poll_read(cx, &mut self.buffer) {
            Poll::Ready(Ok(0) | Err(_)) => {
                // The cell has closed the descriptor; the socket tells its end.
                *closed = true;
                Poll::Pending
            }
            Poll::Ready(Ok(count)) => Poll::Ready(Bytes::copy_from_slice(&self.buffer[..count])),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Output that was written before the end and not told of yet.
    fn rest(&mut self) -> Vec<Bytes> {
        let mut events = Vec::new();
        let mut cx = TaskContext::from_waker(std::task::Waker::noop());
        for stream in [Stream::Stdout, Stream::Stderr] {
            match stream {
                Stream::Stdout => self.kernel.stdout.try_again(),
                Stream::Stderr => self.kernel.stderr.try_again(),
            }
            if let Poll::Ready(bytes) = self.poll_output(&mut cx, stream) {
                events.extend(self.text(stream, &bytes));
            }
            let left = match stream {
                Stream::Stdout => self.stdout.finish(),
                Stream::Stderr => self.stderr.finish(),
            };
            events.extend(text_event(stream, &left));
        }
        events
    }

    fn text(&mut self, stream: Stream, bytes: &[u8]) -> Option<Bytes> {
        let text = match stream {
            Stream::Stdout => self.stdout.decode(bytes),
            Stream::Stderr => self.stderr.decode(bytes),
        };
        text_event(stream, &text)
    }
}

fn text_event(stream: Stream, text: &str) -> Option<Bytes> {
    if text.is_empty() {
        return None;
    }
    let kind = match stream {
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let timestamp = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
    Some(line(&json!({ "type": kind, "text": text, "timestamp": timestamp })))
}

fn error_event(name: &str, value: &str) -> Bytes {
    line(&json!({
        "type": "error", "name": name, "value": value, "traceback": format!("{name}: {value}"),
    }))
}

fn line(value: &serde_json::Value) -> Bytes {
    let mut bytes = serde_json::to_vec(value).expect("our events have string keys");
    bytes.push(b'\n');
    bytes.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_cell_quotes_values_and_skips_names_that_are_none() {
        let vars = BTreeMap::from([
            ("A".to_owned(), "it's".to_owned()),
            ("no name".to_owned(), "x".to_owned()),
        ]);
        let cell = shell_cell("echo \"$A\"", &BTreeMap::new(), &vars);
        assert_eq!(
            cell,
            "__warren_run() { local -x A='it'\\''s'; eval 'echo \"$A\"'; }; __warren_run\n"
        );
    }
}
