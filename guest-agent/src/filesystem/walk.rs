//! Listing directories.

use std::io;
use std::path::{Path, PathBuf};

use super::entry::Entry;
use crate::connect::{Code, ConnectError};
use crate::runtime;
use crate::users::Users;

/// Entries of one reply. More would be hundreds of megabytes of JSON.
const ENTRIES_MAX: usize = 200_000;

/// Entries looked at before other requests get their turn.
const ENTRIES_PER_TURN: usize = 16;

/// Entries below `path`, `depth` levels deep, in the order of their names.
/// Links are listed and not followed, except `path` itself. Other requests get their
/// turn in between.
pub async fn list(path: &Path, depth: u32, users: &Users) -> Result<Vec<Entry>, ConnectError> {
    let fail = |error: &io::Error| {
        ConnectError::from_io(&format!("read directory '{}'", path.display()), error)
    };
    let meta = std::fs::metadata(path).map_err(|error| fail(&error))?;
    if !meta.is_dir() {
        let message = format!("path is not a directory: {}", path.display());
        return Err(ConnectError::new(Code::InvalidArgument, message));
    }
    let mut entries = Vec::new();
    let mut stack = children(path).await.map_err(|error| fail(&error))?;
    stack.reverse();
    let mut stack: Vec<_> = stack.into_iter().map(|child| (child, 1)).collect();
    while let Some((place, level)) = stack.pop() {
        // What vanishes while we walk is not an error of the walk.
        let Ok(meta) = std::fs::symlink_metadata(&place) else { continue };
        if entries.len() == ENTRIES_MAX {
            let message =
                format!("'{}' has more than {ENTRIES_MAX} entries at this depth", path.display());
            return Err(ConnectError::new(Code::ResourceExhausted, message));
        }
        entries.push(Entry::from_metadata(&place, &meta, users));
        if entries.len() % ENTRIES_PER_TURN == 0 {
            runtime::yield_now().await;
        }
        if meta.is_dir() && level < depth {
            let below = children(&place).await.unwrap_or_default();
            stack.extend(below.into_iter().rev().map(|child| (child, level + 1)));
        }
    }
    Ok(entries)
}

async fn children(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut children = Vec::new();
    for entry in std::fs::read_dir(path)? {
        children.push(entry?.path());
        if children.len() % ENTRIES_PER_TURN == 0 {
            runtime::yield_now().await;
        }
    }
    children.sort();
    Ok(children)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_stops_at_depth_and_sorts() {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(place.path().join("b/c/d")).unwrap();
        std::fs::write(place.path().join("a"), "").unwrap();
        let users = Users::of("/etc");
        let names = async |depth| -> Vec<String> {
            let listed = list(place.path(), depth, &users).await.unwrap();
            listed.into_iter().map(|entry| entry.name).collect()
        };
        runtime::run(async {
            assert_eq!(names(1).await, ["a", "b"]);
            assert_eq!(names(2).await, ["a", "b", "c"]);
            assert_eq!(names(9).await, ["a", "b", "c", "d"]);
        })
        .unwrap();
    }

    #[test]
    fn list_file_is_refused() {
        let users = Users::of("/etc");
        let error = runtime::run(list(Path::new("/etc/passwd"), 1, &users)).unwrap().unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
    }
}
