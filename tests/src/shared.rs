//! A state directory with one template, built once for all tests.
//!
//! Building a template boots a guest, which takes its time; so it is kept in the
//! cache under a hash of what went into it. A test gets a copy whose big files
//! are hard links: they are never written once the template is built.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::fs::FlockOperation;

use crate::artifacts::{Artifacts, cache};
use crate::node::{CODE_INTERPRETER_TEMPLATE, NodeOptions, TEMPLATE, TestNode};

/// What the shared state holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contents {
    /// The template `base`.
    Base,
    /// That of the code interpreter alone, which is bigger.
    CodeInterpreter,
}

impl Contents {
    fn folder(self) -> &'static str {
        match self {
            Self::Base => "test-state",
            Self::CodeInterpreter => "test-state-code-interpreter",
        }
    }

    /// Name, and flags of `warren template build`.
    fn template(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Base => (TEMPLATE, &[]),
            Self::CodeInterpreter => ("code-interpreter", &["--alias", CODE_INTERPRETER_TEMPLATE]),
        }
    }

    fn rootfs(self, artifacts: &Artifacts) -> &Path {
        match self {
            Self::Base => &artifacts.rootfs,
            Self::CodeInterpreter => &artifacts.code_interpreter_rootfs,
        }
    }
}

/// Copies the shared state to `target`, building it first if need be.
pub(crate) fn copy_to(artifacts: &Artifacts, contents: Contents, target: &Path) {
    let folder = cache().join(contents.folder());
    std::fs::create_dir_all(&folder).expect("make the folder of shared state");
    let lock = File::create(folder.join("lock")).expect("open the lock of the shared state");
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).expect("lock the shared state");
    let source = folder.join(fingerprint(artifacts, contents));
    if !source.exists() {
        remove_others(&folder);
        build(artifacts, contents, &source);
    }
    copy(&source, target);
}

/// Names the state after the files that decide it.
fn fingerprint(artifacts: &Artifacts, contents: Contents) -> String {
    let mut hasher = DefaultHasher::new();
    let programs = [artifacts.program("warrend"), artifacts.program("warren-vmm")];
    let rootfs = contents.rootfs(artifacts);
    let programs = programs.iter().map(PathBuf::as_path);
    for path in programs.chain([artifacts.kernel.as_path(), rootfs]) {
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

fn build(artifacts: &Artifacts, contents: Contents, target: &Path) {
    let partial = target.with_extension("partial");
    let (name, flags) = contents.template();
    eprintln!("building the template {name} that tests share; this takes some minutes");
    let started = Instant::now();
    let mut node = TestNode::with(NodeOptions {
        state: Some(partial.clone()),
        without_template: true,
        ..NodeOptions::default()
    });
    build_template(&node, name, contents.rootfs(artifacts), flags);
    eprintln!("template {name}: built in {} s", started.elapsed().as_secs());
    node.stop_daemon();
    drop(node);
    std::fs::rename(partial, target).expect("publish the shared state");
}

/// Builds a template by the command line, which shows each step as it comes.
///
/// # Panics
/// If it fails.
pub(crate) fn build_template(node: &TestNode, name: &str, rootfs: &Path, flags: &[&str]) {
    let status = Command::new(node.artifacts().program("warren"))
        .args(["template", "build", name, "--image"])
        .arg(rootfs)
        .args(flags)
        .env("WARREN_URL", format!("http://{}", node.address()))
        .env("WARREN_API_KEY", node.api_key())
        .stdin(Stdio::null())
        // The output of a program that uses this is its own.
        .stdout(Stdio::null())
        .status()
        .expect("start warren");
    assert!(status.success(), "build of template {name}: {status}\n{}", node.log());
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
