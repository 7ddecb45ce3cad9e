//! An open host file with a known, checked size.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{BlockError, SECTOR_BYTES};

/// How an image is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageAccess {
    /// Never written.
    ReadOnly,
    /// Written in place.
    ReadWrite,
}

/// A disk image. Cloning shares the descriptor, which has no position of its own
/// that would matter: a template opens it once for all its clones.
#[derive(Debug, Clone)]
pub struct ImageFile {
    path: PathBuf,
    file: Arc<File>,
    bytes: u64,
}

impl ImageFile {
    /// Opens the image at `path`.
    pub fn open(path: &Path, access: ImageAccess) -> Result<Self, BlockError> {
        let file = OpenOptions::new()
            .read(true)
            .write(access == ImageAccess::ReadWrite)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOCTTY)
            .open(path)
            .map_err(|source| BlockError::Open { path: path.to_owned(), source })?;
        Self::from_file(file, path)
    }

    /// Takes a file that is open already; `path` is for messages.
    pub fn from_file(file: File, path: &Path) -> Result<Self, BlockError> {
        Self::from_shared(Arc::new(file), path)
    }

    pub(super) fn from_shared(file: Arc<File>, path: &Path) -> Result<Self, BlockError> {
        let size = |source| BlockError::Size { path: path.to_owned(), source };
        let kind = file.metadata().map_err(size)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(BlockError::Kind { path: path.to_owned() });
        }
        // Seeking to the end knows the size of block devices too.
        let bytes = rustix::fs::seek(&*file, rustix::fs::SeekFrom::End(0))
            .map_err(|errno| size(errno.into()))?;
        if bytes < SECTOR_BYTES {
            return Err(BlockError::Empty { path: path.to_owned(), bytes });
        }
        if !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(BlockError::Unaligned { path: path.to_owned(), bytes });
        }
        Ok(Self { path: path.to_owned(), file, bytes })
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size when opened.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn file(&self) -> &Arc<File> {
        &self.file
    }
}

impl AsFd for ImageFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
