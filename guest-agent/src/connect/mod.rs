//! The Connect protocol with its JSON codec: errors, unary calls and
//! enveloped streams.

mod envelope;
mod error;

pub use envelope::{Envelopes, end_frame, frame, frame_json, last_frame};
pub use error::{Code, ConnectError};

use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::http::{self as web, Body, BodyError, Reply, Request};

/// Largest message we take. Input of a process comes base64-coded in one
/// message, so this allows some 48 MiB at once; files have a route of their own.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// How often a quiet stream says that it lives, unless the client asks
/// otherwise.
const KEEPALIVE_DEFAULT: Duration = Duration::from_secs(90);

/// What a call's headers ask for.
#[derive(Debug, Clone, Copy)]
pub struct CallOptions {
    /// When the call must end.
    pub deadline: Option<Instant>,
    /// Longest silence of a stream.
    pub keepalive: Duration,
}

impl CallOptions {
    /// Reads `Connect-Timeout-Ms` and `Keepalive-Ping-Interval`.
    pub fn from_headers(headers: &HeaderMap) -> Result<Self, ConnectError> {
        let number = |name: &str| -> Result<Option<u64>, ConnectError> {
            let Some(value) = headers.get(name) else { return Ok(None) };
            let number = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok());
            number.map(Some).ok_or_else(|| {
                ConnectError::new(Code::InvalidArgument, format!("{name} is not a number"))
            })
        };
        let deadline = number("connect-timeout-ms")?
            .and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)));
        let keepalive = number("keepalive-ping-interval")?
            .filter(|seconds| *seconds > 0)
            .map_or(KEEPALIVE_DEFAULT, Duration::from_secs);
        Ok(CallOptions { deadline, keepalive })
    }
}

/// Which of the two body forms a request has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One JSON message.
    Unary,
    /// Enveloped JSON messages.
    Stream,
}

/// The refusal of a request that is not in the form its method takes.
pub fn wrong_form(headers: &HeaderMap, form: Form) -> Option<Reply> {
    let expected = match form {
        Form::Unary => "application/json",
        Form::Stream => "application/connect+json",
    };
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case(expected) {
        return None;
    }
    let mut reply = web::empty(StatusCode::UNSUPPORTED_MEDIA_TYPE);
    reply.headers_mut().insert("accept-post", HeaderValue::from_static(expected));
    Some(reply)
}

/// Decodes a message.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ConnectError> {
    // An empty body is how some clients send an empty message.
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    serde_json::from_slice(bytes)
        .map_err(|e| ConnectError::new(Code::InvalidArgument, format!("decode the request: {e}")))
}

/// Answers a unary call.
pub async fn unary<T, R, F>(request: Request, call: impl FnOnce(T, HeaderMap) -> F) -> Reply
where
    T: DeserializeOwned,
    R: Serialize,
    F: Future<Output = Result<R, ConnectError>>,
{
    if let Some(reply) = wrong_form(request.headers(), Form::Unary) {
        return reply;
    }
    let (parts, body) = request.into_parts();
    let outcome = async {
        let bytes = web::collect(body, MESSAGE_BYTES_MAX).await.map_err(ConnectError::from)?;
        let message = decode::<T>(&bytes)?;
        drop(bytes);
        let options = CallOptions::from_headers(&parts.headers)?;
        let answer = call(message, parts.headers);
        match crate::runtime::either(answer, crate::runtime::deadline(options.deadline)).await {
            crate::runtime::Either::First(result) => result,
            crate::runtime::Either::Second(()) => {
                Err(ConnectError::new(Code::DeadlineExceeded, "the call's time is over"))
            }
        }
    };
    match outcome.await {
        Ok(value) => web::json(StatusCode::OK, &value),
        Err(error) => error.unary_reply(),
    }
}

/// Takes the one message of a server-streaming call.
pub async fn stream_request<T: DeserializeOwned>(
    body: web::RequestBody,
) -> Result<T, ConnectError> {
    let mut envelopes = Envelopes::new(body, MESSAGE_BYTES_MAX);
    match envelopes.next().await? {
        Some(message) => decode(&message),
        None => Err(ConnectError::new(Code::InvalidArgument, "the stream has no message")),
    }
}

/// A reply that is a stream of envelopes.
pub fn stream_reply(body: Body) -> Reply {
    let mut reply = Reply::new(body);
    let kind = HeaderValue::from_static("application/connect+json");
    reply.headers_mut().insert(header::CONTENT_TYPE, kind);
    reply
}

/// A stream that ends before it began.
pub fn failed_stream(error: &ConnectError) -> Reply {
    stream_reply(Body::full(last_frame(Some(error))))
}

/// Reads the envelopes of a client stream.
pub fn client_stream(body: web::RequestBody) -> Envelopes {
    Envelopes::new(body, MESSAGE_BYTES_MAX)
}

impl From<BodyError> for ConnectError {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::TooLarge(_) => ConnectError::new(Code::ResourceExhausted, error.to_string()),
            BodyError::Read(_) => ConnectError::new(Code::Canceled, error.to_string()),
        }
    }
}
