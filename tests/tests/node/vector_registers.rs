//! Vector registers survive context switches and births.

use std::process::Command;

use warren_tests::{Artifacts, Need, TestNode, missing};

#[test]
fn vector_registers_of_two_processes_do_not_mix() {
    if missing(&[Need::Kvm, Need::Root, Need::Compiler]) || !cpu_has_avx() {
        return;
    }
    let node = TestNode::start();
    let sandbox = node.create();
    assert_eq!(sandbox.write("/tmp/vector", &compiled("vector.c")).status, 200);

    let script = "chmod +x /tmp/vector; /tmp/vector 1 >/tmp/one & /tmp/vector 2 >/tmp/two; wait; \
                  cat /tmp/one /tmp/two";
    let lines = sandbox.shell(script).text();

    assert_no_corruption(&lines, 2, 2000);
}

/// Checks what `count` processes of `vector.c` printed, each of which was to be
/// interrupted so often.
pub(crate) fn assert_no_corruption(lines: &str, count: usize, switches_min: u64) {
    for line in lines.lines() {
        let words: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [_rounds, switches, corruptions] = words[..] else { panic!("odd line {line:?}") };
        assert!(switches > switches_min, "hardly anything was tested: {line}");
        assert_eq!(corruptions, 0, "{line}");
    }
    assert_eq!(lines.lines().count(), count);
}

pub(crate) fn cpu_has_avx() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" avx "))
}

/// A static program for the guest.
pub(crate) fn compiled(source: &str) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    let status = Command::new("cc")
        .args(["-O2", "-static", "-o"])
        .arg(&program)
        .arg(Artifacts::guest_source(source))
        .status()
        .unwrap();
    assert!(status.success(), "{source} does not compile");
    std::fs::read(program).unwrap()
}
