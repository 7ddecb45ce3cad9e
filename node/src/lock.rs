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
    /// What this node left running is found by another run directory.
    #[error(
        "processes of {state} run in {run}; start warrend with --run-dir {run} (or WARREN_RUN_DIR), \
         and end them before you use another"
    )]
    Elsewhere {
        /// The state directory.
        state: PathBuf,
        /// The run directory of its processes.
        run: PathBuf,
    },
}

/// Name of the file in the state directory that names the run directory.
const RUN_DIRECTORY_FILE: &str = "run-directory";

/// Keeps a node from forgetting what runs: its sandboxes are found by the sockets in the
/// run directory, and one that is not found counts as ended.
///
/// # Errors
/// [`LockError::Elsewhere`] if processes listen in the run directory of an earlier start.
pub fn keep_run_directory(state: &Path, run: &Path) -> Result<(), LockError> {
    let path = state.join(RUN_DIRECTORY_FILE);
    let failed = |source| LockError::Open { path: path.clone(), source };
    let run = std::path::absolute(run).map_err(failed)?;
    match std::fs::read_to_string(&path) {
        Ok(before) if Path::new(&before) == run => return Ok(()),
        Ok(before) if has_listeners(Path::new(&before)) => {
            return Err(LockError::Elsewhere { state: state.to_owned(), run: before.into() });
        }
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    std::fs::write(&path, run.as_os_str().as_encoded_bytes()).map_err(failed)
}

/// Whether a process of a sandbox or template listens in a run directory.
fn has_listeners(run: &Path) -> bool {
    let directories = ["sandboxes", "templates"].map(|kind| std::fs::read_dir(run.join(kind)));
    directories.into_iter().flatten().flatten().flatten().any(|entry| {
        std::os::unix::net::UnixStream::connect(entry.path().join("control.sock")).is_ok()
    })
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
    fn run_directory_with_listeners_is_not_left() {
        let directory = tempfile::tempdir().unwrap();
        let (state, one, two) =
            (directory.path(), directory.path().join("one"), directory.path().join("two"));
        keep_run_directory(state, &one).unwrap();
        keep_run_directory(state, &one).unwrap();
        let sandbox = one.join("sandboxes/x");
        std::fs::create_dir_all(&sandbox).unwrap();
        let listener =
            std::os::unix::net::UnixListener::bind(sandbox.join("control.sock")).unwrap();
        let error = keep_run_directory(state, &two).unwrap_err().to_string();
        assert!(error.contains(&format!("--run-dir {}", one.display())), "{error}");
        drop(listener);
        keep_run_directory(state, &two).unwrap();
        keep_run_directory(state, &two).unwrap();
    }

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
