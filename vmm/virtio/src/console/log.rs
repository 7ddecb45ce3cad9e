//! A console log that cannot fill the host's disk.
//!
//! Two generations of half the limit each: when the file is full it becomes
//! `<path>.old`, and what was there goes. The end of the output is always kept.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::device::ConsoleSink;

/// The bounded file.
#[derive(Debug)]
pub struct ConsoleLog {
    path: PathBuf,
    generation_bytes_max: u64,
    open: Option<(File, u64)>,
}

impl ConsoleLog {
    /// A log at `path` of at most `bytes_max` bytes on disk. No file is made yet.
    pub fn new(path: &Path, bytes_max: u64) -> Self {
        Self { path: path.to_owned(), generation_bytes_max: bytes_max / 2, open: None }
    }

    fn old_path(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".old");
        PathBuf::from(name)
    }

    /// The file with room for a byte at least, and its room.
    fn writable(&mut self) -> io::Result<(&mut File, &mut u64)> {
        if self.open.as_ref().is_some_and(|(_, bytes)| *bytes >= self.generation_bytes_max) {
            std::fs::rename(&self.path, self.old_path())?;
            self.open = None;
        }
        if self.open.is_none() {
            let file = OpenOptions::new()
                .append(true)
                .create(true)
                .mode(0o600)
                .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
                .open(&self.path)?;
            let bytes = file.metadata()?.len();
            self.open = Some((file, bytes));
        }
        let (file, bytes) = self.open.as_mut().expect("it was opened above");
        Ok((file, bytes))
    }
}

impl ConsoleSink for ConsoleLog {
    fn output(&mut self, data: &[u8]) -> io::Result<usize> {
        let mut done = 0;
        while let Some(rest) = data.get(done..).filter(|rest| !rest.is_empty()) {
            let limit = self.generation_bytes_max;
            if limit == 0 {
                break;
            }
            let (file, bytes) = self.writable()?;
            let room = usize::try_from(limit.saturating_sub(*bytes)).unwrap_or(usize::MAX);
            let part = rest.get(..room.min(rest.len())).unwrap_or_default();
            if part.is_empty() {
                // A file left full by an earlier process: the next turn rotates it.
                continue;
            }
            file.write_all(part)?;
            *bytes += crate::queue::to_u64(part.len());
            done += part.len();
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_output_makes_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        drop(ConsoleLog::new(&path, 100));
        assert!(!path.exists());
    }

    #[test]
    fn much_output_keeps_its_end_and_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        let mut log = ConsoleLog::new(&path, 100);
        for number in 0..100 {
            let line = format!("line {number}\n");
            assert_eq!(log.output(line.as_bytes()).unwrap(), line.len());
        }
        let new = std::fs::read_to_string(&path).unwrap();
        let old = std::fs::read_to_string(log.old_path()).unwrap();
        assert!(new.len() + old.len() <= 100);
        assert!((old + &new).ends_with("line 98\nline 99\n"));
    }

    #[test]
    fn full_file_of_an_earlier_process_is_rotated() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        std::fs::write(&path, [b'x'; 200]).unwrap();
        let mut log = ConsoleLog::new(&path, 100);
        assert_eq!(log.output(b"new").unwrap(), 3);
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn limit_of_nothing_takes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = ConsoleLog::new(&directory.path().join("console.log"), 0);
        assert_eq!(log.output(b"new").unwrap(), 0);
    }
}
