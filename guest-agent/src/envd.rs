//! Routes of port 49983: envd's protocol and the agent's own.

use std::rc::Rc;

use http::{Method, StatusCode};

use crate::agent::Agent;
use crate::connect::{Code, ConnectError};
use crate::files;
use crate::filesystem::Filesystem;
use crate::http::{self as web, Reply, Request, Service};
use crate::init;
use crate::interpreter::Interpreter;
use crate::lifecycle;
use crate::metrics::Metrics;
use crate::process::Processes;

/// The services of port 49983.
pub struct Envd {
    agent: Rc<Agent>,
    processes: Processes,
    filesystem: Filesystem,
    metrics: Metrics,
    interpreter: Rc<Interpreter>,
}

impl Envd {
    /// Services over an agent.
    pub fn new(agent: Rc<Agent>, interpreter: Rc<Interpreter>) -> Self {
        Envd {
            processes: Processes::new(agent.clone()),
            filesystem: Filesystem::new(agent.clone()),
            metrics: Metrics::default(),
            interpreter,
            agent,
        }
    }

    /// The token that clients must show now.
    pub fn token(&self) -> Option<String> {
        self.agent.settings.borrow().access_token.clone()
    }
}

impl Service for Envd {
    async fn answer(self: Rc<Self>, request: Request) -> Reply {
        let path = request.uri().path().to_owned();
        // These bring their own way of being allowed.
        match (request.method(), path.as_str()) {
            (&Method::GET, "/health") => return web::empty(StatusCode::NO_CONTENT),
            (&Method::POST, "/init") => return init::answer(&self.agent, request).await,
            (_, "/files") => return files::answer(&self.agent, request).await,
            _ => {}
        }
        let rpc = path.strip_prefix('/').and_then(|path| path.split_once('/'));
        if !self.agent.header_token_ok(request.headers()) {
            let message = "the X-Access-Token header is missing or wrong";
            return match rpc {
                Some(_) => ConnectError::new(Code::Unauthenticated, message).unary_reply(),
                None => web::error(StatusCode::UNAUTHORIZED, message),
            };
        }
        match (request.method(), rpc) {
            (&Method::POST, Some(("process.Process", method))) => {
                self.processes.answer(method, request).await
            }
            (&Method::POST, Some(("filesystem.Filesystem", method))) => {
                self.filesystem.answer(method, request).await
            }
            (&Method::GET, None) if path == "/metrics" => match self.metrics.sample() {
                Ok(sample) => web::json(StatusCode::OK, &sample),
                Err(error) => web::error(StatusCode::INTERNAL_SERVER_ERROR, error),
            },
            (&Method::GET, None) if path == "/envs" => {
                web::json(StatusCode::OK, &self.agent.settings.borrow().environment)
            }
            (&Method::POST, Some(("files", "compose"))) => {
                files::answer_compose(&self.agent, request).await
            }
            (&Method::POST, None) if path == "/warmup" => {
                lifecycle::warm_up(self.clone(), self.interpreter.clone())
            }
            (&Method::POST, None) if path == "/quiesce" => {
                web::close_idle_connections();
                lifecycle::quiesce()
            }
            _ => web::error(StatusCode::NOT_FOUND, format_args!("no route for {path}")),
        }
    }
}
