//! A whole node in the test's process, and a client for it.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::TaskTracker;

use super::fixtures::{MemoryStore, template_record};
use super::stub::{Host, Stub};
use crate::api::{self, App, StopRequest};
use crate::config::Config;
use crate::flags::Flags;
use crate::idempotency::Idempotency;
use crate::keys::ApiKeys;
use crate::kinds::Kind;
use crate::metrics::Metrics;
use crate::sandboxes::{Parts, Sandboxes};
use crate::server::{self, Listener};
use crate::store::{SandboxRecord, Store};
use crate::templates::Templates;

/// A node that serves on a port of its own.
pub struct TestNode {
    pub address: SocketAddr,
    pub key: String,
    pub host: Arc<Host>,
    pub store: Arc<MemoryStore>,
    pub app: Arc<App>,
}

/// A reply, read to its end.
#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!("{error}: {}", String::from_utf8_lossy(&self.body));
        })
    }
}

impl TestNode {
    pub async fn start() -> Self {
        Self::start_with(&[], Arc::default(), Vec::new()).await
    }

    /// With flags, on a host that may have guests, and with what was stored.
    pub async fn start_with(flags: &[&str], host: Arc<Host>, records: Vec<SandboxRecord>) -> Self {
        use clap::Parser;
        let mut arguments = vec!["warrend", "--memory-floor-mib", "0"];
        arguments.extend(flags);
        let config = Config::from_flags(Flags::try_parse_from(arguments).unwrap()).unwrap();
        let memory_store = Arc::new(MemoryStore::default());
        let store: Arc<dyn Store> = Arc::clone(&memory_store) as Arc<dyn Store>;
        let kinds: Vec<Arc<dyn Kind>> = vec![Arc::new(Stub(Arc::clone(&host)))];
        let (work, background) = (TaskTracker::new(), TaskTracker::new());
        let metrics = Metrics::new();
        let templates = Templates::new(Arc::clone(&store), &kinds, vec![template_record("base")]);
        let sandboxes = Sandboxes::new(Parts {
            node_id: config.node_id.clone(),
            limits: config.limits,
            store: Arc::clone(&store),
            kinds,
            metrics: metrics.clone(),
            work: work.clone(),
            background: background.clone(),
        });
        sandboxes.adopt(records, templates.names()).await.unwrap();
        let keys = ApiKeys::new(store, Vec::new());
        let (_, key) = keys.add("test").await.unwrap();
        let stop = StopRequest::default();
        let app = Arc::new(App {
            sandboxes: sandboxes.clone(),
            templates,
            keys,
            idempotency: Idempotency::default(),
            metrics,
            work,
            background: background.clone(),
            stop: stop.clone(),
            started_at: Timestamp::now(),
            config,
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let handler = api::handler(Arc::clone(&app));
        background.spawn(async move { sandboxes.enforce_deadlines().await });
        tokio::spawn(server::serve(Listener::Network(listener), handler, stop.asked));
        Self { address, key, host, store: memory_store, app }
    }

    pub async fn connect(&self) -> SendRequest<Body> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        sender
    }

    /// Sends a request on a connection of its own.
    pub async fn send(&self, request: Request<Body>) -> http::Response<Incoming> {
        self.connect().await.send_request(request).await.unwrap()
    }

    pub async fn ask(&self, request: Request<Body>) -> Reply {
        let response = self.send(request).await;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes().to_vec();
        Reply { status: parts.status, headers: parts.headers, body }
    }

    /// A request to the API with the node's key.
    pub async fn api(&self, method: Method, path: &str, body: Option<Value>) -> Reply {
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "127.0.0.1")
            .header("x-api-key", &self.key)
            .body(body)
            .unwrap();
        self.ask(request).await
    }

    /// Makes a sandbox of template `base`; returns its id and access token.
    pub async fn create(&self) -> (String, String) {
        let body = serde_json::json!({ "templateID": "base" });
        let reply = self.api(Method::POST, "/v2/sandboxes", Some(body)).await;
        assert_eq!(reply.status, StatusCode::CREATED, "{:?}", reply.json());
        let text = |name: &str| reply.json()[name].as_str().unwrap().to_owned();
        (text("sandboxID"), text("envdAccessToken"))
    }
}

/// A request to a sandbox by headers.
pub fn to_sandbox(id: &str, port: u16, path: &str) -> http::request::Builder {
    Request::builder()
        .uri(path)
        .header("host", "127.0.0.1")
        .header("e2b-sandbox-id", id)
        .header("e2b-sandbox-port", port)
}
