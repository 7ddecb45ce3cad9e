//! The kernel command line: what every guest gets, what an emulating back end needs,
//! and the devices' addresses. `guest-kernel/README.md` explains the parameters.

use std::fmt::Write;

use crate::arch::Backend;
use crate::layout::{DEVICE_LINES, MMIO_START, MMIO_STRIDE};

const COMMON: &str = "console=ttyS0 panic=-1 no_timer_check tsc=reliable clocksource=kvm-clock \
                      loglevel=4 cgroup_disable=memory root=/dev/vda rootfstype=erofs ro \
                      init=/sbin/warren-agent";
const HARDWARE: &str = "reboot=k warren_ports=1";
const EMULATING: &str = "warren_emul=1 warren_pageops=1 warren_ports=1 rodata=off norandmaps";

/// The whole command line for `devices` virtio devices; `extra` comes last and wins.
#[must_use]
pub fn compose(backend: Backend, devices: usize, extra: &str) -> String {
    let of_backend = match backend {
        Backend::Hardware => HARDWARE,
        Backend::Emulating => EMULATING,
    };
    let mut line = format!("{COMMON} {of_backend}");
    for (index, interrupt) in (0u64..).zip(DEVICE_LINES).take(devices) {
        let address = MMIO_START + index * MMIO_STRIDE;
        write!(line, " virtio_mmio.device=4K@{address:#x}:{interrupt}")
            .expect("a String takes all that is written");
    }
    if !extra.is_empty() {
        line.push(' ');
        line.push_str(extra);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_distinct_addresses_and_lines() {
        let line = compose(Backend::Hardware, 2, "quiet");
        assert!(line.contains("virtio_mmio.device=4K@0xd0000000:5"));
        assert!(line.contains("virtio_mmio.device=4K@0xd0001000:6"));
        assert!(line.ends_with(" quiet"));
        assert!(!line.contains("warren_emul"));
    }
}
