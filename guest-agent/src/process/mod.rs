//! envd's process service.
//!
//! ```text
//!            Start                          exit seen by the reaper
//!  request ────────> running ─────────────────────────────> exited
//!                       │  pump reads, log keeps,              │ pump drains what is
//!                       │  streams take                        │ in the pipes
//!                       v                                      v
//!                  back-pressure                             ended ──> kept for a late
//!                                                                      Connect, bounded
//! ```
//!
//! A process belongs to the sandbox, not to the request that started it: a
//! client that goes away changes nothing, the server's time limit does.

mod input;
mod log;
mod messages;
mod pump;
mod start;
mod stream;
mod table;

pub use messages::{ProcessConfig, Selector};
pub use start::start;
pub use stream::Ending;
pub use table::{Process, Table};

use std::rc::Rc;

use http::{HeaderMap, StatusCode};
use rustix::process::Signal;

use crate::agent::Agent;
use crate::connect::{self, CallOptions, Code, ConnectError, Form};
use crate::http::{self as web, Body, Reply, Request};
use messages::{
    CloseStdinRequest, ConnectRequest, Empty, ListResponse, SendInputRequest, SendSignalRequest,
    SignalName, StartRequest, UpdateRequest,
};
use stream::EventStream;

/// The process service.
pub struct Processes {
    agent: Rc<Agent>,
    table: Rc<Table>,
}

impl Processes {
    /// A service without processes.
    pub fn new(agent: Rc<Agent>) -> Self {
        Processes { agent, table: Rc::default() }
    }

    /// Processes known to the service.
    pub fn table(&self) -> &Rc<Table> {
        &self.table
    }

    /// Answers a call of the method named.
    pub async fn answer(&self, method: &str, request: Request) -> Reply {
        match method {
            "Start" => self.stream(request, Self::start).await,
            "Connect" => self.stream(request, Self::connect).await,
            "List" => connect::unary(request, |_: Empty, _| async { Ok(self.list()) }).await,
            "SendSignal" => {
                connect::unary(request, |message, _| async move { self.send_signal(&message) })
                    .await
            }
            "SendInput" => connect::unary(request, |message, _| self.send_input(message)).await,
            "CloseStdin" => {
                connect::unary(request, |message, _| async move { self.close_stdin(&message) })
                    .await
            }
            "Update" => {
                connect::unary(request, |message, _| async move { self.update(&message) }).await
            }
            "StreamInput" => self.stream_input(request).await,
            _ => web::empty(StatusCode::NOT_FOUND),
        }
    }

    async fn stream<T: serde::de::DeserializeOwned>(
        &self,
        request: Request,
        open: fn(&Self, T, &HeaderMap, CallOptions) -> Result<EventStream, ConnectError>,
    ) -> Reply {
        if let Some(reply) = connect::wrong_form(request.headers(), Form::Stream) {
            return reply;
        }
        let (parts, body) = request.into_parts();
        let opened = async {
            let options = CallOptions::from_headers(&parts.headers)?;
            let message = connect::stream_request(body).await?;
            open(self, message, &parts.headers, options)
        };
        match opened.await {
            Ok(stream) => connect::stream_reply(Body::stream(stream)),
            Err(error) => connect::failed_stream(&error),
        }
    }

    fn start(
        &self,
        message: StartRequest,
        headers: &HeaderMap,
        options: CallOptions,
    ) -> Result<EventStream, ConnectError> {
        let user = self.agent.user_of(headers)?;
        let process = start(&self.agent, &self.table, message, &user, options.deadline)?;
        Ok(EventStream::new(process, Ending::OfProcess, options, stream::Replay::Missed))
    }

    fn connect(
        &self,
        message: ConnectRequest,
        _: &HeaderMap,
        options: CallOptions,
    ) -> Result<EventStream, ConnectError> {
        let process = self.table.find_or_ended(&message.process)?;
        // After the end nothing new comes: what is kept is all there is to tell.
        let replay = match message.replay || process.end().is_some() {
            true => stream::Replay::Retained,
            false => stream::Replay::Missed,
        };
        Ok(EventStream::new(process, Ending::OfRequest, options, replay))
    }

    fn list(&self) -> ListResponse {
        ListResponse { processes: self.table.running().map(|process| process.info()).collect() }
    }

    fn send_signal(&self, message: &SendSignalRequest) -> Result<Empty, ConnectError> {
        let process = self.table.find(&message.process)?;
        let signal = match message.signal {
            SignalName::Unspecified => {
                return Err(ConnectError::new(Code::InvalidArgument, "no signal is named"));
            }
            SignalName::Terminate => Signal::TERM,
            SignalName::Kill => Signal::KILL,
        };
        if process.signal(signal) { Ok(Empty {}) } else { Err(Table::not_found(&message.process)) }
    }

    async fn send_input(&self, message: SendInputRequest) -> Result<Empty, ConnectError> {
        let process = self.table.find(&message.process)?;
        process.input(&message.input).await?;
        Ok(Empty {})
    }

    fn close_stdin(&self, message: &CloseStdinRequest) -> Result<Empty, ConnectError> {
        self.table.find(&message.process)?.close_stdin()?;
        Ok(Empty {})
    }

    fn update(&self, message: &UpdateRequest) -> Result<Empty, ConnectError> {
        let process = self.table.find(&message.process)?;
        if let Some(size) = message.pty.as_ref().and_then(|pty| pty.size.as_ref()) {
            process.resize(size)?;
        }
        Ok(Empty {})
    }

    async fn stream_input(&self, request: Request) -> Reply {
        if let Some(reply) = connect::wrong_form(request.headers(), Form::Stream) {
            return reply;
        }
        let (parts, body) = request.into_parts();
        let taken = async {
            let options = CallOptions::from_headers(&parts.headers)?;
            let take = input::take_stream(&self.table, connect::client_stream(body));
            let limit = crate::runtime::deadline(options.deadline);
            match crate::runtime::either(take, limit).await {
                crate::runtime::Either::First(result) => result,
                crate::runtime::Either::Second(()) => {
                    Err(ConnectError::new(Code::DeadlineExceeded, "the stream's time is over"))
                }
            }
        };
        let body = match taken.await {
            Ok(()) => {
                let mut frames = connect::frame_json(&Empty {}).to_vec();
                frames.extend_from_slice(&connect::end_frame());
                frames.into()
            }
            Err(error) => connect::last_frame(Some(&error)),
        };
        connect::stream_reply(Body::full(body))
    }
}
