//! Files that sandboxes read first, brought whole into the page cache of every clone.
//!
//! They are sent to `/dev/null` rather than read: the kernel then reads ahead as it does
//! for a read, in large folios, but copies nothing to user space.

use std::collections::HashSet;
use std::fs::{File, FileType};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Part of the memory that the files may take.
const MEMORY_PERCENT: u64 = 25;

/// The search ends when all but this part of the limit is used.
const ENOUGH_DIVISOR: u64 = 16;

/// A larger file is rarely read as a whole by those who use it.
const FILE_BYTES_MAX: u64 = 24 << 20;

/// Bytes sent at once.
const SEND_BYTES: usize = 1 << 20;

/// Programs and what every program maps, first.
const FIRST: [&str; 23] = [
    "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
    "/usr/lib/x86_64-linux-gnu/libc.so.6",
    "/usr/lib/x86_64-linux-gnu/libm.so.6",
    "/usr/lib/x86_64-linux-gnu/libtinfo.so.6",
    "/usr/lib/x86_64-linux-gnu/libselinux.so.1",
    "/usr/lib/x86_64-linux-gnu/libpcre2-8.so.0",
    "/usr/lib/x86_64-linux-gnu/libz.so.1",
    "/usr/lib/x86_64-linux-gnu/libexpat.so.1",
    "/usr/lib/x86_64-linux-gnu/libcrypto.so.3",
    "/usr/bin/bash",
    "/usr/bin/dash",
    "/usr/bin/sh",
    "/usr/bin/env",
    "/usr/bin/cat",
    "/usr/bin/ls",
    "/usr/bin/true",
    "/usr/bin/python3",
    "/etc/passwd",
    "/etc/group",
    "/etc/profile",
    "/etc/bash.bashrc",
    "/etc/nsswitch.conf",
    "/etc/ld.so.cache",
];

/// Directories, the most wanted first.
const DIRECTORIES: [&str; 5] = [
    "/usr/lib/python3*",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/lib/python3*",
    "/usr/bin",
    "/usr/lib/git-core",
];

/// Directories of many small files that few sandboxes use. A small file costs the build
/// about as much as one of a hundred kilobytes, and a clone that does read it little.
const COLD_DIRECTORIES: [&str; 19] = [
    "distutils",
    "ensurepip",
    "gconv",
    "idlelib",
    "lib2to3",
    "mergetools",
    "perl",
    "perl-base",
    "perl5",
    "pip",
    "pkg_resources",
    "pydoc_data",
    "security",
    "setuptools",
    "test",
    "tests",
    "turtledemo",
    "wheel",
    "wsgiref",
];

/// What was read.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Amount {
    /// Files.
    pub files: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Bytes that may be read.
pub fn budget() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into()) / 100 * MEMORY_PERCENT
}

/// Reads hot files up to `limit` bytes; `pause` is called between files.
pub async fn read(limit: u64, mut pause: impl AsyncFnMut(Amount)) -> Amount {
    let Ok(sink) = File::options().write(true).open("/dev/null") else {
        return Amount::default();
    };
    let mut reader = Reader { limit, read: Amount::default(), seen: HashSet::new(), sink };
    // Few files fit into the last bit; looking for them costs more than they are worth.
    let enough = limit - limit / ENOUGH_DIVISOR;
    for path in FIRST {
        // The real file, whatever leads there.
        if let Ok(path) = std::fs::canonicalize(path) {
            reader.read_file(&path);
        }
    }
    for pattern in DIRECTORIES {
        for root in expand(pattern) {
            let mut stack = vec![root];
            while let Some(directory) = stack.pop() {
                let compiled = directory.join("__pycache__").is_dir();
                for (path, kind) in sorted_children(&directory) {
                    if kind.is_dir() && !is_cold(&path) {
                        stack.push(path);
                    } else if kind.is_file() && is_wanted(&path, compiled) {
                        reader.read_file(&path);
                        pause(reader.read).await;
                    }
                    if reader.read.bytes >= enough {
                        return reader.read;
                    }
                }
            }
        }
    }
    reader.read
}

struct Reader {
    limit: u64,
    read: Amount,
    seen: HashSet<(u64, u64)>,
    sink: File,
}

impl Reader {
    fn read_file(&mut self, path: &Path) {
        let Ok(file) = File::open(path) else { return };
        let Ok(meta) = file.metadata() else { return };
        let fits = meta.len() <= FILE_BYTES_MAX && self.read.bytes + meta.len() <= self.limit;
        if !meta.is_file() || !fits || !self.seen.insert((meta.dev(), meta.ino())) {
            return;
        }
        if let Ok(bytes) = self.send(&file) {
            self.read.bytes += bytes;
            self.read.files += 1;
        }
    }

    fn send(&self, file: &File) -> io::Result<u64> {
        let mut total = 0;
        loop {
            match rustix::fs::sendfile(&self.sink, file, None, SEND_BYTES)? {
                0 => return Ok(total),
                sent => total += u64::try_from(sent).expect("a length fits 64 bits"),
            }
        }
    }
}

/// Directories that match a name with `*` at its end.
fn expand(pattern: &str) -> Vec<PathBuf> {
    let Some(prefix) = pattern.strip_suffix('*') else { return vec![pattern.into()] };
    let (parent, start) = prefix.rsplit_once('/').unwrap_or(("", prefix));
    let mut found = sorted_children(Path::new(parent));
    found.retain(|(path, _)| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start))
    });
    found.into_iter().map(|(path, _)| path).collect()
}

/// What is in a directory, with its kind as the directory tells it: no file is looked at.
fn sorted_children(directory: &Path) -> Vec<(PathBuf, FileType)> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut children: Vec<_> =
        entries.filter_map(|entry| Some((entry.path(), entry.file_type().ok()?))).collect();
    children.sort_by(|(one, _), (other, _)| one.cmp(other));
    children
}

fn is_cold(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| COLD_DIRECTORIES.contains(&name) || name.starts_with("config-"))
}

/// Python reads a source only when its compiled form is missing; static
/// libraries and headers are for compilers.
fn is_wanted(path: &Path, compiled: bool) -> bool {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("py") => !compiled,
        Some("a" | "o" | "h" | "la" | "txt" | "rst") => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_wanted_sources_only_without_compiled_form() {
        assert!(is_wanted(Path::new("/usr/lib/x.py"), false));
        assert!(!is_wanted(Path::new("/usr/lib/x.py"), true));
        assert!(is_wanted(Path::new("/usr/lib/__pycache__/x.pyc"), false));
        assert!(!is_wanted(Path::new("/usr/lib/x.a"), false));
    }

    #[test]
    fn expand_star_matches_the_start_of_a_name() {
        let place = tempfile::tempdir().unwrap();
        for name in ["python3", "python3.11", "perl"] {
            std::fs::create_dir(place.path().join(name)).unwrap();
        }
        let pattern = format!("{}/python3*", place.path().display());
        assert_eq!(expand(&pattern).len(), 2);
    }
}
