//! Which host file holds which bytes of the disk.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FallocateFlags;

use super::allocation::Allocation;
use super::image::ImageFile;
use super::{BLOCK_BYTES, BlockError, SECTOR_BYTES};

/// What a disk is made of.
#[derive(Debug, Clone)]
pub enum DiskConfig {
    /// One file, never written.
    ReadOnly(ImageFile),
    /// One file, written in place.
    ReadWrite(ImageFile),
    /// Files that are never written, and one made at the first write.
    CopyOnWrite {
        /// What the disk shows where nothing was written.
        base: ImageFile,
        /// Deltas that ended, oldest first: a block is in the youngest that holds it.
        layers: Vec<ImageFile>,
        /// Where the delta file is to be; its directory exists by the first write.
        delta: PathBuf,
        /// Size of the disk; at least the base's, which is meant by `None`.
        bytes: Option<u64>,
    },
}

/// A disk.
#[derive(Debug)]
pub enum Disk {
    /// One file, never written.
    ReadOnly(ImageFile),
    /// One file, written in place.
    ReadWrite(ImageFile),
    /// A base and a delta.
    CopyOnWrite(CopyOnWriteDisk),
}

/// Which blocks the files above the base hold.
#[derive(Debug, Default)]
pub struct Allocations {
    /// One per layer, oldest first.
    pub layers: Vec<Allocation>,
    /// Of the delta.
    pub delta: Allocation,
}

/// A delta that ended.
#[derive(Debug)]
struct Layer {
    image: ImageFile,
    allocation: Allocation,
}

/// A base that is never written, layers with blocks that differ from it, and the delta
/// that takes the writes.
#[derive(Debug)]
pub struct CopyOnWriteDisk {
    base: ImageFile,
    layers: Vec<Layer>,
    delta_path: PathBuf,
    delta: Option<Arc<File>>,
    allocation: Allocation,
    bytes: u64,
}

/// Where a piece of the disk is read from.
#[derive(Debug, Clone)]
pub enum Source {
    /// From a file, at the disk's own offset.
    File(Arc<File>),
    /// Nowhere: it is zero.
    Zero,
}

/// Whether the request may write the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writable {
    /// It may.
    Yes,
    /// It may not.
    No,
}

impl Disk {
    /// The disk of a configuration, as `allocations` say it was left: one for each layer
    /// of the configuration.
    pub fn new(config: DiskConfig, allocations: Allocations) -> Result<Self, BlockError> {
        Ok(match config {
            DiskConfig::ReadOnly(image) => Self::ReadOnly(image),
            DiskConfig::ReadWrite(image) => Self::ReadWrite(image),
            DiskConfig::CopyOnWrite { base, layers, delta, bytes } => {
                let bytes = bytes.unwrap_or(base.bytes());
                if bytes < base.bytes() {
                    return Err(BlockError::Shrunk {
                        path: base.path().to_owned(),
                        bytes,
                        base_bytes: base.bytes(),
                    });
                }
                if !bytes.is_multiple_of(SECTOR_BYTES) {
                    return Err(BlockError::Unaligned { path: base.path().to_owned(), bytes });
                }
                if let Some(layer) = layers.iter().find(|layer| layer.bytes() != bytes) {
                    return Err(BlockError::LayerSize {
                        path: layer.path().to_owned(),
                        found: layer.bytes(),
                        bytes,
                    });
                }
                let layers = layers.into_iter().zip(allocations.layers);
                Self::CopyOnWrite(CopyOnWriteDisk {
                    base,
                    layers: layers.map(|(image, allocation)| Layer { image, allocation }).collect(),
                    delta_path: delta,
                    delta: None,
                    allocation: allocations.delta,
                    bytes,
                })
            }
        })
    }

    /// Size of the disk.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::ReadOnly(image) | Self::ReadWrite(image) => image.bytes(),
            Self::CopyOnWrite(disk) => disk.bytes,
        }
    }

    /// The file a message about the disk should name.
    pub fn path(&self) -> &Path {
        match self {
            Self::ReadOnly(image) | Self::ReadWrite(image) => image.path(),
            Self::CopyOnWrite(disk) => disk.base.path(),
        }
    }

    /// Whether the disk takes writes.
    pub fn writable(&self) -> Writable {
        match self {
            Self::ReadOnly(_) => Writable::No,
            Self::ReadWrite(_) | Self::CopyOnWrite(_) => Writable::Yes,
        }
    }

    /// Blocks the delta holds.
    pub fn allocation(&self) -> Option<&Allocation> {
        self.copy_on_write().map(|disk| &disk.allocation)
    }

    /// The disk, if it is a copy-on-write disk.
    pub fn copy_on_write(&self) -> Option<&CopyOnWriteDisk> {
        match self {
            Self::ReadOnly(_) | Self::ReadWrite(_) => None,
            Self::CopyOnWrite(disk) => Some(disk),
        }
    }

    /// Where the bytes from `range.start` on come from, and how many of them, at
    /// least one, come from there.
    pub fn source(&mut self, range: Range<u64>) -> io::Result<(Source, u64)> {
        match self {
            Self::ReadOnly(image) | Self::ReadWrite(image) => {
                Ok((Source::File(image.file().clone()), range.end - range.start))
            }
            Self::CopyOnWrite(disk) => disk.source(range),
        }
    }

    /// The file to make durable, if there is one.
    pub fn flush_target(&self) -> Option<Arc<File>> {
        match self {
            Self::ReadOnly(_) => None,
            Self::ReadWrite(image) => Some(image.file().clone()),
            Self::CopyOnWrite(disk) => disk.delta.clone(),
        }
    }
}

impl CopyOnWriteDisk {
    fn source(&mut self, range: Range<u64>) -> io::Result<(Source, u64)> {
        let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
        let (allocated, count) = self.allocation.run(blocks.clone());
        let end = ((blocks.start + count) * BLOCK_BYTES).min(range.end);
        if allocated {
            return Ok((Source::File(self.delta()?.clone()), end - range.start));
        }
        let (layer, count) = self.layer_of(blocks.start..blocks.start + count);
        let end = ((blocks.start + count) * BLOCK_BYTES).min(range.end);
        if let Some(layer) = layer {
            return Ok((Source::File(layer.clone()), end - range.start));
        }
        let base_end = self.base.bytes();
        match range.start < base_end {
            true => Ok((Source::File(self.base.file().clone()), end.min(base_end) - range.start)),
            false => Ok((Source::Zero, end - range.start)),
        }
    }

    /// The youngest layer that holds the first of `blocks`, if one does, and how many
    /// blocks from there come from the same file.
    fn layer_of(&self, blocks: Range<u64>) -> (Option<&Arc<File>>, u64) {
        let mut end = blocks.end;
        for layer in self.layers.iter().rev() {
            let (allocated, count) = layer.allocation.run(blocks.start..end);
            end = blocks.start + count;
            if allocated {
                return (Some(layer.image.file()), count);
            }
        }
        (None, end - blocks.start)
    }

    /// Files of the layers, oldest first.
    pub fn layers(&self) -> impl Iterator<Item = &ImageFile> {
        self.layers.iter().map(|layer| &layer.image)
    }

    /// Which blocks the layers hold, in their order.
    pub fn layer_allocations(&self) -> impl Iterator<Item = &Allocation> {
        self.layers.iter().map(|layer| &layer.allocation)
    }

    /// Ends the delta: if it holds anything it becomes the youngest layer, which nobody
    /// writes any more, and writes go to a new file at `delta` from now on. No transfer
    /// may be in flight.
    pub fn end_delta(&mut self, delta: PathBuf) -> Result<(), BlockError> {
        if !self.allocation.is_empty() {
            let path = self.delta_path.clone();
            let file =
                self.delta().map_err(|source| BlockError::Open { path: path.clone(), source })?;
            let image = ImageFile::from_shared(file.clone(), &path)?;
            let allocation = std::mem::take(&mut self.allocation);
            self.layers.push(Layer { image, allocation });
        }
        self.delta = None;
        self.delta_path = delta;
        Ok(())
    }

    /// The delta file, made or opened now if it was not yet.
    pub fn delta(&mut self) -> io::Result<&Arc<File>> {
        if self.delta.is_none() {
            let fresh = self.allocation.is_empty();
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(fresh)
                .truncate(fresh)
                .mode(0o600)
                .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
                .open(&self.delta_path)?;
            if fresh {
                file.set_len(self.bytes)?;
            }
            self.delta = Some(Arc::new(file));
        }
        Ok(self.delta.as_ref().expect("it was made above"))
    }

    /// Blocks that `range` covers wholly; the last block of the disk may be short.
    pub fn whole_blocks(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start.div_ceil(BLOCK_BYTES);
        let end = match range.end == self.bytes {
            true => range.end.div_ceil(BLOCK_BYTES),
            false => range.end / BLOCK_BYTES,
        };
        start..end.max(start)
    }

    /// Blocks at the two ends of `range` that it covers in part and the delta does
    /// not hold: they must be completed from the base first.
    pub fn partial_blocks(&self, range: &Range<u64>) -> impl Iterator<Item = u64> + use<> {
        let whole = self.whole_blocks(range);
        let first = range.start / BLOCK_BYTES;
        let last = (range.end - 1) / BLOCK_BYTES;
        let missing = |block: u64| !whole.contains(&block) && !self.allocation.contains(block);
        let head = missing(first).then_some(first);
        let tail = (last != first && missing(last)).then_some(last);
        head.into_iter().chain(tail)
    }

    /// Copies one block from what is below the delta into it and allocates it.
    pub fn copy_block(&mut self, block: u64) -> io::Result<()> {
        let mut bytes = [0; 4096];
        let offset = block * BLOCK_BYTES;
        let in_disk = length(self.bytes - offset);
        let in_base = length(self.base.bytes().saturating_sub(offset));
        let (file, present) = match self.layer_of(block..block + 1).0 {
            Some(layer) => (layer, in_disk),
            None => (self.base.file(), in_base),
        };
        let data = bytes.get_mut(..present).unwrap_or_default();
        file.read_exact_at(data, offset)?;
        let data = bytes.get(..in_disk).unwrap_or_default();
        self.delta()?.write_all_at(data, offset)?;
        self.allocation.set(block..block + 1);
        Ok(())
    }

    /// Notes that the delta now holds `blocks`.
    pub fn allocate(&mut self, blocks: Range<u64>) {
        self.allocation.set(blocks);
    }

    /// Makes whole blocks read as zero and gives their space back.
    pub fn zero_blocks(&mut self, blocks: Range<u64>) -> io::Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        // Blocks the delta never held are holes in it already.
        let mut block = blocks.start;
        while block < blocks.end {
            let (allocated, count) = self.allocation.run(block..blocks.end);
            let end = ((block + count) * BLOCK_BYTES).min(self.bytes);
            if allocated {
                let start = block * BLOCK_BYTES;
                punch_hole(self.delta()?, start..end)?;
            }
            block += count;
        }
        self.delta()?;
        self.allocation.set(blocks);
        Ok(())
    }

    /// Makes `range` read as zero: whole blocks by dropping them, the parts of
    /// blocks at its ends by writing.
    pub fn zero(&mut self, range: &Range<u64>) -> io::Result<()> {
        let whole = self.whole_blocks(range);
        if whole.is_empty() {
            // One block in part, or two neighbours in part.
            let border = (range.start / BLOCK_BYTES + 1) * BLOCK_BYTES;
            self.zero_part(range.start..range.end.min(border))?;
            return self.zero_part(border..range.end);
        }
        let (start, end) = (whole.start * BLOCK_BYTES, whole.end * BLOCK_BYTES);
        self.zero_blocks(whole)?;
        self.zero_part(range.start..start)?;
        self.zero_part(end..range.end)
    }

    /// Makes a part of one block, or nothing, read as zero.
    fn zero_part(&mut self, range: Range<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let block = range.start / BLOCK_BYTES;
        if !self.allocation.contains(block) {
            self.copy_block(block)?;
        }
        let zeroes = [0u8; 4096];
        let data = zeroes.get(..length(range.end - range.start)).unwrap_or_default();
        self.delta()?.write_all_at(data, range.start)
    }
}

/// Makes `range` of `file` a hole, without changing its size.
pub fn punch_hole(file: &File, range: Range<u64>) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file.as_fd(), flags, range.start, range.end - range.start)?;
    Ok(())
}

/// At most a block, as a length in memory.
fn length(bytes: u64) -> usize {
    usize::try_from(bytes.min(BLOCK_BYTES)).expect("at most 4096")
}
