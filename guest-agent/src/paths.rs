//! Paths as clients write them.

use std::path::PathBuf;

use crate::users::User;

/// Longest path the kernel takes, with its terminator.
const PATH_BYTES_MAX: usize = 4096;

/// Why a path cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// It holds a NUL byte.
    #[error("the path holds a NUL byte")]
    Nul,
    /// It is too long.
    #[error("the path has {0} bytes, more than {max}", max = PATH_BYTES_MAX - 1)]
    TooLong(usize),
    /// `~name` is not expanded.
    #[error("the path starts with a user's home that is not the caller's: {0:?}")]
    ForeignHome(String),
}

/// Makes `path` absolute: `~` is the user's home, a relative path starts at
/// `workdir` (or the home), and `.`, `..` and doubled slashes are resolved in
/// the text, as the shell's `cd` does.
pub fn resolve(path: &str, user: &User, workdir: Option<&str>) -> Result<PathBuf, PathError> {
    if path.contains('\0') {
        return Err(PathError::Nul);
    }
    let start = workdir.filter(|dir| !dir.is_empty()).unwrap_or(&user.home);
    let text = match path.strip_prefix('~') {
        Some("") => user.home.clone(),
        Some(rest) if rest.starts_with('/') => format!("{}{rest}", user.home),
        Some(_) => return Err(PathError::ForeignHome(path.to_owned())),
        None if path.starts_with('/') => path.to_owned(),
        None => format!("{start}/{path}"),
    };
    let mut parts = Vec::new();
    for part in text.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    let clean = format!("/{}", parts.join("/"));
    if clean.len() >= PATH_BYTES_MAX {
        return Err(PathError::TooLong(clean.len()));
    }
    Ok(clean.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use warren_base::spawn::Identity;

    fn resolved(path: &str, workdir: Option<&str>) -> Result<String, PathError> {
        let identity = Identity { uid: 1, gid: 1, groups: vec![] };
        let user = User { name: "u".into(), identity, home: "/home/u".into() };
        resolve(path, &user, workdir).map(|path| path.to_str().unwrap().to_owned())
    }

    #[test]
    fn resolve_relative_starts_at_workdir_or_home() {
        assert_eq!(resolved("a//b/./c", None).unwrap(), "/home/u/a/b/c");
        assert_eq!(resolved("a", Some("/w")).unwrap(), "/w/a");
        assert_eq!(resolved("", Some("")).unwrap(), "/home/u");
    }

    #[test]
    fn resolve_home_and_parents() {
        assert_eq!(resolved("~", None).unwrap(), "/home/u");
        assert_eq!(resolved("~/x/../y", Some("/w")).unwrap(), "/home/u/y");
        assert_eq!(resolved("/../../etc", None).unwrap(), "/etc");
    }

    #[test]
    fn resolve_unusable_paths_are_refused() {
        assert_eq!(resolved("a\0b", None), Err(PathError::Nul));
        assert!(matches!(resolved("~root/x", None), Err(PathError::ForeignHome(_))));
        assert!(matches!(resolved(&"a/".repeat(3000), None), Err(PathError::TooLong(_))));
    }
}
