//! Clones of one template are not copies of each other.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use warren_tests::{Need, Sandbox, TestNode, missing};

const CLONES: usize = 200;
/// Requests under way at once.
const WORKERS: usize = 4;

#[test]
fn clones_never_share_random_numbers() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let kernel = Mutex::new(Vec::new());
    let urandom = Mutex::new(Vec::new());
    let uuids = Mutex::new(Vec::new());
    let queue = Mutex::new(0..CLONES);

    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                while let Some(_turn) = next(&queue) {
                    let sandbox = node.create();
                    let uuid = sandbox.read("/proc/sys/kernel/random/uuid").expect(200).text();
                    kernel.lock().unwrap().push(uuid);
                    let code = "import os, uuid\nprint(open('/dev/urandom', 'rb').read(16).hex(), uuid.uuid4())";
                    let printed = sandbox.cell(code);
                    let (bytes, uuid) = printed.split_once(' ').expect("two words");
                    urandom.lock().unwrap().push(bytes.to_owned());
                    uuids.lock().unwrap().push(uuid.to_owned());
                    assert_eq!(node.kill(&sandbox.id).status, 204);
                }
            });
        }
    });

    assert_distinct("/proc/sys/kernel/random/uuid", &kernel.into_inner().unwrap());
    assert_distinct("/dev/urandom", &urandom.into_inner().unwrap());
    assert_distinct("uuid.uuid4()", &uuids.into_inner().unwrap());
}

#[test]
fn clones_have_an_identity_and_a_clock_of_their_own() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let (first, second) = (node.create(), node.create());

    for path in ["/run/machine-id", "/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/hostname"]
    {
        let read = |sandbox: &Sandbox| sandbox.read(path).expect(200).text();
        assert_ne!(read(&first), read(&second), "{path} is shared");
    }
    let guest: u64 = first.shell("date +%s").text().parse().unwrap();
    let host = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    assert!(host.abs_diff(guest) <= 5, "the guest's clock is {guest}, the host's {host}");
}

#[test]
fn clones_do_not_see_each_others_files() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let (first, second) = (node.create(), node.create());

    assert_eq!(first.write("/home/user/secret", b"mine").status, 200);
    // Past the guest's page cache, onto its disk.
    assert_eq!(first.shell("sync").exit_code, 0);

    assert_eq!(second.read("/home/user/secret").status, 404);
    assert_eq!(node.create().read("/home/user/secret").status, 404);
    assert_eq!(first.read("/home/user/secret").expect(200).body, b"mine");
}

fn next(queue: &Mutex<std::ops::Range<usize>>) -> Option<usize> {
    queue.lock().unwrap().next()
}

fn assert_distinct(what: &str, values: &[String]) {
    let distinct: HashSet<&String> = values.iter().collect();
    assert_eq!(values.len(), CLONES);
    assert_eq!(distinct.len(), CLONES, "{what} gave the same value to two clones");
}
