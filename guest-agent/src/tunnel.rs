//! Streams to TCP ports of the guest's loopback.
//!
//! The client writes `<port>\n` and reads `OK\n`, or `ERR <reason>\n` before
//! the end. Then bytes go both ways, each direction no faster than its reader
//! and ended on its own.

use std::cell::Cell;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::task::Poll;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::net::Socket;
use crate::runtime;

/// Longest first line: five digits and the line's end.
const LINE_BYTES_MAX: usize = 7;

/// Bytes moved at once in one direction.
const COPY_BYTES: usize = 32 * 1024;

/// Serves one connection.
pub async fn serve(client: Socket) {
    let mut line = Vec::new();
    let opened = match read_port(&client, &mut line).await {
        Ok(port) => connect(port).await,
        Err(reason) => Err(reason),
    };
    let server = match opened {
        Ok(server) => server,
        Err(reason) => {
            let _ = client.source().write_all(format!("ERR {reason}\n").as_bytes()).await;
            return;
        }
    };
    if client.source().write_all(b"OK\n").await.is_err() {
        return;
    }
    let failed = Cell::new(false);
    let up = copy(&client, &server, &failed);
    let down = copy(&server, &client, &failed);
    let mut up = std::pin::pin!(up);
    let mut down = std::pin::pin!(down);
    let (mut up_done, mut down_done) = (false, false);
    std::future::poll_fn(|cx| {
        up_done = up_done || up.as_mut().poll(cx).is_ready();
        down_done = down_done || down.as_mut().poll(cx).is_ready();
        let over = (up_done && down_done) || failed.get();
        if over { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

async fn read_port(client: &Socket, line: &mut Vec<u8>) -> Result<u16, String> {
    // One byte at a time would be one call each: take what is there, the client
    // waits for the reply before it sends more.
    let mut buffer = [0; 64];
    while !line.contains(&b'\n') {
        match client.source().read(&mut buffer).await {
            Ok(0) | Err(_) => return Err("no port was named".to_owned()),
            Ok(count) => line.extend_from_slice(&buffer[..count]),
        }
        if line.len() > LINE_BYTES_MAX {
            return Err("the first line is too long".to_owned());
        }
    }
    let text = std::str::from_utf8(line).unwrap_or_default().trim_end();
    text.parse::<u16>()
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| format!("{text:?} is not a TCP port"))
}

async fn connect(port: u16) -> Result<Socket, String> {
    let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    match connect_to(v4).await {
        Ok(socket) => Ok(socket),
        // Some servers listen on IPv6 alone.
        Err(error) => connect_to(SocketAddr::from((Ipv6Addr::LOCALHOST, port)))
            .await
            .map_err(|_| error.to_string()),
    }
}

async fn connect_to(address: SocketAddr) -> io::Result<Socket> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // Over the loopback the handshake is over before the call returns.
    match rustix::net::connect(&fd, &address) {
        Ok(()) => {}
        Err(rustix::io::Errno::INPROGRESS) => {
            runtime::yield_now().await;
            rustix::net::sockopt::socket_error(&fd)??;
        }
        Err(error) => return Err(error.into()),
    }
    let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
    Ok(Socket::new(fd))
}

/// Moves bytes until the end of `from`, which it passes on.
async fn copy(from: &Socket, to: &Socket, failed: &Cell<bool>) {
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        match from.source().read(&mut buffer).await {
            Ok(0) => {
                let _ = to.finish();
                return;
            }
            Ok(count) if to.source().write_all(&buffer[..count]).await.is_ok() => {}
            // A reset of one side ends both.
            Ok(_) | Err(_) => return failed.set(true),
        }
    }
}
