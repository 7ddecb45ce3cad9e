//! The proxy's own answers. Clients look for the sentences "was not found" and "port
//! is not open".

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Map, Value, json};

/// No such sandbox, or it is paused, or it has ended.
pub fn not_found(id: &str) -> Response<Body> {
    about(StatusCode::BAD_GATEWAY, id, "The sandbox was not found", [])
}

/// Nobody listens on the port.
pub fn port_closed(id: &str, port: u16) -> Response<Body> {
    let message = "The sandbox is running but port is not open";
    about(StatusCode::BAD_GATEWAY, id, message, [("port", json!(port))])
}

/// The sandbox takes no more requests.
pub fn busy(id: &str) -> Response<Body> {
    let message = "The sandbox has too many requests under way";
    let mut response = about(StatusCode::TOO_MANY_REQUESTS, id, message, []);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// The guest does not answer in time.
pub fn timeout(id: &str) -> Response<Body> {
    about(StatusCode::GATEWAY_TIMEOUT, id, "The sandbox did not answer in time", [])
}

/// The connection to the guest broke before a reply came.
pub fn broken(id: &str, cause: &str) -> Response<Body> {
    let message = format!("The sandbox is running but the request failed: {cause}");
    about(StatusCode::BAD_GATEWAY, id, &message, [])
}

/// A route that is the node's alone.
pub fn internal_route(id: &str) -> Response<Body> {
    about(StatusCode::NOT_FOUND, id, "The route is not available", [])
}

/// A port that wants a token.
pub fn traffic_token(id: &str, header: &str, given: TokenGiven) -> Response<Body> {
    let message = match given {
        TokenGiven::None => {
            format!(
                "The sandbox takes only requests with a traffic access token; header '{header}' is missing"
            )
        }
        TokenGiven::Wrong => format!("The traffic access token in header '{header}' is not valid"),
    };
    about(StatusCode::FORBIDDEN, id, &message, [])
}

/// What was in the place of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenGiven {
    None,
    Wrong,
}

/// Something is wrong before a sandbox is known.
pub fn refused(status: StatusCode, message: &str) -> Response<Body> {
    json_response(status, &json!({ "code": status.as_u16(), "message": message }))
}

fn about<const N: usize>(
    status: StatusCode,
    id: &str,
    message: &str,
    more: [(&str, Value); N],
) -> Response<Body> {
    let mut body = Map::new();
    body.insert("sandboxId".to_owned(), json!(id));
    body.insert("message".to_owned(), json!(message));
    body.insert("code".to_owned(), json!(status.as_u16()));
    for (name, value) in more {
        body.insert(name.to_owned(), value);
    }
    json_response(status, &Value::Object(body))
}

fn json_response(status: StatusCode, body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
