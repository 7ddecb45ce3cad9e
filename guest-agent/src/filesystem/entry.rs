//! What is told of one file.

use std::collections::BTreeMap;
use std::fs::{FileType, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use serde::{Serialize, Serializer};

use crate::connect::ConnectError;
use crate::users::Users;

/// A file, directory or link as clients see it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: EntryKind,
    pub path: String,
    #[serde(serialize_with = "as_text")]
    pub size: u64,
    pub mode: u32,
    pub permissions: String,
    pub owner: String,
    pub group: String,
    pub modified_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_symlink: bool,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// Kinds of entries. A link is of the kind of its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum EntryKind {
    #[serde(rename = "FILE_TYPE_UNSPECIFIED")]
    Other,
    #[serde(rename = "FILE_TYPE_FILE")]
    File,
    #[serde(rename = "FILE_TYPE_DIRECTORY")]
    Directory,
    #[serde(rename = "FILE_TYPE_SYMLINK")]
    Symlink,
}

impl From<FileType> for EntryKind {
    fn from(kind: FileType) -> Self {
        if kind.is_dir() {
            EntryKind::Directory
        } else if kind.is_symlink() {
            EntryKind::Symlink
        } else if kind.is_file() {
            EntryKind::File
        } else {
            EntryKind::Other
        }
    }
}

impl Entry {
    /// Describes the entry at `path`, a link itself and not its target.
    pub fn of(path: &Path, users: &Users) -> Result<Self, ConnectError> {
        let meta = std::fs::symlink_metadata(path).map_err(|error| {
            ConnectError::from_io(&format!("file '{}'", path.display()), &error)
        })?;
        Ok(Self::from_metadata(path, &meta, users))
    }

    /// Describes an entry whose metadata is at hand.
    pub fn from_metadata(path: &Path, meta: &Metadata, users: &Users) -> Self {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let is_symlink = meta.is_symlink();
        let (kind, symlink_target) = if is_symlink {
            match (std::fs::canonicalize(path), std::fs::metadata(path)) {
                (Ok(target), Ok(meta)) => (meta.file_type().into(), Some(text(&target))),
                // The target is not there or not reachable: tell what is written.
                _ => {
                    let target = std::fs::read_link(path).map(|target| text(&target));
                    (EntryKind::Symlink, target.ok())
                }
            }
        } else {
            (meta.file_type().into(), None)
        };
        let name = path.file_name().map_or_else(|| "/".to_owned(), |name| text(Path::new(name)));
        Entry {
            name,
            kind,
            path: text(path),
            size: meta.len(),
            mode: meta.mode() & 0o777,
            permissions: permissions(meta),
            owner: users.user_name(meta.uid()),
            group: users.group_name(meta.gid()),
            modified_time: timestamp(meta),
            symlink_target,
            is_symlink,
            metadata: crate::files::read_metadata(path),
        }
    }
}

fn as_text<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

fn timestamp(meta: &Metadata) -> String {
    let nanoseconds = i32::try_from(meta.mtime_nsec()).unwrap_or(0);
    // Times that protobuf cannot express become its beginning.
    jiff::Timestamp::new(meta.mtime(), nanoseconds)
        .unwrap_or(jiff::Timestamp::UNIX_EPOCH)
        .to_string()
}

/// Type and permissions in the notation of envd's own language: a letter for
/// each thing that is special, or a dash, then the nine bits.
fn permissions(meta: &Metadata) -> String {
    let (kind, mode) = (meta.file_type(), meta.mode());
    let special = [
        (kind.is_dir(), 'd'),
        (kind.is_symlink(), 'L'),
        (kind.is_block_device() || kind.is_char_device(), 'D'),
        (kind.is_fifo(), 'p'),
        (kind.is_socket(), 'S'),
        (mode & 0o4000 != 0, 'u'),
        (mode & 0o2000 != 0, 'g'),
        (kind.is_char_device(), 'c'),
        (mode & 0o1000 != 0, 't'),
    ];
    let mut text: String =
        special.iter().filter(|(holds, _)| *holds).map(|(_, letter)| letter).collect();
    if text.is_empty() {
        text.push('-');
    }
    for (shift, letter) in (0..9).rev().zip("rwxrwxrwx".chars()) {
        text.push(if mode >> shift & 1 == 1 { letter } else { '-' });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn of_directory_and_links() {
        let place = tempfile::tempdir().unwrap();
        let users = Users::of("/etc");
        let at = |name: &str| place.path().join(name);
        std::fs::create_dir(at("d")).unwrap();
        std::fs::set_permissions(at("d"), std::fs::Permissions::from_mode(0o1777)).unwrap();
        std::os::unix::fs::symlink("d", at("to-d")).unwrap();
        std::os::unix::fs::symlink("nothing", at("dangling")).unwrap();

        let directory = Entry::of(&at("d"), &users).unwrap();
        assert_eq!(directory.permissions, "dtrwxrwxrwx");
        assert_eq!((directory.kind, directory.mode), (EntryKind::Directory, 0o777));

        let link = Entry::of(&at("to-d"), &users).unwrap();
        assert_eq!((link.kind, link.is_symlink), (EntryKind::Directory, true));
        assert_eq!(link.symlink_target.as_deref(), at("d").canonicalize().unwrap().to_str());
        assert!(link.permissions.starts_with('L'));

        let dangling = Entry::of(&at("dangling"), &users).unwrap();
        assert_eq!(dangling.kind, EntryKind::Symlink);
        assert_eq!(dangling.symlink_target.as_deref(), Some("nothing"));
    }

    #[test]
    fn of_missing_is_not_found() {
        let error = Entry::of(Path::new("/no/such"), &Users::of("/etc")).unwrap_err();
        assert_eq!(error.code, crate::connect::Code::NotFound);
    }
}
