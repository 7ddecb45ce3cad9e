//! Processes that are not our children, held by pidfd.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

/// A process, safe from reuse of its number.
#[derive(Debug, Clone)]
pub struct Process {
    pid: u32,
    descriptor: Arc<AsyncFd<OwnedFd>>,
}

impl Process {
    /// Takes hold of a process. `NotFound` if it is gone already.
    pub fn open(pid: u32) -> io::Result<Self> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let descriptor = pidfd_open(number, PidfdFlags::NONBLOCK).map_err(|error| match error {
            rustix::io::Errno::SRCH => io::Error::from(io::ErrorKind::NotFound),
            other => other.into(),
        })?;
        // Deprecated for types whose descriptor may change or close; an `OwnedFd` does
        // neither, and the replacement is unsafe to call.
        #[expect(deprecated, reason = "sound for OwnedFd")]
        let descriptor = AsyncFd::with_interest(descriptor, Interest::READABLE)?;
        Ok(Self { pid, descriptor: Arc::new(descriptor) })
    }

    /// The process that listens on the other end of a unix stream.
    pub fn listener_of(stream: &UnixStream) -> io::Result<Self> {
        let peer = rustix::net::sockopt::socket_peercred(stream)?;
        Self::open(u32::try_from(peer.pid.as_raw_nonzero().get()).unwrap_or_default())
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        let mut descriptors = [PollFd::new(self.descriptor.get_ref(), PollFlags::IN)];
        let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut descriptors, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }

    /// Kills. A process that is gone already is a success.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(self.descriptor.get_ref(), Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Resolves when the process has ended.
    pub async fn ended(&self) {
        // An error means that the descriptor can no longer be watched, which happens
        // only while the runtime shuts down.
        if self.descriptor.readable().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Children of a process with one thread; none where the kernel does not tell.
pub fn children(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    text.unwrap_or_default().split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// The last `bytes_max` bytes of a file; nothing if there is no such file.
pub fn tail(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let length = file.metadata()?.len();
    let start = length.saturating_sub(bytes_max);
    let mut bytes = vec![0; usize::try_from(length - start).unwrap_or(0)];
    let mut filled = 0;
    while filled < bytes.len() {
        let offset = start + u64::try_from(filled).unwrap_or(u64::MAX);
        match file.read_at(&mut bytes[filled..], offset)? {
            0 => break,
            count => filled += count,
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// The last lines of a log for an error message.
pub fn tail_lines(path: &Path, lines_max: usize) -> String {
    let bytes = tail(path, 8192).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> =
        text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(lines_max)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn killed_process_is_seen_to_end() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        assert!(!process.has_ended());
        process.kill().unwrap();
        process.ended().await;
        assert!(process.has_ended());
        child.wait().unwrap();
        process.kill().unwrap();
    }

    #[tokio::test]
    async fn unknown_pid_is_not_found() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert_eq!(Process::open(pid).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn child_is_listed() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        // Made by a thread of the test harness, whose children are its own.
        let listed = std::fs::read_dir(format!("/proc/{}/task", std::process::id()))
            .unwrap()
            .flatten()
            .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
            .any(|text| text.split_whitespace().any(|word| word == child.id().to_string()));
        assert!(listed);
        assert!(children(child.id()).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn tail_of_missing_file_is_empty() {
        assert!(tail(Path::new("/nonexistent/x"), 10).unwrap().is_empty());
    }
}
