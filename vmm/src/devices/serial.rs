//! The serial console: guest output goes to a bounded log, there is no input.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use kvm_ioctls::VmFd;
use vm_superio::Serial;
use vm_superio::serial::{NoEvents, SerialState};
use warren_virtio::console::{ConsoleLog, ConsoleSink};

use super::Line;
use crate::error::VmmError;
use crate::layout::SERIAL_LINE;

/// Most bytes of console output kept on disk.
const LOG_BYTES_MAX: u64 = 1 << 20;

/// Serial console of a microVM.
pub type SerialPort = Serial<Line, NoEvents, SerialLog>;

/// Bytes from the serial port into the log.
#[derive(Debug)]
pub struct SerialLog(ConsoleLog);

impl Write for SerialLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.output(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn log(path: &Path) -> SerialLog {
    SerialLog(ConsoleLog::new(path, LOG_BYTES_MAX))
}

/// A serial console no guest has touched yet.
#[must_use]
pub fn serial(vm: Arc<VmFd>, log_path: &Path) -> SerialPort {
    Serial::new(Line::new(vm, SERIAL_LINE), log(log_path))
}

/// A serial console as it was saved.
///
/// # Errors
/// When the state is impossible.
pub fn restore_serial(
    vm: Arc<VmFd>,
    log_path: &Path,
    state: &SerialState,
) -> Result<SerialPort, VmmError> {
    Serial::from_state(state, Line::new(vm, SERIAL_LINE), NoEvents, log(log_path)).map_err(
        |error| {
            VmmError::new(
                "restore the serial console",
                "build the template again",
                format!("{error:?}"),
            )
        },
    )
}
