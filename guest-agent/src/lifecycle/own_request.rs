//! Requests of the agent to itself, over a socket pair: they touch everything
//! that a client's first request would.

use std::io;
use std::rc::Rc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::http::{self as web, Service};
use crate::net::Socket;
use crate::runtime::{self, Source};

/// One connection to a service of this process.
pub struct OwnClient {
    source: Source,
    token: Option<String>,
    server: runtime::Task,
}

impl OwnClient {
    /// Connects.
    pub fn connect<S: Service>(service: Rc<S>, token: Option<String>) -> io::Result<Self> {
        let (ours, theirs) = pair()?;
        let server = runtime::spawn(web::serve(service, Socket::new(theirs)));
        Ok(OwnClient { source: Source::new(ours), token, server })
    }

    /// Sends one request and reads until the server closes; returns the reply
    /// as it came.
    pub async fn request(
        self,
        method: &str,
        path: &str,
        kind: &str,
        body: &[u8],
    ) -> io::Result<String> {
        let token = self.token.map(|token| format!("x-access-token: {token}\r\n"));
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: self\r\nconnection: close\r\n{}\
             content-type: {kind}\r\ncontent-length: {}\r\n\r\n",
            token.unwrap_or_default(),
            body.len(),
        );
        self.source.write_all(&[head.as_bytes(), body].concat()).await?;
        let mut reply = Vec::new();
        let mut buffer = vec![0; 16 * 1024];
        loop {
            match self.source.read(&mut buffer).await? {
                0 => break,
                count => reply.extend_from_slice(&buffer[..count]),
            }
        }
        drop(self.server);
        Ok(String::from_utf8_lossy(&reply).into_owned())
    }
}

/// Two connected, non-blocking sockets.
pub fn pair() -> io::Result<(std::os::fd::OwnedFd, std::os::fd::OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}
