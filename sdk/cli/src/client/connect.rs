//! The Connect protocol with its JSON codec, as far as a client of the agent
//! needs it: unary calls and streams of enveloped messages from the server.

use bytes::{Buf, Bytes, BytesMut};
use http::{Method, Request};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::http::{api_error, finish};
use super::{Body, Http, full};
use crate::error::CliError;

/// The agent's port in the guest.
pub(crate) const AGENT_PORT: &str = "49983";
/// Flag of the envelope that ends a stream.
const END_OF_STREAM: u8 = 2;
const HEADER_BYTES: usize = 5;
/// Messages are pieces of output; more is a broken peer.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// A sandbox as seen through the node's proxy.
#[derive(Debug, Clone)]
pub(crate) struct Agent {
    http: Http,
    sandbox: String,
    token: Option<String>,
    user: Option<String>,
}

#[derive(Debug, Deserialize)]
struct RpcError {
    code: String,
    #[serde(default)]
    message: String,
}

#[derive(Debug, Deserialize)]
struct EndOfStream {
    error: Option<RpcError>,
}

impl Agent {
    /// Finds a sandbox and its token.
    pub(crate) async fn of(http: &Http, id: &str, user: Option<&str>) -> Result<Self, CliError> {
        let sandbox = http.sandbox(id).await?;
        Ok(Self {
            http: http.clone(),
            sandbox: sandbox.id,
            token: sandbox.envd_access_token,
            user: user.map(str::to_owned),
        })
    }

    pub(super) fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    pub(super) fn http(&self) -> &Http {
        &self.http
    }

    /// A request that the proxy brings to the agent.
    pub(super) fn request(&self, method: Method, path: &str) -> http::request::Builder {
        let mut request = self
            .http
            .bare_request(method, path)
            .header("e2b-sandbox-id", &self.sandbox)
            .header("e2b-sandbox-port", AGENT_PORT);
        if let Some(token) = &self.token {
            request = request.header("x-access-token", token);
        }
        if let Some(user) = &self.user {
            use base64::Engine;
            let credentials = base64::engine::general_purpose::STANDARD.encode(format!("{user}:"));
            request = request.header(http::header::AUTHORIZATION, format!("Basic {credentials}"));
        }
        request
    }

    /// One request, one reply.
    pub(crate) async fn unary<T: DeserializeOwned>(
        &self,
        method: &'static str,
        message: &Value,
    ) -> Result<T, CliError> {
        let request = self
            .request(Method::POST, method)
            .header(http::header::CONTENT_TYPE, "application/json")
            .header("connect-protocol-version", "1");
        let response = self.http.send_any(finish(request, full(message.to_string()))?).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        if status.is_success() {
            return serde_json::from_slice(&body)
                .map_err(|source| CliError::Reply(method.to_owned(), source));
        }
        Err(failure(method, status.as_u16(), &body))
    }

    /// One request, many replies.
    pub(crate) async fn stream(
        &self,
        method: &'static str,
        message: &Value,
    ) -> Result<Messages, CliError> {
        let request = self
            .request(Method::POST, method)
            .header(http::header::CONTENT_TYPE, "application/connect+json")
            .header("connect-protocol-version", "1")
            .header("keepalive-ping-interval", "50");
        let request: Request<Body> =
            finish(request, full(envelope(0, message.to_string().as_bytes())))?;
        let response = self.http.send_any(request).await?;
        let status = response.status();
        if !status.is_success() {
            let body = response.into_body().collect().await?.to_bytes();
            return Err(failure(method, status.as_u16(), &body));
        }
        Ok(Messages { method, body: response.into_body(), buffer: BytesMut::new() })
    }
}

fn failure(method: &'static str, status: u16, body: &[u8]) -> CliError {
    match serde_json::from_slice::<RpcError>(body) {
        Ok(error) => CliError::Rpc { context: method, code: error.code, message: error.message },
        Err(_) => api_error(status, body),
    }
}

fn envelope(flags: u8, message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).expect("requests are far below 4 GiB");
    let mut bytes = Vec::with_capacity(HEADER_BYTES + message.len());
    bytes.push(flags);
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(message);
    bytes.into()
}

/// Replies of a stream.
#[derive(Debug)]
pub(crate) struct Messages {
    method: &'static str,
    body: Incoming,
    buffer: BytesMut,
}

impl Messages {
    /// The next reply; `None` after a proper end.
    pub(crate) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, CliError> {
        let Some((flags, message)) = self.envelope().await? else {
            return Err(CliError::StreamEnded);
        };
        let wrong = |source| CliError::Reply(self.method.to_owned(), source);
        if flags & END_OF_STREAM == 0 {
            return serde_json::from_slice(&message).map(Some).map_err(wrong);
        }
        let end: EndOfStream = serde_json::from_slice(&message).map_err(wrong)?;
        match end.error {
            None => Ok(None),
            Some(RpcError { code, message }) => {
                Err(CliError::Rpc { context: self.method, code, message })
            }
        }
    }

    async fn envelope(&mut self) -> Result<Option<(u8, Bytes)>, CliError> {
        loop {
            if let Some(found) = split_envelope(&mut self.buffer)? {
                return Ok(Some(found));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

fn split_envelope(buffer: &mut BytesMut) -> Result<Option<(u8, Bytes)>, CliError> {
    let Some(&[flags, a, b, c, d]) = buffer.first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    if length > MESSAGE_BYTES_MAX {
        return Err(CliError::said(format!("the agent sent a message of {length} bytes"), ""));
    }
    if buffer.len() < HEADER_BYTES + length {
        return Ok(None);
    }
    buffer.advance(HEADER_BYTES);
    Ok(Some((flags, buffer.split_to(length).freeze())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_envelope_waits_for_the_whole_message() {
        let bytes = envelope(2, b"{}");
        let mut buffer = BytesMut::from(&bytes[..6]);
        assert!(split_envelope(&mut buffer).unwrap().is_none());
        buffer.extend_from_slice(&bytes[6..]);
        assert_eq!(split_envelope(&mut buffer).unwrap(), Some((2, Bytes::from_static(b"{}"))));
        assert!(buffer.is_empty());
    }

    #[test]
    fn split_envelope_refuses_a_huge_length() {
        let mut buffer = BytesMut::from(&[0, 0xff, 0xff, 0xff, 0xff][..]);
        assert!(split_envelope(&mut buffer).is_err());
    }
}
