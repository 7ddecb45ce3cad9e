//! Processes by id and by tag, the ended ones for a while.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use rustix::process::{Signal, WaitStatus};

use super::log::OutputLog;
use super::messages::{ProcessConfig, ProcessInfo, Selector};
use crate::children::Child;
use crate::connect::{Code, ConnectError};
use crate::runtime::{Event, Lock, Source};

/// Ended processes kept for a late Connect. The oldest goes first.
const ENDED_KEPT: usize = 64;

/// Output kept for all ended processes together.
const ENDED_OUTPUT_BYTES: u64 = 2 << 20;

/// A process that was started by a request.
pub struct Process {
    pub(super) child: Child,
    pub(super) config: ProcessConfig,
    pub(super) tag: Option<String>,
    pub(super) log: RefCell<OutputLog>,
    /// Output or the end has come.
    pub(super) news: Event,
    /// A reader has taken something or gone away, or the child has ended.
    pub(super) room: Event,
    /// All output of the process is in the log.
    pub(super) ended: Cell<bool>,
    /// The server's time limit ended it.
    pub(super) timed_out: Cell<bool>,
    pub(super) input: RefCell<Option<Rc<Source>>>,
    pub(super) input_lock: Lock,
    pub(super) terminal: Option<Rc<Source>>,
}

impl Process {
    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.pid.as_raw_nonzero().get()
    }

    /// How it ended, once all its output is in the log.
    pub fn end(&self) -> Option<WaitStatus> {
        self.child.exit.status().filter(|_| self.ended.get())
    }

    /// Waits until it has exited.
    pub async fn exited(&self) -> WaitStatus {
        self.child.exit.wait().await
    }

    /// Signals the whole process group. `false` when the process is gone.
    pub fn signal(&self, signal: Signal) -> bool {
        self.child.signal_group(signal)
    }

    pub(super) fn info(&self) -> ProcessInfo {
        ProcessInfo { config: self.config.clone(), pid: self.pid(), tag: self.tag.clone() }
    }

    fn is_running(&self) -> bool {
        self.child.exit.status().is_none()
    }

    fn matches(&self, selector: &Selector) -> bool {
        match selector {
            Selector::Pid(pid) => self.pid() == *pid,
            Selector::Tag(tag) => self.tag.as_deref() == Some(tag),
            Selector::Nothing => false,
        }
    }
}

/// All processes of the service.
#[derive(Default)]
pub struct Table {
    live: RefCell<HashMap<i32, Rc<Process>>>,
    ended: RefCell<VecDeque<Rc<Process>>>,
}

impl Table {
    pub(super) fn insert(&self, process: &Rc<Process>) {
        self.live.borrow_mut().insert(process.pid(), process.clone());
    }

    /// Moves an ended process to those kept for a while.
    pub(super) fn retire(&self, process: &Rc<Process>) {
        let mut live = self.live.borrow_mut();
        // Its number may have been given to another process by now.
        if live.get(&process.pid()).is_some_and(|other| Rc::ptr_eq(other, process)) {
            live.remove(&process.pid());
        }
        let mut ended = self.ended.borrow_mut();
        ended.push_back(process.clone());
        if ended.len() > ENDED_KEPT {
            ended.pop_front();
        }
        let held = |p: &Rc<Process>| p.log.borrow().held_bytes();
        let mut total: u64 = ended.iter().map(held).sum();
        for process in ended.iter() {
            if total <= ENDED_OUTPUT_BYTES {
                break;
            }
            let before = held(process);
            process.log.borrow_mut().forget();
            total -= before - held(process);
        }
    }

    /// A process that runs.
    pub fn find(&self, selector: &Selector) -> Result<Rc<Process>, ConnectError> {
        let live = self.live.borrow();
        let mut candidates = live.values().filter(|p| p.is_running() && p.matches(selector));
        candidates.next().cloned().ok_or_else(|| Self::not_found(selector))
    }

    /// A process that runs or has ended not long ago.
    pub fn find_or_ended(&self, selector: &Selector) -> Result<Rc<Process>, ConnectError> {
        if let Some(process) = self.live.borrow().values().find(|p| p.matches(selector)) {
            return Ok(process.clone());
        }
        let ended = self.ended.borrow();
        let newest = ended.iter().rev().find(|process| process.matches(selector));
        newest.cloned().ok_or_else(|| Self::not_found(selector))
    }

    /// Processes that run.
    pub fn running(&self) -> impl Iterator<Item = Rc<Process>> {
        let mut list: Vec<_> =
            self.live.borrow().values().filter(|process| process.is_running()).cloned().collect();
        list.sort_by_key(|process| process.pid());
        list.into_iter()
    }

    pub(super) fn not_found(selector: &Selector) -> ConnectError {
        match selector {
            Selector::Pid(pid) => {
                ConnectError::new(Code::NotFound, format!("process with pid {pid} not found"))
            }
            Selector::Tag(tag) => {
                ConnectError::new(Code::NotFound, format!("process with tag {tag:?} not found"))
            }
            Selector::Nothing => ConnectError::new(Code::InvalidArgument, "no process is selected"),
        }
    }
}
