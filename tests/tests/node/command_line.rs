//! The `warren` command against a real node.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use warren_tests::{Artifacts, Need, TestNode, missing};

#[test]
fn run_gives_the_commands_output_and_exit_code() {
    let Some(cli) = Cli::new() else { return };

    let output = cli.run(&["run", "base", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]);

    assert_eq!(output.status.code(), Some(7));
    assert_eq!(text(&output.stdout), "out\n");
    assert_eq!(text(&output.stderr), "err\n");
    assert!(cli.node.ids().is_empty(), "run leaves a sandbox");
}

#[test]
fn create_exec_cp_ls_kill_work_together() {
    let Some(cli) = Cli::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    let local = directory.path().join("data");
    std::fs::write(&local, b"one\0two\n").unwrap();
    let local = local.to_str().unwrap();

    let id = cli.ok(&["create", "base", "--metadata", "job=7"]).trim().to_owned();
    cli.ok(&["cp", local, &format!("{id}:/tmp/data")]);
    assert_eq!(cli.ok(&["exec", &id, "--", "wc", "-c", "/tmp/data"]), "8 /tmp/data\n");
    cli.ok(&["cp", &format!("{id}:/tmp/data"), &format!("{local}.back")]);
    assert_eq!(std::fs::read(format!("{local}.back")).unwrap(), b"one\0two\n");
    let list: Value = serde_json::from_str(&cli.ok(&["ls", "--json"])).unwrap();
    assert_eq!(list[0]["sandboxID"], id.as_str());
    assert_eq!(list[0]["metadata"]["job"], "7");
    assert_eq!(cli.ok(&["pause", &id]).trim(), id);
    assert!(cli.ok(&["ls"]).contains("paused"));
    assert!(!cli.ok(&["stats"]).contains(&id));
    assert_eq!(cli.ok(&["resume", &id, "--timeout", "600"]).trim(), id);
    let children = cli.ok(&["fork", &id, "-n", "2"]);
    assert_eq!(children.lines().count(), 2);
    for child in children.lines() {
        assert_eq!(cli.ok(&["exec", child, "--", "echo", "child"]).trim(), "child");
        assert_eq!(cli.ok(&["kill", child]).trim(), child);
    }
    assert_eq!(cli.ok(&["kill", &id]).trim(), id);
    assert_eq!(cli.ok(&["ls", "--quiet"]).trim(), "");
}

#[test]
fn cp_leaves_links_and_special_files_out_and_says_so() {
    let Some(cli) = Cli::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path().join("tree");
    std::fs::create_dir_all(tree.join("inner")).unwrap();
    std::fs::write(tree.join("inner/a b"), "text").unwrap();
    std::os::unix::fs::symlink("/nowhere", tree.join("dangling")).unwrap();
    std::os::unix::fs::symlink("..", tree.join("inner/up")).unwrap();
    assert!(Command::new("mkfifo").arg(tree.join("fifo")).status().unwrap().success());
    let id = cli.ok(&["create"]).trim().to_owned();

    let output = cli.run(&["cp", "--json", "-r", tree.to_str().unwrap(), &format!("{id}:/tmp")]);

    assert!(output.status.success(), "{}", text(&output.stderr));
    let value: Value = serde_json::from_str(text(&output.stdout)).unwrap();
    assert_eq!(value["files"], 1);
    assert_eq!(value["leftOut"].as_array().unwrap().len(), 3);
    let found = cli.ok(&["exec", &id, "--", "find", "/tmp/tree", "-type", "f"]);
    assert_eq!(found, "/tmp/tree/inner/a b\n");
}

#[test]
fn exec_forwards_standard_input() {
    let Some(cli) = Cli::new() else { return };
    let id = cli.ok(&["create"]).trim().to_owned();

    let mut child = cli
        .command(&["exec", "-i", &id, "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all("grüße\n".as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();

    assert!(output.status.success());
    assert_eq!(text(&output.stdout), "grüße\n");
}

#[test]
fn failures_say_what_to_do_and_have_codes_of_their_own() {
    let Some(cli) = Cli::new() else { return };

    let unknown = cli.run(&["exec", "nosuchsandbox", "--", "true"]);
    assert_eq!(unknown.status.code(), Some(125));
    assert!(text(&unknown.stderr).contains("warren ls"), "{}", text(&unknown.stderr));

    let template = cli.run(&["create", "no-such-template"]);
    assert_eq!(template.status.code(), Some(1));
    assert!(text(&template.stderr).contains("warren template ls"), "{}", text(&template.stderr));

    let nobody = cli.command(&["ls"]).env("WARREN_URL", "http://127.0.0.1:1").output().unwrap();
    assert_eq!(nobody.status.code(), Some(1));
    assert!(text(&nobody.stderr).contains("warren up"), "{}", text(&nobody.stderr));

    let signal = cli.run(&["run", "base", "--", "sh", "-c", "kill -9 $$"]);
    assert_eq!(signal.status.code(), Some(137));
}

#[test]
fn down_with_kill_leaves_no_process() {
    let Some(cli) = Cli::new() else { return };
    cli.ok(&["create"]);

    cli.ok(&["down", "--kill"]);

    // The daemon itself stays a zombie until the test node takes its exit code.
    let daemon = cli.node.daemon();
    let left: Vec<_> = cli.node.processes().into_iter().filter(|pid| *pid != daemon).collect();
    assert!(left.is_empty(), "{left:?} still run");
}

#[test]
fn down_keeps_sandboxes_and_templates() {
    let Some(mut cli) = Cli::new() else { return };
    let id = cli.ok(&["create"]).trim().to_owned();
    let process = cli.node.process_of(&id);

    cli.ok(&["down"]);
    cli.node.start_daemon();

    assert_eq!(cli.ok(&["ls", "--quiet"]).trim(), id);
    assert_eq!(cli.node.process_of(&id), process);
}

#[test]
fn keys_of_a_node_that_never_was_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");

    let output = Command::new(Artifacts::find().program("warrend"))
        .arg("--state-dir")
        .arg(&state)
        .arg("--run-dir")
        .arg(directory.path().join("run"))
        .args(["keys", "add", "bob"])
        .output()
        .unwrap();

    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("no node has its state"), "{}", text(&output.stderr));
    assert!(!state.exists(), "a store was made");
}

#[test]
fn doctor_finds_this_machine_fit() {
    let Some(cli) = Cli::new() else { return };

    let output = cli.run(&["doctor", "--json"]);

    let findings: Value = serde_json::from_str(text(&output.stdout)).unwrap();
    let kvm =
        findings.as_array().unwrap().iter().find(|finding| finding["check"] == "kvm").unwrap();
    assert_eq!(kvm["verdict"], "ok");
    assert_eq!(output.status.code(), Some(0), "{findings}");
}

#[test]
fn doctor_without_kvm_says_what_to_do() {
    if missing(&[Need::Root]) {
        return;
    }
    let hide =
        "mount -t tmpfs dev /mnt && cp -a /dev/null /mnt/ && mount --move /mnt /dev && exec \"$@\"";

    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", hide, "sh"])
        .arg(Artifacts::find().program("warren"))
        .arg("doctor")
        .output()
        .unwrap();

    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("/dev/kvm is missing"), "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("modprobe"), "{}", text(&output.stdout));
}

struct Cli {
    node: TestNode,
}

impl Cli {
    fn new() -> Option<Self> {
        if missing(&[Need::Kvm, Need::Root]) {
            return None;
        }
        Some(Self { node: TestNode::start() })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(Artifacts::find().program("warren"));
        command
            .args(arguments)
            .env("WARREN_URL", format!("http://{}", self.node.address()))
            .env("WARREN_STATE_DIR", self.node.state_directory())
            .env_remove("WARREN_API_KEY")
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout).to_owned()
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}
