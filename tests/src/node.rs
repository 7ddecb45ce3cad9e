//! A real `warrend` in directories of its own.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::artifacts::{Artifacts, cache};
use crate::census::{Census, processes_below};
use crate::http::{Client, Reply};
use crate::sandbox::Sandbox;
use crate::shared::{self, Contents};

const START_PATIENCE: Duration = Duration::from_secs(60);
const STOP_PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);

/// The template that the shared state holds.
pub(crate) const TEMPLATE: &str = "base";

/// The template that the code interpreter's SDK asks for by default.
pub(crate) const CODE_INTERPRETER_TEMPLATE: &str = "code-interpreter-v1";

/// How a node is to start.
#[derive(Debug, Clone, Default)]
pub struct NodeOptions {
    /// More flags for `warrend`.
    pub flags: Vec<String>,
    /// Use this state directory and leave it there.
    pub state: Option<PathBuf>,
    /// Start without the shared template.
    pub without_template: bool,
    /// Start with the shared template of the code interpreter instead of `base`.
    pub code_interpreter: bool,
    /// A command that runs the daemon: its last arguments are the daemon's own line.
    pub wrapper: Vec<String>,
}

/// A running `warrend`. Dropping it ends everything that it started.
#[derive(Debug)]
pub struct TestNode {
    artifacts: Artifacts,
    options: NodeOptions,
    directory: TempDir,
    run: TempDir,
    state: PathBuf,
    address: String,
    daemon: Option<Child>,
    client: Client,
}

impl TestNode {
    /// Starts a node with the shared template.
    ///
    /// # Panics
    /// If it does not come up.
    #[must_use]
    pub fn start() -> Self {
        Self::with(NodeOptions::default())
    }

    /// Starts a node in another way.
    ///
    /// # Panics
    /// If it does not come up.
    #[must_use]
    pub fn with(options: NodeOptions) -> Self {
        let mut node = Self::prepared(options);
        if let Err(log) = node.launch() {
            panic!("warrend does not come up:\n{log}");
        }
        node
    }

    /// Starts a node that is expected to refuse, and returns what it said.
    ///
    /// # Panics
    /// If it comes up.
    #[must_use]
    pub fn refused(options: NodeOptions) -> String {
        match Self::prepared(options).launch() {
            Err(said) => said,
            Ok(()) => panic!("warrend came up"),
        }
    }

    fn prepared(options: NodeOptions) -> Self {
        let artifacts = Artifacts::find();
        // On the file system of the shared template, so that files can be linked.
        let directory = TempDir::new_in(Self::scratch()).expect("make a directory");
        // Socket paths are short of room.
        let run =
            tempfile::Builder::new().prefix("wt").tempdir_in("/tmp").expect("make a directory");
        let state = options.state.clone().unwrap_or_else(|| directory.path().join("state"));
        if options.state.is_none() && !options.without_template {
            let contents = match options.code_interpreter {
                true => Contents::CodeInterpreter,
                false => Contents::Base,
            };
            shared::copy_to(&artifacts, contents, &state);
        }
        let address = format!("127.0.0.1:{}", free_port());
        Self {
            client: Client::new(&address),
            artifacts,
            options,
            directory,
            run,
            state,
            address,
            daemon: None,
        }
    }

    /// Starts the daemon; what it said if it ends instead.
    fn launch(&mut self) -> Result<(), String> {
        let log_path = self.log_path();
        let log = File::options().create(true).append(true).open(&log_path).expect("open the log");
        let program = self.artifacts.program("warrend");
        let mut command = match self.options.wrapper.split_first() {
            None => Command::new(program),
            Some((wrapper, arguments)) => {
                let mut command = Command::new(wrapper);
                command.args(arguments).arg(program);
                command
            }
        };
        let mut child = command
            .args(["--listen", &self.address, "--state-dir"])
            .arg(&self.state)
            .arg("--run-dir")
            .arg(self.run_directory())
            .arg("--kernel")
            .arg(&self.artifacts.kernel)
            .args(&self.options.flags)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("share the log"))
            .stderr(log)
            .process_group(0)
            .spawn()
            .expect("start warrend");
        let deadline = Instant::now() + START_PATIENCE;
        let bare = Client::new(&self.address);
        while !bare.send("GET", "/health", &[], b"").is_ok_and(|reply| reply.status < 300) {
            let ended = child.try_wait().expect("look after warrend").is_some();
            if ended || Instant::now() > deadline {
                let _ = child.kill();
                let _ = child.wait();
                return Err(std::fs::read_to_string(&log_path).unwrap_or_default());
            }
            std::thread::sleep(POLL);
        }
        self.daemon = Some(child);
        let key = std::fs::read_to_string(self.state.join("api-key")).unwrap_or_default();
        self.client = Client::new(&self.address).with_header("x-api-key", key.trim());
        Ok(())
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The API, with the key of this node.
    #[must_use]
    pub fn api(&self) -> &Client {
        &self.client
    }

    /// The key in the file that the daemon left for local users.
    #[must_use]
    pub fn api_key(&self) -> String {
        std::fs::read_to_string(self.state.join("api-key")).unwrap_or_default().trim().to_owned()
    }

    /// What must last.
    #[must_use]
    pub fn state_directory(&self) -> &Path {
        &self.state
    }

    /// Sockets and logs.
    #[must_use]
    pub fn run_directory(&self) -> PathBuf {
        self.run.path().join("run")
    }

    /// The programs, kernel and image in use.
    #[must_use]
    pub fn artifacts(&self) -> &Artifacts {
        &self.artifacts
    }

    /// The daemon's log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The file of the daemon's log.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        self.run.path().join("warrend.log")
    }

    /// Process id of the daemon.
    ///
    /// # Panics
    /// If it does not run.
    #[must_use]
    pub fn daemon(&self) -> u32 {
        self.daemon.as_ref().expect("warrend runs").id()
    }

    /// Asks for a sandbox; `more` is merged into the request.
    #[must_use]
    pub fn try_create(&self, more: &Value) -> Reply {
        let mut body = json!({"templateID": TEMPLATE, "timeout": 600});
        if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
            body.extend(more.clone());
        }
        self.client.post("/v2/sandboxes", &body)
    }

    /// A new sandbox of the shared template.
    ///
    /// # Panics
    /// If it is not created.
    #[must_use]
    pub fn create(&self) -> Sandbox {
        self.create_with(&json!({}))
    }

    /// A new sandbox with more in the request.
    ///
    /// # Panics
    /// If it is not created.
    #[must_use]
    pub fn create_with(&self, more: &Value) -> Sandbox {
        let reply = self.try_create(more);
        assert_eq!(reply.status, 201, "create: {}\n{}", reply.text(), self.log());
        Sandbox::of(&self.address, &reply.json())
    }

    /// Kills a sandbox.
    #[must_use]
    pub fn kill(&self, id: &str) -> Reply {
        self.client.delete(&format!("/sandboxes/{id}"))
    }

    /// Pauses a sandbox.
    #[must_use]
    pub fn pause(&self, id: &str) -> Reply {
        self.client.post(&format!("/sandboxes/{id}/pause"), &json!({}))
    }

    /// A sandbox that runs, or is paused and resumed by this.
    ///
    /// # Panics
    /// If it is neither, or not resumed.
    #[must_use]
    pub fn connect(&self, id: &str) -> Sandbox {
        let path = format!("/v2/sandboxes/{id}/connect");
        let reply = self.client.post(&path, &json!({"timeout": 600}));
        assert!(matches!(reply.status, 200 | 201), "connect: {}\n{}", reply.text(), self.log());
        Sandbox::of(&self.address, &reply.json())
    }

    /// Children of a running sandbox.
    ///
    /// # Panics
    /// If one of them is not made.
    #[must_use]
    pub fn fork(&self, id: &str, count: usize) -> Vec<Sandbox> {
        let path = format!("/sandboxes/{id}/fork");
        let body = json!({"timeout": 600, "count": count});
        let outcomes = self.client.post(&path, &body).expect(201).json();
        let child = |outcome: &Value| {
            assert!(outcome["sandbox"].is_object(), "fork: {outcome}\n{}", self.log());
            Sandbox::of(&self.address, &outcome["sandbox"])
        };
        outcomes.as_array().expect("a list").iter().map(child).collect()
    }

    /// Ids of the sandboxes that run or are paused.
    ///
    /// # Panics
    /// If the list is not one.
    #[must_use]
    pub fn ids(&self) -> Vec<String> {
        let list = self.client.get("/v2/sandboxes?limit=100").expect(200).json();
        let id = |sandbox: &Value| sandbox["sandboxID"].as_str().expect("an id").to_owned();
        list.as_array().expect("a list").iter().map(id).collect()
    }

    /// Counts what the node holds now.
    #[must_use]
    pub fn census(&self, sandboxes: &[String]) -> Census {
        Census::of(
            self.daemon(),
            &[self.state.as_path(), self.run_directory().as_path()],
            sandboxes,
        )
    }

    /// SIGKILL for the process of one sandbox.
    ///
    /// # Panics
    /// If there is none.
    pub fn kill_process_of(&self, id: &str) {
        let pid = self.process_of(id).expect("the sandbox has a process");
        signal(pid, Signal::KILL);
    }

    /// Processes that belong to the node, the daemon among them.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        processes_below(&self.run_directory())
    }

    /// The process that holds the sandbox's control socket.
    #[must_use]
    pub fn process_of(&self, id: &str) -> Option<u32> {
        let directory = self.run_directory().join("sandboxes").join(id);
        let stream = UnixStream::connect(directory.join("control.sock")).ok()?;
        let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }

    /// A directory on the file system of the shared template.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    pub fn scratch() -> PathBuf {
        let nodes = cache().join("test-nodes");
        std::fs::create_dir_all(&nodes).expect("make the directory of test nodes");
        nodes
    }

    /// Builds one more template, with flags of `warren template build`.
    ///
    /// # Panics
    /// If that fails.
    pub fn build_template(&self, name: &str, rootfs: &Path, flags: &[&str]) {
        shared::build_template(self, name, rootfs, flags);
    }

    /// Copies the state with the shared template; big files are hard links.
    pub fn copy_shared_state(target: &Path) {
        shared::copy_to(&Artifacts::find(), Contents::Base, target);
    }

    /// SIGKILL for the daemon alone; what it started lives on.
    ///
    /// # Panics
    /// If it does not run.
    pub fn kill_daemon(&mut self) {
        let mut child = self.daemon.take().expect("warrend runs");
        child.kill().expect("kill warrend");
        child.wait().expect("wait for warrend");
    }

    /// SIGTERM for the daemon, and waits until it has ended.
    ///
    /// # Panics
    /// If it does not stop in time.
    pub fn stop_daemon(&mut self) {
        let mut child = self.daemon.take().expect("warrend runs");
        signal(child.id(), Signal::TERM);
        assert!(ends_in_time(&mut child), "warrend does not stop:\n{}", self.log());
    }

    /// Starts the daemon again on the same directories and address.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn start_daemon(&mut self) {
        if let Err(log) = self.launch() {
            panic!("warrend does not come up again:\n{log}");
        }
    }
}

impl TestNode {
    /// Lets the daemon clean up, its control groups too; kills one that does not.
    fn end_daemon(&mut self) {
        let Some(mut child) = self.daemon.take() else { return };
        let body = json!({"sandboxes": "kill"}).to_string();
        let headers = [("content-type", "application/json")];
        let client = self.client.clone().with_patience(STOP_PATIENCE);
        let asked = client.send("POST", "/v1/node/stop", &headers, body.as_bytes()).is_ok();
        if !asked || !ends_in_time(&mut child) {
            let _ = child.kill();
        }
        let _ = child.wait();
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        self.end_daemon();
        // Templates and clones outlive a daemon that was killed, by design.
        let directories = [self.directory.path(), self.run.path()];
        let deadline = Instant::now() + STOP_PATIENCE;
        while Instant::now() < deadline {
            let left: Vec<u32> =
                directories.iter().flat_map(|directory| processes_below(directory)).collect();
            if left.is_empty() {
                break;
            }
            left.into_iter().for_each(|pid| signal(pid, Signal::KILL));
            std::thread::sleep(POLL);
        }
        if std::thread::panicking() {
            eprintln!("---- warrend's log ----\n{}", tail(&self.log()));
        }
    }
}

/// Whether a daemon that was asked to stop has ended within [`STOP_PATIENCE`].
fn ends_in_time(daemon: &mut Child) -> bool {
    let deadline = Instant::now() + STOP_PATIENCE;
    while daemon.try_wait().expect("look after warrend").is_none() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    // It may have ended by itself.
    let _ = kill_process(pid.expect("process ids are positive"), signal);
}

fn tail(text: &str) -> String {
    const LINES: usize = 40;
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}
