//! The programs, kernel and images under test.
//!
//! `make test` names them by `WARREN_BIN`, `WARREN_KERNEL`, `WARREN_ROOTFS` and
//! `WARREN_CODE_INTERPRETER_ROOTFS`.
//! Without these, the programs are those that cargo built last, and the scripts
//! that build kernel and image are asked (they answer at once if nothing changed).

use std::path::{Path, PathBuf};
use std::process::Command;

/// The things under test.
#[derive(Debug, Clone)]
pub struct Artifacts {
    /// Directory of `warrend`, `warren-vmm` and `warren`.
    pub programs: PathBuf,
    /// Guest kernel.
    pub kernel: PathBuf,
    /// Root image of the `base` recipe.
    pub rootfs: PathBuf,
    /// Root image of the `code-interpreter` recipe.
    pub code_interpreter_rootfs: PathBuf,
}

impl Artifacts {
    /// Finds them.
    ///
    /// # Panics
    /// If one is missing.
    #[must_use]
    pub fn find() -> Self {
        let root = workspace();
        let programs = from_environment("WARREN_BIN")
            .unwrap_or_else(|| root.join("target/x86_64-unknown-linux-gnu/release"));
        assert!(
            programs.join("warrend").exists(),
            "there is no warrend in {}; run: make build",
            programs.display()
        );
        Self {
            programs,
            kernel: from_environment("WARREN_KERNEL")
                .unwrap_or_else(|| ask(&root, "guest-kernel/build", &["--print-path"])),
            rootfs: from_environment("WARREN_ROOTFS")
                .unwrap_or_else(|| ask(&root, "image/build", &["base", "--print-path"])),
            code_interpreter_rootfs: from_environment("WARREN_CODE_INTERPRETER_ROOTFS")
                .unwrap_or_else(|| {
                    ask(&root, "image/build", &["code-interpreter", "--print-path"])
                }),
        }
    }

    /// Guest kernel for several vCPUs; built when it is first asked for, unless
    /// `WARREN_KERNEL_SMP` names one.
    ///
    /// # Panics
    /// If it cannot be built.
    #[must_use]
    pub fn kernel_smp() -> PathBuf {
        from_environment("WARREN_KERNEL_SMP").unwrap_or_else(|| {
            ask(&workspace(), "guest-kernel/build", &["--variant", "smp", "--print-path"])
        })
    }

    /// A C program for the guest, in `tests/guest`.
    #[must_use]
    pub fn guest_source(name: &str) -> PathBuf {
        workspace().join("tests/guest").join(name)
    }

    /// One of the programs.
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }
}

/// The root of the source tree.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate has a parent").to_owned()
}

/// Where built and prepared things are kept between runs.
pub(crate) fn cache() -> PathBuf {
    from_environment("WARREN_CACHE")
        .or_else(|| from_environment("XDG_CACHE_HOME").map(|path| path.join("warren")))
        .or_else(|| from_environment("HOME").map(|path| path.join(".cache/warren")))
        .expect("HOME is set")
}

fn from_environment(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn ask(root: &Path, script: &str, arguments: &[&str]) -> PathBuf {
    let output = Command::new(root.join(script))
        .args(arguments)
        .stderr(std::process::Stdio::inherit())
        .output()
        .expect("run the build script");
    assert!(output.status.success(), "{script} failed");
    let path = String::from_utf8(output.stdout).expect("paths are text");
    PathBuf::from(path.lines().last().expect("the script prints a path").trim())
}
