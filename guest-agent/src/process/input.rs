//! Input of a process: its standard input or its terminal.

use std::rc::Rc;

use super::messages::{Input, Size, StreamInputRequest};
use super::start::window;
use super::table::{Process, Table};
use crate::connect::{self, Code, ConnectError, Envelopes};

impl Process {
    /// Writes all of the input, as fast as the process takes it. Calls are
    /// served in the order in which they came.
    pub async fn input(&self, input: &Input) -> Result<(), ConnectError> {
        let unavailable = |what: &str| ConnectError::new(Code::FailedPrecondition, what);
        let (source, bytes) = match input {
            Input::Stdin(bytes) => {
                let source = self.input.borrow().clone();
                let source = source.ok_or_else(|| {
                    unavailable("the process's stdin is closed or was not asked for")
                })?;
                (source, bytes)
            }
            Input::Pty(bytes) => {
                let source = self.terminal.clone();
                (source.ok_or_else(|| unavailable("the process has no pty"))?, bytes)
            }
            Input::Nothing => {
                return Err(ConnectError::new(Code::InvalidArgument, "the input is empty"));
            }
        };
        let _turn = self.input_lock.acquire().await;
        source
            .write_all(bytes)
            .await
            .map_err(|error| unavailable(&format!("write to the process: {error}")))
    }

    /// Lets the process see the end of its standard input.
    pub fn close_stdin(&self) -> Result<(), ConnectError> {
        if self.terminal.is_some() {
            let message = "a pty has no stdin to close, send Ctrl+D instead";
            return Err(ConnectError::new(Code::FailedPrecondition, message));
        }
        // Closing twice is no error: the caller has what it wanted.
        self.input.take();
        Ok(())
    }

    pub(super) fn resize(&self, size: &Size) -> Result<(), ConnectError> {
        let terminal = self
            .terminal
            .as_ref()
            .ok_or_else(|| ConnectError::new(Code::FailedPrecondition, "the process has no pty"))?;
        rustix::termios::tcsetwinsize(terminal, window(size))
            .map_err(|error| ConnectError::from_io("resize the pty", &error.into()))
    }
}

/// Takes a client stream of input to its end.
pub async fn take_stream(table: &Rc<Table>, mut messages: Envelopes) -> Result<(), ConnectError> {
    let mut process = None;
    while let Some(message) = messages.next().await? {
        match connect::decode(&message)? {
            StreamInputRequest::Start(start) => process = Some(table.find(&start.process)?),
            StreamInputRequest::Data(data) => {
                let process: &Rc<Process> = process.as_ref().ok_or_else(|| {
                    let message = "the first message of the stream must select a process";
                    ConnectError::new(Code::InvalidArgument, message)
                })?;
                process.input(&data.input).await?;
            }
            StreamInputRequest::Keepalive(_) => {}
        }
    }
    Ok(())
}
