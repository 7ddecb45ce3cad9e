//! Benchmarks of creating and of keeping sandboxes: `warren-perf create|idle`.
//!
//! The last line on standard output is one JSON object; what goes before is for people.
//! `tests/perf/` has the commands that build what is needed and run this.
#![forbid(unsafe_code)]

mod create;
mod floor;
mod idle;
mod qemu;
mod quantile;

use std::process::ExitCode;

use std::str::FromStr;

use serde_json::json;
use warren_tests::{Sandbox, TestNode};

const USAGE: &str = "usage: warren-perf create [COUNT [MEMORY_MIB]]   (default 500)
       warren-perf idle [COUNT [MEMORY_MIB]]     (default 200)

MEMORY_MIB: memory of a sandbox; by default that of the template which the tests share.";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let Some(numbers) = words.iter().skip(1).map(|word| u32::from_str(word).ok()).collect() else {
        return usage();
    };
    let numbers: Vec<u32> = numbers;
    let count = numbers.first().copied();
    let subject = || Subject::new(numbers.get(1).copied());
    match (words.first().map(String::as_str), numbers.len()) {
        (Some("create"), 0..=2) => create::run(&subject(), count.unwrap_or(500)),
        (Some("idle"), 0..=2) => idle::run(&subject(), count.unwrap_or(200)),
        _ => return usage(),
    }
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(2)
}

/// A node and the template of it that is measured.
struct Subject {
    node: TestNode,
    template: &'static str,
    memory_mib: u32,
}

impl Subject {
    fn new(memory_mib: Option<u32>) -> Self {
        let node = TestNode::start();
        let mut template = "base";
        if let Some(memory_mib) = memory_mib {
            template = "measured";
            let rootfs = &node.artifacts().rootfs;
            node.build_template(template, rootfs, &["--memory", &memory_mib.to_string()]);
        }
        let about = node.api().get(&format!("/v1/templates/{template}")).expect(200).json();
        let memory_mib = about["memoryMib"].as_u64().and_then(|mib| u32::try_from(mib).ok());
        let memory_mib = memory_mib.expect("the memory of the template");
        Self { node, template, memory_mib }
    }

    fn create(&self) -> Sandbox {
        self.node.create_with(&json!({"templateID": self.template}))
    }
}
