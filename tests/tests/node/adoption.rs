//! The daemon may die at any time; sandboxes do not notice.

use warren_tests::{Need, TestNode, missing};

#[test]
fn sandbox_survives_sigkill_of_the_daemon() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let mut node = TestNode::start();
    let sandbox = node.create();
    assert_eq!(
        sandbox.shell("echo before >/tmp/mark; sleep 1000 & echo started").text(),
        "started"
    );

    node.kill_daemon();
    node.start_daemon();

    assert_eq!(node.ids(), std::slice::from_ref(&sandbox.id));
    assert_eq!(sandbox.read("/tmp/mark").expect(200).text().trim(), "before");
    assert_eq!(sandbox.shell("pgrep -c sleep").text(), "1");
    assert_eq!(node.kill(&sandbox.id).status, 204);
}

#[test]
fn sandbox_survives_a_graceful_restart() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let mut node = TestNode::start();
    let sandbox = node.create();

    node.stop_daemon();
    node.start_daemon();

    assert_eq!(node.ids(), std::slice::from_ref(&sandbox.id));
    assert_eq!(sandbox.shell("echo still here").text(), "still here");
    // The template process was adopted too: a create needs no new one.
    let second = node.create();
    assert!(second.is_healthy());
}

#[test]
fn restart_forgets_a_sandbox_whose_process_died_meanwhile() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let mut node = TestNode::start();
    let (victim, survivor) = (node.create(), node.create());

    node.kill_daemon();
    node.kill_process_of(&victim.id);
    node.start_daemon();

    assert_eq!(node.ids(), std::slice::from_ref(&survivor.id));
    assert_eq!(node.kill(&victim.id).status, 404);
    assert!(survivor.is_healthy());
}
