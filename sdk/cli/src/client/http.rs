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
        Err(api_error(status, &body))
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

/// What an error reply says: its `message` and `error_code`, or the body itself.
pub(super) fn api_error(status: u16, body: &[u8]) -> CliError {
    let parsed = serde_json::from_slice::<serde_json::Value>(body).unwrap_or_default();
    let text = |name: &str| parsed.get(name)?.as_str().map(str::to_owned);
    let plain = || String::from_utf8_lossy(body).trim().to_owned();
    CliError::Api {
        status,
        message: text("message").unwrap_or_else(plain),
        code: text("error_code"),
    }
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
    fn api_error_takes_message_and_code_of_the_body() {
        let of = |body: &[u8]| match api_error(404, body) {
            CliError::Api { status: 404, message, code } => (message, code),
            other => panic!("{other}"),
        };
        assert_eq!(
            of(br#"{"code":404,"message":"no such sandbox"}"#),
            ("no such sandbox".to_owned(), None)
        );
        let coded = of(br#"{"message":"wait","error_code":"being_built"}"#);
        assert_eq!(coded, ("wait".to_owned(), Some("being_built".to_owned())));
        assert_eq!(of(b"plain\n"), ("plain".to_owned(), None));
    }
}
