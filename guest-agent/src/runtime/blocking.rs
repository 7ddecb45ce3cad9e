//! Work that may hold its thread for long.

use std::io::{self, Error};

use rustix::pipe::PipeFlags;

use super::Source;

/// Runs `work` on a thread of its own, for work on the file system that is as long as a
/// tree is large: the kernel shares the CPU between it and the other requests. The
/// thread ends with the work, so an idle agent has one thread. Work whose future is
/// dropped goes on to its end.
///
/// # Errors
///
/// When there is no thread or pipe to be had, and when `work` panics.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (done, working) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let thread = std::thread::Builder::new().spawn(move || {
        let _ends_with_the_work = working;
        work()
    })?;
    Source::empty(done).read(&mut [0]).await?;
    thread.join().map_err(|_| Error::other("the work panicked"))
}
