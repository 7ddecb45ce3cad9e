//! A file's own key and value pairs, kept as extended attributes.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;

use http::HeaderMap;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::FileError;

/// Prefix of the request headers.
const HEADER_PREFIX: &str = "x-metadata-";

/// Prefix of the attributes.
const ATTRIBUTE_PREFIX: &str = "user.e2b.";

/// The kernel's limit for the names of one file's attributes.
const NAMES_BYTES_MAX: usize = 64 * 1024;

/// Names of a file with some attributes.
const NAMES_BYTES_USUAL: usize = 512;

/// The kernel's limit for one attribute.
const VALUE_BYTES_MAX: usize = 64 * 1024;

/// What the headers of an upload say.
pub fn from_headers(headers: &HeaderMap) -> Result<BTreeMap<String, String>, FileError> {
    let mut metadata = BTreeMap::new();
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(HEADER_PREFIX) else { continue };
        let value = value.to_str().map_err(|_| {
            FileError::bad_request(format_args!("the value of metadata {key:?} is not ASCII"))
        })?;
        if key.is_empty() {
            return Err(FileError::bad_request("a metadata key is empty"));
        }
        metadata.insert(key.to_owned(), value.to_owned());
    }
    Ok(metadata)
}

/// Replaces all of an open file's metadata.
pub fn replace(file: impl AsFd, metadata: &BTreeMap<String, String>) -> Result<(), FileError> {
    let names = match names(|buffer| rustix::fs::flistxattr(&file, buffer)) {
        Ok(names) => names,
        Err(Errno::OPNOTSUPP) if metadata.is_empty() => return Ok(()),
        Err(error) => return Err(FileError::from_io("list metadata", &error.into())),
    };
    for name in keys(&names) {
        if !metadata.contains_key(&name[ATTRIBUTE_PREFIX.len()..]) {
            rustix::fs::fremovexattr(&file, name)
                .map_err(|error| FileError::from_io("remove metadata", &error.into()))?;
        }
    }
    for (key, value) in metadata {
        let name = format!("{ATTRIBUTE_PREFIX}{key}");
        rustix::fs::fsetxattr(&file, name, value.as_bytes(), XattrFlags::empty())
            .map_err(|error| FileError::from_io("store metadata", &error.into()))?;
    }
    Ok(())
}

/// A file's metadata; a link's own, not its target's.
pub fn read(path: &Path) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::new();
    let names = names(|buffer| rustix::fs::llistxattr(path, buffer)).unwrap_or_default();
    for name in keys(&names) {
        let mut value = vec![0; VALUE_BYTES_MAX];
        if let Ok(length) = rustix::fs::lgetxattr(path, name, &mut value[..]) {
            let text = String::from_utf8_lossy(&value[..length]).into_owned();
            metadata.insert(name[ATTRIBUTE_PREFIX.len()..].to_owned(), text);
        }
    }
    metadata
}

/// Names of all attributes. Most files have none or few: a small buffer first.
fn names(
    mut list: impl FnMut(&mut [u8]) -> rustix::io::Result<usize>,
) -> rustix::io::Result<Vec<u8>> {
    for size in [NAMES_BYTES_USUAL, NAMES_BYTES_MAX] {
        let mut buffer = vec![0; size];
        match list(&mut buffer) {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
            Err(Errno::RANGE) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Errno::RANGE)
}

fn keys(names: &[u8]) -> impl Iterator<Item = &str> {
    names
        .split(|byte| *byte == 0)
        .filter_map(|name| std::str::from_utf8(name).ok())
        .filter(|name| name.starts_with(ATTRIBUTE_PREFIX))
}
