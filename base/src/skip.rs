//! How a test that cannot run on this machine is counted.

use std::io::Write;

/// Writes down that the running test is skipped and why: to standard error, and as a
/// line of the file that `WARREN_SKIPPED` names, which the test command counts. The
/// test must return after it.
///
/// # Panics
///
/// When the file cannot be written: a skip must not get lost.
pub fn skipped(reason: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let line = format!("{test}: {reason}\n");
    eprint!("skipped {line}");
    if let Some(path) = std::env::var_os("WARREN_SKIPPED") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("write down the skip");
    }
}
