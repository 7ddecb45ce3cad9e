//! `POST /init`: who this sandbox is, after it was created, resumed or forked.
//!
//! The node lets no request through before the answer, so every step is done
//! when 204 is sent, and a step that fails is named and nothing is claimed.
//! Everything that can be opened or looked up beforehand was: the call itself
//! is a few writes.

mod hooks;
mod machine;

pub use machine::{BOOT_ID, HOSTS, KERNEL_BOOT_ID, MACHINE_ID, Machine, hosts};

use std::collections::BTreeMap;

use http::StatusCode;
use serde::Deserialize;

use crate::agent::Agent;
use crate::http::{self as web, Reply, Request};

/// A body larger than this is no identity.
const BODY_BYTES_MAX: usize = 1 << 20;

/// The body. What is absent stays as it is.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct InitRequest {
    /// Wall-clock time, RFC 3339.
    pub timestamp: Option<String>,
    /// Token that clients must show from now on; empty is none.
    pub access_token: Option<String>,
    /// Environment of every process.
    pub env_vars: Option<BTreeMap<String, String>>,
    /// Whom to run as when a request names nobody.
    pub default_user: Option<String>,
    /// Where to run when a request names no place.
    pub default_workdir: Option<String>,
    /// Names, numbers and randomness of this clone.
    pub identity: Option<Identity>,
}

/// What makes a clone different from its siblings.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Identity {
    /// The sandbox's id.
    pub sandbox_id: String,
    /// Host name; empty stays as it is.
    pub hostname: String,
    /// 32 hexadecimal digits.
    pub machine_id: String,
    /// A UUID.
    pub boot_id: String,
    /// Number of this child among those of one fork.
    pub fork_index: u64,
    /// 64 hexadecimal digits, the caller's to use.
    pub seed: String,
    /// Randomness for the kernel, base64.
    pub entropy: String,
}

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {message}")]
pub struct InitError {
    /// Which one.
    pub step: &'static str,
    /// Why.
    pub message: String,
}

impl InitError {
    fn new(step: &'static str, message: impl std::fmt::Display) -> Self {
        InitError { step, message: message.to_string() }
    }
}

/// Answers the request.
pub async fn answer(agent: &Agent, request: Request) -> Reply {
    let body = match web::collect(request.into_body(), BODY_BYTES_MAX).await {
        Ok(body) => body,
        Err(error) => return web::error(StatusCode::BAD_REQUEST, error),
    };
    let body = if body.is_empty() { b"{}" } else { &body[..] };
    let message = match serde_json::from_slice(body) {
        Ok(message) => message,
        Err(error) => return web::error(StatusCode::BAD_REQUEST, format_args!("decode: {error}")),
    };
    match apply(agent, message).await {
        Ok(()) => web::empty(StatusCode::NO_CONTENT),
        Err(error) => {
            crate::console::error(format_args!("init: {error}"));
            let value = serde_json::json!({
                "code": 500, "step": error.step, "message": format!("init failed at {error}"),
            });
            web::json(StatusCode::INTERNAL_SERVER_ERROR, &value)
        }
    }
}

async fn apply(agent: &Agent, request: InitRequest) -> Result<(), InitError> {
    let machine = &agent.machine;
    if let Some(timestamp) = request.timestamp.as_deref() {
        machine.set_clock(timestamp)?;
    }
    if let Some(identity) = &request.identity {
        machine.take_identity(identity)?;
    }
    let user = request.default_user.as_deref().filter(|user| !user.is_empty());
    if let Some(user) = user.filter(|user| agent.users.named(user).is_none()) {
        return Err(InitError::new("default user", format_args!("no user {user:?}")));
    }
    let is_new = request.identity.is_some();
    store(agent, request);
    if is_new {
        agent.generation.set(agent.generation.get() + 1);
        hooks::run(agent).await?;
    }
    Ok(())
}

fn store(agent: &Agent, request: InitRequest) {
    let mut settings = agent.settings.borrow_mut();
    if let Some(token) = request.access_token {
        settings.access_token = Some(token).filter(|token| !token.is_empty());
    }
    if let Some(environment) = request.env_vars {
        settings.environment = environment;
    }
    if let Some(user) = request.default_user {
        settings.default_user = Some(user).filter(|user| !user.is_empty());
    }
    if let Some(workdir) = request.default_workdir {
        settings.default_workdir = Some(workdir).filter(|workdir| !workdir.is_empty());
    }
    if let Some(identity) = request.identity {
        settings.identity = BTreeMap::from([
            ("E2B_SANDBOX".to_owned(), "true".to_owned()),
            ("E2B_SANDBOX_ID".to_owned(), identity.sandbox_id.clone()),
            ("WARREN_SANDBOX_ID".to_owned(), identity.sandbox_id),
            ("WARREN_FORK_INDEX".to_owned(), identity.fork_index.to_string()),
            ("WARREN_SEED".to_owned(), identity.seed),
        ]);
    }
}
