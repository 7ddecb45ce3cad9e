//! The parts of identity that live in the kernel and in files.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::time::{ClockId, Timespec};

use super::{Identity, InitError};

/// Where the machine id is; `/etc/machine-id` points here.
pub const MACHINE_ID: &str = "/run/machine-id";
/// Where the boot id is; it is bound over the kernel's.
pub const BOOT_ID: &str = "/run/boot-id";
/// Where the kernel tells its boot id.
pub const KERNEL_BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Where host names are; `/etc/hosts` points here where we made it.
pub const HOSTS: &str = "/run/hosts";

/// Longest host name the kernel takes.
const HOSTNAME_BYTES_MAX: usize = 64;

/// Files and devices that take the identity of a clone, opened beforehand.
pub enum Machine {
    /// The kernel is this sandbox's alone.
    Own(Box<OwnKernel>),
    /// The kernel is shared: its clock, randomness and names are not ours.
    Shared,
}

/// What a kernel of our own needs.
pub struct OwnKernel {
    random: File,
    machine_id: File,
    boot_id: File,
    hosts: File,
}

impl Machine {
    /// Opens what a kernel of our own needs.
    pub fn own() -> std::io::Result<Self> {
        let open = |path: &str| OpenOptions::new().write(true).open(path);
        Ok(Machine::Own(Box::new(OwnKernel {
            random: open("/dev/urandom")?,
            machine_id: open(MACHINE_ID)?,
            boot_id: open(BOOT_ID)?,
            hosts: open(HOSTS)?,
        })))
    }

    /// Steps the wall clock.
    pub fn set_clock(&self, timestamp: &str) -> Result<(), InitError> {
        let time: jiff::Timestamp =
            timestamp.parse().map_err(|error| InitError::new("clock", error))?;
        let Machine::Own(_) = self else { return Ok(()) };
        let time = Timespec { tv_sec: time.as_second(), tv_nsec: time.subsec_nanosecond().into() };
        rustix::time::clock_settime(ClockId::Realtime, time)
            .map_err(|error| InitError::new("clock", error))
    }

    /// Takes names and randomness.
    pub fn take_identity(&self, identity: &Identity) -> Result<(), InitError> {
        let Machine::Own(kernel) = self else { return Ok(()) };
        kernel.take_entropy(&identity.entropy)?;
        if !identity.hostname.is_empty() {
            kernel.set_hostname(&identity.hostname)?;
        }
        if !identity.machine_id.is_empty() {
            let id = &identity.machine_id;
            check_hex("machine id", id, 32)?;
            write(&kernel.machine_id, "machine id", &format!("{id}\n"))?;
        }
        if !identity.boot_id.is_empty() {
            let id = &identity.boot_id;
            check_hex("boot id", &id.replace('-', ""), 32)?;
            write(&kernel.boot_id, "boot id", &format!("{id}\n"))?;
        }
        Ok(())
    }
}

impl OwnKernel {
    /// Without new randomness two clones would draw the same numbers, so its
    /// absence is an error.
    fn take_entropy(&self, entropy: &str) -> Result<(), InitError> {
        let fail = |error: &dyn std::fmt::Display| InitError::new("entropy", error);
        let bytes = STANDARD.decode(entropy).map_err(|error| fail(&error))?;
        if bytes.len() < 32 {
            return Err(fail(&format_args!("{} bytes are fewer than 32", bytes.len())));
        }
        warren_base::guest::add_entropy(&self.random, &bytes).map_err(|error| fail(&error))?;
        warren_base::guest::reseed_random(&self.random).map_err(|error| fail(&error))
    }

    fn set_hostname(&self, name: &str) -> Result<(), InitError> {
        let valid = name.len() <= HOSTNAME_BYTES_MAX
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte));
        if !valid {
            return Err(InitError::new("hostname", format_args!("{name:?} is no host name")));
        }
        rustix::system::sethostname(name.as_bytes())
            .map_err(|error| InitError::new("hostname", error))?;
        write(&self.hosts, "hosts", &hosts(name))
    }
}

/// The host table, always of one length: a shorter name leaves nothing of a
/// longer one behind, without a call to cut the file.
pub fn hosts(name: &str) -> String {
    let own = format!("127.0.1.1 {name}");
    let width = HOSTNAME_BYTES_MAX + 10;
    format!("127.0.0.1 localhost\n::1 localhost ip6-localhost\n{own:width$}\n")
}

fn check_hex(step: &'static str, text: &str, length: usize) -> Result<(), InitError> {
    if text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(());
    }
    Err(InitError::new(step, format_args!("{text:?} is not {length} hexadecimal digits")))
}

fn write(file: &File, step: &'static str, text: &str) -> Result<(), InitError> {
    file.write_all_at(text.as_bytes(), 0).map_err(|error| InitError::new(step, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_has_one_length() {
        assert_eq!(hosts("a").len(), hosts(&"b".repeat(HOSTNAME_BYTES_MAX)).len());
    }

    #[test]
    fn check_hex_refuses_other_text() {
        assert!(check_hex("x", &"0a".repeat(16), 32).is_ok());
        assert!(check_hex("x", &"0g".repeat(16), 32).is_err());
        assert!(check_hex("x", "0a", 32).is_err());
    }
}
