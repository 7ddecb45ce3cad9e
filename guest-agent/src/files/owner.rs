//! Directories that belong to the user they were made for.

use std::io;
use std::path::Path;

use rustix::fs::{Gid, Mode, Uid};

use crate::users::User;

/// Makes `path` and its missing parents, each owned by `user`.
pub fn make_directories(path: &Path, user: &User) -> io::Result<()> {
    let mut missing = Vec::new();
    let mut place = path;
    // Most uploads go to a directory that is there: one call tells.
    loop {
        match rustix::fs::stat(place) {
            Ok(stat) if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() => break,
            Ok(_) => return Err(rustix::io::Errno::NOTDIR.into()),
            Err(rustix::io::Errno::NOENT) => missing.push(place),
            Err(error) => return Err(error.into()),
        }
        let Some(parent) = place.parent() else { break };
        place = parent;
    }
    for place in missing.into_iter().rev() {
        match rustix::fs::mkdir(place, Mode::from_raw_mode(0o755)) {
            Ok(()) => give(place, user)?,
            // Another request made it meanwhile.
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Gives `path` to `user`. Without privileges files are the agent's own.
pub fn give(path: &Path, user: &User) -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let (uid, gid) = ids(user);
    Ok(rustix::fs::chown(path, Some(uid), Some(gid))?)
}

/// The ids of a user's files.
pub fn ids(user: &User) -> (Uid, Gid) {
    (Uid::from_raw(user.identity.uid), Gid::from_raw(user.identity.gid))
}
