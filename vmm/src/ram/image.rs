//! RAM of a template process and of the clones it gives birth to.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use vm_memory::GuestMemoryMmap;

use super::build::next_data;
use super::{RamError, RamSize, Reservation, guest_memory};
use crate::layout::HUGE_PAGE_BYTES;

/// Most mappings of one clone's RAM. Each costs the clone a VMA (about 250 bytes of
/// slab) and time at fork.
const MAPPINGS_MAX: usize = 16;

/// Why a RAM image cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file is not there or cannot be read.
    #[error("read RAM image {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// It belongs to another guest.
    #[error("RAM image {path} has {have} bytes, the guest has {want}")]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length.
        have: u64,
        /// Guest RAM.
        want: u64,
    },
    /// No memory for it.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// A part of the RAM image, in units of 2 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    first: u64,
    last: u64,
    data: bool,
}

/// Guest RAM of a template, mapped privately: what a clone inherits by fork.
#[derive(Debug)]
pub struct TemplateRam {
    // Before `reservation`, so that it goes first.
    memory: GuestMemoryMmap,
    size: RamSize,
    image_bytes: u64,
    _reservation: Reservation,
}

impl TemplateRam {
    /// Loads an image that [`super::BuildRam::save`] wrote.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn load(path: &Path, size: RamSize) -> Result<Self, ImageError> {
        let unreadable = |source| ImageError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        let have = file.metadata().map_err(unreadable)?.len();
        if have != size.bytes() {
            return Err(ImageError::Length { path: path.to_owned(), have, want: size.bytes() });
        }
        let failed =
            |operation| move |source| RamError::System { operation, bytes: size.bytes(), source };
        let memfd = rustix::fs::memfd_create(
            c"warren-template",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )
        .map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&memfd, size.bytes()).map_err(failed("ftruncate"))?;
        let memfd = File::from(memfd);
        let (granules, image_bytes) = copy(&file, &memfd, size).map_err(unreadable)?;
        let extents = extents(&granules);
        collapse(&memfd, &extents)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&memfd, seals).map_err(failed("seal"))?;

        let reservation = Reservation::new(size.length())?;
        for extent in &extents {
            map_privately(&reservation, &memfd, extent).map_err(failed("map privately"))?;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        let memory = guest_memory(&reservation, size, flags)?;
        Ok(Self { memory, size, image_bytes, _reservation: reservation })
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

    /// Bytes of the image that hold data.
    #[must_use]
    pub fn image_bytes(&self) -> u64 {
        self.image_bytes
    }
}

/// Copies the data of `file` into `memfd`. Tells for each 2 MiB whether it has any,
/// and the bytes of data.
fn copy(file: &File, memfd: &File, size: RamSize) -> io::Result<(Vec<bool>, u64)> {
    let granules = usize::try_from(size.bytes() / HUGE_PAGE_BYTES).expect("fits a length");
    let mut has_data = vec![false; granules];
    let mut total = 0;
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while let Some((start, end)) = next_data(file, at)? {
        let end = end.min(size.bytes());
        for granule in start / HUGE_PAGE_BYTES..end.div_ceil(HUGE_PAGE_BYTES) {
            has_data[usize::try_from(granule).expect("fits a length")] = true;
        }
        let mut offset = start;
        while offset < end {
            let length = usize::try_from(end - offset).unwrap_or(usize::MAX).min(buffer.len());
            file.read_exact_at(&mut buffer[..length], offset)?;
            memfd.write_all_at(&buffer[..length], offset)?;
            offset += u64::try_from(length).expect("a length fits 64 bits");
        }
        total += end - start;
        at = end;
        if at >= size.bytes() {
            break;
        }
    }
    Ok((has_data, total))
}

/// Cuts RAM into at most [`MAPPINGS_MAX`] extents that are data or free; the shortest
/// free stretches between data are given up first.
fn extents(has_data: &[bool]) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for (index, data) in (0u64..).zip(has_data.iter().copied()) {
        match extents.last_mut() {
            Some(last) if last.data == data => last.last = index,
            Some(_) | None => extents.push(Extent { first: index, last: index, data }),
        }
    }
    while extents.len() > MAPPINGS_MAX {
        let (index, _) = extents
            .iter()
            .enumerate()
            .filter(|(_, extent)| !extent.data)
            .min_by_key(|(_, extent)| extent.last - extent.first)
            .expect("data and free extents alternate, so one of them is free");
        let mut merged = extents.remove(index);
        merged.data = true;
        if index < extents.len() {
            merged.last = extents.remove(index).last;
        }
        if index > 0 {
            extents[index - 1].last = merged.last;
        } else {
            extents.insert(0, merged);
        }
    }
    extents
}

/// Makes 2 MiB folios of the data. A host that cannot (no such kernel option, no free
/// huge page) still has a correct template, only with more page tables per clone.
fn collapse(memfd: &File, extents: &[Extent]) -> Result<(), RamError> {
    let huge = usize::try_from(HUGE_PAGE_BYTES).expect("2 MiB is a length");
    for extent in extents.iter().filter(|extent| extent.data) {
        let pages = usize::try_from(extent.last - extent.first + 1).expect("fits a length");
        let length = pages * huge;
        let failed = |source| RamError::System {
            operation: "collapse",
            bytes: u64::try_from(length).unwrap_or(u64::MAX),
            source,
        };
        let window = Reservation::new(length)?;
        // SAFETY: MAP_FIXED replaces exactly the reservation, which is ours and unused.
        unsafe {
            rustix::mm::mmap(
                window.at(0).cast(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                memfd.as_fd(),
                extent.first * HUGE_PAGE_BYTES,
            )
        }
        .map_err(failed)?;
        for page in 0..pages {
            // SAFETY: the range is part of the window mapped above; populating and
            // collapsing do not change its contents.
            let result = unsafe {
                let start = window.at(0).add(page * huge).cast();
                rustix::mm::madvise(start, huge, Advice::LinuxPopulateWrite).and_then(|()| {
                    match libc::madvise(start, huge, libc::MADV_COLLAPSE) {
                        0 => Ok(()),
                        _ => Err(rustix::io::Errno::from_io_error(&io::Error::last_os_error())
                            .unwrap_or(rustix::io::Errno::IO)),
                    }
                })
            };
            if let Err(error) = result {
                tracing::debug!(%error, page, "template page stays in small folios");
            }
        }
    }
    Ok(())
}

fn map_privately(
    reservation: &Reservation,
    memfd: &File,
    extent: &Extent,
) -> rustix::io::Result<()> {
    let start = reservation.at(extent.first * HUGE_PAGE_BYTES).cast();
    let bytes = (extent.last - extent.first + 1) * HUGE_PAGE_BYTES;
    let length = usize::try_from(bytes).expect("fits a length");
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    if extent.data {
        let offset = extent.first * HUGE_PAGE_BYTES;
        // SAFETY: MAP_FIXED replaces a part of the reservation, which is ours and unused.
        unsafe { rustix::mm::mmap(start, length, protection, flags, memfd.as_fd(), offset) }?;
    } else {
        // SAFETY: as above.
        unsafe { rustix::mm::mmap_anonymous(start, length, protection, flags) }?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::ram::BuildRam;

    #[test]
    fn extents_follow_the_data() {
        let cut = extents(&[true, true, false, false, true]);
        assert_eq!(
            cut,
            [
                Extent { first: 0, last: 1, data: true },
                Extent { first: 2, last: 3, data: false },
                Extent { first: 4, last: 4, data: true },
            ]
        );
    }

    #[test]
    fn extents_never_exceed_the_limit_and_cover_all_data() {
        let pattern: Vec<bool> = (0..200).map(|index| index % 3 != 1).collect();
        let cut = extents(&pattern);
        assert!(cut.len() <= MAPPINGS_MAX);
        assert_eq!(cut[0].first, 0);
        assert_eq!(cut.last().unwrap().last, 199);
        for pair in cut.windows(2) {
            assert_eq!(pair[0].last + 1, pair[1].first);
        }
        for (index, data) in (0u64..).zip(pattern) {
            let extent = cut.iter().find(|e| (e.first..=e.last).contains(&index)).unwrap();
            assert!(extent.data || !data, "data of {index} is not mapped");
        }
    }

    #[test]
    fn saved_ram_loads_with_the_same_bytes_and_holes() {
        let size = RamSize::new(64 << 20).unwrap();
        let build = BuildRam::new(size).unwrap();
        build.memory().write_obj(0x1234_5678u64, GuestAddress(0x5000)).unwrap();
        build.memory().write_obj(7u64, GuestAddress((33 << 20) + 8)).unwrap();
        build.memory().write_obj(0u64, GuestAddress(50 << 20)).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory");
        let written = build.save(&File::create(&path).unwrap()).unwrap();
        assert_eq!(written, 8192);

        let ram = TemplateRam::load(&path, size).unwrap();
        let read = |at| ram.memory().read_obj::<u64>(GuestAddress(at)).unwrap();
        assert_eq!(read(0x5000), 0x1234_5678);
        assert_eq!(read((33 << 20) + 8), 7);
        assert_eq!(read(50 << 20), 0);
        assert_eq!(ram.image_bytes(), 8192);
    }

    #[test]
    fn image_of_another_guest_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory");
        File::create(&path).unwrap().set_len(32 << 20).unwrap();
        let error = TemplateRam::load(&path, RamSize::new(64 << 20).unwrap()).unwrap_err();
        assert!(matches!(error, ImageError::Length { .. }));
    }
}
