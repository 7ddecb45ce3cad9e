//! Languages of cells.

/// A language that we have a kernel for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// Python 3.
    Python,
    /// Bash.
    Bash,
    /// JavaScript, by Node.js.
    JavaScript,
}

impl Language {
    /// Every language.
    pub const ALL: [Language; 3] = [Language::Python, Language::Bash, Language::JavaScript];

    /// The name that clients know.
    pub fn name(self) -> &'static str {
        match self {
            Language::Python => "python",
            Language::Bash => "bash",
            Language::JavaScript => "javascript",
        }
    }

    /// The language of a name.
    pub fn named(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "python" | "python3" | "py" => Some(Language::Python),
            "bash" | "sh" | "shell" => Some(Language::Bash),
            "javascript" | "js" | "node" => Some(Language::JavaScript),
            _ => None,
        }
    }
}
