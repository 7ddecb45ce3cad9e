//! A template with two vCPUs, and what its clones do with them.

use serde_json::{Value, json};
use warren_tests::{Artifacts, Need, NodeOptions, Sandbox, TestNode, missing};

use crate::vector_registers::{assert_no_corruption, compiled, cpu_has_avx};

const TEMPLATE: &str = "two";

#[test]
fn clones_of_a_template_with_two_vcpus_use_both() {
    if missing(&[Need::Kvm, Need::Root, Need::Compiler]) {
        return;
    }
    let kernel = Artifacts::kernel_smp();
    let node = TestNode::with(NodeOptions {
        flags: vec!["--kernel-smp".to_owned(), kernel.display().to_string()],
        without_template: true,
        ..NodeOptions::default()
    });
    // Without the warm-up, which takes longer than everything else together.
    let body = json!({
        "name": TEMPLATE, "rootfs": node.artifacts().rootfs,
        "vcpus": 2, "memory_mib": 256, "warmup": false,
    });
    let built = node.api().post("/v1/templates?wait=true", &body).expect(201).json();
    assert_eq!(built["vcpus"], 2);

    let [first, second] = [(); 2].map(|()| node.create_with(&json!({"templateID": TEMPLATE})));

    assert_eq!(first.shell("grep -c ^processor /proc/cpuinfo").text(), "2");
    assert_eq!(node.api().get(&format!("/v1/sandboxes/{}", first.id)).json()["vcpus"], 2);
    assert_both_cpus_take_turns(&first);
    assert_vector_registers_hold(&second);
    assert_falls_idle(&node, &first);
}

/// Two processes, one on each CPU, that wait for each other a hundred times.
fn assert_both_cpus_take_turns(sandbox: &Sandbox) {
    let code = "import os\n\
        there, back = os.pipe(), os.pipe()\n\
        child = os.fork()\n\
        os.sched_setaffinity(0, {0 if child else 1})\n\
        for _ in range(100):\n\
        \x20   if child:\n\
        \x20       os.write(there[1], b'x')\n\
        \x20       os.read(back[0], 1)\n\
        \x20   else:\n\
        \x20       os.read(there[0], 1)\n\
        \x20       os.write(back[1], b'x')\n\
        if child:\n\
        \x20   os.waitpid(child, 0)\n\
        \x20   print(os.sched_getaffinity(0))\n";
    let finished = sandbox.run("/usr/bin/python3", &["-c", code]);
    assert_eq!(finished.text(), "{0}");
}

/// Two processes on each CPU at the same time, and one that may move between them.
fn assert_vector_registers_hold(sandbox: &Sandbox) {
    if !cpu_has_avx() {
        return;
    }
    assert_eq!(sandbox.write("/tmp/vector", &compiled("vector.c")).status, 200);
    let script = "chmod +x /tmp/vector
        for n in 0 1 2 3; do taskset -c $((n % 2)) /tmp/vector $n 800 >/tmp/$n & done
        /tmp/vector 4 800 >/tmp/4; wait
        cat /tmp/0 /tmp/1 /tmp/2 /tmp/3 /tmp/4";
    assert_no_corruption(&sandbox.shell(script).text(), 5, 200);
}

/// An idle clone hardly halts, because it is hardly woken.
fn assert_falls_idle(node: &TestNode, sandbox: &Sandbox) {
    const WATCH: std::time::Duration = std::time::Duration::from_secs(5);
    const WAKEUPS_MAX: u64 = 100;
    let halts = || {
        let detail = node.api().get(&format!("/v1/sandboxes/{}", sandbox.id)).expect(200).json();
        let count = |value: &Value| value.as_u64();
        count(&detail["stats"]["vmm"]["kvm"]["halt_exits"])
    };
    let Some(before) = halts() else { return };
    std::thread::sleep(WATCH);
    let after = halts().expect("counters do not go away");
    assert!(after - before < WAKEUPS_MAX, "{} wake-ups in 5 s", after - before);
}
