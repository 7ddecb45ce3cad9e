//! Where things of microVMs lie on the host.

use std::path::{Path, PathBuf};

use crate::ids::{SandboxId, TemplateName};

/// Marks the directory of a build that is not finished.
pub const BUILDING_SUFFIX: &str = ".building";

/// Paths below the state and run directories.
#[derive(Debug, Clone)]
pub struct Layout {
    state: PathBuf,
    run: PathBuf,
}

impl Layout {
    pub fn new(state: &Path, run: &Path) -> Self {
        Self { state: state.to_owned(), run: run.to_owned() }
    }

    /// Makes the directories that everything else goes into.
    pub fn make(&self) -> std::io::Result<()> {
        for directory in [
            self.templates(),
            self.state.join("sandboxes"),
            self.run.join("templates"),
            self.sandboxes_run(),
            self.builds_run(),
        ] {
            std::fs::create_dir_all(directory)?;
        }
        Ok(())
    }

    pub fn templates(&self) -> PathBuf {
        self.state.join("templates")
    }

    pub fn template(&self, name: &TemplateName) -> PathBuf {
        self.templates().join(name.as_str())
    }

    /// No template has this name: builds refuse names with the suffix.
    pub fn template_building(&self, name: &TemplateName) -> PathBuf {
        self.templates().join(format!("{name}{BUILDING_SUFFIX}"))
    }

    pub fn templates_run(&self) -> PathBuf {
        self.run.join("templates")
    }

    pub fn template_run(&self, name: &TemplateName) -> PathBuf {
        self.templates_run().join(name.as_str())
    }

    pub fn sandboxes_state(&self) -> PathBuf {
        self.state.join("sandboxes")
    }

    pub fn sandbox_state(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes_state().join(id.as_str())
    }

    pub fn sandboxes_run(&self) -> PathBuf {
        self.run.join("sandboxes")
    }

    pub fn sandbox_run(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes_run().join(id.as_str())
    }

    pub fn builds_run(&self) -> PathBuf {
        self.run.join("builds")
    }

    pub fn build_run(&self, name: &TemplateName) -> PathBuf {
        self.builds_run().join(name.as_str())
    }
}

/// Removes a directory with all in it; one that is not there is a success.
pub fn remove_tree(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Names in a directory; none if it is not there.
pub fn entries(path: &Path) -> std::io::Result<Vec<String>> {
    match std::fs::read_dir(path) {
        Ok(entries) => {
            entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}
