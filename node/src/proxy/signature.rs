//! Signed file links. They name no sandbox: with one URL for all sandboxes, the one
//! whose access token gives the signature is meant.
//!
//! ```text
//! v1_ base64( SHA-256( path:read|write:user:token[:expiration] ) ), unpadded
//! ```

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use http::Uri;
use sha2::{Digest, Sha256};

const VERSION: &str = "v1_";
const FILES: &str = "/files";

/// The signed parts of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedLink {
    path: String,
    user: String,
    signature: String,
    expiration: Option<String>,
}

/// What a link allows; follows from the method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

impl SignedLink {
    /// The link in a request's target, if it is one.
    pub fn of(uri: &Uri) -> Option<Self> {
        if uri.path() != FILES {
            return None;
        }
        let mut link = Self {
            path: String::new(),
            user: String::new(),
            signature: String::new(),
            expiration: None,
        };
        for (name, value) in form_urlencoded::parse(uri.query()?.as_bytes()) {
            match name.as_ref() {
                "path" => link.path = value.into_owned(),
                "username" => link.user = value.into_owned(),
                "signature" => link.signature = value.into_owned(),
                "signature_expiration" => link.expiration = Some(value.into_owned()),
                _ => {}
            }
        }
        (!link.signature.is_empty()).then_some(link)
    }

    /// Whether `token` gives this signature. The time is checked by the agent.
    pub fn is_signed_with(&self, operation: Operation, token: &str) -> bool {
        let Some(given) = self.signature.strip_prefix(VERSION) else { return false };
        let operation = match operation {
            Operation::Read => "read",
            Operation::Write => "write",
        };
        let mut hash = Sha256::new();
        let parts = [self.path.as_str(), operation, self.user.as_str(), token];
        hash.update(parts.join(":"));
        if let Some(expiration) = &self.expiration {
            hash.update(":");
            hash.update(expiration);
        }
        STANDARD_NO_PAD.encode(hash.finalize()) == given
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything but the signature.
    const LINK: &str = "/files?path=%2Fhome%2Fuser%2Fa+b&username=user&signature=";

    fn link(signature: &str) -> SignedLink {
        let encoded: String = form_urlencoded::byte_serialize(signature.as_bytes()).collect();
        SignedLink::of(&format!("{LINK}{encoded}").parse().unwrap()).unwrap()
    }

    fn sign(text: &str) -> String {
        format!("{VERSION}{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
    }

    #[test]
    fn right_token_and_operation_match() {
        let link = link(&sign("/home/user/a b:read:user:token"));
        assert!(link.is_signed_with(Operation::Read, "token"));
        assert!(!link.is_signed_with(Operation::Write, "token"));
        assert!(!link.is_signed_with(Operation::Read, "other"));
    }

    #[test]
    fn expiration_is_part_of_the_signature() {
        let signature = sign("/a:read::token:99");
        let encoded: String = form_urlencoded::byte_serialize(signature.as_bytes()).collect();
        let uri = format!("/files?path=/a&signature_expiration=99&signature={encoded}");
        let link = SignedLink::of(&uri.parse().unwrap()).unwrap();
        assert!(link.is_signed_with(Operation::Read, "token"));
        let uri = format!("/files?path=/a&signature_expiration=98&signature={encoded}");
        let link = SignedLink::of(&uri.parse().unwrap()).unwrap();
        assert!(!link.is_signed_with(Operation::Read, "token"));
    }

    #[test]
    fn other_paths_are_no_links() {
        assert_eq!(SignedLink::of(&"/filez?signature=v1_x".parse().unwrap()), None);
        assert_eq!(SignedLink::of(&"/files?path=/a".parse().unwrap()), None);
    }
}
