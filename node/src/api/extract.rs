//! Reading requests; every refusal has the API's own form.

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, OptionalFromRequestParts, Path, Query};
use http::request::Parts;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use super::ApiError;
use super::auth::KeyId;

/// Requests to the control plane are small.
const BODY_BYTES_MAX: usize = 1 << 20;

/// A JSON body. An empty one counts as `{}`.
pub struct JsonBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request<Body>, _: &S) -> Result<Self, ApiError> {
        let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
        let bytes = body.map_err(|error| {
            if error.is::<LengthLimitError>() {
                let message = format!("the body is longer than {BODY_BYTES_MAX} bytes");
                ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
            } else {
                ApiError::bad_request("the body ended early")
            }
        })?;
        let bytes = bytes.to_bytes();
        let text = if bytes.is_empty() { b"{}" } else { bytes.as_ref() };
        serde_json::from_slice(text)
            .map(Self)
            .map_err(|error| ApiError::bad_request(format!("the body is not as expected: {error}")))
    }
}

/// One path segment.
pub struct Segment(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match <Path<String> as FromRequestParts<S>>::from_request_parts(parts, state).await {
            Ok(Path(segment)) => Ok(Self(segment)),
            Err(_) => Err(ApiError::bad_request("the path is not valid UTF-8")),
        }
    }
}

/// The query.
pub struct Params<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match <Query<T> as FromRequestParts<S>>::from_request_parts(parts, state).await {
            Ok(Query(value)) => Ok(Self(value)),
            Err(error) => Err(ApiError::bad_request(error.body_text())),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for KeyId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let id = parts.extensions.get::<Self>().cloned();
        id.ok_or_else(|| ApiError::new(StatusCode::UNAUTHORIZED, "no API key given"))
    }
}

/// A header as text.
pub struct IdempotencyKey(pub String);

impl<S: Send + Sync> OptionalFromRequestParts<S> for IdempotencyKey {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, ApiError> {
        let Some(value) = parts.headers.get("idempotency-key") else { return Ok(None) };
        let key = value.to_str().unwrap_or_default();
        if !crate::idempotency::Idempotency::is_valid(key) {
            return Err(ApiError::bad_request(
                "Idempotency-Key is not 1 to 255 characters of a-z, 0-9 and '-'",
            ));
        }
        Ok(Some(Self(key.to_owned())))
    }
}
