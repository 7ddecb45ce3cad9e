//! Directories that belong to the user they were made for.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::runtime;
use crate::users::User;

/// Makes `path` and its missing parents, each owned by `user`. Each directory is made
/// beside the one before, so that a deep path costs as much as its length, and other
/// requests get their turn in between.
pub async fn make_directories(path: &Path, user: &User) -> io::Result<()> {
    // Most uploads go to a directory that is there: one call tells.
    match rustix::fs::stat(path) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_dir() => return Ok(()),
        Ok(_) => return Err(Errno::NOTDIR.into()),
        Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let is_root = rustix::process::geteuid().is_root();
    let (uid, gid) = ids(user);
    let open = |place: BorrowedFd<'_>, name: &OsStr| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(place, name, flags, Mode::empty())
    };
    let mut place = open(rustix::fs::CWD, OsStr::new("/"))?;
    for component in path.components() {
        let Component::Normal(name) = component else { continue };
        place = match open(place.as_fd(), name) {
            Err(Errno::NOENT) => {
                match rustix::fs::mkdirat(&place, name, Mode::from_raw_mode(0o755)) {
                    Ok(()) if is_root => {
                        let flags = AtFlags::SYMLINK_NOFOLLOW;
                        rustix::fs::chownat(&place, name, Some(uid), Some(gid), flags)?;
                    }
                    // Without privileges it is the agent's; or another request made it.
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
                runtime::yield_now().await;
                open(place.as_fd(), name)?
            }
            other => other?,
        };
    }
    Ok(())
}

/// Gives `file` to `user`. Without privileges files are the agent's own.
pub fn give(file: &File, user: &User) -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let (uid, gid) = ids(user);
    let meta = file.metadata()?;
    if (meta.uid(), meta.gid()) == (uid.as_raw(), gid.as_raw()) {
        return Ok(());
    }
    Ok(rustix::fs::fchown(file, Some(uid), Some(gid))?)
}

/// The ids of a user's files.
pub fn ids(user: &User) -> (Uid, Gid) {
    (Uid::from_raw(user.identity.uid), Gid::from_raw(user.identity.gid))
}
