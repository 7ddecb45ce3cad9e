//! envd's filesystem service. Like the original's, it acts as the superuser and
//! gives what it makes to the caller.

mod entry;
mod messages;
mod modify;
mod walk;
mod watch;
mod watchers;

pub use entry::Entry;

use std::path::PathBuf;
use std::rc::Rc;

use http::{HeaderMap, StatusCode};

use crate::agent::Agent;
use crate::connect::{self, CallOptions, Code, ConnectError, Form};
use crate::http::{self as web, Body, Reply, Request};
use crate::paths;
use crate::users::User;
use messages::{
    Empty, EntryReply, EventsReply, ListDirReply, ListDirRequest, MoveRequest, PathRequest,
    WatchRequest, WatcherReply, WatcherRequest,
};
use watchers::{WatchStream, Watchers};

/// The filesystem service.
pub struct Filesystem {
    agent: Rc<Agent>,
    watchers: Watchers,
}

impl Filesystem {
    /// A service without watchers.
    pub fn new(agent: Rc<Agent>) -> Self {
        Filesystem { agent, watchers: Watchers::default() }
    }

    /// Answers a call of the method named.
    pub async fn answer(&self, method: &str, request: Request) -> Reply {
        match method {
            "Stat" => unary(request, |m: PathRequest, h| self.stat(&m, h)).await,
            "ListDir" => {
                connect::unary(request, |m, h| async move { self.list(&m, &h).await }).await
            }
            "MakeDir" => {
                connect::unary(request, |m, h| async move { self.make(&m, &h).await }).await
            }
            "Move" => {
                connect::unary(request, |m, h| async move { self.move_entry(&m, &h).await }).await
            }
            "Remove" => {
                connect::unary(request, |m, h| async move { self.remove(&m, &h).await }).await
            }
            "WatchDir" => self.watch(request).await,
            "CreateWatcher" => {
                unary(request, |m: WatchRequest, h| self.create_watcher(&m, h)).await
            }
            "GetWatcherEvents" => {
                unary(request, |m: WatcherRequest, _| self.watcher_events(&m)).await
            }
            "RemoveWatcher" => unary(request, |m: WatcherRequest, _| self.remove_watcher(&m)).await,
            _ => web::empty(StatusCode::NOT_FOUND),
        }
    }

    fn stat(&self, message: &PathRequest, headers: &HeaderMap) -> Result<EntryReply, ConnectError> {
        let (path, _) = self.place(&message.path, headers)?;
        Ok(EntryReply { entry: Entry::of(&path, &self.agent.users)? })
    }

    async fn list(
        &self,
        message: &ListDirRequest,
        headers: &HeaderMap,
    ) -> Result<ListDirReply, ConnectError> {
        let (path, _) = self.place(&message.path, headers)?;
        let entries = walk::list(&path, message.depth.max(1), &self.agent.users).await?;
        Ok(ListDirReply { entries })
    }

    async fn make(
        &self,
        message: &PathRequest,
        headers: &HeaderMap,
    ) -> Result<EntryReply, ConnectError> {
        let (path, user) = self.place(&message.path, headers)?;
        modify::make_directory(&path, &user).await?;
        Ok(EntryReply { entry: Entry::of(&path, &self.agent.users)? })
    }

    async fn move_entry(
        &self,
        message: &MoveRequest,
        headers: &HeaderMap,
    ) -> Result<EntryReply, ConnectError> {
        let (source, user) = self.place(&message.source, headers)?;
        let (destination, _) = self.place(&message.destination, headers)?;
        modify::move_entry(&source, &destination, &user).await?;
        Ok(EntryReply { entry: Entry::of(&destination, &self.agent.users)? })
    }

    async fn remove(
        &self,
        message: &PathRequest,
        headers: &HeaderMap,
    ) -> Result<Empty, ConnectError> {
        let (path, _) = self.place(&message.path, headers)?;
        modify::remove(&path).await?;
        Ok(Empty {})
    }

    async fn watch(&self, request: Request) -> Reply {
        if let Some(reply) = connect::wrong_form(request.headers(), Form::Stream) {
            return reply;
        }
        let (parts, body) = request.into_parts();
        let opened = async {
            let options = CallOptions::from_headers(&parts.headers)?;
            let message: WatchRequest = connect::stream_request(body).await?;
            let (path, _) = self.place(&message.path, &parts.headers)?;
            let watcher = self.watchers.open(&path, &message, &self.agent)?;
            Ok(WatchStream::new(watcher, options))
        };
        match opened.await {
            Ok(stream) => connect::stream_reply(Body::stream(stream)),
            Err(error) => connect::failed_stream(&error),
        }
    }

    fn create_watcher(
        &self,
        message: &WatchRequest,
        headers: &HeaderMap,
    ) -> Result<WatcherReply, ConnectError> {
        let (path, _) = self.place(&message.path, headers)?;
        let watcher_id = self.watchers.create(&path, message, &self.agent)?;
        Ok(WatcherReply { watcher_id })
    }

    fn watcher_events(&self, message: &WatcherRequest) -> Result<EventsReply, ConnectError> {
        Ok(EventsReply { events: self.watchers.events(&message.watcher_id)? })
    }

    fn remove_watcher(&self, message: &WatcherRequest) -> Result<Empty, ConnectError> {
        self.watchers.remove(&message.watcher_id)?;
        Ok(Empty {})
    }

    /// The path a request means and the user it is for.
    fn place(&self, path: &str, headers: &HeaderMap) -> Result<(PathBuf, Rc<User>), ConnectError> {
        let user = self.agent.user_of(headers)?;
        let path = paths::resolve(path, &user, self.agent.workdir().as_deref())
            .map_err(|error| ConnectError::new(Code::InvalidArgument, error.to_string()))?;
        Ok((path, user))
    }
}

async fn unary<T, R>(
    request: Request,
    call: impl FnOnce(T, &HeaderMap) -> Result<R, ConnectError>,
) -> Reply
where
    T: serde::de::DeserializeOwned,
    R: serde::Serialize,
{
    connect::unary(request, |message, headers| async move { call(message, &headers) }).await
}
