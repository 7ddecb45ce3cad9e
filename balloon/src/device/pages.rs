//! Pages, ranges of them, and who gives them back.

use std::fmt::Debug;
use std::io;

use vm_memory::GuestAddress;

/// Bytes of a balloon page, whatever the guest's own page size.
pub const PAGE_BYTES: u64 = 4096;

/// A number of balloon pages of 4 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct BalloonPages(pub u32);

impl BalloonPages {
    /// The same in bytes.
    pub fn bytes(self) -> u64 {
        u64::from(self.0) * PAGE_BYTES
    }
}

/// A run of pages, not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestRange {
    /// First byte.
    pub start: GuestAddress,
    /// Length.
    pub bytes: u64,
}

/// Gives guest pages back to the host.
///
/// The guest does not use the range until it asked for it again, and then expects
/// any content. Whether the range becomes zero, the template's bytes again, or a
/// hole in a shared file is the implementation's choice.
pub trait PageReclaimer: Debug + Send {
    /// Gives the `bytes` from `start` back: page-aligned, not empty, inside guest RAM.
    /// Called with the device's lock held, so it must not wait.
    fn release(&self, start: GuestAddress, bytes: u64) -> io::Result<()>;
}

/// Joins page numbers to ranges, longest possible, in ascending order. The
/// numbers are sorted in place; a number that comes twice counts once.
pub fn join(numbers: &mut [u32]) -> impl Iterator<Item = GuestRange> + '_ {
    numbers.sort_unstable();
    let mut rest: &[u32] = numbers;
    std::iter::from_fn(move || {
        let (first, mut tail) = rest.split_first()?;
        let mut last = *first;
        while let Some((next, behind)) = tail.split_first() {
            if *next - last > 1 {
                break;
            }
            last = *next;
            tail = behind;
        }
        rest = tail;
        Some(GuestRange {
            start: GuestAddress(u64::from(*first) * PAGE_BYTES),
            bytes: (u64::from(last - *first) + 1) * PAGE_BYTES,
        })
    })
}
