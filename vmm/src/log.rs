//! Where this process's own log goes: standard error, or a file that is made when the
//! first line is written to it.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tracing::level_filters::LevelFilter;

/// Most bytes that a microVM logs. What a guest can provoke must not fill the disk.
const BYTES_MAX: u64 = 1 << 20;

static PATH: Mutex<Option<PathBuf>> = Mutex::new(None);
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// Starts logging to standard error. `WARREN_VMM_LOG` names the level (default `warn`).
pub fn start() {
    let level = std::env::var("WARREN_VMM_LOG").ok();
    let level = level.and_then(|level| level.parse().ok()).unwrap_or(LevelFilter::WARN);
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_target(false)
        .with_writer(|| LogWriter)
        .init();
}

/// From now on the log goes to `path`.
pub fn redirect(path: PathBuf) {
    WRITTEN.store(0, Ordering::Relaxed);
    *PATH.lock().unwrap_or_else(PoisonError::into_inner) = Some(path);
}

struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if WRITTEN.fetch_add(length, Ordering::Relaxed) > BYTES_MAX {
            return Ok(bytes.len());
        }
        match &*PATH.lock().unwrap_or_else(PoisonError::into_inner) {
            None => io::stderr().write_all(bytes)?,
            Some(path) => {
                File::options().append(true).create(true).open(path)?.write_all(bytes)?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
