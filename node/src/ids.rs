//! Names of nodes, sandboxes and templates.
//!
//! A sandbox id names its node, so that any front end finds the node without a
//! look-up:
//!
//! ```text
//! 2 n1 k3v9…      one base-36 digit: length of the node id; the node id; 17 random characters
//! ```
//!
//! Only `[a-z0-9]` is used: host names are split at `-` and `.`.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::random;

/// Random characters of a sandbox id: 88 bits.
const RANDOM_CHARACTERS: usize = 17;
/// A sandbox id and a port must fit one DNS label of 63 characters.
const SANDBOX_ID_BYTES_MAX: usize = 48;
const NODE_ID_BYTES_MAX: usize = 16;
const TEMPLATE_NAME_BYTES_MAX: usize = 64;

/// Why a name was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Node ids are part of sandbox ids.
    #[error("node id {0:?} is not 1 to {NODE_ID_BYTES_MAX} characters of a-z and 0-9")]
    Node(String),
    /// See the module's text.
    #[error("sandbox id is not 1 to {SANDBOX_ID_BYTES_MAX} characters of a-z and 0-9")]
    Sandbox,
    /// Template names are directory names.
    #[error(
        "template name {0:?} is not 1 to {TEMPLATE_NAME_BYTES_MAX} characters of a-z, 0-9, '-', '_' and '.', \
         starting with a letter or digit"
    )]
    Template(String),
}

/// Name of a node, 1 to 16 characters of `[a-z0-9]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeId(String);

impl NodeId {
    /// Checks a name.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        if text.len() > NODE_ID_BYTES_MAX || !is_plain(text) {
            return Err(NameError::Node(text.chars().take(64).collect()));
        }
        Ok(Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Name of a sandbox, `^[a-z0-9]{1,48}$`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId(Arc<str>);

impl SandboxId {
    /// A fresh id on this node.
    pub fn random(node: &NodeId) -> Self {
        let length =
            u32::try_from(node.0.len()).ok().and_then(|length| char::from_digit(length, 36));
        let length = length.expect("a node id is at most 16 characters long");
        Self(format!("{length}{}{}", node.0, random::base36(RANDOM_CHARACTERS)).into())
    }

    /// Checks an id that came from outside.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        if text.len() > SANDBOX_ID_BYTES_MAX || !is_plain(text) {
            return Err(NameError::Sandbox);
        }
        Ok(Self(text.into()))
    }

    /// The node that the id names, if it has the form of this version's ids.
    pub fn node(&self) -> Option<&str> {
        let length = usize::try_from(self.0.chars().next()?.to_digit(36)?).ok()?;
        let rest = self.0.get(1..)?;
        (rest.len() == length + RANDOM_CHARACTERS).then(|| &rest[..length])
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for SandboxId {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        Self::parse(&text)
    }
}

impl From<SandboxId> for String {
    fn from(id: SandboxId) -> Self {
        id.0.as_ref().to_owned()
    }
}

impl Borrow<str> for SandboxId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl fmt::Debug for SandboxId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Name or alias of a template; also the name of its directory.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TemplateName(String);

impl TemplateName {
    /// Checks a name.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let fits = text.len() <= TEMPLATE_NAME_BYTES_MAX
            && text.starts_with(|first: char| first.is_ascii_lowercase() || first.is_ascii_digit())
            && text.bytes().all(|byte| {
                byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte)
            });
        if fits { Ok(Self(text.to_owned())) } else { Err(NameError::Template(shorten(text))) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for TemplateName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        Self::parse(&text)
    }
}

impl From<TemplateName> for String {
    fn from(name: TemplateName) -> Self {
        name.0
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

/// The start of a name for an error message.
pub fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn random_id_names_its_node() {
        let node = NodeId::parse("n1").unwrap();
        let id = SandboxId::random(&node);
        assert_eq!(id.node(), Some("n1"));
        assert_eq!(SandboxId::parse(id.as_str()).unwrap(), id);
    }

    #[test]
    fn sandbox_id_with_dash_is_refused() {
        assert_eq!(SandboxId::parse("a-b"), Err(NameError::Sandbox));
    }

    #[test]
    fn template_name_with_slash_or_dots_is_refused() {
        assert!(TemplateName::parse("../x").is_err());
        assert!(TemplateName::parse("..").is_err());
        assert!(TemplateName::parse("a/b").is_err());
        assert!(TemplateName::parse("a\0").is_err());
        assert!(TemplateName::parse("code-interpreter-v1").is_ok());
    }

    proptest! {
        #[test]
        fn parse_never_panics(text in ".{0,80}") {
            if let Ok(id) = SandboxId::parse(&text) {
                let _ = id.node();
                prop_assert_eq!(id.as_str(), text);
            }
        }
    }
}
