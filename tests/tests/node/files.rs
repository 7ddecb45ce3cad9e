//! Files through the proxy, at the sizes and with the names that break things.

use warren_tests::{Need, TestNode, missing};

#[test]
fn file_of_every_byte_comes_back_the_same() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let sandbox = node.create();
    let content: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();

    assert_eq!(sandbox.write("/tmp/a%20b-%C3%A4.bin", &content).status, 200);

    assert!(sandbox.read("/tmp/a%20b-%C3%A4.bin").expect(200).body == content);
}

#[test]
fn empty_file_is_a_file() {
    if missing(&[Need::Kvm, Need::Root]) {
        return;
    }
    let node = TestNode::start();
    let sandbox = node.create();

    assert_eq!(sandbox.write("/tmp/empty", b"").status, 200);

    assert!(sandbox.read("/tmp/empty").expect(200).body.is_empty());
}
