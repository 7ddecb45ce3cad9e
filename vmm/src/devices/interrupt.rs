//! Interrupt lines of a VM, each with an irqfd that is made when it is first raised.

use std::io;
use std::sync::{Arc, OnceLock};

use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use warren_virtio::Interrupt;

/// One edge-triggered line of the VM's interrupt controllers.
pub struct Line {
    vm: Arc<VmFd>,
    number: u32,
    irqfd: OnceLock<EventFd>,
}

impl Line {
    /// Line `number`; costs nothing until it is raised.
    #[must_use]
    pub fn new(vm: Arc<VmFd>, number: u32) -> Self {
        Self { vm, number, irqfd: OnceLock::new() }
    }

    fn irqfd(&self) -> io::Result<&EventFd> {
        if let Some(irqfd) = self.irqfd.get() {
            return Ok(irqfd);
        }
        let irqfd = EventFd::new(EFD_NONBLOCK)?;
        self.vm
            .register_irqfd(&irqfd, self.number)
            .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        // Devices raise their line under their lock, so nobody else came first.
        Ok(self.irqfd.get_or_init(|| irqfd))
    }
}

impl Interrupt for Line {
    fn trigger(&self) -> io::Result<()> {
        self.irqfd()?.write(1)
    }
}

impl vm_superio::Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        Interrupt::trigger(self)
    }
}
