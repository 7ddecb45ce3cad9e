//! Control groups of sandboxes.
//!
//! If a writable hierarchy exists, each sandbox's process is moved into
//! `<own group>/warren/<daemon>/<id>`, where `<daemon>` stands for the run directory:
//! several daemons on one machine never touch each other's groups. Moving a process
//! takes 0.05 ms, but up to 10 ms now and then (version 1 waits for a grace period), so
//! it happens after the reply to create.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::flags::CgroupMode;
use crate::ids::SandboxId;
use crate::process::Process;
use crate::random;

const MOUNTS: &str = "/proc/self/mounts";
const OWN_GROUPS: &str = "/proc/self/cgroup";
/// On version 1 each hierarchy costs a move of its own; this one carries the weights
/// that the scheduler sets.
const V1_CONTROLLER: &str = "cpu";
const GROUP: &str = "warren";
/// Bytes of a digest that tell the daemons of one machine apart.
const DAEMON_BYTES: usize = 6;

/// The group under which sandboxes get theirs.
#[derive(Debug, Clone)]
pub struct Cgroups {
    root: PathBuf,
}

impl Cgroups {
    /// Looks for a hierarchy; `None` if there is none or it is not writable.
    pub fn detect(mode: CgroupMode, run_directory: &Path) -> Option<Self> {
        match mode {
            CgroupMode::Off => None,
            CgroupMode::Auto => {
                let mounts = std::fs::read_to_string(MOUNTS).ok()?;
                let groups = std::fs::read_to_string(OWN_GROUPS).ok()?;
                let daemon = Sha256::digest(run_directory.as_os_str().as_encoded_bytes());
                let daemon = random::encode_hex(&daemon[..DAEMON_BYTES]);
                candidates(&mounts, &groups).into_iter().find_map(|parent| {
                    let root = parent.join(GROUP).join(&daemon);
                    let made = std::fs::create_dir_all(&root).is_ok();
                    (made && is_writable(&root)).then_some(Self { root })
                })
            }
        }
    }

    /// Moves a process into the sandbox's group. Blocking. If the process ends
    /// meanwhile, no group is left.
    pub fn place(&self, id: &SandboxId, process: &Process) -> io::Result<()> {
        let group = self.root.join(id.as_str());
        match std::fs::create_dir(&group) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let moved = if process.has_ended() {
            Err(io::ErrorKind::NotFound.into())
        } else {
            std::fs::write(group.join("cgroup.procs"), process.pid().to_string())
        };
        if moved.is_err() || process.has_ended() {
            self.remove(id)?;
        }
        moved
    }

    /// Removes the sandbox's group. Blocking; its processes must have ended.
    pub fn remove(&self, id: &SandboxId) -> io::Result<()> {
        match std::fs::remove_dir(self.root.join(id.as_str())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Removes the daemon's own group if no sandbox has one.
    pub fn remove_if_empty(&self) {
        let _ = std::fs::remove_dir(&self.root);
    }

    /// Sandboxes that have a group.
    pub fn leftovers(&self) -> Vec<SandboxId> {
        let Ok(entries) = std::fs::read_dir(&self.root) else { return Vec::new() };
        entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| SandboxId::parse(entry.file_name().to_str()?).ok())
            .collect()
    }
}

fn is_writable(group: &Path) -> bool {
    rustix::fs::access(group, rustix::fs::Access::WRITE_OK).is_ok()
}

/// Directories of our own group, best first: version 2 where it has controllers,
/// else version 1's `cpu`.
fn candidates(mounts: &str, groups: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for mount in mounts.lines() {
        let mut fields = mount.split(' ');
        let (Some(_), Some(point), Some(kind), Some(options)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let is_v1 = options.split(',').any(|option| option == V1_CONTROLLER);
        let (rank, own) = match kind {
            "cgroup2" if has_controllers(point) => (0, own_group(groups, str::is_empty)),
            "cgroup" if is_v1 => (
                1,
                own_group(groups, |controllers| {
                    controllers.split(',').any(|controller| controller == V1_CONTROLLER)
                }),
            ),
            _ => continue,
        };
        if let Some(own) = own {
            found.push((rank, Path::new(point).join(own.trim_start_matches('/'))));
        }
    }
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

/// A version 2 hierarchy beside version 1 often has no controllers to use.
fn has_controllers(point: &str) -> bool {
    std::fs::read_to_string(Path::new(point).join("cgroup.controllers"))
        .is_ok_and(|text| text.split_whitespace().any(|controller| controller == V1_CONTROLLER))
}

/// The path in `/proc/self/cgroup` of the line whose controllers fit.
fn own_group(groups: &str, fits: impl Fn(&str) -> bool) -> Option<&str> {
    groups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        fits(controllers).then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn v1_cpu_group_is_found() {
        let mounts =
            "cgroup /x/memory cgroup rw,memory 0 0\ncgroup /x/cpu cgroup rw,relatime,cpu 0 0\n";
        let groups = "4:memory:/a\n1:cpu:/b\n";
        assert_eq!(candidates(mounts, groups), vec![PathBuf::from("/x/cpu/b")]);
    }

    #[test]
    fn no_hierarchy_gives_nothing() {
        assert!(candidates("proc /proc proc rw 0 0\n", "0::/\n").is_empty());
    }
}
