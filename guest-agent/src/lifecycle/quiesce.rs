//! `POST /quiesce`: the last call before the freeze.

use std::io::ErrorKind;

use http::StatusCode;

use crate::http::{self as web, Reply};

/// Writes everything out and puts free memory together. What cannot be done is
/// an error: a template that is not quiet makes every clone loud.
pub fn quiesce() -> Reply {
    rustix::fs::sync();
    // Elsewhere the memory is not ours to put together.
    if rustix::process::getpid().is_init() {
        match std::fs::write("/proc/sys/vm/compact_memory", "1") {
            Ok(()) => {}
            // The kernel has no compaction, or the setting is not ours.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::NotFound
                        | ErrorKind::PermissionDenied
                        | ErrorKind::ReadOnlyFilesystem
                ) => {}
            Err(error) => {
                let message = format_args!("compact memory: {error}");
                return web::error(StatusCode::INTERNAL_SERVER_ERROR, message);
            }
        }
    }
    web::empty(StatusCode::NO_CONTENT)
}
