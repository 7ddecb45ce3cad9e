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

/// A file that is removed when this is dropped, unless it may stay.
pub struct Unkept(PathBuf);

impl Unkept {
    /// The file at `path`.
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// It stays.
    pub fn keep(mut self) {
        self.0 = PathBuf::new();
    }
}

impl Drop for Unkept {
    fn drop(&mut self) {
        if !self.0.as_os_str().is_empty() {
            // Through a link that pointed nowhere, the link is kept. It may be gone with its
            // directory.
            let _ = std::fs::canonicalize(&self.0).and_then(std::fs::remove_file);
        }
    }
}

/// A file beside its destination. It is removed unless it takes its place, so what was
/// there before stays when it cannot be finished.
pub struct Unfinished {
    unkept: Unkept,
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
            let unfinished = Self { unkept: Unkept::new(path), destination, file };
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
    pub fn finish(self) -> io::Result<()> {
        std::fs::rename(&self.unkept.0, &self.destination)?;
        self.unkept.keep();
        Ok(())
    }
}
