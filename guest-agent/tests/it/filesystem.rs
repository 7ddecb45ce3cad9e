use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};
use warren_base::skip::skipped;

use crate::support::{Agent, user_header};

fn call(agent: &Agent, method: &str, message: Value) -> (u16, Value) {
    agent.call(&format!("/filesystem.Filesystem/{method}"), &message)
}

#[test]
fn entries_are_made_listed_moved_and_removed() {
    let agent = Agent::start();
    let at = |name: &str| agent.path(name);
    let (status, made) = call(&agent, "MakeDir", json!({"path": at("x/y")}));
    assert_eq!((status, &made["entry"]["type"]), (200, &json!("FILE_TYPE_DIRECTORY")));
    let (status, error) = call(&agent, "MakeDir", json!({"path": at("x")}));
    assert_eq!((status, &error["code"]), (409, &json!("already_exists")));
    std::fs::write(at("x/f"), "12345").unwrap();
    let (_, list) = call(&agent, "ListDir", json!({"path": at("x")}));
    let names: Vec<_> = list["entries"].as_array().unwrap().iter().map(|e| &e["name"]).collect();
    assert_eq!(names, ["f", "y"]);
    let (_, stat) = call(&agent, "Stat", json!({"path": at("x/f")}));
    assert_eq!(stat["entry"]["size"], "5");
    assert_eq!(stat["entry"]["permissions"], "-rw-r--r--");
    let (status, moved) =
        call(&agent, "Move", json!({"source": at("x/f"), "destination": at("n/g")}));
    assert_eq!((status, &moved["entry"]["path"]), (200, &json!(at("n/g"))));
    let (status, _) = call(&agent, "Move", json!({"source": at("x/f"), "destination": at("h")}));
    assert_eq!(status, 404);
    assert_eq!(call(&agent, "Remove", json!({"path": at("x")})).0, 200);
    assert_eq!(call(&agent, "Remove", json!({"path": at("x")})).0, 200);
    let (status, error) = call(&agent, "Stat", json!({"path": at("x")}));
    assert_eq!((status, &error["code"]), (404, &json!("not_found")));
    assert_eq!(call(&agent, "ListDir", json!({"path": at("n/g")})).0, 400);
    assert_eq!(call(&agent, "Remove", json!({"path": "/"})).0, 400);
}

#[test]
fn watch_stream_tells_of_events() {
    let agent = Agent::start();
    let place = agent.path("w");
    std::fs::create_dir(&place).unwrap();
    let message = json!({"path": place, "recursive": true, "includeEntry": true});
    let mut stream = agent.stream("/filesystem.Filesystem/WatchDir", &message, &[]);
    assert_eq!(stream.next().1, json!({"start": {}}));
    std::fs::create_dir(format!("{place}/d")).unwrap();
    let event = stream.next().1["filesystem"].clone();
    assert_eq!((&event["name"], &event["type"]), (&json!("d"), &json!("EVENT_TYPE_CREATE")));
    assert_eq!(event["entry"]["type"], "FILE_TYPE_DIRECTORY");
    std::fs::write(format!("{place}/d/f"), "x").unwrap();
    assert_eq!(stream.next().1["filesystem"]["name"], "d/f");
}

#[test]
fn watcher_gives_events_since_the_last_call() {
    let agent = Agent::start();
    let place = agent.path("w");
    std::fs::create_dir(&place).unwrap();
    let (_, reply) = call(&agent, "CreateWatcher", json!({"path": place}));
    let id = json!({"watcherId": reply["watcherId"]});
    std::fs::write(format!("{place}/f"), "x").unwrap();
    std::fs::remove_file(format!("{place}/f")).unwrap();
    let (_, reply) = call(&agent, "GetWatcherEvents", id.clone());
    let kinds: Vec<_> = reply["events"].as_array().unwrap().iter().map(|e| &e["type"]).collect();
    assert_eq!(kinds, ["EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE", "EVENT_TYPE_REMOVE"]);
    // An upload is a write, whether or not there was a file before.
    let headers = ["content-type: application/octet-stream", &user_header()];
    for kinds in [&["EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE"][..], &["EVENT_TYPE_WRITE"][..]] {
        let target = format!("/files?path={place}/up");
        assert_eq!(agent.request("POST", &target, &headers, b"x").status, 200);
        let (_, reply) = call(&agent, "GetWatcherEvents", id.clone());
        let events = reply["events"].as_array().unwrap();
        assert!(events.iter().all(|event| event["name"] == "up"), "{events:?}");
        let told: Vec<_> = events.iter().map(|event| &event["type"]).collect();
        let told: Vec<_> = told.into_iter().filter(|kind| *kind != "EVENT_TYPE_CHMOD").collect();
        assert_eq!(told, kinds);
    }
    let (_, reply) = call(&agent, "GetWatcherEvents", id.clone());
    assert_eq!(reply["events"], json!([]));
    assert_eq!(call(&agent, "RemoveWatcher", id.clone()).0, 200);
    assert_eq!(call(&agent, "GetWatcherEvents", id).0, 404);
    assert_eq!(call(&agent, "CreateWatcher", json!({"path": "/no/such"})).0, 404);
    assert_eq!(call(&agent, "CreateWatcher", json!({"path": "/etc/passwd"})).0, 400);
}

#[test]
fn watcher_overflow_is_an_error_and_not_silence() {
    let agent = Agent::start();
    let place = agent.path("w");
    std::fs::create_dir(&place).unwrap();
    let (_, reply) = call(&agent, "CreateWatcher", json!({"path": place}));
    let id = json!({"watcherId": reply["watcherId"]});
    let (one, other) = (format!("{place}/one"), format!("{place}/other"));
    std::fs::write(&one, "").unwrap();
    for _ in 0..5_000 {
        std::fs::rename(&one, &other).unwrap();
        std::fs::rename(&other, &one).unwrap();
    }
    let (status, error) = call(&agent, "GetWatcherEvents", id);
    assert_eq!((status, &error["code"]), (500, &json!("data_loss")));
}

#[test]
fn tree_moves_between_file_systems_and_is_removed_whole() {
    let agent = Agent::start();
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    let device = |path: &std::path::Path| std::fs::metadata(path).unwrap().dev();
    let source = agent.path("tree");
    std::fs::create_dir_all(format!("{source}/a/b")).unwrap();
    if device(source.as_ref()) == device(elsewhere.path()) {
        skipped("the directory of the tests is on the file system of /dev/shm");
        return;
    }
    std::fs::write(format!("{source}/a/b/f"), "12345").unwrap();
    std::os::unix::fs::symlink("b/f", format!("{source}/a/link")).unwrap();
    let destination = elsewhere.path().join("moved");
    let (status, _) = call(&agent, "Move", json!({"source": source, "destination": destination}));
    assert_eq!(status, 200);
    assert!(!std::fs::exists(&source).unwrap());
    assert_eq!(std::fs::read_to_string(destination.join("a/link")).unwrap(), "12345");
    assert_eq!(call(&agent, "Remove", json!({"path": destination})).0, 200);
    assert!(!destination.exists());
}
