//! Making, moving and removing.

use std::io;
use std::path::Path;

use crate::connect::{Code, ConnectError};
use crate::files;
use crate::runtime;
use crate::users::User;

/// Makes a directory and its missing parents.
pub async fn make_directory(path: &Path, user: &User) -> Result<(), ConnectError> {
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => {
            let message = format!("directory already exists: {}", path.display());
            return Err(ConnectError::new(Code::AlreadyExists, message));
        }
        Ok(_) => {
            let message =
                format!("path already exists but it is not a directory: {}", path.display());
            return Err(ConnectError::new(Code::InvalidArgument, message));
        }
        Err(_) => {}
    }
    files::make_directories(path, user).await.map_err(|error| {
        ConnectError::from_io(&format!("make directory '{}'", path.display()), &error)
    })
}

/// Moves an entry; a file that is in the way is replaced, missing parents of
/// the destination are made.
pub async fn move_entry(
    source: &Path,
    destination: &Path,
    user: &User,
) -> Result<(), ConnectError> {
    let fail = |error: &io::Error| {
        let what = format!("move '{}' to '{}'", source.display(), destination.display());
        ConnectError::from_io(&what, error)
    };
    let renamed = match std::fs::rename(source, destination) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Either the source is missing or the destination's parent.
            std::fs::symlink_metadata(source).map_err(|error| fail(&error))?;
            let parent = destination.parent().unwrap_or(destination);
            files::make_directories(parent, user).await.map_err(|error| fail(&error))?;
            std::fs::rename(source, destination)
        }
        other => other,
    };
    match renamed {
        // Between two file systems the content has to move.
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            let (from, to) = (source.to_owned(), destination.to_owned());
            let moved = runtime::blocking(move || copy_over(&from, &to)).await;
            moved.flatten().map_err(|error| fail(&error))
        }
        other => other.map_err(|error| fail(&error)),
    }
}

fn copy_over(source: &Path, destination: &Path) -> io::Result<()> {
    let meta = std::fs::symlink_metadata(source)?;
    copy_tree(source, destination, &meta)?;
    if meta.is_dir() { std::fs::remove_dir_all(source) } else { std::fs::remove_file(source) }
}

fn copy_tree(source: &Path, destination: &Path, meta: &std::fs::Metadata) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    if meta.is_symlink() {
        std::os::unix::fs::symlink(std::fs::read_link(source)?, destination)?;
    } else if meta.is_dir() {
        std::fs::create_dir(destination)?;
        for child in std::fs::read_dir(source)? {
            let child = child?;
            copy_tree(&child.path(), &destination.join(child.file_name()), &child.metadata()?)?;
        }
        std::fs::set_permissions(destination, meta.permissions())?;
    } else if meta.is_file() {
        std::fs::copy(source, destination)?;
    } else {
        return Err(io::ErrorKind::Unsupported.into());
    }
    std::os::unix::fs::lchown(destination, Some(meta.uid()), Some(meta.gid()))
}

/// Removes an entry and everything below it. What is not there is removed
/// already.
pub async fn remove(path: &Path) -> Result<(), ConnectError> {
    if path == Path::new("/") {
        return Err(ConnectError::new(Code::InvalidArgument, "the root cannot be removed"));
    }
    let removed = match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => remove_tree(path).await,
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(|error| {
            ConnectError::from_io(&format!("remove '{}'", path.display()), &error)
        }),
    }
}

async fn remove_tree(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            let path = path.to_owned();
            runtime::blocking(move || std::fs::remove_dir_all(path)).await.flatten()
        }
        other => other,
    }
}
