//! A blocking HTTP/1.1 client that sends what it is told, valid or not.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

/// Guests may be slow; a test that waits longer than this has failed.
const PATIENCE: Duration = Duration::from_secs(180);

/// A server, and headers for each request.
#[derive(Debug, Clone)]
pub struct Client {
    address: String,
    headers: Vec<(String, String)>,
    patience: Duration,
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Reply {
    /// Status code.
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// All of the body that came.
    pub body: Vec<u8>,
}

impl Reply {
    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {} {}", self.status, self.text()))
    }

    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// A header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// This reply, if its status is as expected.
    ///
    /// # Panics
    /// If it is not.
    #[must_use]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "unexpected reply: {}", self.text());
        self
    }
}

impl Client {
    /// A client of `host:port`.
    #[must_use]
    pub fn new(address: impl Into<String>) -> Self {
        Self { address: address.into(), headers: Vec::new(), patience: PATIENCE }
    }

    /// Waits this long for each piece of an answer.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// With one more header in each request.
    #[must_use]
    pub fn with_header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sends a request and reads the whole answer.
    ///
    /// # Errors
    /// What the connection says.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> std::io::Result<Reply> {
        let stream = TcpStream::connect(&self.address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(self.patience))?;
        stream.set_write_timeout(Some(self.patience))?;
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", self.address);
        let own = self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        for (name, value) in own.chain(headers.iter().copied()) {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-length: {}\r\nconnection: close\r\n\r\n", body.len()));
        let mut writer = &stream;
        writer.write_all(head.as_bytes())?;
        // A server may answer and close before it has read all of a bad request.
        let sent = writer.write_all(body);
        match read_reply(&mut BufReader::new(&stream)) {
            Ok(reply) => Ok(reply),
            Err(error) => Err(sent.err().unwrap_or(error)),
        }
    }

    /// `GET`.
    ///
    /// # Panics
    /// If there is no answer.
    #[must_use]
    pub fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], b"").expect("an answer to GET")
    }

    /// `DELETE`.
    ///
    /// # Panics
    /// If there is no answer.
    #[must_use]
    pub fn delete(&self, path: &str) -> Reply {
        self.send("DELETE", path, &[], b"").expect("an answer to DELETE")
    }

    /// `POST` of JSON.
    ///
    /// # Panics
    /// If there is no answer.
    #[must_use]
    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.send(
            "POST",
            path,
            &[("content-type", "application/json")],
            body.to_string().as_bytes(),
        )
        .expect("an answer to POST")
    }
}

fn read_reply(reader: &mut impl BufRead) -> std::io::Result<Reply> {
    let broken = |text: &str| std::io::Error::other(format!("bad HTTP reply: {text}"));
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status =
        line.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or_else(|| broken(&line))?;
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let trimmed = line.trim_end();
        if trimmed.is_empty() {
            break;
        }
        let (name, value) = trimmed.split_once(':').ok_or_else(|| broken(trimmed))?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let header =
        |name: &str| headers.iter().find(|(known, _)| known == name).map(|(_, value)| value);
    let mut body = Vec::new();
    if header("transfer-encoding").is_some_and(|value| value == "chunked") {
        loop {
            line.clear();
            reader.read_line(&mut line)?;
            let length = usize::from_str_radix(line.trim(), 16).map_err(|_| broken(&line))?;
            let start = body.len();
            body.resize(start + length, 0);
            reader.read_exact(&mut body[start..])?;
            line.clear();
            reader.read_line(&mut line)?;
            if length == 0 {
                break;
            }
        }
    } else if let Some(length) = header("content-length") {
        body.resize(length.parse().map_err(|_| broken(length))?, 0);
        reader.read_exact(&mut body)?;
    } else if status != 204 {
        reader.read_to_end(&mut body)?;
    }
    Ok(Reply { status, headers, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_reply_joins_chunks() {
        let text =
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n";
        let reply = read_reply(&mut &text[..]).unwrap();
        assert_eq!((reply.status, reply.body.as_slice()), (200, &b"abc"[..]));
    }

    #[test]
    fn read_reply_takes_the_length_it_is_told() {
        let text = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno";
        let reply = read_reply(&mut &text[..]).unwrap();
        assert_eq!((reply.status, reply.text().as_str()), (404, "no"));
    }
}
