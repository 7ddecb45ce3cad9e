//! Starts a test node for a client suite in another language.
//!
//! Prints one line of JSON (`url`, `apiKey`, `template`), then lives until its
//! standard input ends. With `--code-interpreter` first, the node has the code
//! interpreter's template instead of `base`; flags are handed on to `warrend`.
#![forbid(unsafe_code)]

use std::io::Read;

use warren_tests::{NodeOptions, TestNode};

fn main() {
    let mut flags: Vec<String> = std::env::args().skip(1).collect();
    let code_interpreter = flags.first().is_some_and(|flag| flag == "--code-interpreter");
    if code_interpreter {
        flags.remove(0);
    }
    let template = if code_interpreter { "code-interpreter-v1" } else { "base" };
    let node = TestNode::with(NodeOptions { flags, code_interpreter, ..NodeOptions::default() });
    let line = serde_json::json!({
        "url": format!("http://{}", node.address()),
        "apiKey": node.api_key(),
        "template": template,
        "log": node.log_path(),
    });
    println!("{line}");
    let mut rest = Vec::new();
    // Nothing is expected: the end is the message.
    let _ = std::io::stdin().read_to_end(&mut rest);
}
