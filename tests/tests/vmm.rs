//! `warren-vmm` alone, with guests of a few instructions: no kernel, no agent, no node.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use warren_tests::{Need, missing};
use warren_vmm_api::{
    BootConfig, BootProtocol, CheckpointRequest, ClientError, CpuProfile, DiskConfig, DiskMode,
    SpawnRequest, TemplateClient, VmClient, VmState, VmVerb,
};

const PATIENCE: Duration = Duration::from_secs(30);
const MEMORY_BYTES: u64 = 32 << 20;
/// Where the guest's code is loaded and entered.
const ENTRY: u64 = 0x10_0000;

/// mov $7,%al; mov $0x501,%dx; out %al,(%dx)
const END_WITH_7: &[u8] = &[0xb0, 7, 0x66, 0xba, 0x01, 0x05, 0xee];
/// cli; hlt; jmp to the hlt
const HALT: &[u8] = &[0xfa, 0xf4, 0xeb, 0xfd];

/// Names frame 0x200 as the source of a copy and halts until a timer 12e9 TSC ticks away;
/// then copies to frame 0x202 and says Y on the serial console if that worked, or N.
const COPY_AROUND_A_HALT: &[u8] = &[
    // cli; gate of vector 0x40 at 0x300400 for the handler at 0x10009b; lidt 0x1000c0
    0xfa, 0xb8, 0x9b, 0x00, 0x10, 0x00, 0x66, 0x89, 0x04, 0x25, 0x00, 0x04, 0x30, 0x00, 0x66, 0xc7,
    0x04, 0x25, 0x02, 0x04, 0x30, 0x00, 0x10, 0x00, 0x66, 0xc7, 0x04, 0x25, 0x04, 0x04, 0x30, 0x00,
    0x00, 0x8e, 0xc1, 0xe8, 0x10, 0x66, 0x89, 0x04, 0x25, 0x06, 0x04, 0x30, 0x00, 0x0f, 0x01, 0x1c,
    0x25, 0xc0, 0x00, 0x10, 0x00, // x2APIC on: MSR 0x1b |= 0xc00
    0xb9, 0x1b, 0x00, 0x00, 0x00, 0x0f, 0x32, 0x0d, 0x00, 0x0c, 0x00, 0x00, 0x0f, 0x30, 0x31, 0xd2,
    // local APIC on, its timer in TSC deadline mode: MSRs 0x80f = 0x1ff, 0x832 = 0x40040
    0xb9, 0x0f, 0x08, 0x00, 0x00, 0xb8, 0xff, 0x01, 0x00, 0x00, 0x0f, 0x30, 0xb9, 0x32, 0x08, 0x00,
    0x00, 0xb8, 0x40, 0x00, 0x04, 0x00, 0x0f, 0x30, // movq $0x1111,0x200000
    0x48, 0xc7, 0x04, 0x25, 0x00, 0x00, 0x20, 0x00, 0x11, 0x11, 0x00, 0x00,
    // mov $0x200,%eax; mov $0x544,%dx; out %eax,(%dx)
    0xb8, 0x00, 0x02, 0x00, 0x00, 0x66, 0xba, 0x44, 0x05, 0xef,
    // MSR 0x6e0 = rdtsc + 12e9
    0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0, 0x48, 0xba, 0x00, 0x78, 0x41, 0xcb, 0x02,
    0x00, 0x00, 0x00, 0x48, 0x01, 0xd0, 0x48, 0x89, 0xc2, 0x48, 0xc1, 0xea, 0x20, 0xb9, 0xe0, 0x06,
    0x00, 0x00, 0x0f, 0x30, // sti; hlt; jmp to the hlt
    0xfb, 0xf4, 0xeb, 0xfd, // handler: mov $0x202,%eax; mov $0x548,%dx; out %eax,(%dx)
    0xb8, 0x02, 0x02, 0x00, 0x00, 0x66, 0xba, 0x48, 0x05, 0xef,
    // cmpq $0x1111,0x202000; Y or N to port 0x3f8; cli; hlt; jmp to the hlt
    0xb0, 0x4e, 0x48, 0x81, 0x3c, 0x25, 0x00, 0x20, 0x20, 0x00, 0x11, 0x11, 0x00, 0x00, 0x75, 0x02,
    0xb0, 0x59, 0x66, 0xba, 0xf8, 0x03, 0xee, 0xfa, 0xf4, 0xeb, 0xfd,
    // limit and base of the interrupt table
    0xff, 0x0f, 0x00, 0x00, 0x30, 0x00, 0x00, 0x00, 0x00, 0x00,
];

/// Says A, B, … Z, A, … on the serial console for ever, with a pause after each letter.
const LETTERS: &[u8] = &[
    // mov $'A',%bl; mov $20000,%ecx; dec %ecx; jnz to the dec
    0xb3, 0x41, 0xb9, 0x20, 0x4e, 0x00, 0x00, 0xff, 0xc9, 0x75, 0xfc,
    // mov %bl,%al; mov $0x3f8,%dx; out %al,(%dx); inc %bl; cmp $'Z'+1,%bl
    0x88, 0xd8, 0x66, 0xba, 0xf8, 0x03, 0xee, 0xfe, 0xc3, 0x80, 0xfb, 0x5b,
    // jne to the mov of %ecx; mov $'A',%bl; jmp to the mov of %ecx
    0x75, 0xe9, 0xb3, 0x41, 0xeb, 0xe5,
];

/// A guest that can be frozen at once, because it halts until a timer fires, and then does
/// `work` with interrupts off.
fn after_a_halt(work: &[u8]) -> Vec<u8> {
    const HANDLER: usize = 0x9b;
    const INTERRUPT_TABLE: usize = 0xc0;
    let mut code = COPY_AROUND_A_HALT[..HANDLER].to_vec();
    code.extend(work);
    assert!(code.len() <= INTERRUPT_TABLE, "the work is too long");
    code.resize(INTERRUPT_TABLE, 0);
    code.extend(&COPY_AROUND_A_HALT[INTERRUPT_TABLE..]);
    code
}

fn program() -> PathBuf {
    // The test binary lies in target/…/release/deps.
    let own = std::env::current_exe().expect("own path");
    let directory = own.parent().and_then(Path::parent).expect("a build directory");
    let built = directory.join("warren-vmm");
    match std::env::var_os("WARREN_BIN") {
        Some(directory) => Path::new(&directory).join("warren-vmm"),
        None => built,
    }
}

/// An ELF file whose one segment is `code` at [`ENTRY`].
fn elf(code: &[u8]) -> Vec<u8> {
    const HEADERS: u64 = 64 + 56;
    let length = u64::try_from(code.len()).expect("a short program");
    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]); // executable, x86-64, version
    for word in [ENTRY, 64, 0] {
        file.extend(word.to_le_bytes()); // entry, program headers, section headers
    }
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]);
    file.extend([1, 0, 0, 0, 7, 0, 0, 0]); // PT_LOAD, rwx
    for word in [HEADERS, ENTRY, ENTRY, length, length, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

/// A microVM to be booted, in a directory of its own.
struct Guest {
    directory: TempDir,
    config: BootConfig,
}

impl Guest {
    fn new(code: &[u8]) -> Self {
        let directory =
            tempfile::Builder::new().prefix("wv").tempdir_in("/tmp").expect("directory");
        let kernel = directory.path().join("kernel");
        std::fs::write(&kernel, elf(code)).expect("write the kernel");
        let config = BootConfig {
            id: "test".to_owned(),
            directory: directory.path().to_owned(),
            kernel,
            command_line: String::new(),
            boot_protocol: BootProtocol::Linux64,
            vcpus: 1,
            memory_bytes: MEMORY_BYTES,
            cpu_profile: CpuProfile::Host,
            disks: Vec::new(),
            net: None,
        };
        Self { directory, config }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self) -> Command {
        let config = self.path("boot.json");
        std::fs::write(&config, serde_json::to_vec(&self.config).expect("encode"))
            .expect("write the configuration");
        let mut command = Command::new(program());
        command.args(["boot", "--config"]).arg(config);
        command
    }

    /// Runs it to its end.
    fn run(&self) -> Output {
        self.command().output().expect("run warren-vmm")
    }

    /// Starts it and waits for its control socket.
    fn start(&self) -> Running {
        let child = self.command().stderr(Stdio::inherit()).spawn().expect("start warren-vmm");
        Running { child, socket: self.path("control.sock") }
    }

    /// Starts it, freezes it, and tells where the template's files are.
    fn freeze(&self) -> PathBuf {
        let files = self.path("template");
        std::fs::create_dir(&files).expect("make the template's directory");
        let running = self.start();
        running.client().verb(VmVerb::Freeze { directory: files.clone() }).expect("freeze");
        assert_eq!(running.exit_code(), 0);
        files
    }

    /// A clone, in a directory of its own.
    fn spawn(&self, template: &TemplateClient, name: &str) -> VmClient {
        self.spawn_from(template, name, None).expect("spawn")
    }

    /// A clone that goes on from a snapshot.
    fn spawn_from(
        &self,
        template: &TemplateClient,
        name: &str,
        snapshot: Option<&Path>,
    ) -> Result<VmClient, ClientError> {
        let directory = self.path(name);
        std::fs::create_dir(&directory).expect("make the clone's directory");
        template.spawn(SpawnRequest {
            id: name.to_owned(),
            directory: directory.clone(),
            disks: BTreeMap::new(),
            snapshot: snapshot.map(Path::to_owned),
            layers: BTreeMap::new(),
        })?;
        VmClient::connect(&directory.join("control.sock"), PATIENCE)
    }

    /// Keeps this moment of a clone; tells how to have clones from it, and the process.
    fn checkpoint(&self, clone: &mut VmClient, name: &str) -> (TemplateClient, u32) {
        let directory = self.path(name);
        std::fs::create_dir(&directory).expect("make the checkpoint's directory");
        let socket = directory.join("control.sock");
        let request = CheckpointRequest { directory, disks: BTreeMap::new() };
        let reply = clone.checkpoint(request).expect("take a checkpoint");
        // Whoever looks for the process behind the socket finds the frozen one.
        let stream = UnixStream::connect(&socket).expect("connect");
        let peer = rustix::net::sockopt::socket_peercred(&stream).expect("peer");
        assert_eq!(u32::try_from(peer.pid.as_raw_nonzero().get()), Ok(reply.pid));
        (TemplateClient::new(&socket, PATIENCE), reply.pid)
    }

    /// Waits until the serial console has said something after the first `seen` bytes.
    fn console_beyond(&self, directory: &str, seen: usize) -> String {
        let begin = Instant::now();
        loop {
            let text = self.console(directory);
            if text.len() > seen {
                return text;
            }
            assert!(begin.elapsed() < PATIENCE, "{directory} says no more than {text}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What came over the serial console of the guest or of a clone.
    fn console(&self, directory: &str) -> String {
        std::fs::read_to_string(self.path(directory).join("console.log")).unwrap_or_default()
    }

    /// What it says when it refuses to start.
    fn refusal(&self) -> String {
        let output = self.run();
        assert!(!output.status.success(), "it started");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

/// A process that is ended with the test.
struct Running {
    child: Child,
    socket: PathBuf,
}

impl Running {
    fn client(&self) -> VmClient {
        let begin = Instant::now();
        loop {
            match VmClient::connect(&self.socket, PATIENCE) {
                Ok(client) => return client,
                Err(error) => assert!(begin.elapsed() < PATIENCE, "no control socket: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn exit_code(mut self) -> i32 {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("look after warren-vmm") {
                return status.code().expect("it was not killed");
            }
            assert!(begin.elapsed() < PATIENCE, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A template process over the files in `directory`.
fn template(directory: &Path) -> (Running, TemplateClient) {
    let socket = directory.join("template.sock");
    let child = Command::new(program())
        .args(["template", "--directory"])
        .arg(directory)
        .arg("--socket")
        .arg(&socket)
        .spawn()
        .expect("start the template");
    let client = TemplateClient::new(&socket, PATIENCE);
    let begin = Instant::now();
    while let Err(error) = client.status() {
        assert!(begin.elapsed() < PATIENCE, "no template: {error}");
        std::thread::sleep(Duration::from_millis(5));
    }
    (Running { child, socket }, client)
}

#[test]
fn guest_that_ends_gives_its_exit_code() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let output = Guest::new(END_WITH_7).run();
    assert_eq!(output.status.code(), Some(7), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn pages_are_zeroed_and_copied_by_port() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let code: Vec<u8> = [
        // movq $0x1111,0x200000; movq $0x2222,0x201000
        &[0x48, 0xc7, 0x04, 0x25, 0x00, 0x00, 0x20, 0x00, 0x11, 0x11, 0, 0][..],
        &[0x48, 0xc7, 0x04, 0x25, 0x00, 0x10, 0x20, 0x00, 0x22, 0x22, 0, 0],
        // copy frame 0x200 to frame 0x202
        &[0xb8, 0x00, 0x02, 0, 0, 0x66, 0xba, 0x44, 0x05, 0xef],
        &[0xb8, 0x02, 0x02, 0, 0, 0x66, 0xba, 0x48, 0x05, 0xef],
        // zero frame 0x201, and a frame that is not RAM
        &[0xb8, 0x01, 0x02, 0, 0, 0x66, 0xba, 0x40, 0x05, 0xef],
        &[0xb8, 0xff, 0xff, 0xff, 0xff, 0xef],
        // mov 0x202000,%rax; or 0x201000,%rax; cmp $0x1111,%rax; setne %al; end
        &[0x48, 0x8b, 0x04, 0x25, 0x00, 0x20, 0x20, 0x00],
        &[0x48, 0x0b, 0x04, 0x25, 0x00, 0x10, 0x20, 0x00],
        &[0x48, 0x3d, 0x11, 0x11, 0, 0, 0x0f, 0x95, 0xc0],
        &[0x66, 0xba, 0x01, 0x05, 0xee],
    ]
    .concat();
    let output = Guest::new(&code).run();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn registers_outside_every_device_read_as_ones_and_swallow_writes() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let code: Vec<u8> = [
        // Page tables map the first GiB only: map 0xd0000000 too.
        // movq $0xd0000083,0x300400 (by way of %rax); movq $0x300003,0xa018
        &[0xb8, 0x83, 0x00, 0x00, 0xd0, 0x48, 0x89, 0x04, 0x25, 0x00, 0x04, 0x30, 0x00][..],
        &[0x48, 0xc7, 0x04, 0x25, 0x18, 0xa0, 0x00, 0x00, 0x03, 0x00, 0x30, 0x00],
        // mov $0xd00f0000,%ebx; mov %eax,(%rbx); mov (%rbx),%eax; cmp $-1,%eax; setne %al; end
        &[0xbb, 0x00, 0x00, 0x0f, 0xd0, 0x89, 0x03, 0x8b, 0x03],
        &[0x83, 0xf8, 0xff, 0x0f, 0x95, 0xc0],
        &[0x66, 0xba, 0x01, 0x05, 0xee],
    ]
    .concat();
    let guest = Guest::new(&code);
    let output = guest.run();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains("reset"), "{said}");
    assert_eq!(output.status.code(), Some(0), "{said}");
}

#[test]
fn paused_guest_resumes_and_stops() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let guest = Guest::new(HALT);
    let running = guest.start();
    let mut client = running.client();
    assert_eq!(client.verb(VmVerb::Pause).expect("pause").state, VmState::Paused);
    assert_eq!(client.verb(VmVerb::Pause).expect("pause twice").state, VmState::Paused);
    assert_eq!(client.verb(VmVerb::Resume).expect("resume").state, VmState::Running);
    // A pause that comes before the vCPU has entered the guest interrupts nothing.
    let begin = Instant::now();
    while client.stats().expect("stats").exits.interrupted == 0 {
        assert!(begin.elapsed() < PATIENCE, "pausing does not interrupt the vCPU");
        client.verb(VmVerb::Pause).expect("pause");
        client.verb(VmVerb::Resume).expect("resume");
        std::thread::sleep(Duration::from_millis(5));
    }
    client.verb(VmVerb::Stop).expect("stop");
    assert_eq!(running.exit_code(), 0);
}

#[test]
fn clones_of_a_frozen_guest_live_apart() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let guest = Guest::new(HALT);
    let files = guest.freeze();

    let (process, template) = template(&files);
    let mut clones = Vec::new();
    for number in 0..3 {
        let directory = guest.path(&format!("clone{number}"));
        std::fs::create_dir(&directory).expect("make the clone's directory");
        let request = SpawnRequest {
            id: format!("clone{number}"),
            directory: directory.clone(),
            disks: BTreeMap::new(),
            snapshot: None,
            layers: BTreeMap::new(),
        };
        let reply = template.spawn(request).expect("spawn");
        let clone = VmClient::connect(&directory.join("control.sock"), PATIENCE).expect("connect");
        clones.push((reply.pid, clone));
    }
    assert_eq!(template.status().expect("status").spawned, 3);
    template.stop().expect("stop the template");
    assert_eq!(process.exit_code(), 0);
    for (number, (pid, clone)) in clones.iter_mut().enumerate() {
        let status = clone.status().expect("the clone outlives its template");
        assert_eq!(status.pid, *pid);
        assert_eq!(status.id, format!("clone{number}"));
        let refused = clone.verb(VmVerb::Freeze { directory: files.clone() });
        assert!(matches!(refused, Err(ClientError::Refused(_))), "a clone is no template");
        clone.verb(VmVerb::Stop).expect("stop");
    }
}

#[test]
fn vcpu_that_the_guest_never_starts_does_not_hold_up_a_freeze() {
    // A busy guest is frozen after 20 s all the same.
    const AT_ONCE: Duration = Duration::from_secs(10);
    if missing(&[Need::Kvm]) {
        return;
    }
    let mut guest = Guest::new(HALT);
    guest.config.vcpus = 2;
    let begin = Instant::now();
    let files = guest.freeze();
    assert!(begin.elapsed() < AT_ONCE, "frozen after {:?}", begin.elapsed());

    let (_process, template) = template(&files);
    assert_eq!(template.status().expect("status").vcpus, 2);
    let mut clone = guest.spawn(&template, "clone");
    assert_eq!(clone.status().expect("status").vcpus, 2);
    assert_eq!(clone.verb(VmVerb::Pause).expect("pause").state, VmState::Paused);
    assert_eq!(clone.verb(VmVerb::Resume).expect("resume").state, VmState::Running);
    clone.verb(VmVerb::Stop).expect("stop");
}

#[test]
fn clone_has_the_timer_and_the_half_done_page_copy_of_its_template() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let guest = Guest::new(COPY_AROUND_A_HALT);
    let files = guest.freeze();
    assert_eq!(guest.console("."), "", "the timer fired before the freeze");

    let (_process, template) = template(&files);
    let mut clone = guest.spawn(&template, "clone");
    let begin = Instant::now();
    while guest.console("clone").is_empty() {
        assert!(begin.elapsed() < PATIENCE, "the timer does not fire");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(guest.console("clone"), "Y");
    clone.verb(VmVerb::Stop).expect("stop");
}

/// The letter that [`LETTERS`] says after the last of `text`.
fn letter_after(text: &str) -> u8 {
    match text.bytes().last() {
        None | Some(b'Z') => b'A',
        Some(letter) => letter + 1,
    }
}

fn assert_alphabet(text: &str, from: u8) {
    let mut expected = from;
    for letter in text.bytes() {
        assert_eq!(letter, expected, "{text} does not go on from {}", char::from(from));
        expected = if letter == b'Z' { b'A' } else { letter + 1 };
    }
}

#[test]
fn checkpoint_of_a_busy_clone_goes_on_where_it_was_taken() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let guest = Guest::new(&after_a_halt(LETTERS));
    let files = guest.freeze();
    let (_process, template) = template(&files);
    let mut clone = guest.spawn(&template, "clone");
    guest.console_beyond("clone", 3);

    // Stopped, so that it is known how far it is; a checkpoint leaves it stopped.
    clone.verb(VmVerb::Pause).expect("pause");
    let said = guest.console("clone");
    let (moment, frozen) = guest.checkpoint(&mut clone, "moment");
    assert_eq!(clone.status().expect("status").state, VmState::Paused);
    clone.verb(VmVerb::Resume).expect("resume");

    // Twice from one moment, and once from a moment of a clone of it.
    let next = letter_after(&said);
    let mut first = guest.spawn(&moment, "first");
    let second = guest.spawn(&moment, "second");
    for name in ["first", "second"] {
        assert_alphabet(&guest.console_beyond(name, 30), next);
    }
    let (later, _) = guest.checkpoint(&mut first, "later");
    let third = guest.spawn(&later, "third");
    let heard = guest.console_beyond("third", 0);
    assert!(heard.as_bytes()[0].is_ascii_uppercase());
    assert_alphabet(&heard, heard.as_bytes()[0]);
    assert_alphabet(&guest.console_beyond("clone", said.len()), b'A');

    // What was frozen needs nobody else, and holds nothing of the clone's VM.
    clone.verb(VmVerb::Stop).expect("stop");
    guest.spawn(&moment, "fourth").verb(VmVerb::Stop).expect("stop");
    assert_eq!(moment.status().expect("status").spawned, 3);
    let open: Vec<_> = std::fs::read_dir(format!("/proc/{frozen}/fd"))
        .expect("descriptors of the frozen process")
        .map(|entry| std::fs::read_link(entry.expect("entry").path()).unwrap_or_default())
        .collect();
    let mapped = std::fs::read_to_string(format!("/proc/{frozen}/maps")).expect("mappings");
    assert!(!mapped.contains("kvm-vcpu"), "{mapped}");
    assert!(!open.iter().any(|target| target.to_string_lossy().contains("kvm-v")), "{open:?}");
    for mut client in [first, second, third] {
        client.verb(VmVerb::Stop).expect("stop");
    }
    for template in [moment, later] {
        template.stop().expect("stop");
    }
}

#[test]
fn snapshot_goes_on_where_it_was_taken_each_time() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let guest = Guest::new(&after_a_halt(LETTERS));
    let files = guest.freeze();
    let (_process, template) = template(&files);
    let save = |clone: &mut VmClient, name: &str| {
        clone.verb(VmVerb::Pause).expect("pause");
        let (moment, _) = guest.checkpoint(clone, &format!("{name}-moment"));
        clone.verb(VmVerb::Stop).expect("stop");
        let directory = guest.path(name);
        std::fs::create_dir(&directory).expect("make the snapshot's directory");
        let reply = moment.save(directory.clone()).expect("save");
        assert!((4096..16 << 20).contains(&reply.page_bytes), "{reply:?}");
        moment.stop().expect("stop");
        directory
    };
    let error = template.save(guest.path(".")).expect_err("a template is saved already");
    assert!(error.to_string().contains("this is a template"), "{error}");

    let mut clone = guest.spawn(&template, "clone");
    guest.console_beyond("clone", 3);
    let snapshot = save(&mut clone, "snapshot");
    let next = letter_after(&guest.console("clone"));
    let resume =
        |name: &str, from: &Path| guest.spawn_from(&template, name, Some(from)).expect("resume");
    // A snapshot is not used up; and what was resumed can be saved again.
    for name in ["first", "second"] {
        let mut clone = resume(name, &snapshot);
        assert_alphabet(&guest.console_beyond(name, 30), next);
        let again = save(&mut clone, &format!("{name}-again"));
        let next = letter_after(&guest.console(name));
        let name = format!("{name}-resumed");
        let mut clone = resume(&name, &again);
        assert_alphabet(&guest.console_beyond(&name, 3), next);
        clone.verb(VmVerb::Stop).expect("stop");
    }

    // Another template, damage, nothing at all.
    let other = Guest::new(&after_a_halt(HALT));
    let other_files = other.freeze();
    let (_other_process, other_template) = self::template(&other_files);
    let refused = |template: &TemplateClient, name: &str, from: &Path| {
        guest.spawn_from(template, name, Some(from)).expect_err("it cannot be").to_string()
    };
    let said = refused(&other_template, "elsewhere", &snapshot);
    assert!(said.contains("another template"), "{said}");
    let pages = snapshot.join("pages");
    let mut bytes = std::fs::read(&pages).expect("read the pages");
    bytes[5000] ^= 1;
    std::fs::write(&pages, bytes).expect("damage the pages");
    let said = refused(&template, "damaged", &snapshot);
    assert!(said.contains("checksum"), "{said}");
    let said = refused(&template, "missing", &guest.path("nowhere"));
    assert!(said.contains("read state file"), "{said}");
    template.status().expect("the template lives on");
}

#[test]
fn checkpoint_that_cannot_be_taken_leaves_the_clone_running() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let guest = Guest::new(&after_a_halt(LETTERS));
    let booted = guest.start();
    let request = || CheckpointRequest { directory: guest.path("nowhere"), disks: BTreeMap::new() };
    let error = booted.client().checkpoint(request()).expect_err("it was booted");
    assert!(error.to_string().contains("booted"), "{error}");
    booted.client().verb(VmVerb::Stop).expect("stop");
    assert_eq!(booted.exit_code(), 0);

    let files = guest.freeze();
    let (_process, template) = template(&files);
    let mut clone = guest.spawn(&template, "clone");
    let error = clone.checkpoint(request()).expect_err("there is no such directory");
    assert!(matches!(error, ClientError::Refused(_)), "{error}");
    assert_eq!(clone.status().expect("status").state, VmState::Running);
    guest.console_beyond("clone", guest.console("clone").len());
    clone.verb(VmVerb::Stop).expect("stop");
}

#[test]
fn spawn_into_a_missing_directory_fails_and_the_template_lives_on() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let guest = Guest::new(HALT);
    let files = guest.freeze();
    let (_process, template) = template(&files);
    let request = SpawnRequest {
        id: "lost".to_owned(),
        directory: guest.path("nowhere"),
        disks: BTreeMap::new(),
        snapshot: None,
        layers: BTreeMap::new(),
    };
    let error = template.spawn(request).expect_err("there is no such directory");
    assert!(matches!(error, ClientError::Refused(_)), "{error}");
    template.status().expect("the template lives on");
}

#[test]
fn damaged_template_is_refused() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let guest = Guest::new(HALT);
    let files = guest.freeze();
    let state = files.join("state");
    let mut bytes = std::fs::read(&state).expect("read the state");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&state, bytes).expect("damage the state");
    let output = Command::new(program())
        .args(["template", "--directory"])
        .arg(&files)
        .arg("--socket")
        .arg(guest.path("template.sock"))
        .output()
        .expect("run the template");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(said.contains("checksum"), "{said}");
}

#[test]
fn control_socket_answers_nonsense_and_other_versions_with_an_error() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let guest = Guest::new(HALT);
    let running = guest.start();
    drop(running.client());
    for (line, word) in [
        ("nonsense\n", "read a control request"),
        ("{\"version\":99,\"verb\":\"status\"}\n", "protocol version 99"),
        ("{\"version\":1,\"verb\":\"dance\"}\n", "unknown variant"),
    ] {
        let mut stream = UnixStream::connect(&running.socket).expect("connect");
        stream.set_read_timeout(Some(PATIENCE)).expect("set a time limit");
        stream.write_all(line.as_bytes()).expect("write");
        let mut reply = String::new();
        BufReader::new(stream).read_line(&mut reply).expect("an answer");
        assert!(reply.contains("error") && reply.contains(word), "{line}: {reply}");
    }
    running.client().status().expect("it lives on");
}

#[test]
fn microvm_that_cannot_start_names_the_step_and_what_to_do() {
    if missing(&[Need::Kvm]) {
        return;
    }
    let good = || Guest::new(HALT);

    let mut guest = good();
    guest.config.kernel = guest.path("no-such-kernel");
    let said = guest.refusal();
    assert!(said.contains("load kernel") && said.contains("no-such-kernel"), "{said}");

    let guest = good();
    let whole = std::fs::read(&guest.config.kernel).expect("read the kernel");
    std::fs::write(&guest.config.kernel, &whole[..100]).expect("truncate");
    let said = guest.refusal();
    assert!(said.contains("load kernel") && said.contains("advice"), "{said}");

    let guest = good();
    std::fs::write(&guest.config.kernel, vec![b'x'; 5000]).expect("write");
    let said = guest.refusal();
    assert!(said.contains("vmlinux"), "{said}");

    let mut guest = good();
    guest.config.memory_bytes = 1 << 20;
    let said = guest.refusal();
    assert!(said.contains("32 MiB"), "{said}");

    let mut guest = good();
    guest.config.vcpus = 33;
    let said = guest.refusal();
    assert!(said.contains("33 vCPUs"), "{said}");

    let mut guest = good();
    let empty = guest.path("empty");
    std::fs::write(&empty, b"").expect("write");
    guest.config.disks.push(DiskConfig {
        id: "rootfs".to_owned(),
        path: empty,
        mode: DiskMode::ReadOnly,
    });
    let said = guest.refusal();
    assert!(said.contains("rootfs") && said.contains("0 bytes"), "{said}");

    let mut guest = good();
    guest.config.directory = guest.path("nowhere");
    let said = guest.refusal();
    assert!(said.contains("nowhere"), "{said}");

    let guest = good();
    let mut command = guest.command();
    std::fs::write(guest.path("boot.json"), b"{\"id\": 3}").expect("write");
    let output = command.output().expect("run");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("read configuration"), "{said}");
}

#[test]
fn wrong_words_on_the_command_line_show_the_usage() {
    for words in [&[][..], &["boot"][..], &["template", "--directory", "x"][..], &["fly"][..]] {
        let output = Command::new(program()).args(words).output().expect("run");
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage"));
    }
}
