//! Counts what a node holds, to find leaks.

use std::path::{Path, PathBuf};

/// Counts at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Census {
    /// Processes that have the node's run directory on their command line or came of such.
    pub processes: usize,
    /// Open descriptors of the daemon.
    pub descriptors: usize,
    /// Threads of the daemon.
    pub threads: usize,
    /// Files and directories below the state and run directories, logs left out.
    pub files: usize,
    /// Control groups named after the node's sandboxes.
    pub control_groups: usize,
    /// Mounts below the node's directories.
    pub mounts: usize,
}

impl Census {
    pub(crate) fn of(daemon: u32, directories: &[&Path; 2], sandboxes: &[String]) -> Self {
        let process = PathBuf::from(format!("/proc/{daemon}"));
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let below = |line: &str| {
            directories.iter().any(|directory| line.contains(&*directory.to_string_lossy()))
        };
        Self {
            // Each process names the run directory; some name both.
            processes: processes_below(directories[1]).len(),
            descriptors: entries(&process.join("fd")),
            threads: entries(&process.join("task")),
            files: directories.iter().map(|directory| files_below(directory)).sum(),
            control_groups: control_groups(sandboxes),
            mounts: mounts.lines().filter(|line| below(line)).count(),
        }
    }
}

/// Processes that belong to a node: those whose command line names its directory.
pub(crate) fn processes_below(directory: &Path) -> Vec<u32> {
    let needle = directory.to_string_lossy().into_owned();
    let own = std::process::id();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != own)
        .filter(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&needle))
        })
        .collect()
}

fn entries(directory: &Path) -> usize {
    std::fs::read_dir(directory).map_or(0, Iterator::count)
}

fn files_below(directory: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    entries
        .filter_map(Result::ok)
        .filter(|entry| !entry.file_name().to_string_lossy().ends_with(".log"))
        .map(|entry| {
            let below = if entry.path().is_dir() && !entry.path().is_symlink() {
                files_below(&entry.path())
            } else {
                0
            };
            1 + below
        })
        .sum()
}

fn control_groups(sandboxes: &[String]) -> usize {
    fn walk(directory: &Path, depth: u32, sandboxes: &[String]) -> usize {
        if depth == 0 {
            return 0;
        }
        let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
        entries
            .filter_map(Result::ok)
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| {
                let name = entry.file_name().to_string_lossy().into_owned();
                let own = sandboxes.iter().any(|id| name.contains(id.as_str()));
                usize::from(own) + walk(&entry.path(), depth - 1, sandboxes)
            })
            .sum()
    }
    walk(Path::new("/sys/fs/cgroup"), 5, sandboxes)
}
