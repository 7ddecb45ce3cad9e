//! RAM of a cold microVM, from which a template is saved.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{MapFlags, ProtFlags};
use vm_memory::GuestMemoryMmap;

use super::{RamError, RamPart, RamSize, Reservation, guest_memory};
use crate::layout::PAGE_BYTES;

/// Guest RAM in a memfd, mapped shared.
#[derive(Debug)]
pub struct BuildRam {
    // Before `reservation`, so that it goes first.
    memory: GuestMemoryMmap,
    size: RamSize,
    memfd: File,
    _reservation: Reservation,
}

impl BuildRam {
    /// Zeroed RAM.
    ///
    /// # Errors
    /// When the kernel refuses memory.
    pub fn new(size: RamSize) -> Result<Self, RamError> {
        let failed =
            |operation| move |source| RamError::System { operation, bytes: size.bytes(), source };
        let memfd = rustix::fs::memfd_create(c"warren-ram", MemfdFlags::CLOEXEC)
            .map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&memfd, size.bytes()).map_err(failed("ftruncate"))?;
        let reservation = Reservation::new(size.length())?;
        // SAFETY: MAP_FIXED replaces exactly the reservation, which is ours and unused.
        unsafe {
            rustix::mm::mmap(
                reservation.at(0).cast(),
                size.length(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE,
                &memfd,
                0,
            )
        }
        .map_err(failed("map"))?;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let memory = guest_memory(&reservation, size, flags)?;
        Ok(Self { memory, size, memfd: memfd.into(), _reservation: reservation })
    }

    /// The guest's view.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// How much.
    #[must_use]
    pub fn size(&self) -> RamSize {
        self.size
    }

    /// Another handle by which freed pages can be punched out.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn hole_puncher(&self) -> std::io::Result<HolePuncher> {
        Ok(HolePuncher { memfd: self.memfd.try_clone()?, parts: self.size.parts() })
    }

    /// Writes all pages that are not zero into `file`, at their offset in the RAM
    /// image; the rest stays a hole. Returns the bytes written.
    ///
    /// # Errors
    /// When `file` cannot be written.
    pub fn save(&self, file: &File) -> std::io::Result<u64> {
        file.set_len(self.size.bytes())?;
        let page = usize::try_from(PAGE_BYTES).expect("a page is a length");
        let mut buffer = vec![0; 256 * page];
        let mut written = 0;
        let mut at = 0;
        while let Some((start, end)) = next_data(&self.memfd, at)? {
            let mut offset = start;
            while offset < end {
                let length = usize::try_from(end - offset).unwrap_or(usize::MAX).min(buffer.len());
                let chunk = &mut buffer[..length];
                self.memfd.read_exact_at(chunk, offset)?;
                written += write_data_pages(file, chunk, offset, page)?;
                offset += u64::try_from(length).expect("a length fits 64 bits");
            }
            at = end;
        }
        Ok(written)
    }
}

/// Gives pages of a template that is being built back to the host.
#[derive(Debug)]
pub struct HolePuncher {
    memfd: File,
    parts: Vec<RamPart>,
}

impl HolePuncher {
    /// Punches out a guest-physical range that lies in one part of RAM.
    ///
    /// # Errors
    /// When the range is not RAM, or the kernel refuses.
    pub fn punch(&self, guest: u64, bytes: u64) -> std::io::Result<()> {
        let part = self
            .parts
            .iter()
            .find(|part| {
                guest >= part.guest
                    && guest.checked_add(bytes).is_some_and(|end| end <= part.guest + part.bytes)
            })
            .ok_or(std::io::ErrorKind::InvalidInput)?;
        rustix::fs::fallocate(
            self.memfd.as_fd(),
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            part.offset + (guest - part.guest),
            bytes,
        )?;
        Ok(())
    }
}

/// Writes the runs of pages in `chunk` that are not all zero.
fn write_data_pages(file: &File, chunk: &[u8], offset: u64, page: usize) -> std::io::Result<u64> {
    let mut written = 0;
    let mut run: Option<usize> = None;
    let pages = chunk.len().div_ceil(page);
    for index in 0..=pages {
        let data = index < pages && {
            let end = ((index + 1) * page).min(chunk.len());
            chunk[index * page..end].iter().any(|byte| *byte != 0)
        };
        match (data, run) {
            (true, None) => run = Some(index * page),
            (false, Some(start)) => {
                let bytes = &chunk[start..(index * page).min(chunk.len())];
                let at = offset + u64::try_from(start).expect("a length fits 64 bits");
                file.write_all_at(bytes, at)?;
                written += u64::try_from(bytes.len()).expect("a length fits 64 bits");
                run = None;
            }
            (true, Some(_)) | (false, None) => {}
        }
    }
    Ok(written)
}

/// Next range of `file` from `at` on that is not a hole.
pub(super) fn next_data(file: &File, at: u64) -> std::io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(start))?;
    Ok(Some((start, end)))
}
