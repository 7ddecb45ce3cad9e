//! The code interpreter: `/execute` and `/contexts`.
//!
//! ```text
//!   client ── HTTP ── execution ── control socket ── kernel process
//!                        │                            │   │
//!                        └──── pipes ─── its output ──┘   └ forked of the zygote
//! ```
//!
//! A context is a process that keeps state between cells. Python's are forked
//! of a zygote that has imported what cells want, so a new context costs a fork
//! and not the start of an interpreter.

mod context;
mod execution;
mod install;
mod kernel;
mod language;
mod lines;
mod text;
mod zygote;

pub use language::Language;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header};
use serde::Deserialize;
use serde_json::json;

use crate::agent::Agent;
use crate::http::{self as web, Body, Chunks, Reply, Request, Service};
use crate::runtime;
use context::{Context, Contexts};
use kernel::KernelError;

/// Code of one cell, with its environment.
const BODY_BYTES_MAX: usize = 32 << 20;

/// Pieces of output that wait for a slow client; then the kernel waits too.
const CHUNKS_WAITING_MAX: usize = 16;

/// How long the head of a reply waits for the first events.
const HEAD_WAIT: Duration = Duration::from_millis(50);

/// The services of port 49999.
pub struct Interpreter {
    agent: Rc<Agent>,
    contexts: Rc<Contexts>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ExecuteRequest {
    code: String,
    context_id: Option<String>,
    language: Option<String>,
    env_vars: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ContextRequest {
    cwd: Option<String>,
    language: Option<String>,
}

/// Why a request is refused.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("{0}")]
    BadRequest(String),
    #[error("context {0} not found")]
    UnknownContext(String),
    #[error("the X-Access-Token header is missing or wrong")]
    Unauthorized,
    #[error("start a kernel: {0}")]
    Kernel(#[from] KernelError),
    #[error("no route for {0}")]
    NoRoute(String),
}

impl Refusal {
    fn reply(&self) -> Reply {
        let status = match self {
            Refusal::BadRequest(_) => StatusCode::BAD_REQUEST,
            Refusal::Kernel(error) if error.is_callers_mistake() => StatusCode::BAD_REQUEST,
            Refusal::Kernel(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Refusal::UnknownContext(_) | Refusal::NoRoute(_) => StatusCode::NOT_FOUND,
            Refusal::Unauthorized => StatusCode::UNAUTHORIZED,
        };
        web::error(status, self)
    }
}

impl Interpreter {
    /// An interpreter whose Python default context exists by name only.
    pub fn new(agent: Rc<Agent>) -> Self {
        let contexts = Contexts::new(agent.clone());
        Interpreter { agent, contexts }
    }

    /// Starts the zygote and the default context, so that a clone has them.
    pub async fn warm_up(&self) -> Result<(), String> {
        let context = self.contexts.default_of(Language::Python);
        context.kernel().await.map(drop).map_err(|error| error.to_string())
    }

    async fn route(&self, request: Request) -> Result<Reply, Refusal> {
        let path = request.uri().path().to_owned();
        let parts: Vec<_> = path.split('/').skip(1).collect();
        match (request.method().as_str(), &parts[..]) {
            ("GET", ["health"]) => {
                Ok(web::bytes_reply(StatusCode::OK, "text/plain", Bytes::from_static(b"OK")))
            }
            ("POST", ["execute"]) => {
                if !self.agent.header_token_ok(request.headers()) {
                    return Err(Refusal::Unauthorized);
                }
                self.execute(body(request).await?).await
            }
            (method, ["contexts", rest @ ..]) => {
                // Clients show their token only with code; a wrong one is
                // refused everywhere.
                let shows = request.headers().contains_key("x-access-token");
                if shows && !self.agent.header_token_ok(request.headers()) {
                    return Err(Refusal::Unauthorized);
                }
                match (method, rest) {
                    ("GET", []) => Ok(web::json(StatusCode::OK, &self.contexts.list())),
                    ("POST", []) => {
                        let message: ContextRequest = body(request).await?;
                        self.create(message).await
                    }
                    ("POST", [id, "restart"]) => {
                        self.known(id)?.restart().await?;
                        Ok(web::empty(StatusCode::NO_CONTENT))
                    }
                    ("DELETE", [id]) => {
                        self.known(id)?.stop();
                        self.contexts.remove(id);
                        Ok(web::empty(StatusCode::NO_CONTENT))
                    }
                    _ => Err(Refusal::NoRoute(path.clone())),
                }
            }
            _ => Err(Refusal::NoRoute(path.clone())),
        }
    }

    async fn create(&self, message: ContextRequest) -> Result<Reply, Refusal> {
        let language = parse_language(message.language.as_deref())?;
        let context = self.contexts.create(language, message.cwd.as_deref()).await?;
        Ok(web::json(StatusCode::OK, &context.describe()))
    }

    async fn execute(&self, message: ExecuteRequest) -> Result<Reply, Refusal> {
        let context = match (&message.context_id, &message.language) {
            (Some(_), Some(_)) => {
                let message = "only one of context_id and language can be given";
                return Err(Refusal::BadRequest(message.to_owned()));
            }
            (Some(id), None) => self.known(id)?,
            (None, language) => self.contexts.default_of(parse_language(language.as_deref())?),
        };
        let (sender, receiver) = runtime::channel(CHUNKS_WAITING_MAX);
        let env_vars = message.env_vars.unwrap_or_default();
        runtime::spawn(execution::run(context, message.code, env_vars, sender)).detach();
        // Most cells are over at once: their events go out with the head.
        let soon = runtime::sleep_until(Instant::now() + HEAD_WAIT);
        runtime::either(receiver.filled(), soon).await;
        let mut reply = Reply::new(Body::stream(Chunks(receiver)));
        let kind = HeaderValue::from_static("application/x-ndjson");
        reply.headers_mut().insert(header::CONTENT_TYPE, kind);
        Ok(reply)
    }

    fn known(&self, id: &str) -> Result<Rc<Context>, Refusal> {
        self.contexts.find(id).ok_or_else(|| Refusal::UnknownContext(id.to_owned()))
    }
}

impl Service for Interpreter {
    async fn answer(self: Rc<Self>, request: Request) -> Reply {
        if request.method() == Method::OPTIONS {
            return web::json(StatusCode::OK, &json!({}));
        }
        self.route(request).await.unwrap_or_else(|refusal| refusal.reply())
    }
}

async fn body<T: serde::de::DeserializeOwned>(request: Request) -> Result<T, Refusal> {
    let bytes = web::collect(request.into_body(), BODY_BYTES_MAX)
        .await
        .map_err(|error| Refusal::BadRequest(error.to_string()))?;
    let bytes = if bytes.is_empty() { b"{}" } else { &bytes[..] };
    serde_json::from_slice(bytes)
        .map_err(|error| Refusal::BadRequest(format!("decode the request: {error}")))
}

fn parse_language(name: Option<&str>) -> Result<Language, Refusal> {
    let Some(name) = name else { return Ok(Language::Python) };
    Language::named(name).ok_or_else(|| {
        let known = Language::ALL.map(Language::name).join(", ");
        Refusal::BadRequest(format!("language {name:?} is not supported, use one of {known}"))
    })
}
