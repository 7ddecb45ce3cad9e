//! Watches that clients hold: as a stream, or by an id that they ask with.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;

use super::messages::{FilesystemEvent, WatchRequest};
use super::watch::Watch;
use crate::agent::Agent;
use crate::connect::{self, CallOptions, Code, ConnectError};
use crate::http::ChunkStream;
use crate::runtime::{self, Sleep, Task};

/// Watches that one sandbox may hold. The kernel's own limit is 128.
const WATCHES_MAX: usize = 100;

/// File systems whose changes elsewhere are not told to us.
const NETWORK_FILE_SYSTEMS: [i64; 5] = [0x6969, 0xff53_4d42, 0x517b, 0xfe53_4d42, 0x6573_5546];

/// Watches in use.
#[derive(Default)]
pub struct Watchers {
    named: RefCell<HashMap<String, Named>>,
    last: Cell<u64>,
    streams: Rc<Cell<usize>>,
}

struct Named {
    watch: Rc<RefCell<Watch>>,
    /// Follows new directories while nobody asks.
    _follower: Task,
}

/// A watch counted against the limit.
pub struct Opened {
    watch: Watch,
    count: Rc<Cell<usize>>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.count.set(self.count.get() - 1);
    }
}

impl Watchers {
    /// Opens a watch for a stream.
    pub fn open(
        &self,
        path: &Path,
        request: &WatchRequest,
        agent: &Rc<Agent>,
    ) -> Result<Opened, ConnectError> {
        let watch = self.new_watch(path, request, agent)?;
        self.streams.set(self.streams.get() + 1);
        Ok(Opened { watch, count: self.streams.clone() })
    }

    /// Opens a watch and names it.
    pub fn create(
        &self,
        path: &Path,
        request: &WatchRequest,
        agent: &Rc<Agent>,
    ) -> Result<String, ConnectError> {
        let watch = Rc::new(RefCell::new(self.new_watch(path, request, agent)?));
        let followed = watch.clone();
        let follower = runtime::spawn(std::future::poll_fn(move |cx| {
            let _ = followed.borrow_mut().poll(cx);
            Poll::Pending
        }));
        self.last.set(self.last.get() + 1);
        let id = format!("w{}", self.last.get());
        self.named.borrow_mut().insert(id.clone(), Named { watch, _follower: follower });
        Ok(id)
    }

    /// Events of a named watch since it was last asked.
    pub fn events(&self, id: &str) -> Result<Vec<FilesystemEvent>, ConnectError> {
        let named = self.named.borrow();
        let named = named.get(id).ok_or_else(|| unknown(id))?;
        let mut watch = named.watch.borrow_mut();
        watch.look_now();
        let mut events = Vec::new();
        while let Some(event) = watch.next_event()? {
            events.push(event);
        }
        Ok(events)
    }

    /// Ends a named watch.
    pub fn remove(&self, id: &str) -> Result<(), ConnectError> {
        self.named.borrow_mut().remove(id).map(drop).ok_or_else(|| unknown(id))
    }

    fn new_watch(
        &self,
        path: &Path,
        request: &WatchRequest,
        agent: &Rc<Agent>,
    ) -> Result<Watch, ConnectError> {
        if self.named.borrow().len() + self.streams.get() >= WATCHES_MAX {
            let message = format!("{WATCHES_MAX} watches are open already");
            return Err(ConnectError::new(Code::ResourceExhausted, message));
        }
        let shown = path.display();
        let place = rustix::fs::statfs(path)
            .map_err(|error| ConnectError::from_io(&format!("path '{shown}'"), &error.into()))?;
        if !request.allow_network_mounts && NETWORK_FILE_SYSTEMS.contains(&place.f_type) {
            let message = format!("cannot watch path on network filesystem: {shown}");
            return Err(ConnectError::new(Code::InvalidArgument, message));
        }
        let entries_for = request.include_entry.then(|| agent.clone());
        Watch::new(path, request.recursive, entries_for)
    }
}

fn unknown(id: &str) -> ConnectError {
    ConnectError::new(Code::NotFound, format!("watcher with id {id} not found"))
}

enum State {
    Opening,
    Running,
    Done,
}

/// Events of a watch as Connect frames.
pub struct WatchStream {
    opened: Opened,
    options: CallOptions,
    state: State,
    quiet_since: Instant,
    timer: Option<Sleep>,
}

impl WatchStream {
    /// Streams the events of a watch.
    pub fn new(opened: Opened, options: CallOptions) -> Self {
        WatchStream {
            opened,
            options,
            state: State::Opening,
            quiet_since: Instant::now(),
            timer: None,
        }
    }

    fn next_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        match self.state {
            State::Opening => {
                self.state = State::Running;
                return Poll::Ready(Some(raw_frame(br#"{"start":{}}"#)));
            }
            State::Running => {}
            State::Done => return Poll::Ready(None),
        }
        let _ = self.opened.watch.poll(cx);
        match self.opened.watch.next_event() {
            Ok(Some(event)) => {
                self.quiet_since = Instant::now();
                let message = serde_json::json!({ "filesystem": event });
                return Poll::Ready(Some(connect::frame_json(&message)));
            }
            Ok(None) => {}
            Err(error) => return self.end(&error),
        }
        loop {
            let now = Instant::now();
            if self.options.deadline.is_some_and(|deadline| now >= deadline) {
                let message = "the time limit of the request is over";
                return self.end(&ConnectError::new(Code::DeadlineExceeded, message));
            }
            let keepalive = self.quiet_since + self.options.keepalive;
            if now >= keepalive {
                self.quiet_since = now;
                return Poll::Ready(Some(raw_frame(br#"{"keepalive":{}}"#)));
            }
            let next = self.options.deadline.map_or(keepalive, |deadline| deadline.min(keepalive));
            let timer = self.timer.get_or_insert_with(|| runtime::sleep_until(next));
            if Pin::new(timer).poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.timer = None;
        }
    }

    fn end(&mut self, error: &ConnectError) -> Poll<Option<Bytes>> {
        self.state = State::Done;
        Poll::Ready(Some(connect::last_frame(Some(error))))
    }
}

impl ChunkStream for WatchStream {
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        self.next_frame(cx).map(|frame| frame.map(Ok))
    }
}

fn raw_frame(message: &[u8]) -> Bytes {
    connect::frame(message.len(), |out| out.extend_from_slice(message))
}
