//! Pause, resume and fork of sandboxes that are at work.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use warren_tests::{Need, Sandbox, TestNode, missing};

/// Something of every kind that has to survive: a process that counts, a variable of an
/// interpreter, a file whose bytes are on the disk.
fn set_to_work(sandbox: &Sandbox) -> String {
    let started = sandbox.shell(
        "echo 'i=0; while :; do i=$((i+1)); echo $i >/tmp/count; sleep 1; done' >/tmp/work\n\
             nohup sh /tmp/work >/dev/null 2>&1 &\n\
             head -c 65536 /dev/urandom >/home/user/data; sync",
    );
    assert_eq!(started.text(), "");
    assert_eq!(sandbox.cell("answer = 41"), "");
    digest(sandbox)
}

/// Of the file as it is on the disk, past the guest's page cache.
fn digest(sandbox: &Sandbox) -> String {
    sandbox.shell("dd if=/home/user/data bs=65536 iflag=direct 2>/dev/null | sha256sum").text()
}

fn count(sandbox: &Sandbox) -> u64 {
    sandbox.shell("cat /tmp/count").text().parse().expect("a number")
}

fn assert_at_work(sandbox: &Sandbox, digest_before: &str, count_before: u64) {
    assert_eq!(digest(sandbox), digest_before);
    assert_eq!(sandbox.cell("print(answer + 1)"), "42");
    let begin = Instant::now();
    let first = count(sandbox);
    assert!(first >= count_before, "it went back from {count_before} to {first}");
    while count(sandbox) == first {
        assert!(begin.elapsed() < Duration::from_secs(60), "the process counts no more");
    }
    let guest: i64 = sandbox.shell("date +%s").text().parse().expect("seconds");
    let host = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let host = i64::try_from(host).expect("before the end of time");
    assert!((guest - host).abs() <= 5, "the guest's clock says {guest}, the host's {host}");
}

#[test]
fn paused_sandbox_goes_on_where_it_was_each_time() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let sandbox = node.create();
    let digest = set_to_work(&sandbox);
    let hostname = sandbox.shell("hostname").text();

    for round in 0..2 {
        let before = count(&sandbox);
        assert_eq!(
            sandbox.shell(&format!("echo {round} >/home/user/round{round}; sync")).text(),
            ""
        );
        assert_eq!(node.pause(&sandbox.id).status, 204);
        assert_eq!(node.process_of(&sandbox.id), None);
        assert!(!sandbox.is_healthy());
        assert_eq!(node.pause(&sandbox.id).status, 409);
        std::thread::sleep(Duration::from_secs(2));

        let resumed = node.connect(&sandbox.id);
        assert_at_work(&resumed, &digest, before);
        assert_eq!(resumed.shell("hostname").text(), hostname);
        for earlier in 0..=round {
            let text = resumed.shell(&format!("cat /home/user/round{earlier}")).text();
            assert_eq!(text, earlier.to_string());
        }
    }
    assert_eq!(node.pause(&sandbox.id).status, 204);
    assert_eq!(node.kill(&sandbox.id).status, 204);
    let left = node.census(std::slice::from_ref(&sandbox.id));
    assert_eq!(left.control_groups, 0);
    assert!(!node.state_directory().join("sandboxes").join(&sandbox.id).exists());
}

#[test]
fn paused_sandbox_outlives_its_node() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let mut node = TestNode::start();
    let sandbox = node.create();
    let digest = set_to_work(&sandbox);
    let before = count(&sandbox);
    assert_eq!(node.pause(&sandbox.id).status, 204);

    node.kill_daemon();
    node.start_daemon();

    assert_at_work(&node.connect(&sandbox.id), &digest, before);
}

#[test]
fn daemon_killed_in_the_middle_of_a_pause_or_resume_loses_nothing() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let mut node = TestNode::start();
    let sandbox = node.create();
    let digest = set_to_work(&sandbox);
    let mut before = count(&sandbox);
    // Milliseconds that lie before, in and after the steps of a pause and of a resume.
    for delay in [2, 8, 20, 40, 80, 160] {
        for verb in ["pause", "connect"] {
            let request = node.api().clone();
            let path = format!("/sandboxes/{}/{verb}", sandbox.id);
            let asked = std::thread::spawn(move || {
                // It may be cut off.
                let body = br#"{"timeout": 1800}"#;
                let _ = request.send("POST", &path, &[("content-type", "application/json")], body);
            });
            std::thread::sleep(Duration::from_millis(delay));
            node.kill_daemon();
            asked.join().expect("the request ends");
            node.start_daemon();
            assert_eq!(node.ids(), std::slice::from_ref(&sandbox.id), "{verb} after {delay} ms");
        }
        let resumed = node.connect(&sandbox.id);
        assert_at_work(&resumed, &digest, before);
        before = count(&resumed);
    }
}

#[test]
fn children_of_a_fork_are_alike_and_apart() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let parent = node.create();
    let digest = set_to_work(&parent);
    let before = count(&parent);

    let children = node.fork(&parent.id, 2);
    assert_at_work(&parent, &digest, before);
    let mut hostnames = vec![parent.shell("hostname").text()];
    for (index, child) in children.iter().enumerate() {
        assert_at_work(child, &digest, before);
        hostnames.push(child.shell("hostname").text());
        assert_eq!(child.shell("echo $WARREN_FORK_INDEX").text(), index.to_string());
        assert_eq!(child.shell(&format!("echo {index} >/home/user/own; sync")).text(), "");
    }
    hostnames.sort();
    hostnames.dedup();
    assert_eq!(hostnames.len(), 3, "{hostnames:?}");
    assert_ne!(parent.shell("cat /home/user/own").exit_code, 0);

    // A child needs nothing of its parent; it can be paused, and have children itself.
    assert_eq!(node.kill(&parent.id).status, 204);
    assert_eq!(node.pause(&children[1].id).status, 204);
    let resumed = node.connect(&children[1].id);
    assert_at_work(&resumed, &digest, before);
    let grandchild = node.fork(&resumed.id, 1).remove(0);
    for (sandbox, own) in [(&children[0], "0"), (&resumed, "1"), (&grandchild, "1")] {
        assert_eq!(sandbox.shell("cat /home/user/own").text(), own);
        assert_eq!(self::digest(sandbox), digest);
    }
}
