//! What must be refused, with a message that says what to do, and without harm to
//! the node or to other sandboxes.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use warren_tests::{Need, NodeOptions, Reply, TestNode, missing};

#[test]
fn missing_kvm_is_named() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    // In a mount namespace of its own the daemon gets a /dev with little in it.
    let hide = "mount -t tmpfs dev /mnt && cp -a /dev/null /dev/zero /dev/urandom /mnt/ \
                && mount --move /mnt /dev && exec \"$@\"";
    let wrapper = ["unshare", "--mount", "sh", "-c", hide, "sh"].map(str::to_owned);
    let node = TestNode::with(NodeOptions { wrapper: wrapper.to_vec(), ..NodeOptions::default() });

    let reply = node.try_create(&json!({}));

    assert!(reply.status >= 500, "{}", reply.text());
    assert!(reply.text().contains("kvm"), "the error does not name KVM: {}", reply.text());
}

#[test]
fn truncated_kernel_is_refused() {
    let Some(bench) = Bench::new() else { return };
    let kernel = std::fs::read(&bench.node.artifacts().kernel).unwrap();
    let path = bench.file("vmlinux", &kernel[..kernel.len() / 2]);

    bench.assert_build_fails(&json!({"kernel": path}), "kernel");
}

#[test]
fn kernel_that_is_no_elf_is_refused() {
    let Some(bench) = Bench::new() else { return };
    let path = bench.file("vmlinux", b"#!/bin/sh\necho I am no kernel\n");

    bench.assert_build_fails(&json!({"kernel": path}), "kernel");
}

#[test]
fn empty_root_image_is_refused() {
    let Some(bench) = Bench::new() else { return };
    let path = bench.file("rootfs.erofs", b"");

    bench.assert_build_fails(&json!({"rootfs": path}), "root");
}

#[test]
fn memory_of_one_mebibyte_is_refused() {
    let Some(bench) = Bench::new() else { return };

    bench.assert_build_fails(&json!({"memory_mib": 1}), "ram");
}

#[test]
fn unknown_template_is_refused() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();

    let reply = node.try_create(&json!({"templateID": "no-such-template"}));

    assert_refused(&reply, &[404], "no-such-template");
    assert!(node.ids().is_empty());
}

#[test]
fn metadata_of_ten_thousand_characters_is_refused() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();

    let reply = node.try_create(&json!({"metadata": {"key": "x".repeat(10_000)}}));

    assert_refused(&reply, &[400], "metadata");
    assert!(node.ids().is_empty());
}

#[test]
fn bodies_that_are_not_what_they_should_be_are_refused() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let post = |body: &[u8]| {
        let json = [("content-type", "application/json")];
        node.api().send("POST", "/v2/sandboxes", &json, body).unwrap()
    };

    for body in [
        &b""[..],
        b"{",
        b"[]",
        b"{}",
        b"{\"templateID\": 7}",
        b"\xff\xfe",
        b"{\"templateID\": \"base\", \"timeout\": -1}",
    ] {
        let reply = post(body);
        assert!((400..500).contains(&reply.status), "{body:?}: {} {}", reply.status, reply.text());
    }
    assert!(node.ids().is_empty());
}

#[test]
fn odd_paths_are_refused_and_harm_nothing() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let sandbox = node.create();

    for path in ["%00", "/tmp/a%00b", "/tmp/%ff%fe", "", &"x".repeat(5000), &"a/".repeat(3000)] {
        let read = sandbox.read(path);
        assert!(
            (400..500).contains(&read.status),
            "read of {path:?}: {} {}",
            read.status,
            read.text()
        );
        let write = sandbox.write(path, b"x");
        let refused = (400..600).contains(&write.status);
        // A name that is not UTF-8 is legal on Linux; taking it is fine as well.
        assert!(
            refused || path.contains("%ff"),
            "write to {path:?}: {} {}",
            write.status,
            write.text()
        );
    }
    for id in ["..%2f..", "%00", &"a".repeat(10_000), "UPPER", "%ff"] {
        let reply = node.kill(id);
        assert!(
            (400..500).contains(&reply.status),
            "kill of {id:?}: {} {}",
            reply.status,
            reply.text()
        );
    }

    assert_eq!(sandbox.shell("echo well").text(), "well");
}

#[test]
fn wrong_key_is_refused() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let stranger = warren_tests::Client::new(node.address());

    assert_eq!(stranger.get("/v2/sandboxes").status, 401);
    assert_eq!(stranger.with_header("x-api-key", "e2b_00").get("/v2/sandboxes").status, 401);
}

#[test]
fn second_daemon_on_one_state_directory_refuses() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let first = TestNode::start();
    let state = Some(first.state_directory().to_owned());

    let said = TestNode::refused(NodeOptions { state, ..NodeOptions::default() });

    assert!(said.contains("lock") || said.contains("another"), "{said}");
    assert!(said.contains(&*first.state_directory().to_string_lossy()), "{said}");
    assert!(first.create().is_healthy());
}

#[test]
fn full_disk_fails_the_write_and_nothing_else() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let state = SmallDisk::new("8m");
    let node =
        TestNode::with(NodeOptions { state: Some(state.prepared()), ..NodeOptions::default() });
    let (writer, other) = (node.create(), node.create());
    assert_eq!(other.write("/home/user/kept", b"kept").status, 200);
    assert_eq!(other.shell("sync").exit_code, 0);

    let script = "yes | head -c 12000000 >/home/user/big && sync /home/user/big";
    let finished = writer.shell(script);

    assert_ne!(finished.exit_code, 0, "12 MB went to a disk of 8 MB");
    assert_eq!(other.read("/home/user/kept").expect(200).body, b"kept");
    assert_eq!(node.ids().len(), 2);
    assert_eq!(node.kill(&writer.id).status, 204);
    // Its blocks are free again.
    assert_eq!(node.create().write("/home/user/new", b"new").status, 200);
}

/// A node to try bad builds on, and a place for bad files.
struct Bench {
    node: TestNode,
    directory: tempfile::TempDir,
}

impl Bench {
    fn new() -> Option<Self> {
        if missing(&[Need::Kvm, Need::Root]) {
            return None;
        }
        Some(Self { node: TestNode::start(), directory: tempfile::tempdir().unwrap() })
    }

    fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Builds a template that must not come to be; the error names `culprit`.
    fn assert_build_fails(&self, fault: &Value, culprit: &str) {
        let mut body = json!({"name": "bad", "rootfs": self.node.artifacts().rootfs});
        body.as_object_mut().unwrap().extend(fault.as_object().unwrap().clone());
        let before = self.node.census(&[]);

        let reply = self.node.api().post("/v1/templates", &body);

        let text = reply.text();
        assert!(reply.status >= 400 || text.contains("\"error\""), "it was built: {text}");
        assert!(text.to_lowercase().contains(culprit), "the error does not name {culprit}: {text}");
        let list = self.node.api().get("/v1/templates").expect(200).text();
        assert!(!list.contains("\"bad\""), "{list}");
        assert_eq!(self.node.census(&[]).files, before.files, "the failed build left files");
        assert!(self.node.create().is_healthy());
    }
}

fn assert_refused(reply: &Reply, statuses: &[u16], culprit: &str) {
    assert!(statuses.contains(&reply.status), "{} {}", reply.status, reply.text());
    assert!(reply.text().contains(culprit), "the error does not name {culprit}: {}", reply.text());
}

/// A small file system for a state directory.
struct SmallDisk {
    mount: tempfile::TempDir,
    templates: tempfile::TempDir,
}

impl SmallDisk {
    fn new(size: &str) -> Self {
        let mount = tempfile::tempdir().unwrap();
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "warren-test"])
            .arg(mount.path()));
        Self { mount, templates: tempfile::tempdir_in(TestNode::scratch()).unwrap() }
    }

    /// The shared state, with templates elsewhere: they do not fit.
    fn prepared(&self) -> PathBuf {
        let elsewhere = self.templates.path().join("state");
        TestNode::copy_shared_state(&elsewhere);
        let state = self.mount.path().join("state");
        std::fs::create_dir(&state).unwrap();
        std::os::unix::fs::symlink(elsewhere.join("templates"), state.join("templates")).unwrap();
        for entry in std::fs::read_dir(&elsewhere).unwrap().filter_map(Result::ok) {
            if entry.path().is_file() {
                std::fs::copy(entry.path(), state.join(entry.file_name())).unwrap();
            }
        }
        state
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        detach(self.mount.path());
    }
}

fn detach(path: &Path) {
    let _ = Command::new("umount").arg("--lazy").arg(path).status();
}

fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}
