//! Builds a template:
//!
//! ```text
//! validate ▶ files ▶ boot ▶ agent ▶ warmup ▶ quiesce ▶ freeze ▶ start
//! ```
//!
//! The files are made in `STATE/templates/<name>.building`, which becomes
//! `STATE/templates/<name>` after the freeze. Whatever step fails, the microVM is
//! killed and both directories are removed.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use futures_util::future::{Either, select};
use jiff::Timestamp;
use tokio::net::UnixStream;
use tokio::process::Child;
use warren_vmm_api::{
    BootConfig, BootProtocol, CpuProfile, DiskConfig, DiskMode, VmStatus, VmVerb,
};

use super::layout::{self, BUILDING_SUFFIX};
use super::{Microvms, control, files, instance};
use crate::agent::{self, ENVD_VERSION};
use crate::error::chain;
use crate::kinds::{
    Blame, BuildError, BuildPlan, GuestPort, KindName, Progress, ProgressLine, Warmup,
};
use crate::process;
use crate::random;
use crate::store::TemplateRecord;

const MEMORY_MIB_RANGE: std::ops::RangeInclusive<u32> = 32..=65536;
const VCPUS_RANGE: std::ops::RangeInclusive<u8> = 1..=32;
const DISK_MIB_RANGE: std::ops::RangeInclusive<u32> = 16..=1_048_576;
/// RAM is given in units of huge pages.
const MEMORY_MIB_STEP: u32 = 2;
/// A kernel under an emulating KVM needs many seconds.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
const BOOT_POLL: Duration = Duration::from_millis(100);
/// Every interpreter and common program runs once.
const WARMUP_LIMIT: Duration = Duration::from_secs(1800);
const QUIESCE_LIMIT: Duration = Duration::from_secs(300);
const FREEZE_LIMIT: Duration = Duration::from_secs(300);
/// Lines of the console in an error.
const CONSOLE_LINES: usize = 30;

type Step<T> = Result<T, BuildError>;

impl Microvms {
    pub(super) async fn build_template(
        &self,
        plan: BuildPlan,
        progress: Progress,
    ) -> Step<TemplateRecord> {
        let Ok(_building) = self.building.try_lock() else {
            let message = "another build is under way; try again later";
            return Err(failed("validate", Blame::Later, message));
        };
        let name = plan.name.clone();
        let outcome = self.build_steps(plan, &progress).await;
        if outcome.is_err() {
            let _ = self.drop_template(name.clone()).await;
        }
        for path in [self.layout.template_building(&name), self.layout.build_run(&name)] {
            if let Err(error) = layout::remove_tree(&path) {
                tracing::warn!(template = %name, path = %path.display(), %error, "build left files");
            }
        }
        outcome
    }

    async fn build_steps(&self, plan: BuildPlan, progress: &Progress) -> Step<TemplateRecord> {
        let say = |step, message: String| progress(ProgressLine { step, message, detail: None });
        say("validate", format!("kernel {}", plan.kernel.display()));
        let plan = blocking("validate", move || validate(&plan).map(|()| plan)).await?;
        let building = self.layout.template_building(&plan.name);
        let run = self.layout.build_run(&plan.name);

        say("files", format!("disk of {} MiB, copy of {}", plan.disk_mib, plan.rootfs.display()));
        let (target, run_too, source, disk_mib) =
            (building.clone(), run.clone(), plan.rootfs.clone(), plan.disk_mib);
        blocking("files", move || make_files(&target, &run_too, &source, disk_mib)).await?;

        say("boot", format!("{} vCPU, {} MiB", plan.vcpus, plan.memory_mib));
        let mut machine = Machine::boot(&self.vmm, &run, &boot_config(&plan, &building, &run))?;
        let frozen = guest_steps(&mut machine, &plan, &building, progress).await;
        if frozen.is_err() {
            machine.kill().await;
        }
        frozen.map_err(|error| BuildError { console: machine.console(), ..error })?;

        let record = TemplateRecord {
            name: plan.name.clone(),
            aliases: plan.aliases.clone(),
            kind: KindName::Microvm,
            build_id: random::uuid(),
            vcpus: plan.vcpus,
            memory_mib: plan.memory_mib,
            disk_mib: plan.disk_mib,
            envd_version: ENVD_VERSION.to_owned(),
            created_at: Timestamp::now(),
        };
        let (final_path, record_too) = (self.layout.template(&plan.name), record.clone());
        blocking("freeze", move || publish(&building, &final_path, &record_too)).await?;

        say("start", "template process".to_owned());
        self.templates
            .ensure(&plan.name)
            .await
            .map_err(|error| failed("start", Blame::Node, chain(&error)))?;
        Ok(record)
    }
}

async fn guest_steps(
    machine: &mut Machine,
    plan: &BuildPlan,
    building: &Path,
    progress: &Progress,
) -> Step<()> {
    let say = |step, message: String| progress(ProgressLine { step, message, detail: None });
    let begin = std::time::Instant::now();
    machine.unless_dead("agent", wait_for_agent(&machine.vsock())).await?;
    say("agent", format!("answers after {} ms", begin.elapsed().as_millis()));

    if plan.warmup == Warmup::Full {
        let stream = machine.connect("warmup").await?;
        let lines = |line: String| progress(warmup_line(line));
        let call = agent::stream_lines(stream, "/warmup", WARMUP_LIMIT, lines);
        machine.unless_dead("warmup", call).await?;
    }

    say("quiesce", "compact memory, report free pages".to_owned());
    let stream = machine.connect("quiesce").await?;
    let call = agent::stream_lines(stream, "/quiesce", QUIESCE_LIMIT, |_| ());
    machine.unless_dead("quiesce", call).await?;

    say("freeze", "save state and memory".to_owned());
    machine.freeze(building).await
}

/// The agent's lines are objects, most with a `step` of their own.
fn warmup_line(line: String) -> ProgressLine {
    let Ok(detail) = serde_json::from_str::<serde_json::Value>(&line) else {
        return ProgressLine { step: "warmup", message: line, detail: None };
    };
    let mut message = detail["step"].as_str().unwrap_or("done").to_owned();
    if let (Some(files), Some(bytes)) = (detail["files"].as_u64(), detail["bytes"].as_u64()) {
        message.push_str(&format!(": {files} files, {} MiB", bytes >> 20));
    }
    if let Some(error) = detail["error"].as_str() {
        message.push_str(&format!(": {error}"));
    }
    ProgressLine { step: "warmup", message, detail: Some(detail) }
}

async fn wait_for_agent(vsock: &Path) -> Result<(), agent::AgentError> {
    let deadline = tokio::time::Instant::now() + BOOT_LIMIT;
    loop {
        let outcome = match instance::connect_vsock(vsock.to_owned(), GuestPort::Envd).await {
            Ok(stream) => agent::health(stream).await,
            Err(source) => Err(agent::AgentError::Connect(source)),
        };
        match outcome {
            Ok(()) => return Ok(()),
            Err(error) if tokio::time::Instant::now() > deadline => return Err(error),
            Err(_) => tokio::time::sleep(BOOT_POLL).await,
        }
    }
}

/// A cold microVM; our child.
struct Machine {
    child: Child,
    run: PathBuf,
}

impl Machine {
    fn boot(vmm: &Path, run: &Path, config: &BootConfig) -> Step<Self> {
        let node = |message: String| failed("boot", Blame::Node, message);
        let config_path = run.join("boot.json");
        let text = serde_json::to_vec_pretty(config).map_err(|error| node(error.to_string()))?;
        std::fs::write(&config_path, text).map_err(|error| node(error.to_string()))?;
        let log =
            std::fs::File::create(run.join("vmm.log")).map_err(|error| node(error.to_string()))?;
        let log_too = log.try_clone().map_err(|error| node(error.to_string()))?;
        let child = tokio::process::Command::new(vmm)
            .arg("boot")
            .arg("--config")
            .arg(&config_path)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(log_too)
            .process_group(0)
            .spawn()
            .map_err(|error| node(format!("start {}: {error}", vmm.display())))?;
        Ok(Self { child, run: run.to_owned() })
    }

    fn vsock(&self) -> PathBuf {
        self.run.join("vsock.sock")
    }

    async fn connect(&self, step: &'static str) -> Step<UnixStream> {
        instance::connect_vsock(self.vsock(), GuestPort::Envd)
            .await
            .map_err(|error| failed(step, Blame::Node, format!("connect to the agent: {error}")))
    }

    /// Runs a call to the agent, unless the VMM ends first.
    async fn unless_dead<T>(
        &mut self,
        step: &'static str,
        call: impl Future<Output = Result<T, agent::AgentError>>,
    ) -> Step<T> {
        let outcome = {
            let dead = std::pin::pin!(self.child.wait());
            match select(std::pin::pin!(call), dead).await {
                Either::Left((outcome, _)) => {
                    outcome.map_err(|error| failed(step, Blame::Node, chain(&error)))
                }
                Either::Right((status, _)) => {
                    Err(failed(step, Blame::Node, describe_exit(status.ok())))
                }
            }
        };
        outcome.map_err(|error| self.with_log(error))
    }

    async fn freeze(&mut self, directory: &Path) -> Step<()> {
        let verb = VmVerb::Freeze { directory: directory.to_owned() };
        let asked: Result<VmStatus, _> =
            control::ask(&self.run.join("control.sock"), verb, FREEZE_LIMIT).await;
        if let Err(error) = asked {
            return Err(self.with_log(failed("freeze", Blame::Node, chain(&error))));
        }
        match tokio::time::timeout(FREEZE_LIMIT, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(status) => {
                let error = failed("freeze", Blame::Node, describe_exit(status.ok()));
                Err(self.with_log(error))
            }
            Err(_) => Err(failed("freeze", Blame::Node, "the VMM did not end after the freeze")),
        }
    }

    async fn kill(&mut self) {
        let _ = self.child.start_kill();
        let _ = self.child.wait().await;
    }

    fn console(&self) -> Option<String> {
        let text = process::tail_lines(&self.run.join("console.log"), CONSOLE_LINES);
        (!text.is_empty()).then_some(text)
    }

    fn with_log(&self, mut error: BuildError) -> BuildError {
        let log = process::tail_lines(&self.run.join("vmm.log"), 5);
        if !log.is_empty() {
            error.message = format!("{}; the VMM says: {log}", error.message);
        }
        error
    }
}

fn validate(plan: &BuildPlan) -> Step<()> {
    let refuse = |message: String| Err(failed("validate", Blame::Request, message));
    if plan.name.as_str().ends_with(BUILDING_SUFFIX) {
        return refuse(format!("template names do not end with {BUILDING_SUFFIX}"));
    }
    if !VCPUS_RANGE.contains(&plan.vcpus) {
        return refuse(format!("{} vCPUs is not within 1 to 32", plan.vcpus));
    }
    if !MEMORY_MIB_RANGE.contains(&plan.memory_mib) {
        return refuse(format!("{} MiB of RAM is not within 32 to 65536", plan.memory_mib));
    }
    if !plan.memory_mib.is_multiple_of(MEMORY_MIB_STEP) {
        return refuse(format!("{} MiB of RAM is not a multiple of 2", plan.memory_mib));
    }
    if !DISK_MIB_RANGE.contains(&plan.disk_mib) {
        return refuse(format!("a disk of {} MiB is not within 16 to 1048576", plan.disk_mib));
    }
    let checks = files::check_kernel(&plan.kernel).and_then(|()| files::check_rootfs(&plan.rootfs));
    if let Err(error) = checks {
        return refuse(error.to_string());
    }
    let kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if let Err(error) = kvm {
        let message = format!("open /dev/kvm: {error}; load the kvm module and give access to it");
        return Err(failed("validate", Blame::Node, message));
    }
    Ok(())
}

fn make_files(building: &Path, run: &Path, rootfs: &Path, disk_mib: u32) -> Step<()> {
    let node = |what: &str| {
        let what = what.to_owned();
        move |error: std::io::Error| failed("files", Blame::Node, format!("{what}: {error}"))
    };
    for directory in [building, run] {
        layout::remove_tree(directory).map_err(node("remove an older build"))?;
        std::fs::create_dir_all(directory).map_err(node("make the build's directory"))?;
    }
    std::fs::copy(rootfs, building.join("rootfs")).map_err(node("copy the root file system"))?;
    let disk = building.join("disk");
    let file = std::fs::File::create(&disk).map_err(node("make the disk"))?;
    file.set_len(u64::from(disk_mib) << 20).map_err(node("size the disk"))?;
    let output = std::process::Command::new("mkfs.ext4")
        .args(["-q", "-F", "-m", "0", "-O", "^has_journal"])
        .args(["-E", "assume_storage_prezeroed=1,lazy_itable_init=1,nodiscard"])
        .arg(&disk)
        .stdin(Stdio::null())
        .output()
        .map_err(node("run mkfs.ext4 (package e2fsprogs)"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(failed("files", Blame::Node, format!("mkfs.ext4: {}", text.trim())));
    }
    Ok(())
}

fn boot_config(plan: &BuildPlan, building: &Path, run: &Path) -> BootConfig {
    let disk = |id: &str, mode| DiskConfig { id: id.to_owned(), path: building.join(id), mode };
    BootConfig {
        id: format!("build-{}", plan.name),
        directory: run.to_owned(),
        kernel: plan.kernel.clone(),
        command_line: String::new(),
        boot_protocol: BootProtocol::Linux64,
        vcpus: plan.vcpus,
        memory_bytes: u64::from(plan.memory_mib) << 20,
        cpu_profile: CpuProfile::Host,
        disks: vec![disk("rootfs", DiskMode::ReadOnly), disk("disk", DiskMode::Writable)],
        net: None,
    }
}

/// Makes the finished build the template, durably.
fn publish(building: &Path, target: &Path, record: &TemplateRecord) -> Step<()> {
    let node = |error: std::io::Error| {
        failed("freeze", Blame::Node, format!("publish the template: {error}"))
    };
    let text = serde_json::to_vec_pretty(record)
        .map_err(|error| failed("freeze", Blame::Node, error.to_string()))?;
    std::fs::write(building.join("template.json"), text).map_err(node)?;
    for name in ["template.json", "state", "memory", "disk", "rootfs"] {
        std::fs::File::open(building.join(name)).and_then(|file| file.sync_all()).map_err(node)?;
    }
    layout::remove_tree(target).map_err(node)?;
    std::fs::rename(building, target).map_err(node)?;
    let parent = target.parent().unwrap_or(target);
    std::fs::File::open(parent).and_then(|directory| directory.sync_all()).map_err(node)
}

async fn blocking<T: Send + 'static>(
    step: &'static str,
    work: impl FnOnce() -> Step<T> + Send + 'static,
) -> Step<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(failed(step, Blame::Node, error.to_string())))
}

fn failed(step: &'static str, blame: Blame, message: impl Into<String>) -> BuildError {
    BuildError { step, blame, message: message.into(), console: None }
}

fn describe_exit(status: Option<ExitStatus>) -> String {
    match status {
        Some(status) => match status.signal() {
            Some(signal) => format!("the VMM was ended by signal {signal}"),
            None => format!("the VMM ended with code {}", status.code().unwrap_or_default()),
        },
        None => "the VMM ended".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::TemplateName;

    fn plan() -> BuildPlan {
        BuildPlan {
            name: TemplateName::parse("t").unwrap(),
            aliases: Vec::new(),
            rootfs: "/nonexistent/rootfs".into(),
            kernel: "/nonexistent/kernel".into(),
            vcpus: 1,
            memory_mib: 128,
            disk_mib: 64,
            warmup: Warmup::Skip,
        }
    }

    #[test]
    fn one_mib_of_ram_is_refused() {
        let error = validate(&BuildPlan { memory_mib: 1, ..plan() }).unwrap_err();
        assert_eq!(error.blame, Blame::Request);
        assert_eq!(error.message, "1 MiB of RAM is not within 32 to 65536");
    }

    #[test]
    fn missing_kernel_is_named() {
        let error = validate(&plan()).unwrap_err();
        assert!(error.message.contains("/nonexistent/kernel"), "{error}");
    }
}
