//! The peer: QEMU's `microvm` machine, cold, with the same kernel and root image.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use warren_tests::Artifacts;

/// Longest time one start may take: an emulating KVM needs about ten seconds.
const PATIENCE: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(2);

/// QEMU has nobody who completes XSAVE: where KVM emulates, the guest must not use it.
const EMULATING: &str = "warren_emul=1 rodata=off norandmaps clearcpuid=xsave";

/// Milliseconds from starting QEMU until the guest's PID 1 runs, `count` times. Empty if
/// QEMU is not installed.
pub fn measure(artifacts: &Artifacts, count: u32, memory_mib: u32) -> Vec<f64> {
    if Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        eprintln!("qemu-system-x86_64 is not installed: no comparison with it");
        return Vec::new();
    }
    (0..count).filter_map(|_| start(artifacts, memory_mib)).collect()
}

fn start(artifacts: &Artifacts, memory_mib: u32) -> Option<f64> {
    let directory = tempfile::TempDir::new().expect("make a directory");
    let console = directory.path().join("console");
    let emulating = Path::new("/sys/module/kvm_pvm").exists();
    let command_line = format!(
        "console=ttyS0 panic=-1 no_timer_check tsc=reliable clocksource=kvm-clock loglevel=4 \
         cgroup_disable=memory root=/dev/vda rootfstype=erofs ro init=/sbin/warren-agent {}",
        if emulating { EMULATING } else { "" }
    );
    let begin = Instant::now();
    let mut child = Command::new("qemu-system-x86_64")
        .args([
            "-M",
            "microvm,accel=kvm,acpi=off,rtc=off",
            "-cpu",
            "host",
            "-nodefaults",
            "-no-reboot",
        ])
        .args(["-display", "none", "-m", &memory_mib.to_string(), "-kernel"])
        .arg(&artifacts.kernel)
        .args(["-append", &command_line, "-serial"])
        .arg(format!("file:{}", console.display()))
        .arg("-drive")
        .arg(format!("id=root,if=none,format=raw,readonly=on,file={}", artifacts.rootfs.display()))
        .args(["-device", "virtio-blk-device,drive=root"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("start QEMU");
    // The first words of PID 1.
    let entered = |text: String| text.contains("warren-agent: ");
    let took = loop {
        if std::fs::read_to_string(&console).is_ok_and(entered) {
            break Some(begin.elapsed().as_secs_f64() * 1000.0);
        }
        let ended = child.try_wait().expect("look after QEMU").is_some();
        if ended || begin.elapsed() > PATIENCE {
            let said = std::fs::read_to_string(&console).unwrap_or_default();
            eprintln!("the guest did not reach PID 1 under QEMU:\n{said}");
            break None;
        }
        std::thread::sleep(POLL);
    };
    let _ = child.kill();
    let _ = child.wait();
    took
}
