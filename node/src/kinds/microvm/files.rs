//! Checks of the files a template is built from, before anything is started.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Offset and magic number of an EROFS superblock.
const EROFS_OFFSET: u64 = 1024;
const EROFS_MAGIC: [u8; 4] = 0xe0f5_e1e2_u32.to_le_bytes();
const ELF_HEADER_BYTES: usize = 64;
const ELF_MACHINE_X86_64: u16 = 62;
const PROGRAM_HEADER_BYTES: u64 = 56;
/// A vmlinux has about five.
const PROGRAM_HEADERS_MAX: u16 = 64;

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("open {role} {path}: {source}")]
    Open { role: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{role} {path} is not a regular file")]
    NotAFile { role: &'static str, path: PathBuf },
    #[error("{role} {path} is empty")]
    Empty { role: &'static str, path: PathBuf },
    #[error("{role} {path} is not an uncompressed 64-bit x86 ELF file (vmlinux)")]
    NotElf { role: &'static str, path: PathBuf },
    #[error("{role} {path} is truncated: it has {length} bytes and its headers name {needed}")]
    Truncated { role: &'static str, path: PathBuf, length: u64, needed: u64 },
    #[error("{role} {path} is not an EROFS image")]
    NotErofs { role: &'static str, path: PathBuf },
}

/// An uncompressed ELF kernel with all its segments.
pub fn check_kernel(path: &Path) -> Result<(), FileError> {
    let role = "kernel";
    let (file, length) = open(role, path)?;
    let not_elf = || FileError::NotElf { role, path: path.to_owned() };
    let mut header = [0; ELF_HEADER_BYTES];
    file.read_exact_at(&mut header, 0).map_err(|_| not_elf())?;
    let is_64_bit_little_endian = header.starts_with(b"\x7fELF\x02\x01");
    if !is_64_bit_little_endian || u16_at(&header, 18) != ELF_MACHINE_X86_64 {
        return Err(not_elf());
    }
    let table = u64_at(&header, 32);
    let count = u16_at(&header, 56);
    if count == 0 || count > PROGRAM_HEADERS_MAX {
        return Err(not_elf());
    }
    let mut needed = table.saturating_add(u64::from(count) * PROGRAM_HEADER_BYTES);
    for index in 0..u64::from(count) {
        let mut entry = [0; 56];
        if file
            .read_exact_at(&mut entry, table.saturating_add(index * PROGRAM_HEADER_BYTES))
            .is_err()
        {
            break;
        }
        needed = needed.max(u64_at(&entry, 8).saturating_add(u64_at(&entry, 32)));
    }
    if needed > length {
        return Err(FileError::Truncated { role, path: path.to_owned(), length, needed });
    }
    Ok(())
}

/// An EROFS image.
pub fn check_rootfs(path: &Path) -> Result<(), FileError> {
    let role = "root file system";
    let (file, _) = open(role, path)?;
    let mut magic = [0; 4];
    match file.read_exact_at(&mut magic, EROFS_OFFSET) {
        Ok(()) if magic == EROFS_MAGIC => Ok(()),
        Ok(()) | Err(_) => Err(FileError::NotErofs { role, path: path.to_owned() }),
    }
}

fn open(role: &'static str, path: &Path) -> Result<(File, u64), FileError> {
    let owned = || path.to_owned();
    // The type is checked first: opening a FIFO would block.
    let metadata = std::fs::metadata(path).map_err(|source| FileError::Open {
        role,
        path: owned(),
        source,
    })?;
    if !metadata.is_file() {
        return Err(FileError::NotAFile { role, path: owned() });
    }
    if metadata.len() == 0 {
        return Err(FileError::Empty { role, path: owned() });
    }
    let file =
        File::open(path).map_err(|source| FileError::Open { role, path: owned(), source })?;
    Ok((file, metadata.len()))
}

fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([bytes[offset], bytes[offset + 1]])
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file
    }

    fn elf(file_bytes: u64) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 56];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18] = 62;
        bytes[32] = 64;
        bytes[56] = 1;
        bytes[64 + 8] = 120;
        bytes[64 + 32..64 + 40].copy_from_slice(&file_bytes.to_le_bytes());
        bytes
    }

    #[test]
    fn kernel_with_all_segments_is_accepted() {
        check_kernel(file(&elf(0)).path()).unwrap();
    }

    #[test]
    fn truncated_kernel_is_refused() {
        let error = check_kernel(file(&elf(1 << 20)).path()).unwrap_err();
        assert!(matches!(error, FileError::Truncated { length: 120, .. }), "{error}");
    }

    #[test]
    fn kernel_that_is_text_is_refused() {
        let error = check_kernel(file(b"#!/bin/sh\n").path()).unwrap_err();
        assert!(matches!(error, FileError::NotElf { .. }), "{error}");
    }

    #[test]
    fn rootfs_of_zero_bytes_is_refused() {
        let error = check_rootfs(file(b"").path()).unwrap_err();
        assert!(matches!(error, FileError::Empty { .. }), "{error}");
    }

    #[test]
    fn rootfs_without_magic_is_refused() {
        let error = check_rootfs(file(&[0; 4096]).path()).unwrap_err();
        assert!(matches!(error, FileError::NotErofs { .. }), "{error}");
    }

    #[test]
    fn directory_as_rootfs_is_refused() {
        let error = check_rootfs(Path::new("/tmp")).unwrap_err();
        assert!(matches!(error, FileError::NotAFile { .. }), "{error}");
    }
}
