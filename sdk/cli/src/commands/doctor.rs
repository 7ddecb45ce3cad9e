//! `doctor`: can this machine run sandboxes, and what to do if not.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;

use crate::client::Http;
use crate::error::CliError;
use crate::locate::{self, Variant};
use crate::output::{self, Output};
use crate::settings::Settings;

/// Less and a template of 256 MiB with some clones does not fit.
const MEMORY_BYTES_WANTED: u64 = 2 << 30;
/// A root image, a template's memory and some disks.
const DISK_BYTES_WANTED: u64 = 4 << 30;
/// A node holds some descriptors per sandbox.
const DESCRIPTORS_WANTED: u64 = 65_536;
/// Three threads a sandbox, and thousands of sandboxes.
const THREADS_WANTED: u64 = 32_768;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Warn,
    Fail,
}

/// One thing looked at.
#[derive(Debug, Serialize)]
struct Finding {
    check: &'static str,
    verdict: Verdict,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<&'static str>,
}

impl Finding {
    fn new(
        check: &'static str,
        good: bool,
        bad: Verdict,
        found: impl Into<String>,
        advice: &'static str,
    ) -> Self {
        let verdict = if good { Verdict::Ok } else { bad };
        Self { check, verdict, found: found.into(), advice: (!good).then_some(advice) }
    }
}

pub(super) async fn doctor(settings: &Settings, output: Output) -> Result<ExitCode, CliError> {
    let mut findings = machine(&settings.state_directory);
    findings.extend(installation());
    findings.push(daemon(settings).await?);
    output.result(&findings, || {
        let lines: Vec<String> = findings.iter().map(line).collect();
        lines.join("\n")
    });
    let failed = findings.iter().any(|finding| finding.verdict == Verdict::Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Failures of the machine that no sandbox can live with.
pub(super) fn blockers(state_directory: &Path) -> Vec<String> {
    machine(state_directory)
        .iter()
        .filter(|finding| finding.verdict == Verdict::Fail)
        .map(line)
        .collect()
}

fn line(finding: &Finding) -> String {
    let verdict = match finding.verdict {
        Verdict::Ok => "ok  ",
        Verdict::Warn => "warn",
        Verdict::Fail => "FAIL",
    };
    let mut line = format!("{verdict}  {:12} {}", finding.check, finding.found);
    if let Some(advice) = finding.advice {
        line.push_str("\n        -> ");
        line.push_str(advice);
    }
    line
}

fn machine(state_directory: &Path) -> Vec<Finding> {
    vec![
        architecture(),
        kvm(),
        host_kernel(),
        control_groups(),
        memory(),
        huge_pages(),
        disk(state_directory),
        descriptors(),
        threads(),
        tap(),
    ]
}

fn architecture() -> Finding {
    let found = std::env::consts::ARCH;
    Finding::new(
        "processor",
        found == "x86_64",
        Verdict::Fail,
        found,
        "only x86_64 machines are supported",
    )
}

fn kvm() -> Finding {
    let path = "/dev/kvm";
    let (good, found, advice) = match std::fs::OpenOptions::new().read(true).write(true).open(path)
    {
        Ok(file) if !is_kvm(&file) => (
            false,
            format!("{path} is not the device of KVM (character device 10:232)"),
            "remove it and load the module again: modprobe kvm_intel or kvm_amd",
        ),
        Ok(_) => (true, format!("{path} opens"), ""),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => (
            false,
            format!("{path} is missing"),
            "switch virtualization on in the firmware and load the module: modprobe kvm_intel or kvm_amd; \
             in a virtual machine ask for nested virtualization",
        ),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => (
            false,
            format!("{path} may not be opened: {error}"),
            "run as root, or join the group that owns it: usermod -aG kvm USER",
        ),
        Err(error) => {
            (false, format!("{path} cannot be opened: {error}"), "see dmesg for what KVM says")
        }
    };
    Finding::new("kvm", good, Verdict::Fail, found, advice)
}

fn is_kvm(file: &std::fs::File) -> bool {
    const MISC_MAJOR: u32 = 10;
    const KVM_MINOR: u32 = 232;
    let device = file.metadata().map(|metadata| metadata.rdev());
    device.is_ok_and(|device| device == rustix::fs::makedev(MISC_MAJOR, KVM_MINOR))
}

fn host_kernel() -> Finding {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    Finding::new(
        "kernel",
        version(&release) >= (5, 14),
        Verdict::Fail,
        format!("Linux {release}"),
        "Linux 5.14 or newer is needed (MADV_POPULATE_WRITE, close_range)",
    )
}

/// Major and minor; zeros where there is no number.
fn version(release: &str) -> (u32, u32) {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn control_groups() -> Finding {
    let root = Path::new("/sys/fs/cgroup");
    let writable = |path: &Path| {
        rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok() && path.is_dir()
    };
    let (good, found) = if root.join("cgroup.controllers").exists() {
        (writable(root), "version 2")
    } else if root.join("memory").is_dir() {
        (writable(&root.join("memory")), "version 1")
    } else {
        (false, "none mounted")
    };
    let found = if good { format!("{found}, writable") } else { format!("{found}, not writable") };
    Finding::new(
        "cgroups",
        good,
        Verdict::Warn,
        found,
        "sandboxes run without control groups of their own: run as root where /sys/fs/cgroup is writable",
    )
}

fn memory() -> Finding {
    let available = meminfo("MemAvailable").unwrap_or(0);
    Finding::new(
        "memory",
        available >= MEMORY_BYTES_WANTED,
        Verdict::Warn,
        format!("{} available", output::bytes(available)),
        "less than 2 GiB: expect few sandboxes; warrend refuses to create below its floor (--memory-floor-mib)",
    )
}

fn meminfo(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

fn huge_pages() -> Finding {
    let mode =
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    Finding::new(
        "huge pages",
        mode.contains("[always]") || mode.contains("[madvise]"),
        Verdict::Warn,
        if mode.is_empty() { "not in this kernel".to_owned() } else { mode.trim().to_owned() },
        "creates get slower without: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )
}

fn disk(state_directory: &Path) -> Finding {
    let existing = state_directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let free = rustix::fs::statvfs(existing)
        .map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize))
        .unwrap_or(0);
    Finding::new(
        "disk",
        free >= DISK_BYTES_WANTED,
        Verdict::Warn,
        format!("{} free for {}", output::bytes(free), state_directory.display()),
        "less than 4 GiB: free some, or choose another place by --state-dir",
    )
}

fn descriptors() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::MAX);
    Finding::new(
        "open files",
        most >= DESCRIPTORS_WANTED,
        Verdict::Warn,
        if most == u64::MAX { "no limit".to_owned() } else { format!("up to {most}") },
        "raise it for thousands of sandboxes: ulimit -Hn 1048576, or LimitNOFILE= in the unit",
    )
}

fn threads() -> Finding {
    let read = |path| -> u64 {
        std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    };
    let most = read("/proc/sys/kernel/threads-max").min(read("/proc/sys/kernel/pid_max"));
    Finding::new(
        "threads",
        most >= THREADS_WANTED,
        Verdict::Warn,
        format!("up to {most}"),
        "raise them for thousands of sandboxes: sysctl kernel.pid_max=4194304 kernel.threads-max=1000000",
    )
}

fn tap() -> Finding {
    let path = "/dev/net/tun";
    Finding::new(
        "network",
        Path::new(path).exists(),
        Verdict::Warn,
        if Path::new(path).exists() {
            format!("{path} is there")
        } else {
            format!("{path} is missing")
        },
        "needed only for sandboxes with a network device: modprobe tun",
    )
}

fn installation() -> Vec<Finding> {
    let shown = |path: &Option<PathBuf>, missing: &str| {
        path.as_ref().map_or_else(|| missing.to_owned(), |path| path.display().to_string())
    };
    let found = |check, path: Option<PathBuf>, missing: &str, advice| {
        Finding::new(check, path.is_some(), Verdict::Warn, shown(&path, missing), advice)
    };
    vec![
        found("warrend", locate::program("warrend"), "not found", "build it: make build"),
        found("warren-vmm", locate::program("warren-vmm"), "not found", "build it: make build"),
        found(
            "guest kernel",
            locate::kernel(Variant::Up),
            "none built",
            "build it: make guest-kernel",
        ),
        found("root image", locate::image("base"), "none built", "build it: make image"),
    ]
}

async fn daemon(settings: &Settings) -> Result<Finding, CliError> {
    let up = Http::new(settings)?.is_up().await;
    let url = settings.url();
    Ok(Finding::new(
        "daemon",
        up,
        Verdict::Warn,
        if up { format!("answers at {url}") } else { format!("does not answer at {url}") },
        "start it: warren up",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_reads_the_first_two_numbers() {
        assert_eq!(version("6.18.44-fc-v669"), (6, 18));
        assert_eq!(version("odd"), (0, 0));
    }

    #[test]
    fn good_finding_carries_no_advice() {
        let finding = Finding::new("x", true, Verdict::Fail, "y", "do z");
        assert_eq!((finding.verdict, finding.advice), (Verdict::Ok, None));
    }
}
