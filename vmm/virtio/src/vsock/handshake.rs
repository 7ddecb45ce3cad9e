//! Host clients that have not said which port they want.
//!
//! The line is read without taking a byte beyond its end: what follows belongs
//! to the stream.

use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::{HANDSHAKE_BYTES_MAX, HANDSHAKE_TIME_MAX};

/// A client and the part of its line that came so far.
#[derive(Debug)]
pub struct Handshake {
    /// The client.
    pub socket: OwnedFd,
    line: [u8; HANDSHAKE_BYTES_MAX],
    len: usize,
    /// When patience ends.
    pub deadline: Instant,
}

/// How far the line came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandshakeProgress {
    /// More is to come.
    Waiting,
    /// The client wants this port.
    Connect(u32),
    /// The client hung up, or what it wrote is no such line.
    Failed,
}

impl Handshake {
    /// A client that was just accepted.
    pub fn new(socket: OwnedFd, now: Instant) -> Self {
        Self { socket, line: [0; HANDSHAKE_BYTES_MAX], len: 0, deadline: now + HANDSHAKE_TIME_MAX }
    }

    /// Reads what there is of the line.
    pub fn advance(&mut self) -> HandshakeProgress {
        loop {
            let room = self.line.get_mut(self.len..).unwrap_or_default();
            if room.is_empty() {
                return HandshakeProgress::Failed;
            }
            let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            let seen = match recv(&self.socket, &mut *room, flags) {
                Ok((0, _)) => return HandshakeProgress::Failed,
                Ok((bytes, _)) => bytes,
                Err(Errno::AGAIN) => return HandshakeProgress::Waiting,
                Err(Errno::INTR) => continue,
                Err(_) => return HandshakeProgress::Failed,
            };
            let peeked = room.get(..seen).unwrap_or_default();
            let end = peeked.iter().position(|byte| *byte == b'\n');
            let taken = end.map_or(seen, |end| end + 1);
            let part = room.get_mut(..taken).unwrap_or_default();
            match recv(&self.socket, part, RecvFlags::DONTWAIT) {
                Ok((bytes, _)) if bytes == taken => self.len += taken,
                Ok(_) | Err(_) => return HandshakeProgress::Failed,
            }
            if end.is_some() {
                let line = self.line.get(..self.len).unwrap_or_default();
                return match parse(line) {
                    Some(port) => HandshakeProgress::Connect(port),
                    None => HandshakeProgress::Failed,
                };
            }
        }
    }
}

/// The port of a `CONNECT <port>\n` line.
fn parse(line: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(line).ok()?;
    let line = text.strip_suffix('\n')?;
    let line = line.strip_suffix('\r').unwrap_or(line);
    let port = line.strip_prefix("CONNECT ")?;
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // The highest port number means "any" and cannot be connected to.
    port.parse().ok().filter(|port| *port != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_the_line_only() {
        assert_eq!(parse(b"CONNECT 49983\n"), Some(49983));
        assert_eq!(parse(b"CONNECT 1\r\n"), Some(1));
        for line in [
            &b"CONNECT 1"[..],
            b"CONNECT \n",
            b"CONNECT +1\n",
            b"CONNECT 1 \n",
            b"connect 1\n",
            b"CONNECT 4294967295\n",
            b"CONNECT 4294967296\n",
            b"CONNECT \xff\n",
            b"\n",
        ] {
            assert_eq!(parse(line), None, "{}", line.escape_ascii());
        }
    }
}
