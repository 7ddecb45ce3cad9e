//! What process 1 does before it serves and after it has served.

mod mounts;
mod tune;

use std::fmt::Arguments;

use rustix::system::RebootCommand;

pub use mounts::MountError;

/// I/O port by which a guest tells its monitor that it ends, and how.
const EXIT_PORT: u64 = 0x501;

/// Makes the file systems ready and sets the kernel up.
pub fn prepare() -> Result<(), MountError> {
    mounts::prepare()?;
    tune::apply();
    if let Err(error) = warren_base::guest::raise_loopback() {
        crate::console::error(format_args!("raise the loopback interface: {error}"));
    }
    Ok(())
}

/// Tells the console how far the boot is.
pub fn progress(message: Arguments<'_>) {
    if rustix::process::getpid().is_init() {
        crate::console::progress(message);
    }
}

/// Ends the guest. Does not return when there is one.
pub fn end() {
    rustix::fs::sync();
    if let Ok(port) = std::fs::OpenOptions::new().write(true).open("/dev/port") {
        let _ = rustix::io::pwrite(&port, &[0], EXIT_PORT);
    }
    let _ = rustix::system::reboot(RebootCommand::PowerOff);
    let _ = rustix::system::reboot(RebootCommand::Restart);
}
