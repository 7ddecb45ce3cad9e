//! The proxy as clients see it.

use std::time::Duration;

use axum::body::Body;
use base64::Engine;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use serde_json::json;
use sha2::Digest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::node::{TestNode, to_sandbox};

#[tokio::test]
async fn health_is_204_while_it_runs_and_502_afterwards() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let health = || to_sandbox(&id, 49983, "/health").body(Body::empty()).unwrap();
    assert_eq!(node.ask(health()).await.status, StatusCode::NO_CONTENT);
    node.api(http::Method::DELETE, &format!("/sandboxes/{id}"), None).await;
    let reply = node.ask(health()).await;
    assert_eq!(reply.status, StatusCode::BAD_GATEWAY);
    let expected = json!({ "sandboxId": id, "message": "The sandbox was not found", "code": 502 });
    assert_eq!(reply.json(), expected);
}

#[tokio::test]
async fn host_name_and_headers_lead_to_the_same_sandbox() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let by_headers = to_sandbox(&id, 49999, "/a?b=c").body(Body::empty()).unwrap();
    let reply = node.ask(by_headers).await.json();
    assert_eq!((&reply["port"], &reply["target"]), (&json!(49999), &json!("/a?b=c")));
    let by_host = Request::get("/a")
        .header("host", format!("49999-{id}.sbx.test"))
        .body(Body::empty())
        .unwrap();
    assert_eq!(node.ask(by_host).await.json()["port"], 49999);
}

#[tokio::test]
async fn other_ports_go_through_the_tunnel() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let open = to_sandbox(&id, 8080, "/x").body(Body::empty()).unwrap();
    assert_eq!(node.ask(open).await.json()["target"], "/x");
    let closed = to_sandbox(&id, 8081, "/x").body(Body::empty()).unwrap();
    let reply = node.ask(closed).await;
    assert_eq!(reply.status, StatusCode::BAD_GATEWAY);
    assert_eq!(
        reply.json(),
        json!({ "sandboxId": id, "message": "The sandbox is running but port is not open",
            "port": 8081, "code": 502 })
    );
}

#[tokio::test]
async fn routing_errors_are_400() {
    let node = TestNode::start().await;
    let request = Request::get("/").header("e2b-sandbox-id", "a").body(Body::empty()).unwrap();
    let reply = node.ask(request).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert_eq!(reply.json()["message"], "missing header");
}

#[tokio::test]
async fn internal_routes_are_404() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    for path in ["/init", "/warmup", "/quiesce", "//init", "/%69nit"] {
        let request = to_sandbox(&id, 49983, path).method("POST").body(Body::empty()).unwrap();
        assert_eq!(node.ask(request).await.status, StatusCode::NOT_FOUND, "{path}");
    }
}

#[tokio::test]
async fn connections_to_the_guest_are_used_again() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    for _ in 0..20 {
        node.ask(to_sandbox(&id, 49983, "/echo").body(Body::from("x")).unwrap()).await;
    }
    // A connection becomes free a moment after the reply is read.
    let used = node.host.connections.load(std::sync::atomic::Ordering::Relaxed);
    assert!(used <= 5, "{used} connections");
}

#[tokio::test]
async fn body_flows_while_it_is_sent() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let (mut writer, reader) = tokio::io::duplex(16);
    let body = Body::from_stream(tokio_util_reader(reader));
    let request = to_sandbox(&id, 49983, "/echo").method("POST").body(body).unwrap();
    writer.write_all(b"one").await.unwrap();
    let mut reply = node.send(request).await.into_body();
    let first = reply.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(first, "one");
    writer.write_all(b"two").await.unwrap();
    let second = reply.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(second, "two");
    drop(writer);
    assert!(reply.frame().await.is_none());
}

fn tokio_util_reader(
    reader: tokio::io::DuplexStream,
) -> impl futures_util::Stream<Item = std::io::Result<Vec<u8>>> {
    futures_util::stream::unfold(reader, |mut reader| async {
        let mut buffer = vec![0; 16];
        match reader.read(&mut buffer).await {
            Ok(0) | Err(_) => None,
            Ok(count) => {
                buffer.truncate(count);
                Some((Ok(buffer), reader))
            }
        }
    })
}

#[tokio::test]
async fn kill_breaks_streams_with_an_error() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let request = to_sandbox(&id, 49983, "/stream").body(Body::empty()).unwrap();
    let mut body = node.send(request).await.into_body();
    assert!(body.frame().await.unwrap().is_ok());
    node.api(http::Method::DELETE, &format!("/sandboxes/{id}"), None).await;
    let end = loop {
        match tokio::time::timeout(Duration::from_secs(2), body.frame()).await.unwrap() {
            Some(Ok(_)) => {}
            other => break other,
        }
    };
    assert!(matches!(end, Some(Err(_))), "a clean end would look like success");
}

#[tokio::test]
async fn client_that_leaves_closes_the_guests_connection() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let request = to_sandbox(&id, 49983, "/stream").body(Body::empty()).unwrap();
    let mut body = node.send(request).await.into_body();
    assert!(body.frame().await.unwrap().is_ok());
    let streams = || node.app.metrics.render().contains("warren_streams 1");
    assert!(streams());
    drop(body);
    for _ in 0..100 {
        if !streams() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the stream goes on without a client");
}

#[tokio::test]
async fn switched_protocol_passes_both_ways_and_breaks_at_the_end() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let request = to_sandbox(&id, 8080, "/switch")
        .header("connection", "Upgrade")
        .header("upgrade", "shout")
        .body(Body::empty())
        .unwrap();
    let response = node.send(request).await;
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(response.headers()["upgrade"], "shout");
    let mut stream = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    stream.write_all(b"abc").await.unwrap();
    let mut loud = [0; 3];
    stream.read_exact(&mut loud).await.unwrap();
    assert_eq!(&loud, b"ABC");
    node.api(http::Method::DELETE, &format!("/sandboxes/{id}"), None).await;
    let end = tokio::time::timeout(Duration::from_secs(2), stream.read(&mut loud)).await.unwrap();
    assert!(matches!(end, Ok(0) | Err(_)));
}

#[tokio::test]
async fn signed_link_finds_its_sandbox() {
    let node = TestNode::start().await;
    let (_, _) = node.create().await;
    let (_, token) = node.create().await;
    let digest = sha2::Sha256::digest(format!("/a b:read::{token}"));
    let signature = base64::engine::general_purpose::STANDARD_NO_PAD.encode(digest);
    let signature: String = form_urlencoded::byte_serialize(signature.as_bytes()).collect();
    let link = format!("/files?path=%2Fa%20b&signature=v1_{signature}");
    let get =
        |path: &str| Request::get(path).header("host", "127.0.0.1").body(Body::empty()).unwrap();
    let reply = node.ask(get(&link)).await;
    assert_eq!(reply.status, StatusCode::OK);
    assert_eq!(reply.json()["target"], link);
    let reply = node.ask(get("/files?path=%2Fa&signature=v1_wrong")).await;
    assert_eq!(reply.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn private_traffic_needs_its_token() {
    let node = TestNode::start().await;
    let body = json!({ "templateID": "base", "network": { "allowPublicTraffic": false } });
    let sandbox = node.api(http::Method::POST, "/v2/sandboxes", Some(body)).await.json();
    let id = sandbox["sandboxID"].as_str().unwrap();
    let token = sandbox["trafficAccessToken"].as_str().unwrap();
    let plain = to_sandbox(id, 8080, "/").body(Body::empty()).unwrap();
    assert_eq!(node.ask(plain).await.status, StatusCode::FORBIDDEN);
    let with = to_sandbox(id, 8080, "/").header("e2b-traffic-access-token", token);
    assert_eq!(node.ask(with.body(Body::empty()).unwrap()).await.status, StatusCode::OK);
    let envd = to_sandbox(id, 49983, "/health").body(Body::empty()).unwrap();
    assert_eq!(node.ask(envd).await.status, StatusCode::NO_CONTENT);
}
