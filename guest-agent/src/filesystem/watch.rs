//! One watch of a directory, and of all below it when asked.
//!
//! inotify watches single directories, so a recursive watch follows what is
//! made, moved in and moved out. What appears in a new directory before its
//! watch is in place is found by looking, and told once.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::task::{Context, Poll};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

use super::entry::Entry;
use super::messages::{EventKind, FilesystemEvent};
use crate::agent::Agent;
use crate::connect::{Code, ConnectError};
use crate::files::Purpose;
use crate::runtime::Source;

/// Events kept for a client that does not take them.
const EVENTS_MAX: usize = 16 * 1024;

/// Bytes of raw events read at once; the kernel needs room for one long name.
const READ_BYTES: usize = 16 * 1024;

/// A watch and its events.
pub struct Watch {
    source: Source,
    root: PathBuf,
    recursive: bool,
    entries_for: Option<Rc<Agent>>,
    /// Watched directories by descriptor, relative to the root.
    directories: HashMap<i32, PathBuf>,
    /// Told by looking; their event may still come.
    found: HashSet<PathBuf>,
    events: VecDeque<FilesystemEvent>,
    lost: bool,
    /// An unfinished file that was just moved away: to its place.
    replacing: Option<(u32, Purpose)>,
}

struct Raw {
    watch: i32,
    flags: ReadFlags,
    /// Tells which two events are one move.
    cookie: u32,
    name: Option<PathBuf>,
}

impl Watch {
    /// Watches `root`. With `entries_for`, events describe their entries.
    pub fn new(
        root: &Path,
        recursive: bool,
        entries_for: Option<Rc<Agent>>,
    ) -> Result<Self, ConnectError> {
        let flags = CreateFlags::CLOEXEC | CreateFlags::NONBLOCK;
        let fd = inotify::init(flags).map_err(|error| failed(root, error))?;
        let mut watch = Watch {
            source: Source::new(fd),
            root: root.to_owned(),
            recursive,
            entries_for,
            directories: HashMap::new(),
            found: HashSet::new(),
            events: VecDeque::new(),
            lost: false,
            replacing: None,
        };
        watch.add(Path::new(""), Announce::No).map_err(|error| failed(root, error))?;
        Ok(watch)
    }

    /// Takes what the kernel has and waits for more.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let read = self.source.poll_input(cx, |fd| Ok((read_events(fd)?, true)));
            match read {
                Poll::Pending => break,
                Poll::Ready(Ok(events)) => self.take_all(events),
                Poll::Ready(Err(_)) => {
                    self.lost = true;
                    break;
                }
            }
        }
        // The queue is empty: nothing found by looking is still to come.
        self.found.clear();
        if self.events.is_empty() && !self.lost { Poll::Pending } else { Poll::Ready(()) }
    }

    /// Takes what the kernel has by now, without waiting for more.
    pub fn look_now(&mut self) {
        while let Ok(events) = read_events(self.source.as_fd()) {
            self.take_all(events);
        }
        self.found.clear();
    }

    /// The next event; an error tells that some were lost.
    pub fn next_event(&mut self) -> Result<Option<FilesystemEvent>, ConnectError> {
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        if std::mem::take(&mut self.lost) {
            let message = "too many events at once: some were lost, look at the directory anew";
            return Err(ConnectError::new(Code::DataLoss, message));
        }
        Ok(None)
    }

    fn take_all(&mut self, events: Vec<Raw>) {
        for event in events {
            self.take(&event);
        }
    }

    fn take(&mut self, event: &Raw) {
        if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.lost = true;
            return;
        }
        if event.flags.contains(ReadFlags::IGNORED) {
            self.directories.remove(&event.watch);
            return;
        }
        if let Some(purpose) = event.name.as_deref().and_then(|name| Purpose::of(name.as_os_str()))
        {
            // Of an upload that replaces a file, only the replacing is told.
            if event.flags.contains(ReadFlags::MOVED_FROM) {
                self.replacing = Some((event.cookie, purpose));
            }
            return;
        }
        let replacing = self.replacing.take().filter(|(cookie, _)| *cookie == event.cookie);
        let Some(directory) = self.directories.get(&event.watch).cloned() else { return };
        let is_directory = event.flags.contains(ReadFlags::ISDIR);
        let path = match &event.name {
            Some(name) => directory.join(name),
            // A directory below is told of by its parent.
            None if !directory.as_os_str().is_empty() => return,
            None => directory,
        };
        for (flag, kind) in [
            (ReadFlags::CREATE, EventKind::Create),
            (ReadFlags::MOVED_TO, EventKind::Create),
            (ReadFlags::MOVED_FROM, EventKind::Rename),
            (ReadFlags::MOVE_SELF, EventKind::Rename),
            (ReadFlags::ATTRIB, EventKind::Chmod),
            (ReadFlags::MODIFY, EventKind::Write),
            (ReadFlags::DELETE, EventKind::Remove),
            (ReadFlags::DELETE_SELF, EventKind::Remove),
        ] {
            if !event.flags.contains(flag) {
                continue;
            }
            if flag == ReadFlags::CREATE && self.found.remove(&path) {
                continue;
            }
            let kind = match replacing {
                Some((_, Purpose::Replacement)) if flag == ReadFlags::MOVED_TO => EventKind::Write,
                Some(_) | None => kind,
            };
            self.push(&path, kind);
        }
        if self.recursive && is_directory {
            self.follow(event.flags, &path);
        }
    }

    fn follow(&mut self, flags: ReadFlags, path: &Path) {
        if flags.contains(ReadFlags::MOVED_FROM) {
            self.forget_below(path);
        }
        let announce = match () {
            () if flags.contains(ReadFlags::CREATE) => Announce::Yes,
            () if flags.contains(ReadFlags::MOVED_TO) => Announce::No,
            () => return,
        };
        match self.add(path, announce) {
            // It is gone already, or was no directory of ours.
            Ok(()) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
            Err(_) => self.lost = true,
        }
    }

    /// Watches a directory and, when recursive, all below it.
    fn add(&mut self, relative: &Path, announce: Announce) -> rustix::io::Result<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        let mut stack = vec![relative.to_owned()];
        while let Some(relative) = stack.pop() {
            let place = self.root.join(&relative);
            match inotify::add_watch(&self.source, &place, flags) {
                Ok(watch) => drop(self.directories.insert(watch, relative.clone())),
                Err(rustix::io::Errno::NOENT) if !relative.as_os_str().is_empty() => continue,
                Err(error) => return Err(error),
            }
            if !self.recursive {
                return Ok(());
            }
            for child in std::fs::read_dir(&place).into_iter().flatten().flatten() {
                let path = relative.join(child.file_name());
                if announce == Announce::Yes && !self.found.contains(&path) {
                    self.push(&path, EventKind::Create);
                    self.found.insert(path.clone());
                }
                if child.file_type().is_ok_and(|kind| kind.is_dir()) {
                    stack.push(path);
                }
            }
        }
        Ok(())
    }

    fn forget_below(&mut self, path: &Path) {
        let gone: Vec<_> = self
            .directories
            .iter()
            .filter(|(_, directory)| directory.starts_with(path))
            .map(|(watch, _)| *watch)
            .collect();
        for watch in gone {
            self.directories.remove(&watch);
            let _ = inotify::remove_watch(&self.source, watch);
        }
    }

    fn push(&mut self, relative: &Path, kind: EventKind) {
        if self.events.len() == EVENTS_MAX {
            self.lost = true;
            return;
        }
        let entry = self
            .entries_for
            .as_ref()
            .and_then(|agent| Entry::of(&self.root.join(relative), &agent.users).ok());
        let name = match relative.as_os_str().is_empty() {
            true => ".".to_owned(),
            false => relative.to_string_lossy().into_owned(),
        };
        self.events.push_back(FilesystemEvent { name, kind, entry });
    }
}

/// Whether what is found below a new directory is told as created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Announce {
    Yes,
    No,
}

fn read_events(fd: BorrowedFd<'_>) -> rustix::io::Result<Vec<Raw>> {
    let mut buffer = [std::mem::MaybeUninit::uninit(); READ_BYTES];
    let mut reader = Reader::new(fd, &mut buffer);
    let mut events = Vec::new();
    loop {
        let event = reader.next()?;
        events.push(Raw {
            watch: event.wd(),
            flags: event.events(),
            cookie: event.cookie(),
            name: event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).into()),
        });
        if reader.is_buffer_empty() {
            return Ok(events);
        }
    }
}

fn failed(root: &Path, error: rustix::io::Errno) -> ConnectError {
    use rustix::io::Errno;
    let message = format!("watch '{}': {error}", root.display());
    match error {
        // The kernel's limits of watches and of watchers.
        Errno::NOSPC | Errno::MFILE | Errno::NFILE | Errno::NOMEM => {
            ConnectError::new(Code::ResourceExhausted, message)
        }
        Errno::NOENT => ConnectError::new(Code::NotFound, message),
        Errno::NOTDIR => ConnectError::new(Code::InvalidArgument, message),
        _ => ConnectError::new(Code::Internal, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(watch: &mut Watch) -> Vec<(String, EventKind)> {
        watch.look_now();
        let mut list = Vec::new();
        while let Some(event) = watch.next_event().unwrap() {
            list.push((event.name, event.kind));
        }
        list
    }

    #[test]
    fn poll_plain_watch_tells_of_its_directory_only() {
        let place = tempfile::tempdir().unwrap();
        let mut watch = Watch::new(place.path(), false, None).unwrap();
        std::fs::create_dir(place.path().join("d")).unwrap();
        std::fs::write(place.path().join("d/x"), "1").unwrap();
        assert_eq!(drain(&mut watch), [("d".to_owned(), EventKind::Create)]);
    }

    #[test]
    fn poll_recursive_watch_tells_once_of_what_it_missed() {
        let place = tempfile::tempdir().unwrap();
        let mut watch = Watch::new(place.path(), true, None).unwrap();
        std::fs::create_dir_all(place.path().join("a/b")).unwrap();
        std::fs::write(place.path().join("a/b/x"), "1").unwrap();
        let mut events = drain(&mut watch);
        events.sort_by(|left, right| left.0.cmp(&right.0));
        let create = |name: &str| (name.to_owned(), EventKind::Create);
        assert_eq!(events, [create("a"), create("a/b"), create("a/b/x")]);
        std::fs::write(place.path().join("a/b/y"), "").unwrap();
        assert_eq!(drain(&mut watch), [create("a/b/y")]);
    }

    #[test]
    fn poll_recursive_watch_follows_moves() {
        let place = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("a")).unwrap();
        let mut watch = Watch::new(place.path(), true, None).unwrap();
        std::fs::rename(place.path().join("a"), place.path().join("b")).unwrap();
        drain(&mut watch);
        std::fs::write(place.path().join("b/x"), "").unwrap();
        assert_eq!(drain(&mut watch), [("b/x".to_owned(), EventKind::Create)]);
        std::fs::rename(place.path().join("b"), outside.path().join("b")).unwrap();
        drain(&mut watch);
        std::fs::write(outside.path().join("b/y"), "").unwrap();
        assert_eq!(drain(&mut watch), []);
    }

    #[test]
    fn next_event_lost_events_are_an_error_once() {
        let place = tempfile::tempdir().unwrap();
        let mut watch = Watch::new(place.path(), false, None).unwrap();
        watch.lost = true;
        assert_eq!(watch.next_event().unwrap_err().code, Code::DataLoss);
        assert!(watch.next_event().unwrap().is_none());
    }
}
