//! One HTTP/1.1 request per connection: a command line makes few, and a dropped
//! connection then ends exactly one of them.

use std::convert::Infallible;
use std::io;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::error::CliError;
use crate::settings::Settings;

/// Longest error body that is read.
const ERROR_BODY_BYTES_MAX: usize = 64 * 1024;

pub(crate) type Body = BoxBody<Bytes, io::Error>;

/// A body that is all there.
pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed()
}

/// A body whose pieces arrive over a channel; an error ends the request.
pub(crate) fn streamed(pieces: mpsc::Receiver<io::Result<Bytes>>) -> Body {
    Streamed(pieces).boxed()
}

struct Streamed(mpsc::Receiver<io::Result<Bytes>>);

impl hyper::body::Body for Streamed {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|bytes| bytes.map(Frame::data)))
    }
}

/// A node, as an HTTP server.
#[derive(Debug, Clone)]
pub(crate) struct Http {
    pub(crate) address: String,
    api_key: Option<HeaderValue>,
}

impl Http {
    pub(crate) fn new(settings: &Settings) -> Result<Self, CliError> {
        let api_key =
            settings.api_key().map(|key| HeaderValue::from_str(&key)).transpose().map_err(
                |_| {
                    CliError::said(
                        "the API key holds characters that no key has",
                        "check WARREN_API_KEY",
                    )
                },
            )?;
        Ok(Self { address: settings.address.clone(), api_key })
    }

    /// A request of the control plane, with the API key.
    pub(crate) fn request(&self, method: Method, path: &str) -> http::request::Builder {
        let builder = self.bare_request(method, path);
        match &self.api_key {
            Some(key) => builder.header("x-api-key", key),
            None => builder,
        }
    }

    /// A request without the API key: what goes into a sandbox must not carry it.
    pub(crate) fn bare_request(&self, method: Method, path: &str) -> http::request::Builder {
        Request::builder().method(method).uri(path).header(header::HOST, &self.address)
    }

    /// Sends a request; an error status becomes [`CliError::Api`].
    pub(crate) async fn send(
        &self,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, CliError> {
        let response = self.send_any(request).await?;
        let status = response.status().as_u16();
        if status < 400 {
            return Ok(response);
        }
        let body = http_body_util::Limited::new(response.into_body(), ERROR_BODY_BYTES_MAX)
            .collect()
            .await
            .map(http_body_util::Collected::to_bytes)
            .unwrap_or_default();
        Err(CliError::Api { status, message: error_message(&body) })
    }

    /// Sends a request and hands back whatever comes.
    pub(crate) async fn send_any(
        &self,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, CliError> {
        let connect = |source| CliError::Connect { address: self.address.clone(), source };
        let stream = TcpStream::connect(&self.address).await.map_err(connect)?;
        stream.set_nodelay(true).map_err(connect)?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // Ends with the response's body; its error shows up there too.
        tokio::spawn(connection);
        Ok(sender.send_request(request).await?)
    }

    /// Sends a request and decodes a JSON reply.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        request: Request<Body>,
    ) -> Result<T, CliError> {
        let what = request.uri().to_string();
        let body = self.send(request).await?.into_body().collect().await?.to_bytes();
        serde_json::from_slice(&body).map_err(|source| CliError::Reply(what, source))
    }
}

/// The `message` of an error body, or the body itself.
fn error_message(body: &[u8]) -> String {
    let parsed: Option<String> = serde_json::from_slice::<serde_json::Value>(body)
        .ok()
        .and_then(|value| value.get("message")?.as_str().map(str::to_owned));
    parsed.unwrap_or_else(|| String::from_utf8_lossy(body).trim().to_owned())
}

/// Builds a request from parts that are known to be valid.
pub(super) fn finish(
    builder: http::request::Builder,
    body: Body,
) -> Result<Request<Body>, CliError> {
    builder.body(body).map_err(|error| {
        CliError::said(
            format!("cannot make a request of these arguments: {error}"),
            "check ids and names for odd characters",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_message_prefers_the_message_field() {
        assert_eq!(
            error_message(br#"{"code":404,"message":"no such sandbox"}"#),
            "no such sandbox"
        );
        assert_eq!(error_message(b"plain\n"), "plain");
    }
}
