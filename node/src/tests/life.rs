//! Births and deaths, and what they leave.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use http::{Method, Request, StatusCode};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use super::fixtures::sandbox_record;
use super::node::TestNode;
use super::stub::Host;
use crate::ids::SandboxId;
use crate::store::{Change, SandboxRecord};

pub async fn until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..200 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} did not happen");
}

fn is_clean(node: &TestNode) -> bool {
    node.app.sandboxes.count() == 0
        && node.host.dirt.lock().unwrap().is_empty()
        && node.host.guests.lock().unwrap().is_empty()
}

async fn failing_create(node: &TestNode) -> super::node::Reply {
    let body = Some(json!({ "templateID": "base" }));
    node.api(Method::POST, "/v2/sandboxes", body).await
}

#[tokio::test]
async fn sandbox_ends_when_its_time_is_over() {
    let node = TestNode::start().await;
    let body = Some(json!({ "templateID": "base", "timeout": 1 }));
    node.api(Method::POST, "/v2/sandboxes", body).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(node.app.sandboxes.count(), 1);
    until("the end", || is_clean(&node)).await;
}

#[tokio::test]
async fn sandbox_whose_process_dies_is_removed() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    node.host.guests.lock().unwrap()[id.as_str()].dead.cancel();
    until("the removal", || is_clean(&node)).await;
}

#[tokio::test]
async fn failed_birth_leaves_nothing() {
    let node = TestNode::start().await;
    node.host.fail_create.store(true, Ordering::Relaxed);
    let reply = failing_create(&node).await;
    assert_eq!(reply.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(is_clean(&node));
}

#[tokio::test]
async fn refused_identity_leaves_nothing_and_names_the_cause() {
    let node = TestNode::start().await;
    node.host.fail_init.store(true, Ordering::Relaxed);
    let reply = failing_create(&node).await;
    assert_eq!(reply.status, StatusCode::INTERNAL_SERVER_ERROR);
    let message = reply.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("no entropy") && message.contains("line two"), "{message}");
    assert!(is_clean(&node));
}

#[tokio::test]
async fn full_disk_fails_the_create_and_not_the_kill() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    node.store.fails.store(true, Ordering::Relaxed);
    let reply = failing_create(&node).await;
    assert_eq!(reply.status, StatusCode::INSUFFICIENT_STORAGE);
    assert_eq!(reply.json()["error_code"], "disk_full");
    let reply = node.api(Method::DELETE, &format!("/sandboxes/{id}"), None).await;
    assert_eq!(reply.status, StatusCode::NO_CONTENT);
    assert!(is_clean(&node));
}

#[tokio::test]
async fn client_that_leaves_during_create_leaves_no_sandbox() {
    let node = TestNode::start().await;
    *node.host.create_pause.lock().unwrap() = Duration::from_millis(200);
    let request = Request::post("/v2/sandboxes")
        .header("x-api-key", &node.key)
        .body(Body::from(json!({ "templateID": "base" }).to_string()))
        .unwrap();
    let asked = tokio::time::timeout(Duration::from_millis(50), node.send(request)).await;
    assert!(asked.is_err());
    assert_eq!(node.app.sandboxes.count(), 1);
    until("the removal", || is_clean(&node)).await;
}

#[tokio::test]
async fn kill_during_create_wins() {
    let node = TestNode::start().await;
    *node.host.create_pause.lock().unwrap() = Duration::from_millis(100);
    let kill = async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        node.api(Method::DELETE, "/v1/sandboxes", None).await
    };
    let (created, killed) = tokio::join!(failing_create(&node), kill);
    assert_eq!(created.status, StatusCode::CONFLICT);
    assert_eq!(killed.json()["killed"], 1);
    assert!(is_clean(&node));
}

#[tokio::test]
async fn concurrent_kills_all_succeed_or_find_nothing() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let path = format!("/sandboxes/{id}");
    let kills = (0..8).map(|_| node.api(Method::DELETE, &path, None));
    let replies = futures_util::future::join_all(kills).await;
    assert!(replies.iter().any(|reply| reply.status == StatusCode::NO_CONTENT));
    assert!(is_clean(&node));
}

#[tokio::test]
async fn record_is_stored_before_the_reply_and_removed_at_the_end() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let stored = |id: &str| {
        let changes = node.store.changes.lock().unwrap();
        changes.iter().fold(false, |stored, change| match change {
            Change::PutSandbox(record) if record.id.as_str() == id => true,
            Change::RemoveSandbox(removed) if removed.as_str() == id => false,
            _ => stored,
        })
    };
    assert!(stored(&id));
    node.api(Method::DELETE, &format!("/sandboxes/{id}"), None).await;
    assert!(!stored(&id));
}

#[tokio::test]
async fn next_start_adopts_ends_and_cleans() {
    let host = Arc::<Host>::default();
    let first = TestNode::start_with(&[], Arc::clone(&host), vec![]).await;
    let (kept, _) = first.create().await;
    let (late, _) = first.create().await;
    let (stray, _) = first.create().await;
    let record = |id: &str, seconds: i64| SandboxRecord {
        id: SandboxId::parse(id).unwrap(),
        end_at: Timestamp::now() + SignedDuration::from_secs(seconds),
        ..sandbox_record("x")
    };
    host.dirt.lock().unwrap().push(SandboxId::parse("dirt").unwrap());
    let records = vec![record(&kept, 100), record(&late, -1), record("vanished", 100)];

    let second = TestNode::start_with(&[], Arc::clone(&host), records).await;

    until("the late one's end", || second.app.sandboxes.count() == 1).await;
    assert!(second.app.sandboxes.running(&kept).is_some());
    assert!(!host.guests.lock().unwrap().contains_key(stray.as_str()));
    assert_eq!(*host.dirt.lock().unwrap(), vec![SandboxId::parse(&kept).unwrap()]);
    let health = super::node::to_sandbox(&kept, 49983, "/health").body(Body::empty()).unwrap();
    assert_eq!(second.ask(health).await.status, StatusCode::NO_CONTENT);
}
