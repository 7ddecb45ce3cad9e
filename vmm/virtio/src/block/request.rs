//! What a descriptor chain of the request queue asks for.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::{RANGE_SECTORS_MAX, RANGES_MAX, REQUEST_BYTES_MAX, SECTOR_BYTES};
use crate::queue::{Chain, Segments, to_u64};

/// Bytes of the request header: type, reserved, sector.
const HEADER_BYTES: usize = 16;

/// Bytes of one range of a discard or write-zeroes request.
const RANGE_BYTES: u64 = 16;

/// The one flag of a range.
const RANGE_UNMAP: u32 = 1;

/// A request whose chain is sound; the data lies where the kind says.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// What to do.
    pub action: Action<'a>,
    /// Where the status byte goes.
    pub status: GuestAddress,
}

/// What to do.
#[derive(Debug, Clone, Copy)]
pub enum Action<'a> {
    /// Fill `data` from the disk.
    Read { offset: u64, data: Segments<'a> },
    /// Write `data` to the disk.
    Write { offset: u64, data: Segments<'a> },
    /// Make completed writes durable.
    Flush,
    /// Tell the device's id.
    Id { data: Segments<'a> },
    /// The ranges are not needed any more.
    Discard { ranges: Segments<'a> },
    /// The ranges read as zero from now on.
    WriteZeroes { ranges: Segments<'a> },
    /// Sound, but outside the disk or of a forbidden size.
    Invalid,
    /// A type this device does not know.
    Unsupported,
}

/// The chain is no request: it has no header or no room for a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotARequest;

impl<'a> Request<'a> {
    /// Reads the header and checks the range against a disk of `disk_bytes`.
    pub fn parse(
        chain: &'a Chain,
        memory: &GuestMemoryMmap,
        disk_bytes: u64,
    ) -> Result<Self, NotARequest> {
        let writable = chain.writable();
        let room = writable.len().checked_sub(1).ok_or(NotARequest)?;
        let status = writable.skip(room).iter().next().ok_or(NotARequest)?.address;

        let mut header = [0; HEADER_BYTES];
        match chain.readable().read(memory, &mut header) {
            Ok(HEADER_BYTES) => {}
            Ok(_) | Err(_) => return Err(NotARequest),
        }
        let [t0, t1, t2, t3, _, _, _, _, s0, s1, s2, s3, s4, s5, s6, s7] = header;
        let kind = u32::from_le_bytes([t0, t1, t2, t3]);
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);

        let outward = chain.readable().skip(to_u64(HEADER_BYTES));
        let inward = writable.limit(room);
        let transfer = |data: Segments<'a>| transfer_offset(sector, data.len(), disk_bytes);
        let action = match kind {
            VIRTIO_BLK_T_IN => match transfer(inward) {
                Some(offset) => Action::Read { offset, data: inward },
                None => Action::Invalid,
            },
            VIRTIO_BLK_T_OUT => match transfer(outward) {
                Some(offset) => Action::Write { offset, data: outward },
                None => Action::Invalid,
            },
            VIRTIO_BLK_T_FLUSH => Action::Flush,
            VIRTIO_BLK_T_GET_ID => Action::Id { data: inward },
            VIRTIO_BLK_T_DISCARD => Action::Discard { ranges: outward },
            VIRTIO_BLK_T_WRITE_ZEROES => Action::WriteZeroes { ranges: outward },
            _ => Action::Unsupported,
        };
        Ok(Self { action, status })
    }
}

fn transfer_offset(sector: u64, bytes: u64, disk_bytes: u64) -> Option<u64> {
    let offset = sector.checked_mul(SECTOR_BYTES)?;
    let end = offset.checked_add(bytes)?;
    let sound = bytes > 0
        && bytes.is_multiple_of(SECTOR_BYTES)
        && bytes <= REQUEST_BYTES_MAX
        && end <= disk_bytes;
    sound.then_some(offset)
}

/// One range of a discard or write-zeroes request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskRange {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What is wrong with the ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeError {
    /// Outside the disk, too many or too long.
    Invalid,
    /// A flag that means nothing here.
    Unsupported,
}

/// Whether the unmap flag may be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmap {
    /// Write-zeroes: a hint.
    Allowed,
    /// Discard: reserved.
    Forbidden,
}

/// Reads and checks all ranges before any of them is acted on.
pub fn parse_ranges(
    ranges: Segments<'_>,
    memory: &GuestMemoryMmap,
    disk_bytes: u64,
    unmap: Unmap,
) -> Result<Vec<DiskRange>, RangeError> {
    let count = ranges.len() / RANGE_BYTES;
    if ranges.is_empty()
        || !ranges.len().is_multiple_of(RANGE_BYTES)
        || count > u64::from(RANGES_MAX)
    {
        return Err(RangeError::Invalid);
    }
    let mut parsed = Vec::new();
    for number in 0..count {
        let mut bytes = [0; 16];
        match ranges.skip(number * RANGE_BYTES).read(memory, &mut bytes) {
            Ok(16) => {}
            Ok(_) | Err(_) => return Err(RangeError::Invalid),
        }
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = bytes;
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        let known = match unmap {
            Unmap::Allowed => RANGE_UNMAP,
            Unmap::Forbidden => 0,
        };
        if flags & !known != 0 {
            return Err(RangeError::Unsupported);
        }
        if sectors == 0 || sectors > RANGE_SECTORS_MAX {
            return Err(RangeError::Invalid);
        }
        let offset = sector.checked_mul(SECTOR_BYTES).ok_or(RangeError::Invalid)?;
        let bytes = u64::from(sectors) * SECTOR_BYTES;
        match offset.checked_add(bytes) {
            Some(end) if end <= disk_bytes => parsed.push(DiskRange { offset, bytes }),
            Some(_) | None => return Err(RangeError::Invalid),
        }
    }
    Ok(parsed)
}
