//! A file that takes its place only when it is complete.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Names of files that are to replace another, and of those that are new.
const REPLACEMENT: &str = ".warren-replacement-";
const NEW: &str = ".warren-new-";

/// What an unfinished file's name tells of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// It takes the place of another file.
    Replacement,
    /// Nothing is at its place yet.
    New,
}

impl Purpose {
    /// Of a file name; `None` for any other file.
    pub fn of(name: &OsStr) -> Option<Self> {
        let bytes = name.as_bytes();
        match () {
            () if bytes.starts_with(REPLACEMENT.as_bytes()) => Some(Self::Replacement),
            () if bytes.starts_with(NEW.as_bytes()) => Some(Self::New),
            () => None,
        }
    }
}

/// A file beside its destination. It is removed unless it takes its place, so what was
/// there before stays when it cannot be finished.
pub struct Unfinished {
    path: PathBuf,
    destination: PathBuf,
    /// The file, open for writing.
    pub file: File,
}

impl Unfinished {
    /// A file in the directory of `destination`, with the permissions of what is there.
    pub fn beside(destination: &Path) -> io::Result<Self> {
        thread_local! {
            static NEXT: Cell<u64> = const { Cell::new(0) };
        }
        // What a link points to is replaced, not the link.
        let (destination, before) = match std::fs::symlink_metadata(destination) {
            Ok(meta) if meta.is_symlink() => {
                let target = std::fs::canonicalize(destination)?;
                let meta = std::fs::metadata(&target)?;
                (target, Some(meta))
            }
            Ok(meta) => (destination.to_owned(), Some(meta)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => (destination.to_owned(), None),
            Err(error) => return Err(error),
        };
        let prefix = if before.is_some() { REPLACEMENT } else { NEW };
        loop {
            let number = NEXT.get();
            NEXT.set(number + 1);
            let path = destination.with_file_name(format!("{prefix}{number}"));
            // Only the agent makes such files, and not before the last one is finished.
            let file = match File::options().write(true).create_new(true).mode(0o666).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other?,
            };
            let unfinished = Self { path, destination, file };
            if let Some(before) = before {
                let mode = before.mode() & 0o7777;
                if unfinished.file.metadata()?.mode() & 0o7777 != mode {
                    unfinished.file.set_permissions(std::fs::Permissions::from_mode(mode))?;
                }
            }
            return Ok(unfinished);
        }
    }

    /// Takes its place, in one step.
    pub fn finish(mut self) -> io::Result<()> {
        std::fs::rename(&self.path, &self.destination)?;
        self.path = PathBuf::new();
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // It may be gone with its directory.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
