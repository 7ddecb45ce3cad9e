//! Where the things are that `up` and `doctor` need: the daemon, a kernel, images.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A program beside this one, or on the PATH.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().map(|path| path.with_file_name(name));
    let on_path = std::env::var_os("PATH").map(|path| {
        std::env::split_paths(&path).map(|directory| directory.join(name)).collect::<Vec<_>>()
    });
    beside.into_iter().chain(on_path.into_iter().flatten()).find(|path| path.is_file())
}

/// Which of the two guest kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// For one vCPU.
    Up,
    /// For several.
    Smp,
}

/// The guest kernel of a variant, as built last.
pub(crate) fn kernel(variant: Variant) -> Option<PathBuf> {
    let suffix = match variant {
        Variant::Up => "-up",
        Variant::Smp => "-smp",
    };
    let entries = std::fs::read_dir(cache()?.join("kernel")).ok()?;
    let age = |path: &PathBuf| {
        path.metadata().and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
    };
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(suffix))
        .map(|entry| entry.path().join("vmlinux"))
        .filter(|path| path.is_file())
        .max_by_key(age)
}

/// The root image of a recipe: the one that was built last with the agent beside this
/// program, else the one that was built last.
pub(crate) fn image(recipe: &str) -> Option<PathBuf> {
    if recipe.contains('/') {
        return None;
    }
    let beside = std::env::current_exe().ok().map(|path| path.with_file_name("images"));
    let cached = cache().map(|path| path.join("image"));
    let image =
        |place: PathBuf| std::fs::canonicalize(place.join(recipe).join("rootfs.erofs")).ok();
    beside.into_iter().chain(cached).find_map(image)
}

/// `$WARREN_CACHE`, `$XDG_CACHE_HOME/warren` or `~/.cache/warren`.
fn cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    set("WARREN_CACHE")
        .map(PathBuf::from)
        .or_else(|| set("XDG_CACHE_HOME").map(|path| Path::new(&path).join("warren")))
        .or_else(|| set("HOME").map(|path| Path::new(&path).join(".cache/warren")))
}
