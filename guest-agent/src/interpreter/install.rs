//! The kernels' own programs, written where their interpreters can read them.

use std::cell::OnceCell;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Files of the kernels.
const FILES: [(&str, &str); 8] = [
    ("python/__main__.py", include_str!("kernel/__main__.py")),
    ("python/warren_cell.py", include_str!("kernel/warren_cell.py")),
    ("python/warren_chart.py", include_str!("kernel/warren_chart.py")),
    ("python/warren_display.py", include_str!("kernel/warren_display.py")),
    ("python/warren_inline.py", include_str!("kernel/warren_inline.py")),
    ("python/warren_traceback.py", include_str!("kernel/warren_traceback.py")),
    ("kernel.js", include_str!("kernel/kernel.js")),
    ("kernel.sh", include_str!("kernel/kernel.sh")),
];

/// Where the files are, once they are written.
#[derive(Default)]
pub struct Installed(OnceCell<PathBuf>);

impl Installed {
    /// The directory, written now if it was not.
    pub fn directory(&self) -> io::Result<&Path> {
        if let Some(directory) = self.0.get() {
            return Ok(directory);
        }
        let id = rustix::process::getpid();
        let directory = match id.is_init() {
            true => PathBuf::from("/run/warren-agent"),
            false => std::env::temp_dir().join(format!("warren-agent-{}", id.as_raw_nonzero())),
        };
        write_all(&directory)?;
        Ok(self.0.get_or_init(|| directory))
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        if let Some(directory) = self.0.take() {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}

fn write_all(directory: &Path) -> io::Result<()> {
    let readable =
        |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
    for place in [directory, &directory.join("python")] {
        std::fs::create_dir_all(place)?;
        readable(place, 0o755)?;
    }
    for (name, content) in FILES {
        let path = directory.join(name);
        std::fs::write(&path, content)?;
        readable(&path, 0o644)?;
    }
    Ok(())
}
