//! Who asks: an API key in `X-API-KEY` (or as a bearer token), or the local socket.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};

use super::{ApiError, App};
use crate::server::Origin;

/// Id of the key that a request came with.
#[derive(Debug, Clone)]
pub struct KeyId(pub String);

/// Requests over the local socket have this id.
const LOCAL: &str = "local";
const API_KEY_HEADER: &str = "x-api-key";

/// Lets requests with a known key pass.
pub async fn check(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let is_local = request.extensions().get::<Origin>() == Some(&Origin::Local);
    let key_id = match presented(request.headers()) {
        Some(key) => match app.keys.check(key) {
            Some(id) => id,
            None => return refuse("invalid API key"),
        },
        None if is_local => LOCAL.to_owned(),
        None => return refuse("no API key given; send it in the header X-API-KEY"),
    };
    request.extensions_mut().insert(KeyId(key_id));
    next.run(request).await
}

fn presented(headers: &HeaderMap) -> Option<&str> {
    if let Some(value) = headers.get(API_KEY_HEADER) {
        // No key contains anything but ASCII.
        return Some(value.to_str().unwrap_or_default());
    }
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

fn refuse(message: &str) -> Response {
    ApiError::new(StatusCode::UNAUTHORIZED, message).into_response()
}
