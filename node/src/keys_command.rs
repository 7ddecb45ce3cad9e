//! `warrend keys …`: asks the running daemon over its local socket, or opens the store
//! if none runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::body::Body;
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::UnixStream;

use crate::config::Config;
use crate::flags::KeysAction;
use crate::keys::{ApiKeys, KeyError};
use crate::lock::{DirectoryLock, LockError};
use crate::store::{RedbStore, Store, StoreError};

/// Why the command failed.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// A daemon has the store but does not answer on its local socket.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// Nothing was ever started there.
    #[error(
        "no node has its state in {0}; name the directories of yours: warrend --state-dir DIR --run-dir DIR keys …"
    )]
    NoNode(PathBuf),
    /// The store is unusable.
    #[error("use the store: {0}")]
    Store(String),
    /// The key was not made.
    #[error("make a key: {0}")]
    Key(String),
    /// The daemon broke off.
    #[error("ask the running warrend")]
    Daemon(#[source] hyper::Error),
    /// The daemon refused.
    #[error("the running warrend answered {0}")]
    Refused(String),
    /// No such key.
    #[error("there is no key with id {0}")]
    Unknown(String),
}

impl From<StoreError> for KeysError {
    fn from(error: StoreError) -> Self {
        Self::Store(crate::error::chain(&error))
    }
}

impl From<KeyError> for KeysError {
    fn from(error: KeyError) -> Self {
        Self::Key(crate::error::chain(&error))
    }
}

/// Adds, lists or removes API keys.
///
/// # Errors
/// See [`KeysError`].
pub async fn manage_keys(config: &Config, action: KeysAction) -> Result<(), KeysError> {
    match UnixStream::connect(config.admin_socket()).await {
        Ok(stream) => by_daemon(stream, action).await,
        Err(_) => by_store(&config.state_directory, action).await,
    }
}

async fn by_daemon(stream: UnixStream, action: KeysAction) -> Result<(), KeysError> {
    match action {
        KeysAction::Add { name } => {
            let (_, reply) =
                call(stream, Method::POST, "/v1/keys", Some(json!({ "name": name }))).await?;
            println!("{}", reply["key"].as_str().unwrap_or_default());
        }
        KeysAction::List => {
            let (_, reply) = call(stream, Method::GET, "/v1/keys", None).await?;
            for key in reply.as_array().into_iter().flatten() {
                let text = |name: &str| key[name].as_str().unwrap_or_default().to_owned();
                print_key(&text("id"), &text("prefix"), &text("createdAt"), &text("name"));
            }
        }
        KeysAction::Remove { id } => {
            let path = format!("/v1/keys/{id}");
            let (status, _) = call(stream, Method::DELETE, &path, None).await?;
            if status == StatusCode::NOT_FOUND {
                return Err(KeysError::Unknown(id));
            }
        }
    }
    Ok(())
}

async fn call(
    stream: UnixStream,
    method: Method,
    path: &str,
    body: Option<Value>,
) -> Result<(StatusCode, Value), KeysError> {
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(KeysError::Daemon)?;
    let driver = tokio::spawn(connection);
    let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "warrend")
        .body(body)
        .map_err(|error| KeysError::Refused(error.to_string()))?;
    let response = sender.send_request(request).await.map_err(KeysError::Daemon)?;
    let status = response.status();
    let bytes = response.into_body().collect().await.map_err(KeysError::Daemon)?.to_bytes();
    driver.abort();
    let value: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    if status.is_success() || status == StatusCode::NOT_FOUND {
        Ok((status, value))
    } else {
        Err(KeysError::Refused(format!("{status}: {}", value["message"])))
    }
}

async fn by_store(directory: &Path, action: KeysAction) -> Result<(), KeysError> {
    if !RedbStore::exists(directory) {
        return Err(KeysError::NoNode(directory.to_owned()));
    }
    let _lock = DirectoryLock::take(directory)?;
    let (store, contents) = RedbStore::open(directory)?;
    let store: Arc<dyn Store> = Arc::new(store);
    let keys = ApiKeys::new(store, contents.keys);
    match action {
        KeysAction::Add { name } => println!("{}", keys.add(&name).await?.1),
        KeysAction::List => {
            for key in keys.list() {
                print_key(&key.id, &key.prefix, &key.created_at.to_string(), &key.name);
            }
        }
        KeysAction::Remove { id } => {
            if !keys.remove(&id).await? {
                return Err(KeysError::Unknown(id));
            }
        }
    }
    Ok(())
}

fn print_key(id: &str, prefix: &str, created_at: &str, name: &str) {
    println!("{id}  {prefix}…  {created_at}  {name}");
}
