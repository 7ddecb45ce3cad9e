//! The event stream of one client: a reply body that takes from the log.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use rustix::process::{Signal, WaitStatus};

use super::log::{Chunk, ReaderId};
use super::table::Process;
use crate::connect::{self, CallOptions, Code, ConnectError};
use crate::http::ChunkStream;
use crate::runtime::{self, Sleep};

/// Whose time limit ends the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The limit is the process's, which is killed by it (Start).
    OfProcess,
    /// The limit is the request's alone (Connect).
    OfRequest,
}

/// Where the stream begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replay {
    /// With the output that no client has seen.
    Missed,
    /// With all output that is still kept.
    Retained,
}

enum State {
    Opening,
    Running,
    Done,
}

/// Events of a process as Connect frames.
pub struct EventStream {
    process: Rc<Process>,
    reader: ReaderId,
    ending: Ending,
    state: State,
    options: CallOptions,
    quiet_since: Instant,
    timer: Option<Sleep>,
}

impl EventStream {
    /// Attaches a client to a process.
    pub fn new(process: Rc<Process>, ending: Ending, options: CallOptions, replay: Replay) -> Self {
        let mut log = process.log.borrow_mut();
        let reader = match replay {
            Replay::Missed => log.attach(),
            Replay::Retained => log.attach_replaying(),
        };
        drop(log);
        let quiet_since = Instant::now();
        EventStream {
            process,
            reader,
            ending,
            state: State::Opening,
            options,
            quiet_since,
            timer: None,
        }
    }

    fn next_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        match self.state {
            State::Opening => {
                self.state = State::Running;
                return Poll::Ready(Some(start_frame(self.process.pid())));
            }
            State::Running => {}
            State::Done => return Poll::Ready(None),
        }
        let chunk = self.process.log.borrow_mut().take(&self.reader);
        if let Some(chunk) = chunk {
            self.process.room.notify();
            self.quiet_since = Instant::now();
            return Poll::Ready(Some(data_frame(&chunk)));
        }
        if let Some(status) = self.process.end() {
            self.state = State::Done;
            let late = self.ending == Ending::OfProcess && self.process.timed_out.get();
            return Poll::Ready(Some(if late {
                connect::last_frame(Some(&out_of_time()))
            } else {
                let missed_bytes = self.process.log.borrow().missed_bytes(&self.reader);
                let mut frames = end_event_frame(status, missed_bytes).to_vec();
                frames.extend_from_slice(&connect::end_frame());
                frames.into()
            }));
        }
        self.process.news.register(cx);
        self.poll_timer(cx)
    }

    /// One timer serves the limit and the keepalive: whichever is earlier.
    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            let now = Instant::now();
            let limit = self.options.deadline.filter(|_| self.ending == Ending::OfRequest);
            if limit.is_some_and(|limit| now >= limit) {
                self.state = State::Done;
                return Poll::Ready(Some(connect::last_frame(Some(&out_of_time()))));
            }
            let keepalive = self.quiet_since + self.options.keepalive;
            if now >= keepalive {
                self.quiet_since = now;
                let frame = connect::frame(40, |out| {
                    out.extend_from_slice(br#"{"event":{"keepalive":{}}}"#);
                });
                return Poll::Ready(Some(frame));
            }
            let next = limit.map_or(keepalive, |limit| limit.min(keepalive));
            // A timer that is early only looks again; moving it at every piece
            // of output would be work for nothing.
            let timer = self.timer.get_or_insert_with(|| runtime::sleep_until(next));
            if Pin::new(timer).poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.timer = None;
        }
    }
}

impl ChunkStream for EventStream {
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        self.next_frame(cx).map(|frame| frame.map(Ok))
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.process.log.borrow_mut().detach(&self.reader);
        self.process.room.notify();
    }
}

fn out_of_time() -> ConnectError {
    ConnectError::new(Code::DeadlineExceeded, "the time limit of the request is over")
}

fn start_frame(pid: i32) -> Bytes {
    connect::frame(48, |out| {
        out.extend_from_slice(format!(r#"{{"event":{{"start":{{"pid":{pid}}}}}}}"#).as_bytes());
    })
}

fn data_frame(chunk: &Chunk) -> Bytes {
    let length = chunk.bytes.len() / 3 * 4 + 64;
    connect::frame(length, |out| {
        let head = format!(r#"{{"event":{{"data":{{"{}":""#, chunk.channel.name());
        out.extend_from_slice(head.as_bytes());
        let start = out.len();
        out.resize(start + chunk.bytes.len().div_ceil(3) * 4, 0);
        let written = STANDARD.encode_slice(&chunk.bytes, &mut out[start..]);
        written.expect("there is room for the encoded bytes");
        out.extend_from_slice(br#""}}}"#);
    })
}

/// The end event. Output that was dropped before this client came is told in
/// `warren.droppedBytes`; a client that does not know the field passes it over.
fn end_event_frame(status: WaitStatus, dropped_bytes: u64) -> Bytes {
    let mut end = match status.exit_status() {
        Some(code) => serde_json::json!({
            "exitCode": code,
            "exited": true,
            "status": format!("exit status {code}"),
        }),
        None => {
            let signal = status.terminating_signal().unwrap_or_default();
            let text = format!("signal: {}", signal_name(signal));
            serde_json::json!({ "exitCode": -1, "exited": false, "status": text, "error": text })
        }
    };
    if end["exitCode"] != 0 && end["error"].is_null() {
        end["error"] = end["status"].clone();
    }
    if dropped_bytes > 0 {
        end["warren"] = serde_json::json!({ "droppedBytes": dropped_bytes.to_string() });
    }
    connect::frame_json(&serde_json::json!({ "event": { "end": end } }))
}

/// Names as clients of this protocol know them.
fn signal_name(number: i32) -> String {
    let name = match Signal::from_named_raw(number) {
        Some(Signal::HUP) => "hangup",
        Some(Signal::INT) => "interrupt",
        Some(Signal::QUIT) => "quit",
        Some(Signal::ILL) => "illegal instruction",
        Some(Signal::TRAP) => "trace/breakpoint trap",
        Some(Signal::ABORT) => "aborted",
        Some(Signal::BUS) => "bus error",
        Some(Signal::FPE) => "floating point exception",
        Some(Signal::KILL) => "killed",
        Some(Signal::USR1) => "user defined signal 1",
        Some(Signal::SEGV) => "segmentation fault",
        Some(Signal::USR2) => "user defined signal 2",
        Some(Signal::PIPE) => "broken pipe",
        Some(Signal::ALARM) => "alarm clock",
        Some(Signal::TERM) => "terminated",
        _ => return format!("signal {number}"),
    };
    name.to_owned()
}
