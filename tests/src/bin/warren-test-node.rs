//! Starts a test node for a client suite in another language.
//!
//! Prints one line of JSON (`url`, `apiKey`, `template`), then lives until its
//! standard input ends; flags are handed on to `warrend`.
#![forbid(unsafe_code)]

use std::io::Read;

use warren_tests::{NodeOptions, TestNode};

fn main() {
    let flags = std::env::args().skip(1).collect();
    let node = TestNode::with(NodeOptions { flags, ..NodeOptions::default() });
    let line = serde_json::json!({
        "url": format!("http://{}", node.address()),
        "apiKey": node.api_key(),
        "template": "base",
        "log": node.log_path(),
    });
    println!("{line}");
    let mut rest = Vec::new();
    // Nothing is expected: the end is the message.
    let _ = std::io::stdin().read_to_end(&mut rest);
}
