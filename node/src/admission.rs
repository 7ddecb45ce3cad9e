//! May one more sandbox be made? Pure: the numbers come in, the verdict goes out.

use std::time::Duration;

/// What the node allows.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Sandboxes alive or being made.
    pub sandboxes_max: usize,
    /// `MemAvailable` that creating leaves untouched.
    pub memory_floor_bytes: u64,
}

/// What the node has at the moment.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub sandboxes: usize,
    /// `None` where the kernel does not say.
    pub memory_available_bytes: Option<u64>,
}

/// Why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// The count is at its limit. Somebody must end a sandbox first.
    #[error(
        "the node runs {0} sandboxes, as many as it is allowed to; end some or raise the limit"
    )]
    Full(usize),
    /// Memory is short.
    #[error(
        "the node has {available_mib} MiB of memory left and keeps {floor_mib} MiB free; end some sandboxes or try again later"
    )]
    Memory { available_mib: u64, floor_mib: u64 },
}

impl AdmissionError {
    /// When it makes sense to ask again.
    pub fn retry_after(self) -> Duration {
        match self {
            Self::Full(_) => Duration::from_secs(1),
            Self::Memory { .. } => Duration::from_secs(2),
        }
    }
}

/// The verdict on one more sandbox.
///
/// # Errors
/// [`AdmissionError`] names the limit that was hit.
pub fn admit(limits: Limits, load: Load) -> Result<(), AdmissionError> {
    if load.sandboxes >= limits.sandboxes_max {
        return Err(AdmissionError::Full(load.sandboxes));
    }
    match load.memory_available_bytes {
        Some(available) if available < limits.memory_floor_bytes => Err(AdmissionError::Memory {
            available_mib: available >> 20,
            floor_mib: limits.memory_floor_bytes >> 20,
        }),
        Some(_) | None => Ok(()),
    }
}

/// `MemTotal` and `MemAvailable` in bytes, read from the text of `/proc/meminfo`.
pub fn parse_meminfo(text: &str) -> (Option<u64>, Option<u64>) {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 =
            line.trim_start_matches(':').trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    (field("MemTotal"), field("MemAvailable"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { sandboxes_max: 2, memory_floor_bytes: 100 };

    #[test]
    fn below_both_limits_is_admitted() {
        let load = Load { sandboxes: 1, memory_available_bytes: Some(100) };
        assert_eq!(admit(LIMITS, load), Ok(()));
    }

    #[test]
    fn count_at_limit_is_refused() {
        let load = Load { sandboxes: 2, memory_available_bytes: Some(1000) };
        assert_eq!(admit(LIMITS, load), Err(AdmissionError::Full(2)));
    }

    #[test]
    fn memory_below_floor_is_refused() {
        let load = Load { sandboxes: 0, memory_available_bytes: Some(99) };
        assert!(matches!(admit(LIMITS, load), Err(AdmissionError::Memory { .. })));
    }

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal:       24 kB\nMemFree: 1 kB\nMemAvailable:   16 kB\n";
        assert_eq!(parse_meminfo(text), (Some(24 * 1024), Some(16 * 1024)));
        assert_eq!(parse_meminfo(""), (None, None));
    }
}
