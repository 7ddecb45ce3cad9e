//! The API as clients see it.

use std::path::Path;
use std::sync::Arc;

use axum::body::Body;
use http::{Method, Request, StatusCode};
use serde_json::{Value, json};

use super::node::TestNode;

fn create(body: Value) -> Option<Value> {
    Some(body)
}

#[tokio::test]
async fn request_without_key_is_refused() {
    let node = TestNode::start().await;
    let request = Request::get("/v2/sandboxes").header("host", "x").body(Body::empty()).unwrap();
    let reply = node.ask(request).await;
    assert_eq!(reply.status, StatusCode::UNAUTHORIZED);
    assert_eq!(reply.json()["code"], 401);
    let request =
        Request::get("/v2/sandboxes").header("x-api-key", "e2b_0").body(Body::empty()).unwrap();
    assert_eq!(node.ask(request).await.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn create_returns_what_clients_need() {
    let node = TestNode::start_with(&["--domain", "sbx.test"], Arc::default(), vec![]).await;
    let body =
        json!({ "templateID": "code-interpreter-v1", "metadata": {}, "envVars": { "A": "b" } });
    let reply = node.api(Method::POST, "/v2/sandboxes", create(body)).await;
    assert_eq!(reply.status, StatusCode::CREATED);
    let sandbox = reply.json();
    assert_eq!(sandbox["templateID"], "base");
    assert_eq!(sandbox["alias"], "code-interpreter-v1");
    assert_eq!(sandbox["domain"], "sbx.test");
    assert_eq!(sandbox["envdAccessToken"].as_str().unwrap().len(), 64);
    assert!(sandbox.get("trafficAccessToken").is_none());
    let id = sandbox["sandboxID"].as_str().unwrap();
    assert!(id.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()));
    let guest = Arc::clone(&node.host.guests.lock().unwrap()[id]);
    let init = guest.inits.lock().unwrap()[0].clone();
    assert_eq!(init["envVars"]["A"], "b");
    assert_eq!(init["accessToken"], sandbox["envdAccessToken"]);
    assert_eq!(init["identity"]["sandboxId"], id);
}

#[tokio::test]
async fn versions_differ_in_the_default_timeout() {
    let node = TestNode::start().await;
    for (path, seconds) in [("/sandboxes", 15), ("/v2/sandboxes", 300)] {
        let reply = node.api(Method::POST, path, create(json!({ "templateID": "base" }))).await;
        let path = format!("/sandboxes/{}", reply.json()["sandboxID"].as_str().unwrap());
        let detail = node.api(Method::GET, &path, None).await.json();
        let time = |name: &str| detail[name].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
        assert_eq!(time("endAt").duration_since(time("startedAt")).as_secs(), seconds);
        assert_eq!(detail["state"], "running");
        assert_eq!(detail["lifecycle"]["onTimeout"], "kill");
    }
}

#[tokio::test]
async fn bad_input_is_refused_with_a_reason_and_leaves_nothing() {
    let node = TestNode::start().await;
    let long = "x".repeat(10_000);
    let many: std::collections::BTreeMap<_, _> = (0..4097).map(|n| (format!("V{n}"), "")).collect();
    let cases = [
        (json!({ "templateID": "nope" }), 404, "template 'nope' not found"),
        (json!({ "templateID": "../x" }), 404, "not found"),
        (
            json!({ "templateID": "base", "metadata": { "a": long } }),
            400,
            "metadata has 10001 bytes",
        ),
        (json!({ "templateID": "base", "timeout": -1 }), 400, "negative"),
        (json!({ "templateID": "base", "timeout": 1_000_000_000 }), 400, "longest allowed"),
        (json!({ "templateID": "base", "envVars": { "A=": "b" } }), 400, "environment variable"),
        (json!({ "templateID": "base", "envVars": { "A": "b\0" } }), 400, "NUL"),
        (json!({ "templateID": "base", "envVars": many }), 400, "4096"),
        (json!({ "templateID": "base", "metadata": { "a": 1 } }), 400, "not as expected"),
        (json!({}), 400, "templateID"),
        (
            json!({ "templateID": "base", "volumeMounts": [{ "name": "a", "path": "/a" }] }),
            501,
            "volumes",
        ),
    ];
    for (body, status, message) in cases {
        let reply = node.api(Method::POST, "/v2/sandboxes", create(body.clone())).await;
        assert_eq!(reply.status.as_u16(), status, "{body}");
        assert_eq!(reply.json()["code"], status);
        let text = reply.json()["message"].as_str().unwrap().to_owned();
        assert!(text.contains(message), "{text}");
    }
    assert_eq!(node.app.sandboxes.count(), 0);
    assert!(node.host.dirt.lock().unwrap().is_empty());
}

#[tokio::test]
async fn invalid_utf8_and_nul_in_paths_are_refused() {
    let node = TestNode::start().await;
    for (path, status) in
        [("/sandboxes/%ff", 400), ("/sandboxes/a%00b", 404), ("/sandboxes/..", 404)]
    {
        let reply = node.api(Method::GET, path, None).await;
        assert_eq!(reply.status.as_u16(), status, "{path}");
        assert_eq!(reply.json()["code"], status);
    }
    let body = json!({ "name": "t", "rootfs": "/a\0b", "kernel": "/k" });
    let reply = node.api(Method::POST, "/v1/templates", create(body)).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn kernel_of_a_template_follows_the_number_of_its_vcpus() {
    let up_only = TestNode::start_with(&["--kernel", "/k"], Arc::default(), Vec::new()).await;
    let both = ["--kernel", "/k", "--kernel-smp", "/smp"];
    let both = TestNode::start_with(&both, Arc::default(), Vec::new()).await;
    let build = async |node: &TestNode, vcpus: u8, kernel: Option<&str>| {
        let name = format!("t{vcpus}{}", kernel.is_some());
        let body = json!({ "name": name, "rootfs": "/r", "vcpus": vcpus, "kernel": kernel });
        node.api(Method::POST, "/v1/templates?wait=true", Some(body)).await
    };
    for (vcpus, kernel, used) in [(1, None, "/k"), (2, None, "/smp"), (2, Some("/own"), "/own")] {
        assert_eq!(build(&both, vcpus, kernel).await.status, StatusCode::CREATED);
        assert_eq!(both.host.kernels.lock().unwrap().last().unwrap(), Path::new(used));
    }

    let refused = build(&up_only, 2, None).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    let message = refused.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("--kernel-smp") && message.contains("--variant smp"), "{message}");
    assert_eq!(build(&up_only, 2, Some("/own")).await.status, StatusCode::CREATED);
}

#[tokio::test]
async fn unknown_routes_and_methods_have_the_error_form() {
    let node = TestNode::start().await;
    assert_eq!(node.api(Method::GET, "/nope", None).await.json()["code"], 404);
    assert_eq!(node.api(Method::PUT, "/v2/sandboxes", None).await.json()["code"], 405);
}

#[tokio::test]
async fn kill_is_204_once_and_404_afterwards() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let path = format!("/sandboxes/{id}");
    assert_eq!(node.api(Method::DELETE, &path, None).await.status, StatusCode::NO_CONTENT);
    assert_eq!(node.api(Method::DELETE, &path, None).await.status, StatusCode::NOT_FOUND);
    assert_eq!(node.api(Method::GET, &path, None).await.status, StatusCode::NOT_FOUND);
    assert!(node.host.dirt.lock().unwrap().is_empty());
}

#[tokio::test]
async fn list_filters_and_pages() {
    let node = TestNode::start().await;
    for n in 0..5 {
        let body =
            json!({ "templateID": "base", "metadata": { "n": n.to_string(), "a b": "c&d" } });
        node.api(Method::POST, "/v2/sandboxes", create(body)).await;
    }
    let reply =
        node.api(Method::GET, "/v2/sandboxes?metadata=a%252520b%3Dc%252526d%26n%3D3", None).await;
    assert_eq!(reply.json().as_array().unwrap().len(), 1);
    assert_eq!(reply.json()[0]["metadata"]["n"], "3");

    let mut seen = Vec::new();
    let mut path = "/v2/sandboxes?limit=2&order=asc".to_owned();
    loop {
        let reply = node.api(Method::GET, &path, None).await;
        for sandbox in reply.json().as_array().unwrap() {
            seen.push(sandbox["metadata"]["n"].as_str().unwrap().to_owned());
        }
        let Some(next) = reply.headers.get("x-next-token") else { break };
        path = format!("/v2/sandboxes?limit=2&order=asc&nextToken={}", next.to_str().unwrap());
    }
    assert_eq!(seen, ["0", "1", "2", "3", "4"]);
    let paused = node.api(Method::GET, "/v2/sandboxes?state=paused", None).await;
    assert_eq!(paused.json(), json!([]));
}

#[tokio::test]
async fn timeout_may_shorten_and_connect_only_extends() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let path = format!("/sandboxes/{id}");
    let end_at = async || -> jiff::Timestamp {
        node.api(Method::GET, &path, None).await.json()["endAt"].as_str().unwrap().parse().unwrap()
    };
    let set = Some(json!({ "timeout": 100 }));
    let reply = node.api(Method::POST, &format!("{path}/timeout"), set).await;
    assert_eq!(reply.status, StatusCode::NO_CONTENT);
    let short = end_at().await;
    let body = Some(json!({ "timeout": 10 }));
    let reply = node.api(Method::POST, &format!("/v2{path}/connect"), body).await;
    assert_eq!(reply.status, StatusCode::OK);
    assert_eq!(end_at().await, short);
    let reply = node.api(Method::POST, &format!("/v2{path}/connect"), None).await;
    assert_eq!(reply.json()["sandboxID"], id);
    assert!(end_at().await.duration_since(short).as_secs() >= 199);
    let reply = node.api(Method::POST, &format!("{path}/connect"), None).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn repeated_create_with_one_key_makes_one_sandbox() {
    let node = TestNode::start().await;
    *node.host.create_pause.lock().unwrap() = std::time::Duration::from_millis(50);
    let request = |template: &str| {
        Request::post("/v2/sandboxes")
            .header("x-api-key", &node.key)
            .header("idempotency-key", "a-1")
            .body(Body::from(json!({ "templateID": template }).to_string()))
            .unwrap()
    };
    let (first, second) = tokio::join!(node.ask(request("base")), node.ask(request("base")));
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(first.json(), second.json());
    assert_eq!(node.app.sandboxes.count(), 1);
    let other = node.ask(request("code-interpreter-v1")).await;
    assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
}

#[tokio::test]
async fn limit_on_the_count_is_429() {
    let host = Arc::default();
    let node = TestNode::start_with(&["--max-sandboxes", "1"], host, vec![]).await;
    node.create().await;
    let body = create(json!({ "templateID": "base" }));
    let reply = node.api(Method::POST, "/v2/sandboxes", body).await;
    assert_eq!(reply.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(reply.headers["retry-after"], "1");
}

#[tokio::test]
async fn short_memory_is_503_with_retry_after() {
    let host = Arc::default();
    let node = TestNode::start_with(&["--memory-floor-mib", "99999999"], host, vec![]).await;
    let body = create(json!({ "templateID": "base" }));
    let reply = node.api(Method::POST, "/v2/sandboxes", body).await;
    assert_eq!(reply.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(reply.headers["retry-after"], "2");
}

#[tokio::test]
async fn metrics_are_sampled_once_in_a_while_and_only_when_asked() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    let guest = Arc::clone(&node.host.guests.lock().unwrap()[id.as_str()]);
    let samples = || guest.samples.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(samples(), 0);
    let path = format!("/sandboxes/{id}/metrics");
    for _ in 0..3 {
        let reply = node.api(Method::GET, &path, None).await;
        assert_eq!(reply.json().as_array().unwrap().len(), 1);
        assert_eq!(reply.json()[0]["diskUsed"], 7);
    }
    assert_eq!(samples(), 1);
    let reply = node.api(Method::GET, &format!("{path}?start=1&end=2"), None).await;
    assert_eq!(reply.json(), json!([]));
    assert_eq!(samples(), 1);
}

#[tokio::test]
async fn what_is_absent_says_so() {
    let node = TestNode::start().await;
    let (id, _) = node.create().await;
    for verb in ["snapshots"] {
        let reply = node.api(Method::POST, &format!("/sandboxes/{id}/{verb}"), None).await;
        assert_eq!(reply.status, StatusCode::NOT_IMPLEMENTED, "{verb}");
        assert_eq!(reply.json()["error_code"], "not_supported");
        let reply = node.api(Method::POST, &format!("/sandboxes/x/{verb}"), None).await;
        assert_eq!(reply.status, StatusCode::NOT_FOUND, "{verb}");
    }
}

#[tokio::test]
async fn node_keys_and_templates_are_managed() {
    let node = TestNode::start().await;
    let reply = node.api(Method::POST, "/v1/keys", Some(json!({ "name": "ci" }))).await;
    assert_eq!(reply.status, StatusCode::CREATED);
    let id = reply.json()["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/keys/{id}");
    assert_eq!(node.api(Method::DELETE, &path, None).await.status, StatusCode::NO_CONTENT);
    assert_eq!(node.api(Method::DELETE, &path, None).await.status, StatusCode::NOT_FOUND);

    let body = json!({ "name": "t2", "rootfs": "/r", "kernel": "/k" });
    let reply = node.api(Method::POST, "/v1/templates?wait=true", Some(body.clone())).await;
    assert_eq!(reply.status, StatusCode::CREATED);
    let reply = node.api(Method::POST, "/v1/templates", Some(body)).await;
    assert_eq!(reply.status, StatusCode::CONFLICT);
    let alias = node.api(Method::GET, "/templates/aliases/code-interpreter-v1", None).await;
    assert_eq!(alias.json()["templateID"], "base");
    assert_eq!(
        node.api(Method::DELETE, "/templates/t2", None).await.status,
        StatusCode::NO_CONTENT
    );
    let node_view = node.api(Method::GET, "/v1/node", None).await.json();
    assert_eq!(node_view["templates"], json!(["base"]));
    let metrics = node.ask(Request::get("/metrics").body(Body::empty()).unwrap()).await;
    assert!(String::from_utf8(metrics.body).unwrap().contains("warren_requests_total"));
}
