//! The crates depend on each other only as docs/architecture.md draws it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

type Edges = BTreeMap<String, BTreeSet<String>>;

#[test]
fn crate_edges_are_those_of_the_architecture_page() {
    let drawn = drawn_edges();
    let real = real_edges();
    let names = |edges: &Edges| edges.keys().cloned().collect::<Vec<_>>();
    assert_eq!(
        names(&real),
        names(&drawn),
        "docs/architecture.md lists other crates than the workspace"
    );
    for (name, dependencies) in &real {
        let beyond: Vec<_> = dependencies.difference(&drawn[name]).collect();
        assert!(
            beyond.is_empty(),
            "{name} depends on {beyond:?}, which docs/architecture.md does not allow"
        );
    }
}

/// Rows `| crate | a, b |` under the heading "may depend on".
fn drawn_edges() -> Edges {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = std::fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let table = page.lines().skip_while(|line| !line.starts_with("| crate | may depend on |"));
    table
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let dependencies = cells[1].split(',').map(str::trim).filter(|name| *name != "–");
            (cells[0].to_owned(), dependencies.map(str::to_owned).collect())
        })
        .collect()
}

/// Crates and the workspace crates that they link, named by their folders.
fn real_edges() -> Edges {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let root = metadata["workspace_root"].as_str().unwrap();
    let folder = |path: &Value| {
        Path::new(path.as_str().unwrap()).strip_prefix(root).unwrap().to_str().unwrap().to_owned()
    };
    metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| {
            let manifest = folder(&package["manifest_path"]);
            let dependencies = package["dependencies"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|dependency| dependency["path"].is_string() && dependency["kind"].is_null())
                .map(|dependency| folder(&dependency["path"]));
            (manifest.trim_end_matches("/Cargo.toml").to_owned(), dependencies.collect())
        })
        .collect()
}
