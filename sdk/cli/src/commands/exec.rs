//! `exec` and `run`: a command in a sandbox, its streams and its exit code.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};

use crate::client::Http;
use crate::client::api::NewSandbox;
use crate::client::connect::Agent;
use crate::client::process::{Event, Input, Process, Signal, Start, Stdin};
use crate::error::CliError;
use crate::flags::{CommandOptions, Exec, Run};
use crate::output::Output;
use crate::terminal::{RawMode, Size};

/// Sort of a terminal that does not tell its own.
const DEFAULT_TERMINAL: &str = "xterm-256color";
/// Input is sent in pieces of this size.
const INPUT_BYTES: usize = 64 * 1024;

pub(super) async fn exec(http: &Http, exec: &Exec, output: Output) -> Result<ExitCode, CliError> {
    let agent = Agent::of(http, &exec.id, exec.options.user.as_deref()).await?;
    attached(&agent, &exec.options, &exec.command, output).await
}

pub(super) async fn run(http: &Http, run: &Run, output: Output) -> Result<ExitCode, CliError> {
    let sandbox = http
        .create(&NewSandbox {
            template: &run.template,
            timeout_seconds: run.new.lifetime.seconds,
            metadata: &run.new.metadata,
            environment: &[],
        })
        .await?;
    let mut interrupt =
        signal(SignalKind::interrupt()).map_err(CliError::io("watch for SIGINT"))?;
    let outcome = async {
        let agent = Agent::of(http, &sandbox.id, run.options.user.as_deref()).await?;
        attached(&agent, &run.options, &run.command, output).await
    };
    let outcome = tokio::select! {
        outcome = outcome => outcome,
        // The sandbox is ours alone: killing it ends the command at once.
        _ = interrupt.recv() => Ok(ExitCode::from(130)),
    };
    if run.keep {
        output.progress(&format!("sandbox {} lives on", sandbox.id));
        return outcome;
    }
    match (outcome, http.kill(&sandbox.id).await) {
        // It may have reached its time limit by itself.
        (outcome, Ok(()) | Err(CliError::Api { status: 404, .. })) => outcome,
        (Ok(_), Err(error)) => Err(error),
        (Err(error), Err(second)) => {
            output.error(&second);
            Err(error)
        }
    }
}

async fn attached(
    agent: &Agent,
    options: &CommandOptions,
    command: &[String],
    output: Output,
) -> Result<ExitCode, CliError> {
    let terminal = options.tty.then(Size::current);
    let mut environment = options.env.clone();
    if options.tty && !environment.iter().any(|(name, _)| name == "TERM") {
        let name = std::env::var("TERM").unwrap_or_else(|_| DEFAULT_TERMINAL.to_owned());
        environment.push(("TERM".to_owned(), name));
    }
    let start = Start {
        command,
        cwd: options.cwd.as_deref(),
        environment: &environment,
        stdin: if options.interactive { Stdin::Open } else { Stdin::Closed },
        terminal,
    };
    if options.tty && options.interactive && !std::io::stdin().is_terminal() {
        return Err(CliError::said(
            "standard input is not a terminal",
            "leave out -t to pipe data in",
        ));
    }
    let mut process = Process::start(agent, &start).await?;
    let raw = if options.tty && options.interactive { RawMode::enter()? } else { None };
    let input = options.interactive.then(|| tokio::spawn(forward_input(process.input.clone())));
    let resizes = options.tty.then(|| tokio::spawn(forward_resizes(process.input.clone())));
    // In raw mode Ctrl-C is a byte for the remote terminal, not a signal for us.
    let interrupts = raw.is_none().then(|| tokio::spawn(forward_interrupts(process.input.clone())));

    let mut sink = Sink::new(output);
    let mut terminated = watch_for(SignalKind::terminate())?;
    let mut hung_up = watch_for(SignalKind::hangup())?;
    let code = loop {
        let event = tokio::select! {
            event = process.next() => event.map_err(|error| match error {
                // Streams of a sandbox that ends are reset.
                CliError::Http(_) => CliError::StreamEnded,
                other => other,
            })?,
            _ = terminated.recv() => break abandon(&process, SignalKind::terminate()).await?,
            _ = hung_up.recv() => break abandon(&process, SignalKind::hangup()).await?,
        };
        let shown = match event {
            Event::Stdout(bytes) | Event::Terminal(bytes) => sink.stdout(&bytes),
            Event::Stderr(bytes) => sink.stderr(&bytes),
            Event::End { exit_code } => break exit_code,
        };
        match shown {
            Ok(()) => {}
            // `| head` has enough; the command ends as one here would.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                break abandon(&process, SignalKind::pipe()).await?;
            }
            Err(error) => return Err(CliError::io("write the command's output")(error)),
        }
    };
    for task in [input, resizes, interrupts].into_iter().flatten() {
        task.abort();
    }
    drop(raw);
    sink.finish(code);
    Ok(ExitCode::from(code))
}

/// Ends the command, since nobody is left who would see it end; the code is that of a
/// program which this signal ended.
async fn abandon(process: &Process, reason: SignalKind) -> Result<u8, CliError> {
    process.input.signal(Signal::Kill).await?;
    Ok(u8::try_from(128 + reason.as_raw_value()).unwrap_or(u8::MAX))
}

fn watch_for(kind: SignalKind) -> Result<tokio::signal::unix::Signal, CliError> {
    signal(kind).map_err(CliError::io("watch for signals"))
}

async fn forward_input(input: Input) -> Result<(), CliError> {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; INPUT_BYTES];
    loop {
        let count = stdin.read(&mut buffer).await.map_err(CliError::io("read standard input"))?;
        if count == 0 {
            return input.close().await;
        }
        input.write(&buffer[..count]).await?;
    }
}

async fn forward_resizes(input: Input) -> Result<(), CliError> {
    let mut changes =
        signal(SignalKind::window_change()).map_err(CliError::io("watch the window's size"))?;
    while changes.recv().await.is_some() {
        input.resize(Size::current()).await?;
    }
    Ok(())
}

/// The first Ctrl-C asks the command to end, the second makes it.
async fn forward_interrupts(input: Input) -> Result<(), CliError> {
    let mut interrupts =
        signal(SignalKind::interrupt()).map_err(CliError::io("watch for SIGINT"))?;
    let mut next = Signal::Terminate;
    while interrupts.recv().await.is_some() {
        input.signal(next).await?;
        next = Signal::Kill;
    }
    Ok(())
}

/// Where output goes: through at once, or collected for one JSON value.
enum Sink {
    Through,
    Collected { stdout: Vec<u8>, stderr: Vec<u8>, output: Output },
}

impl Sink {
    fn new(output: Output) -> Self {
        if output.is_json() {
            Self::Collected { stdout: Vec::new(), stderr: Vec::new(), output }
        } else {
            Self::Through
        }
    }

    fn stdout(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Collected { stdout, .. } => stdout.extend_from_slice(bytes),
            Self::Through => {
                let mut stream = std::io::stdout().lock();
                stream.write_all(bytes).and_then(|()| stream.flush())?;
            }
        }
        Ok(())
    }

    fn stderr(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Collected { stderr, .. } => stderr.extend_from_slice(bytes),
            Self::Through => {
                std::io::stderr().lock().write_all(bytes)?;
            }
        }
        Ok(())
    }

    fn finish(self, exit_code: u8) {
        if let Self::Collected { stdout, stderr, output } = self {
            let value = json!({
                "exitCode": exit_code,
                "stdout": String::from_utf8_lossy(&stdout),
                "stderr": String::from_utf8_lossy(&stderr),
            });
            output.result(&value, String::new);
        }
    }
}
