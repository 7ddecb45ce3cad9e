//! Killing a sandbox leaves nothing behind.

use std::time::{Duration, Instant};

use warren_tests::{Census, Need, TestNode, missing};

const CYCLES: usize = 500;
/// Idle connections and worker threads come and go.
const SLACK: usize = 3;

#[test]
fn create_and_kill_leave_no_process_file_descriptor_or_control_group() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    // What the first create brings stays: connections, lazily made directories.
    cycle(&node);
    let mut ids = Vec::new();
    let before = settled(&node, &ids);

    ids.extend((0..CYCLES).map(|_| cycle(&node)));
    let after = settled(&node, &ids);

    assert_eq!(after.processes, before.processes, "{before:?} {after:?}");
    assert_eq!(after.files, before.files, "{before:?} {after:?}");
    assert_eq!(after.control_groups, 0);
    assert_eq!(after.mounts, before.mounts);
    assert!(after.descriptors <= before.descriptors + SLACK, "{before:?} {after:?}");
    assert!(after.threads <= before.threads + SLACK, "{before:?} {after:?}");
}

#[test]
fn sandbox_whose_process_is_killed_is_cleaned_up() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    cycle(&node);
    let before = settled(&node, &[]);
    let sandbox = node.create();

    node.kill_process_of(&sandbox.id);

    let deadline = Instant::now() + Duration::from_secs(10);
    while node.ids().contains(&sandbox.id) {
        assert!(Instant::now() < deadline, "the node still lists a dead sandbox");
        std::thread::sleep(Duration::from_millis(50));
    }
    let after = settled(&node, &[sandbox.id]);
    assert_eq!((after.processes, after.files), (before.processes, before.files));
}

fn cycle(node: &TestNode) -> String {
    let sandbox = node.create();
    assert!(sandbox.is_healthy());
    assert_eq!(node.kill(&sandbox.id).status, 204);
    sandbox.id
}

/// Counts once two looks in a row agree.
fn settled(node: &TestNode, ids: &[String]) -> Census {
    let mut last = node.census(ids);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(200));
        let next = node.census(ids);
        if next == last {
            break;
        }
        last = next;
    }
    last
}
