//! What a test needs of the machine.

/// Something that a machine may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// `/dev/kvm`, readable and writable.
    Kvm,
    /// User id 0: TAP devices, mounts, control groups.
    Root,
    /// A C compiler that can link statically, for programs that run in a guest.
    Compiler,
}

impl Need {
    fn is_met(self) -> bool {
        match self {
            Self::Kvm => {
                std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
            }
            Self::Root => rustix::process::geteuid().is_root(),
            Self::Compiler => std::process::Command::new("cc").arg("--version").output().is_ok(),
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Self::Kvm => "/dev/kvm cannot be opened",
            Self::Root => "not root",
            Self::Compiler => "no C compiler",
        }
    }
}

/// Whether something is missing. If so, the test must return: it has been written
/// down as skipped, with the reason, in the file that `WARREN_SKIPPED` names.
#[must_use]
pub fn missing(needs: &[Need]) -> bool {
    let Some(need) = needs.iter().find(|need| !need.is_met()) else { return false };
    warren_base::skip::skipped(need.reason());
    true
}
