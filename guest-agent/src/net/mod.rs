//! Listening on vsock, unix and TCP sockets, which are all alike once they
//! are open.

mod socket;

pub use socket::Socket;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::runtime::{self, Source, Task};

/// Connections that may wait to be accepted. One more is refused, which the node cannot
/// tell from a port that nobody listens on; a waiting one costs the guest little.
const BACKLOG: i32 = 4096;

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A vsock port, for every CID.
    Vsock(u32),
    /// A unix socket; a stale file is replaced.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
}

impl std::str::FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, rest) = text.split_once(':').ok_or("expected KIND:ADDRESS")?;
        match kind {
            "vsock" => rest.parse().map(Address::Vsock).map_err(|e| format!("vsock port: {e}")),
            "unix" => Ok(Address::Unix(rest.into())),
            "tcp" => rest.parse().map(Address::Tcp).map_err(|e| format!("tcp address: {e}")),
            _ => Err(format!("unknown kind {kind:?}, expected vsock, unix or tcp")),
        }
    }
}

impl Address {
    fn listen(&self) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let open = |family| rustix::net::socket_with(family, SocketType::STREAM, flags, None);
        match self {
            Address::Vsock(port) => warren_base::guest::listen_vsock(*port, BACKLOG),
            Address::Unix(path) => {
                let _ = std::fs::remove_file(path);
                let socket = open(AddressFamily::UNIX)?;
                rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(path)?)?;
                rustix::net::listen(&socket, BACKLOG)?;
                Ok(socket)
            }
            Address::Tcp(address) => {
                let family = match address {
                    SocketAddr::V4(_) => AddressFamily::INET,
                    SocketAddr::V6(_) => AddressFamily::INET6,
                };
                let socket = open(family)?;
                rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
                rustix::net::bind(&socket, address)?;
                rustix::net::listen(&socket, BACKLOG)?;
                Ok(socket)
            }
        }
    }
}

/// Listens on `address` and hands every connection to `serve`, in a task of
/// its own. The returned task owns the listener.
pub fn listen<F>(address: &Address, serve: impl Fn(Socket) -> F + 'static) -> io::Result<Task>
where
    F: Future<Output = ()> + 'static,
{
    let listener = Source::one_at_a_time(address.listen()?);
    let tcp = matches!(address, Address::Tcp(_));
    let serve = Rc::new(serve);
    Ok(runtime::spawn(async move {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match listener.input(|fd| rustix::net::accept_with(fd, flags)).await {
                Ok(socket) => {
                    if tcp {
                        let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
                    }
                    runtime::spawn(serve(Socket::new(socket))).detach();
                }
                Err(error) => {
                    // Out of descriptors or memory: a pause lets connections end.
                    crate::console::error(format_args!("accept a connection: {error}"));
                    let pause = std::time::Duration::from_millis(100);
                    runtime::sleep_until(std::time::Instant::now() + pause).await;
                }
            }
        }
    }))
}
