//! A state directory with one template, built once for all tests.
//!
//! Building a template boots a guest, which takes its time; so it is kept in the
//! cache under a hash of what went into it. A test gets a copy whose big files
//! are hard links: they are never written once the template is built.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;
use serde_json::{Value, json};

use crate::artifacts::{Artifacts, cache};
use crate::node::{NodeOptions, TEMPLATE, TestNode};

const FOLDER: &str = "test-state";
/// A guest under an emulating KVM boots and warms up slowly.
const BUILD_PATIENCE: Duration = Duration::from_secs(1800);

/// Copies the shared state to `target`, building it first if need be.
pub(crate) fn copy_to(artifacts: &Artifacts, target: &Path) {
    let folder = cache().join(FOLDER);
    std::fs::create_dir_all(&folder).expect("make the folder of shared state");
    let lock = File::create(folder.join("lock")).expect("open the lock of the shared state");
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).expect("lock the shared state");
    let source = folder.join(fingerprint(artifacts));
    if !source.exists() {
        remove_others(&folder);
        build(artifacts, &source);
    }
    copy(&source, target);
}

/// Names the state after the files that decide it.
fn fingerprint(artifacts: &Artifacts) -> String {
    let mut hasher = DefaultHasher::new();
    let programs = [artifacts.program("warrend"), artifacts.program("warren-vmm")];
    for path in programs.iter().chain([&artifacts.kernel, &artifacts.rootfs]) {
        let metadata = std::fs::metadata(path).expect("look at what is tested");
        (path, metadata.len(), metadata.mtime(), metadata.mtime_nsec()).hash(&mut hasher);
    }
    format!("{:016x}", hasher.finish())
}

fn remove_others(folder: &Path) {
    for entry in std::fs::read_dir(folder).expect("list the shared state").filter_map(Result::ok) {
        if entry.path().is_dir() {
            std::fs::remove_dir_all(entry.path()).expect("remove old shared state");
        }
    }
}

fn build(artifacts: &Artifacts, target: &Path) {
    let partial = target.with_extension("partial");
    eprintln!("building the template that all tests share; this takes some minutes");
    let mut node = TestNode::with(NodeOptions {
        state: Some(partial.clone()),
        without_template: true,
        ..NodeOptions::default()
    });
    build_template(&node, TEMPLATE, &artifacts.rootfs, &json!({}));
    node.stop_daemon();
    drop(node);
    std::fs::rename(partial, target).expect("publish the shared state");
}

/// Builds a template and shows its progress.
///
/// # Panics
/// If it fails.
pub(crate) fn build_template(node: &TestNode, name: &str, rootfs: &Path, more: &Value) {
    let mut body = json!({"name": name, "rootfs": rootfs});
    if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
        body.extend(more.clone());
    }
    let reply = node.api().clone().with_patience(BUILD_PATIENCE).post("/v1/templates", &body);
    let text = reply.text();
    eprintln!("{text}");
    assert!(reply.status < 300 && !text.contains("\"error\""), "build of template {name}: {text}");
}

/// Links what is below `templates`, copies the rest.
fn copy(source: &Path, target: &Path) {
    copy_tree(source, target, &|from, to| {
        let linked = from.strip_prefix(source).is_ok_and(|path| path.starts_with("templates"));
        if linked { std::fs::hard_link(from, to) } else { std::fs::copy(from, to).map(drop) }
    });
}

fn copy_tree(
    source: &Path,
    target: &Path,
    copy_file: &dyn Fn(&Path, &Path) -> std::io::Result<()>,
) {
    std::fs::create_dir_all(target).expect("make a directory of the copy");
    for entry in std::fs::read_dir(source).expect("list the shared state").filter_map(Result::ok) {
        let (from, to): (PathBuf, PathBuf) = (entry.path(), target.join(entry.file_name()));
        let kind = entry.file_type().expect("the kind of a file");
        if kind.is_dir() {
            copy_tree(&from, &to, copy_file);
        } else if kind.is_file() {
            copy_file(&from, &to).expect("copy a file of the shared state");
        }
    }
}
