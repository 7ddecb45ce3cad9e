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

const USAGE: &str = "usage: warren-perf create [COUNT]   (default 500)
       warren-perf idle [COUNT]     (default 200)";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let count = words.get(1).map(|word| word.parse::<u32>());
    match (words.first().map(String::as_str), count) {
        (Some("create"), None) => create::run(500),
        (Some("create"), Some(Ok(count))) => create::run(count),
        (Some("idle"), None) => idle::run(200),
        (Some("idle"), Some(Ok(count))) => idle::run(count),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
