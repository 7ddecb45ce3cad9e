//! What a microVM's RAM holds beyond its template's, as a file.
//!
//! The file `pages` is nothing but the pages, in the order of their guest-physical
//! addresses; which ones they are, and their checksum, is part of the state file.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;

use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::private::{Run, private_runs};
use crate::layout::PAGE_BYTES;

/// Bytes copied at a time.
const BUFFER_BYTES: usize = 256 << 10;

/// Pages of a microVM that its template does not have, version 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamDiff {
    /// [`crate::Template`] that it goes on top of.
    pub template: [u8; 32],
    /// Pages skipped since the last run, pages of the run.
    runs: Vec<(u64, u64)>,
    /// BLAKE3 of the file.
    checksum: [u8; 32],
}

/// Why a difference cannot be put on a template's RAM.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// The file is too short, or cannot be read.
    #[error("read the pages")]
    Read(#[from] io::Error),
    /// The file is longer than its runs.
    #[error("the file has more than its {0} bytes of pages")]
    Trailing(u64),
    /// A run lies outside of RAM.
    #[error("page {0} is not RAM")]
    Place(u64),
    /// The file was damaged.
    #[error("checksum of the pages is wrong")]
    Checksum,
}

impl RamDiff {
    /// Writes the pages that are this process's own into `file`.
    ///
    /// # Errors
    /// When the kernel does not tell which they are, or `file` cannot be written.
    pub fn save(template: [u8; 32], memory: &GuestMemoryMmap, mut file: &File) -> io::Result<Self> {
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut runs = Vec::new();
        let mut end_of_last = 0;
        for Run { start, bytes } in private_runs(memory)? {
            runs.push(((start - end_of_last) / PAGE_BYTES, bytes / PAGE_BYTES));
            end_of_last = start + bytes;
            for (at, length) in pieces(start..end_of_last) {
                let part = &mut buffer[..length];
                memory.read_slice(part, GuestAddress(at)).map_err(io::Error::other)?;
                hasher.update(part);
                file.write_all(part)?;
            }
        }
        Ok(Self { template, runs, checksum: *hasher.finalize().as_bytes() })
    }

    /// Bytes of the pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let pages = self.runs.iter().fold(0u64, |sum, (_, count)| sum.saturating_add(*count));
        pages.saturating_mul(PAGE_BYTES)
    }

    /// Puts the pages of `file` into RAM that is as in the template.
    ///
    /// # Errors
    /// See [`DiffError`]; the RAM must not be used then.
    pub fn load(&self, memory: &GuestMemoryMmap, mut file: &File) -> Result<(), DiffError> {
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut page = 0u64;
        for (skipped, count) in &self.runs {
            let start = page.saturating_add(*skipped);
            let outside = || DiffError::Place(start);
            let end = start.checked_add(*count).ok_or_else(outside)?;
            end.checked_mul(PAGE_BYTES).ok_or_else(outside)?;
            for (at, length) in pieces(start * PAGE_BYTES..end * PAGE_BYTES) {
                let part = &mut buffer[..length];
                file.read_exact(part)?;
                hasher.update(part);
                memory
                    .write_slice(part, GuestAddress(at))
                    .map_err(|_| DiffError::Place(at / PAGE_BYTES))?;
            }
            page = end;
        }
        if file.read(&mut [0])? != 0 {
            return Err(DiffError::Trailing(self.bytes()));
        }
        match hasher.finalize().as_bytes() == &self.checksum {
            true => Ok(()),
            false => Err(DiffError::Checksum),
        }
    }
}

/// Starts and lengths of pieces of `range` that fit the buffer.
fn pieces(range: Range<u64>) -> impl Iterator<Item = (u64, usize)> {
    let end = range.end;
    range
        .step_by(BUFFER_BYTES)
        .map(move |at| (at, usize::try_from(end - at).unwrap_or(usize::MAX).min(BUFFER_BYTES)))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use tempfile::TempDir;

    use super::*;
    use crate::ram::{BuildRam, RamSize, TemplateRam};

    const TEMPLATE: [u8; 32] = [7; 32];

    struct Fixture {
        directory: TempDir,
    }

    impl Fixture {
        /// RAM whose first 2 MiB hold data.
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let build = BuildRam::new(RamSize::new(32 << 20).unwrap()).unwrap();
            build.memory().write_slice(&[1; 8192], GuestAddress(0)).unwrap();
            build.save(&File::create(directory.path().join("memory")).unwrap()).unwrap();
            Self { directory }
        }

        fn ram(&self) -> TemplateRam {
            let size = RamSize::new(32 << 20).unwrap();
            TemplateRam::load(&self.directory.path().join("memory"), size).unwrap()
        }

        fn pages(&self) -> PathBuf {
            self.directory.path().join("pages")
        }

        fn save(&self, memory: &GuestMemoryMmap) -> RamDiff {
            RamDiff::save(TEMPLATE, memory, &File::create(self.pages()).unwrap()).unwrap()
        }

        fn load(&self, diff: &RamDiff) -> Result<TemplateRam, DiffError> {
            let ram = self.ram();
            diff.load(ram.memory(), &File::open(self.pages()).unwrap()).map(|()| ram)
        }
    }

    fn bytes(ram: &TemplateRam) -> Vec<u8> {
        let mut bytes = vec![0; 32 << 20];
        ram.memory().read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }

    #[test]
    fn what_was_written_comes_back_and_nothing_else() {
        let fixture = Fixture::new();
        let ram = fixture.ram();
        // A page of the template to zero, one to data, and free memory over a buffer's end.
        ram.memory().write_slice(&[0; 4096], GuestAddress(4096)).unwrap();
        ram.memory().write_slice(&[2; 5], GuestAddress(3 * 4096)).unwrap();
        ram.memory().write_slice(&vec![3; 700 << 10], GuestAddress(8 << 20)).unwrap();
        let diff = fixture.save(ram.memory());
        assert_eq!(diff.bytes(), 8192 + (700 << 10));
        let again = fixture.load(&diff).unwrap();
        assert!(bytes(&again) == bytes(&ram));
        // The second generation: a difference is always against the template.
        again.memory().write_slice(&[4; 10], GuestAddress(16 << 20)).unwrap();
        let diff = fixture.save(again.memory());
        assert!(bytes(&fixture.load(&diff).unwrap()) == bytes(&again));
    }

    #[test]
    fn every_damage_is_found() {
        let fixture = Fixture::new();
        let ram = fixture.ram();
        ram.memory().write_slice(&[5; 9000], GuestAddress(1 << 20)).unwrap();
        let diff = fixture.save(ram.memory());
        let whole = std::fs::read(fixture.pages()).unwrap();
        for at in [0, 4096, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 4;
            std::fs::write(fixture.pages(), damaged).unwrap();
            assert!(matches!(fixture.load(&diff), Err(DiffError::Checksum)));
        }
        std::fs::write(fixture.pages(), &whole[..whole.len() - 1]).unwrap();
        assert!(matches!(fixture.load(&diff), Err(DiffError::Read(_))));
        std::fs::write(fixture.pages(), [&whole[..], &[0]].concat()).unwrap();
        assert!(matches!(fixture.load(&diff), Err(DiffError::Trailing(_))));
        std::fs::write(fixture.pages(), &whole).unwrap();
        for skipped in [8191, u64::MAX / 4096, u64::MAX] {
            let elsewhere = RamDiff { runs: vec![(skipped, 3)], ..diff.clone() };
            assert!(matches!(fixture.load(&elsewhere), Err(DiffError::Place(_))), "{skipped}");
        }
    }
}
