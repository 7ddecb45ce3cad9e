//! Links that carry their own permission.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use http::{HeaderMap, StatusCode};
use sha2::{Digest, Sha256};

use super::FileError;
use crate::agent::{Agent, constant_time_eq};
use crate::http::Query;

/// What a link permits.
#[derive(Debug, Clone, Copy)]
pub enum Operation {
    /// Download.
    Read,
    /// Upload.
    Write,
}

/// Checks that a request shows the token or a signature made with it.
pub fn check(
    agent: &Agent,
    headers: &HeaderMap,
    query: &Query,
    operation: Operation,
) -> Result<(), FileError> {
    let refuse = |message: &str| Err(FileError::new(StatusCode::UNAUTHORIZED, message));
    let settings = agent.settings.borrow();
    let Some(token) = settings.access_token.as_deref() else { return Ok(()) };
    if headers.contains_key("x-access-token") {
        return match agent.header_token_ok(headers) {
            true => Ok(()),
            false => refuse("the X-Access-Token header is wrong"),
        };
    }
    let Some(shown) = query.value("signature") else {
        return refuse("missing signature query parameter");
    };
    let path = query.value("path").unwrap_or_default();
    let username = query.value("username").unwrap_or_default();
    let expiration = match query.value("signature_expiration") {
        None => None,
        Some(text) => match text.parse::<u64>() {
            Ok(seconds) => Some(seconds),
            Err(_) => return refuse("invalid signature expiration"),
        },
    };
    let expected = sign(path, operation, username, token, expiration);
    if !constant_time_eq(expected.as_bytes(), shown.as_bytes()) {
        return refuse("invalid signature");
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    if expiration.is_some_and(|expiration| expiration < now) {
        return refuse("signature is already expired");
    }
    Ok(())
}

fn sign(
    path: &str,
    operation: Operation,
    username: &str,
    token: &str,
    expiration: Option<u64>,
) -> String {
    let operation = match operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    let mut text = format!("{path}:{operation}:{username}:{token}");
    if let Some(expiration) = expiration {
        text.push_str(&format!(":{expiration}"));
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sign_is_the_hash_of_the_fields() {
        let signature = sign("/a", Operation::Read, "", "t", None);
        let expected = STANDARD_NO_PAD.encode(Sha256::digest("/a:read::t"));
        assert_eq!(signature, format!("v1_{expected}"));
        assert_ne!(signature, sign("/a", Operation::Write, "", "t", None));
        assert_ne!(signature, sign("/a", Operation::Read, "", "t", Some(1)));
    }
}
