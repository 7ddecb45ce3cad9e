//! The kernel's console: boot progress and errors. Nothing a client can cause
//! is written more often than a few times a second.

use std::cell::Cell;
use std::fmt::Arguments;
use std::time::{Duration, Instant};

/// Errors written in one interval; the rest is counted and told later.
const ERRORS_PER_INTERVAL: u32 = 10;
const INTERVAL: Duration = Duration::from_secs(10);

thread_local! {
    static LIMIT: Cell<(Option<Instant>, u32)> = const { Cell::new((None, 0)) };
}

/// Writes one line of progress; for the boot only.
pub fn progress(message: Arguments<'_>) {
    write(message);
}

/// Writes one line about something that failed and that no reply tells of.
pub fn error(message: Arguments<'_>) {
    let now = Instant::now();
    let (since, count) = LIMIT.get();
    let fresh = since.is_none_or(|since| now.duration_since(since) > INTERVAL);
    if fresh {
        if count > ERRORS_PER_INTERVAL {
            let silent = count - ERRORS_PER_INTERVAL;
            write(format_args!("{silent} more errors were not written"));
        }
        LIMIT.set((Some(now), 1));
        return write(message);
    }
    LIMIT.set((since, count.saturating_add(1)));
    if count < ERRORS_PER_INTERVAL {
        write(message);
    }
}

fn write(message: Arguments<'_>) {
    let line = format!("warren-agent: {message}\n");
    let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
}
