//! One way to declare a device's counters: a plain struct that serialises, and
//! lists itself by name for the VMM's statistics.

/// Declares a struct of `u64` counters with `entries()`.
#[macro_export]
macro_rules! counters {
    ($(#[$outer:meta])* $name:ident { $($(#[$inner:meta])* $field:ident,)+ }) => {
        $(#[$outer])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        pub struct $name {
            $($(#[$inner])* pub $field: u64,)+
        }

        impl $name {
            /// The counters by name, in order of declaration.
            pub fn entries(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field),)+]
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }

    #[test]
    fn every_counter_is_counted_somewhere() {
        let mut files = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
        let text = |path: &PathBuf| std::fs::read_to_string(path).unwrap();
        let is_declaration = |path: &&PathBuf| path.ends_with("metrics.rs");
        let code: String = files
            .iter()
            .filter(|path| !is_declaration(path) && !path.ends_with("tests.rs"))
            .map(text)
            .collect();
        let mut counters = 0;
        for path in files.iter().filter(is_declaration) {
            for line in text(path).lines() {
                let Some(name) = line.strip_prefix("        ").and_then(|l| l.strip_suffix(','))
                else {
                    continue;
                };
                if name.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase()) {
                    counters += 1;
                    let counted = [" +=", " =", "\n                    +=", "\n                +="]
                        .iter()
                        .any(|operator| code.contains(&format!(".{name}{operator}")));
                    assert!(counted, "{name} of {} is never counted", path.display());
                }
            }
        }
        assert!(counters > 50, "only {counters} counters were found");
    }
}
