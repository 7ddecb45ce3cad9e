//! Pausing, resuming, forking.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use http::{Method, StatusCode};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::fixtures::sandbox_record;
use super::life::until;
use super::node::{Reply, TestNode, to_sandbox};
use super::stub::Host;
use crate::ids::SandboxId;
use crate::store::SandboxRecord;

async fn pause(node: &TestNode, id: &str) -> StatusCode {
    node.api(Method::POST, &format!("/sandboxes/{id}/pause"), None).await.status
}

async fn connect(node: &TestNode, id: &str) -> Reply {
    let path = format!("/v2/sandboxes/{id}/connect");
    node.api(Method::POST, &path, Some(json!({ "timeout": 60 }))).await
}

async fn health(node: &TestNode, id: &str) -> StatusCode {
    node.ask(to_sandbox(id, 49983, "/health").body(Body::empty()).unwrap()).await.status
}

async fn states(node: &TestNode, query: &str) -> Vec<String> {
    let list = node.api(Method::GET, &format!("/v2/sandboxes{query}"), None).await.json();
    let state = |view: &Value| view["state"].as_str().unwrap().to_owned();
    list.as_array().unwrap().iter().map(state).collect()
}

#[tokio::test]
async fn paused_sandbox_takes_no_place_and_comes_back_as_it_was() {
    let node = TestNode::start_with(&["--max-sandboxes", "1"], Arc::default(), Vec::new()).await;
    let (id, token) = node.create().await;
    assert_eq!(pause(&node, &id).await, StatusCode::NO_CONTENT);
    assert_eq!(pause(&node, &id).await, StatusCode::CONFLICT);
    assert_eq!(health(&node, &id).await, StatusCode::BAD_GATEWAY);
    assert_eq!(states(&node, "").await, ["paused"]);
    let metrics = node.ask(http::Request::get("/metrics").body(Body::empty()).unwrap()).await;
    let metrics = String::from_utf8(metrics.body).unwrap();
    assert!(metrics.contains("warren_sandboxes 0\n"), "{metrics}");
    assert!(metrics.contains("warren_sandboxes_paused 1\n"), "{metrics}");
    assert_eq!(states(&node, "?state=running").await, [""; 0]);
    let detail = node.api(Method::GET, &format!("/sandboxes/{id}"), None).await.json();
    assert_eq!((&detail["state"], &detail["pauseMode"]), (&json!("paused"), &json!("full")));

    // Its place is free; with another in it there is no room to come back.
    let (other, _) = node.create().await;
    assert_eq!(connect(&node, &id).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(states(&node, "?state=paused").await, ["paused"]);
    node.api(Method::DELETE, &format!("/sandboxes/{other}"), None).await;

    let reply = connect(&node, &id).await;
    assert_eq!(reply.status, StatusCode::CREATED);
    assert_eq!(reply.json()["envdAccessToken"], token.as_str());
    assert_eq!(health(&node, &id).await, StatusCode::NO_CONTENT);
    assert_eq!(connect(&node, &id).await.status, StatusCode::OK);
    assert!(node.host.asleep.lock().unwrap().is_empty(), "the snapshot is kept for nothing");
    assert_eq!(pause(&node, "nosuch").await, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn pause_that_fails_lets_the_sandbox_run_on() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    node.host.fail_pause.store(true, Ordering::Relaxed);
    assert_eq!(pause(&node, &id).await, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(health(&node, &id).await, StatusCode::NO_CONTENT);
    node.host.fail_pause.store(false, Ordering::Relaxed);
    assert_eq!(pause(&node, &id).await, StatusCode::NO_CONTENT);
}

#[tokio::test]
async fn resume_that_fails_leaves_the_sandbox_paused() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    pause(&node, &id).await;
    for failure in [&node.host.fail_create, &node.host.fail_init] {
        failure.store(true, Ordering::Relaxed);
        assert_eq!(connect(&node, &id).await.status, StatusCode::INTERNAL_SERVER_ERROR);
        failure.store(false, Ordering::Relaxed);
        assert_eq!(states(&node, "").await, ["paused"]);
        assert!(node.host.guests.lock().unwrap().is_empty());
    }
    assert_eq!(connect(&node, &id).await.status, StatusCode::CREATED);
}

#[tokio::test]
async fn kill_ends_a_paused_sandbox_and_one_that_is_being_paused() {
    let node = TestNode::start().await;
    let gone = |node: &TestNode| {
        node.app.sandboxes.count() == 0
            && node.app.sandboxes.paused() == 0
            && node.host.dirt.lock().unwrap().is_empty()
            && node.host.asleep.lock().unwrap().is_empty()
    };
    let (id, _) = node.create().await;
    pause(&node, &id).await;
    let path = format!("/sandboxes/{id}");
    assert_eq!(node.api(Method::DELETE, &path, None).await.status, StatusCode::NO_CONTENT);
    assert!(gone(&node));

    for fails in [false, true] {
        let (id, _) = node.create().await;
        node.host.fail_pause.store(fails, Ordering::Relaxed);
        *node.host.create_pause.lock().unwrap() = Duration::from_millis(100);
        let path = format!("/sandboxes/{id}");
        let kill = async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            node.api(Method::DELETE, &path, None).await.status
        };
        let (paused, killed) = tokio::join!(pause(&node, &id), kill);
        assert_eq!((paused, killed), (StatusCode::CONFLICT, StatusCode::NO_CONTENT));
        assert!(gone(&node));
        *node.host.create_pause.lock().unwrap() = Duration::ZERO;
    }
}

#[tokio::test]
async fn many_connects_resume_once() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    pause(&node, &id).await;
    let replies = futures_util::future::join_all((0..8).map(|_| connect(&node, &id))).await;
    let count = |status| replies.iter().filter(|reply| reply.status == status).count();
    assert_eq!((count(StatusCode::CREATED), count(StatusCode::OK)), (1, 7));
}

#[tokio::test]
async fn timeout_pauses_and_a_request_wakes_where_that_was_asked() {
    let node = TestNode::start().await;
    let body = json!({ "templateID": "base", "timeout": 1, "autoPause": true,
        "autoResume": { "enabled": true } });
    let created = node.api(Method::POST, "/v2/sandboxes", Some(body)).await.json();
    let id = created["sandboxID"].as_str().unwrap();
    until("the pause", || node.app.sandboxes.paused() == 1).await;
    let detail = node.api(Method::GET, &format!("/sandboxes/{id}"), None).await.json();
    assert_eq!(detail["lifecycle"], json!({ "autoResume": true, "onTimeout": "pause" }));
    assert_eq!(health(&node, id).await, StatusCode::NO_CONTENT);
    until("the second pause", || node.app.sandboxes.paused() == 1).await;
}

#[tokio::test]
async fn next_start_finds_paused_sandboxes() {
    let host = Arc::<Host>::default();
    let id = |text: &str| SandboxId::parse(text).unwrap();
    host.asleep.lock().unwrap().extend([id("asleep"), id("unrecorded")]);
    let paused_at = Some(Timestamp::now());
    let records = vec![
        SandboxRecord { paused_at, ..sandbox_record("asleep") },
        // Killed between the end of the process and the record.
        sandbox_record("unrecorded"),
        SandboxRecord { paused_at, ..sandbox_record("vanished") },
    ];
    let node = TestNode::start_with(&[], host, records).await;
    assert_eq!(states(&node, "").await, ["paused", "paused"]);
    for id in ["asleep", "unrecorded"] {
        assert_eq!(connect(&node, id).await.status, StatusCode::CREATED);
        assert_eq!(health(&node, id).await, StatusCode::NO_CONTENT);
    }
}

#[tokio::test]
async fn children_have_tokens_and_numbers_of_their_own() {
    let node = TestNode::start_with(&["--max-sandboxes", "3"], Arc::default(), Vec::new()).await;
    let (id, token) = node.create().await;
    let path = format!("/sandboxes/{id}/fork");
    let reply = node.api(Method::POST, &path, Some(json!({ "count": 3, "timeout": 60 }))).await;
    assert_eq!(reply.status, StatusCode::CREATED);
    let outcomes = reply.json();
    // There was room for two.
    assert_eq!(outcomes[2]["error"]["code"], 429);
    let mut tokens = vec![token];
    for number in 0..2 {
        let child = &outcomes[number]["sandbox"];
        tokens.push(child["envdAccessToken"].as_str().unwrap().to_owned());
        let child = child["sandboxID"].as_str().unwrap();
        let guest = Arc::clone(&node.host.guests.lock().unwrap()[child]);
        let init = guest.inits.lock().unwrap()[0].clone();
        assert_eq!(init["identity"]["sandboxId"], child);
        assert_eq!(init["identity"]["forkIndex"], number);
        assert_eq!(health(&node, child).await, StatusCode::NO_CONTENT);
    }
    tokens.sort();
    tokens.dedup();
    assert_eq!(tokens.len(), 3);
    assert_eq!(health(&node, &id).await, StatusCode::NO_CONTENT);

    for count in [0, 101] {
        let reply = node.api(Method::POST, &path, Some(json!({ "count": count }))).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    }
    pause(&node, &id).await;
    let reply = node.api(Method::POST, &path, Some(json!({ "count": 1 }))).await;
    assert_eq!(reply.status, StatusCode::NOT_FOUND);
    assert!(reply.json()["message"].as_str().unwrap().contains("is paused; resume it first"));
}

#[tokio::test]
async fn template_of_a_paused_sandbox_is_kept() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    pause(&node, &id).await;
    let reply = node.api(Method::DELETE, "/templates/base", None).await;
    assert_eq!(reply.status, StatusCode::CONFLICT);
    node.api(Method::DELETE, &format!("/sandboxes/{id}"), None).await;
    let reply = node.api(Method::DELETE, "/templates/base", None).await;
    assert_eq!(reply.status, StatusCode::NO_CONTENT);
}
