//! A sandbox from create to kill.

use std::time::{Duration, Instant};

use serde_json::json;
use warren_tests::{Need, TestNode, missing};

#[test]
fn sandbox_runs_a_command_and_ends_with_kill() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();

    let sandbox = node.create();
    assert_eq!(sandbox.shell("echo out; echo err >&2").text(), "out");
    assert_eq!(sandbox.shell("exit 7").exit_code, 7);
    assert_eq!(node.ids(), std::slice::from_ref(&sandbox.id));

    let killed = node.kill(&sandbox.id);
    assert_eq!(killed.status, 204);
    assert_eq!(node.kill(&sandbox.id).status, 404);
    assert!(!sandbox.is_healthy());
    assert!(node.ids().is_empty());
}

#[test]
fn sandbox_is_killed_at_its_time_limit() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();

    let sandbox = node.create_with(&json!({"timeout": 2}));
    let created = Instant::now();
    while node.ids().contains(&sandbox.id) {
        assert!(created.elapsed() < Duration::from_secs(10), "it outlives its time limit");
        std::thread::sleep(Duration::from_millis(50));
    }

    assert!(created.elapsed() > Duration::from_secs(1), "it ended before its time limit");
    assert!(!sandbox.is_healthy());
}

#[test]
fn metadata_comes_back_and_filters() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();

    let red = node.create_with(&json!({"metadata": {"colour": "red"}}));
    let _blue = node.create_with(&json!({"metadata": {"colour": "blue"}}));
    let found = node.api().get("/v2/sandboxes?metadata=colour%3Dred").expect(200).json();

    assert_eq!(found.as_array().unwrap().len(), 1);
    assert_eq!(found[0]["sandboxID"], red.id.as_str());
    assert_eq!(found[0]["metadata"]["colour"], "red");
}

#[test]
fn idempotency_key_gives_the_same_sandbox_again() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let client = node.api().clone().with_header("idempotency-key", "job-1");
    let body = json!({"templateID": "base", "timeout": 60});

    let first = client.post("/v2/sandboxes", &body).expect(201).json();
    let second = client.post("/v2/sandboxes", &body).expect(201).json();

    assert_eq!(first["sandboxID"], second["sandboxID"]);
    assert_eq!(node.ids().len(), 1);
}
