//! Passing requests on to sandboxes and replies back.
//!
//! Bodies are streams in both directions: a frame is read from one side when the other
//! has room. A client that leaves drops its request, which closes the connection to the
//! guest. A sandbox that ends breaks the connections to its guest, and each of their
//! clients is reset.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{Method, Request, Response, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;
use tokio_util::task::TaskTracker;

use super::Route;
use super::headers;
use super::reply::{self, TokenGiven};
use super::route::Target;
use super::signature::{Operation, SignedLink};
use crate::agent::ChannelError;
use crate::error::chain;
use crate::kinds::GuestPort;
use crate::sandboxes::{Connected, Sandbox, Sandboxes};
use crate::server::Reset;

const TRAFFIC_TOKEN_HEADER: &str = "e2b-traffic-access-token";
/// Routes of the agent that are the node's alone.
const INTERNAL_ROUTES: [&str; 8] =
    ["init", "warmup", "quiesce", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw"];
/// Buffer per direction of a switched connection.
const TUNNEL_BUFFER_BYTES: usize = 16 * 1024;

/// Answers a request that is not for the API.
pub async fn handle(
    sandboxes: &Sandboxes,
    tracker: &TaskTracker,
    route: Route,
    request: Request<Body>,
) -> Response<Body> {
    let (target, sandbox) = match route {
        Route::Sandbox(target) => {
            let id = target.id.as_str();
            let sandbox = match sandboxes.running(id) {
                Some(sandbox) => Some(sandbox),
                None => match wake_time(sandboxes, &target, &request) {
                    Some(timeout) => wake(sandboxes, id, timeout).await,
                    None => None,
                },
            };
            match sandbox {
                Some(sandbox) => (target, sandbox),
                None => {
                    sandboxes.metrics().proxied("not_found");
                    return reply::not_found(target.id.as_str());
                }
            }
        }
        Route::SignedFile(link) => match find_by_signature(sandboxes, &link, request.method()) {
            Some(sandbox) => {
                let target = Target { id: sandbox.id().clone(), port: GuestPort::Envd.number() };
                (target, sandbox)
            }
            None => {
                sandboxes.metrics().proxied("not_found");
                let message = "the signature belongs to no running sandbox";
                return reply::refused(StatusCode::UNAUTHORIZED, message);
            }
        },
        Route::Refuse(error) => {
            sandboxes.metrics().proxied("refused");
            return reply::refused(StatusCode::BAD_REQUEST, &error.to_string());
        }
        Route::Api => {
            return reply::refused(StatusCode::INTERNAL_SERVER_ERROR, "not for a sandbox");
        }
    };
    if let Some(refusal) = refuse(&sandbox, &target, &request) {
        sandboxes.metrics().proxied("refused");
        return refusal;
    }
    let guard = sandboxes.metrics().stream();
    match pass(&sandbox, tracker, &target, request).await {
        Ok(response) => {
            sandboxes.metrics().proxied("ok");
            response.map(|body| Body::new(Counted { body, _guard: guard }))
        }
        Err(error) => {
            let (label, response) = explain(&sandbox, &target, &error);
            sandboxes.metrics().proxied(label);
            tracing::debug!(sandbox_id = %target.id, port = target.port, error = %chain(&error),
                "request not passed on");
            response
        }
    }
}

/// Resumes a paused sandbox for a request to it.
async fn wake(sandboxes: &Sandboxes, id: &str, timeout: Duration) -> Option<Arc<Sandbox>> {
    match sandboxes.connect(id, timeout).await? {
        Ok(Connected::Running(sandbox) | Connected::Resumed(sandbox)) => Some(sandbox),
        Err(error) => {
            tracing::error!(sandbox_id = id, error = %chain(&error), "not resumed for a request");
            None
        }
    }
}

/// For how long a request would wake a paused sandbox; one that is refused wakes none.
fn wake_time(sandboxes: &Sandboxes, target: &Target, request: &Request<Body>) -> Option<Duration> {
    let sandbox = sandboxes.lasting(target.id.as_str())?;
    let seconds =
        sandbox.with_record(|record| record.auto_resume.then_some(record.timeout_seconds))?;
    refuse(&sandbox, target, request).is_none().then(|| Duration::from_secs(seconds))
}

fn find_by_signature(
    sandboxes: &Sandboxes,
    link: &SignedLink,
    method: &Method,
) -> Option<Arc<Sandbox>> {
    let operation = if *method == Method::POST || *method == Method::PUT {
        Operation::Write
    } else {
        Operation::Read
    };
    sandboxes.all_running().into_iter().find(|sandbox| {
        sandbox.with_record(|record| link.is_signed_with(operation, &record.envd_access_token))
    })
}

fn refuse(sandbox: &Sandbox, target: &Target, request: &Request<Body>) -> Option<Response<Body>> {
    let id = target.id.as_str();
    if *request.method() == Method::CONNECT {
        return Some(reply::refused(StatusCode::METHOD_NOT_ALLOWED, "CONNECT is not supported"));
    }
    if target.port == GuestPort::Envd.number() {
        return is_internal(request.uri().path()).then(|| reply::internal_route(id));
    }
    if target.port == GuestPort::Tunnel.number() {
        return Some(reply::port_closed(id, target.port));
    }
    let wanted = sandbox.with_record(|record| record.traffic_access_token.clone())?;
    match request.headers().get(TRAFFIC_TOKEN_HEADER) {
        None => Some(reply::traffic_token(id, TRAFFIC_TOKEN_HEADER, TokenGiven::None)),
        Some(given) if given.as_bytes() != wanted.as_bytes() => {
            Some(reply::traffic_token(id, TRAFFIC_TOKEN_HEADER, TokenGiven::Wrong))
        }
        Some(_) => None,
    }
}

/// Whether a path, however written, may mean a route that is the node's alone.
fn is_internal(path: &str) -> bool {
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    let mut parts = decoded.split(['/', '\\']).filter(|part| !part.is_empty() && *part != ".");
    parts.any(|part| INTERNAL_ROUTES.iter().any(|known| part.eq_ignore_ascii_case(known)))
}

async fn pass(
    sandbox: &Arc<Sandbox>,
    tracker: &TaskTracker,
    target: &Target,
    mut request: Request<Body>,
) -> Result<Response<Body>, ChannelError> {
    let live = sandbox.live().ok_or(ChannelError::Gone)?;
    let reset = request.extensions().get::<Reset>().cloned();
    let protocol = headers::upgrade(request.headers());
    let client = protocol.is_some().then(|| hyper::upgrade::on(&mut request));
    let authority = request.uri().authority().cloned();
    headers::to_guest(request.headers_mut(), protocol);
    if let Some(host) = authority.and_then(|authority| authority.as_str().parse().ok()) {
        request.headers_mut().insert(header::HOST, host);
    }
    *request.uri_mut() = origin_form(request.uri());
    *request.version_mut() = http::Version::HTTP_11;
    request.extensions_mut().clear();

    let mut response = live.channels.send(target.port, request).await?;
    let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let protocol = headers::upgrade(response.headers());
    headers::strip_hop_by_hop(response.headers_mut(), protocol.filter(|_| switched));
    *response.version_mut() = http::Version::HTTP_11;
    if switched && let Some(client) = client {
        let guest = hyper::upgrade::on(&mut response);
        let sandbox = Arc::clone(sandbox);
        let reset = reset.clone();
        tracker.spawn(async move { tunnel(&sandbox, client, guest, reset).await });
    }
    Ok(response.map(|body| Body::new(body.resetting(reset))))
}

/// Passes bytes both ways until one side ends or the sandbox does.
async fn tunnel(
    sandbox: &Sandbox,
    client: hyper::upgrade::OnUpgrade,
    guest: hyper::upgrade::OnUpgrade,
    reset: Option<Reset>,
) {
    let copy = async {
        let Ok((client, guest)) = tokio::try_join!(client, guest) else { return };
        let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
        // Ends of either side are ordinary here.
        let _ = tokio::io::copy_bidirectional_with_sizes(
            &mut client,
            &mut guest,
            TUNNEL_BUFFER_BYTES,
            TUNNEL_BUFFER_BYTES,
        )
        .await;
    };
    tokio::select! {
        biased;
        () = sandbox.ending() => if let Some(reset) = reset {
            reset.request();
        },
        () = copy => {}
    }
}

fn origin_form(uri: &Uri) -> Uri {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    path.parse().unwrap_or_else(|_| Uri::from_static("/"))
}

fn explain(
    sandbox: &Sandbox,
    target: &Target,
    error: &ChannelError,
) -> (&'static str, Response<Body>) {
    let id = target.id.as_str();
    let is_over = sandbox.phase() != crate::lifecycle::Phase::Running;
    match error {
        ChannelError::Gone => ("not_found", reply::not_found(id)),
        _ if is_over => ("not_found", reply::not_found(id)),
        ChannelError::PortClosed(port) => ("port_closed", reply::port_closed(id, *port)),
        ChannelError::Busy => ("busy", reply::busy(id)),
        ChannelError::Timeout => ("timeout", reply::timeout(id)),
        ChannelError::Connect(_) | ChannelError::Transfer(_) => {
            ("broken", reply::broken(id, &chain(error)))
        }
    }
}

/// A body that is counted as a stream while it lives.
struct Counted {
    body: Body,
    _guard: crate::metrics::StreamGuard,
}

impl hyper::body::Body for Counted {
    type Data = bytes::Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<bytes::Bytes>, axum::Error>>> {
        std::pin::Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_routes_are_found_however_written() {
        for path in ["/init", "//init", "/init/", "/%69nit", "/./init", "/INIT", "/x/../quiesce"] {
            assert!(is_internal(path), "{path}");
        }
        for path in ["/", "/files", "/process.Process/Start", "/initial", "/health"] {
            assert!(!is_internal(path), "{path}");
        }
    }
}
