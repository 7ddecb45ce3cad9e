//! The task of one process: output into the log, the time limit, the end.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use rustix::process::Signal;

use super::log::Channel;
use super::table::{Process, Table};
use crate::runtime::{self, Sleep, Source};

/// Bytes read at once: what a pipe holds.
const READ_BYTES: usize = 64 * 1024;

/// Output read after the exit and still counted as the process's own. A pipe
/// holds no more than this, so nothing that was written before the exit is
/// missed; what a background child writes later cannot delay the end for ever.
const DRAIN_BYTES_MAX: usize = READ_BYTES;

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0x5a; READ_BYTES]);
}

/// One stream of a process.
pub struct Output {
    channel: Channel,
    source: Option<Rc<Source>>,
    drain: Drain,
}

/// What is known of the output after the exit.
enum Drain {
    /// The process runs.
    NotYet,
    /// Bytes read since the exit.
    Going(usize),
    /// All that the process had written is read.
    Done,
}

impl Output {
    /// A stream to read.
    pub fn new(channel: Channel, source: Rc<Source>) -> Self {
        Output { channel, source: Some(source), drain: Drain::NotYet }
    }
}

/// Starts the task. It ends when nobody can write to the outputs any more.
pub fn spawn(
    table: Rc<Table>,
    process: Rc<Process>,
    outputs: Vec<Output>,
    deadline: Option<Instant>,
) {
    let limit = deadline.map(runtime::sleep_until);
    let mut pump = Pump { table, process, outputs, limit };
    runtime::spawn(std::future::poll_fn(move |cx| pump.poll(cx))).detach();
}

struct Pump {
    table: Rc<Table>,
    process: Rc<Process>,
    outputs: Vec<Output>,
    limit: Option<Sleep>,
}

impl Pump {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let process = &self.process;
        process.room.register(cx);
        let exited = process.child.exit.status().is_some();
        if exited {
            self.limit = None;
        } else {
            process.child.exit.happened.register(cx);
        }
        if let Some(limit) = &mut self.limit
            && Pin::new(limit).poll(cx).is_ready()
        {
            self.limit = None;
            process.timed_out.set(true);
            process.signal(Signal::KILL);
        }
        for output in &mut self.outputs {
            if exited && matches!(output.drain, Drain::NotYet) {
                output.drain = Drain::Going(0);
                // What is in the pipe may not have been told to us yet.
                output.source.iter().for_each(|source| source.try_again());
            }
            output.read(process, cx);
        }
        if exited && !process.ended.get() {
            let drained = |o: &Output| o.source.is_none() || matches!(o.drain, Drain::Done);
            if self.outputs.iter().all(drained) {
                process.ended.set(true);
                process.input.take();
                process.news.notify();
                self.table.retire(process);
            }
        }
        let closed = self.outputs.iter().all(|output| output.source.is_none());
        if closed && process.ended.get() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Output {
    fn read(&mut self, process: &Process, cx: &mut Context<'_>) {
        while let Some(source) = &self.source {
            // After the end output is read and dropped, so that a daemon left
            // behind neither blocks nor is killed by a broken pipe.
            let discards = matches!(self.drain, Drain::Done);
            if !discards && !process.log.borrow().has_room() {
                return;
            }
            let read = SCRATCH.with_borrow_mut(|scratch| {
                let read = source.poll_read(cx, scratch);
                read.map_ok(|count| (count, Bytes::copy_from_slice(&scratch[..count])))
            });
            match read {
                Poll::Pending => {
                    if matches!(self.drain, Drain::Going(_)) {
                        self.drain = Drain::Done;
                    }
                    return;
                }
                // A terminal without programs reads as an error.
                Poll::Ready(Ok((0, _)) | Err(_)) => self.source = None,
                Poll::Ready(Ok(_)) if discards => {}
                Poll::Ready(Ok((count, bytes))) => {
                    process.log.borrow_mut().push(self.channel, bytes);
                    process.news.notify();
                    if let Drain::Going(total) = &mut self.drain {
                        *total += count;
                        if *total >= DRAIN_BYTES_MAX {
                            self.drain = Drain::Done;
                        }
                    }
                }
            }
        }
    }
}
