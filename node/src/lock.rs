//! One daemon per state directory and per run directory.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// Why a directory was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// The directory cannot be made.
    #[error("make directory {path}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The lock file cannot be used.
    #[error("open lock file {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// Another daemon has it.
    #[error("{directory} is in use by another warrend ({holder})")]
    Held {
        /// The directory.
        directory: PathBuf,
        /// What the other one wrote.
        holder: String,
    },
}

/// A directory that is ours until this is dropped or the process ends.
#[derive(Debug)]
pub struct DirectoryLock(#[expect(dead_code, reason = "held, not used")] File);

impl DirectoryLock {
    /// Makes the directory if need be and takes it.
    pub fn take(directory: &Path) -> Result<Self, LockError> {
        // Tokens lie in it, and sockets that obey whoever can open them.
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|source| LockError::Directory { path: directory.to_owned(), source })?;
        let path = directory.join("lock");
        let failed = |source| LockError::Open { path: path.clone(), source };
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut holder = String::new();
                let _ = (&mut file).take(64).read_to_string(&mut holder);
                let holder = holder.trim().to_owned();
                return Err(LockError::Held { directory: directory.to_owned(), holder });
            }
            Err(error) => return Err(failed(error.into())),
        }
        // For the message above only; the lock itself is what counts.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "pid {}", std::process::id()));
        Ok(Self(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_taker_is_told_who_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let lock = DirectoryLock::take(directory.path()).unwrap();
        let error = DirectoryLock::take(directory.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(lock);
        DirectoryLock::take(directory.path()).unwrap();
    }
}
