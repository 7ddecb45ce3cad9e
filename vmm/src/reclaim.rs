//! What is done with pages that the guest gives back.

use rustix::mm::Advice;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use warren_balloon::PageReclaimer;

use crate::ram::HolePuncher;

/// While a template is built: the pages leave the RAM image.
#[derive(Debug)]
pub struct PunchHoles(pub HolePuncher);

impl PageReclaimer for PunchHoles {
    fn release(&self, guest: GuestAddress, bytes: u64) -> std::io::Result<()> {
        self.0.punch(guest.0, bytes)
    }
}

/// In a clone: private pages go. Over the template's image this shows the template's
/// page again, which is legal, since a page given back has no defined contents.
#[derive(Debug)]
pub struct DropPages(pub GuestMemoryMmap);

impl PageReclaimer for DropPages {
    fn release(&self, guest: GuestAddress, bytes: u64) -> std::io::Result<()> {
        let length = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::InvalidInput)?;
        let slice = self
            .0
            .get_slice(guest, length)
            .map_err(|_| std::io::Error::from(std::io::ErrorKind::InvalidInput))?;
        let start = slice.ptr_guard_mut().as_ptr().cast();
        // SAFETY: the range lies in guest RAM, which is private to this process and
        // which no reference points into; the guest expects nothing of its contents.
        unsafe { rustix::mm::madvise(start, length, Advice::LinuxDontNeed) }?;
        Ok(())
    }
}
