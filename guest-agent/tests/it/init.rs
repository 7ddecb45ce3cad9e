use serde_json::json;

use crate::support::{Agent, user_name};

#[test]
fn settings_reach_processes_and_the_token_holds() {
    let agent = Agent::start();
    assert_eq!(agent.request("GET", "/health", &[], b"").status, 204);
    let message = json!({
        "accessToken": "first", "envVars": {"GREETING": "hello"}, "defaultUser": user_name(),
        "defaultWorkdir": "/tmp",
        "identity": {"sandboxId": "abc", "forkIndex": 7, "seed": "00ff"},
    });
    assert_eq!(agent.request("POST", "/init", &[], message.to_string().as_bytes()).status, 204);
    assert_eq!(agent.request("GET", "/health", &[], b"").status, 204);
    assert_eq!(agent.request("GET", "/metrics", &[], b"").status, 401);
    let token = "x-access-token: first";
    assert_eq!(agent.request("GET", "/metrics", &[token], b"").status, 200);
    let envs = agent.request("GET", "/envs", &[token], b"").json();
    assert_eq!(envs, json!({"GREETING": "hello"}));
    let text = "echo $GREETING $WARREN_FORK_INDEX $WARREN_SEED $E2B_SANDBOX $E2B_SANDBOX_ID $PWD";
    let outcome = agent.shell_with(text, &[token]).finish();
    assert_eq!(String::from_utf8(outcome.stdout).unwrap(), "hello 7 00ff true abc /tmp\n");
    let second = json!({"accessToken": "second"}).to_string();
    assert_eq!(agent.request("POST", "/init", &[], second.as_bytes()).status, 204);
    assert_eq!(agent.request("GET", "/metrics", &[token], b"").status, 401);
}

#[test]
fn mistakes_name_their_step() {
    let agent = Agent::start();
    let user = json!({"defaultUser": "nobody-at-all"}).to_string();
    let reply = agent.request("POST", "/init", &[], user.as_bytes());
    assert_eq!((reply.status, &reply.json()["step"]), (500, &json!("default user")));
    let clock = json!({"timestamp": "yesterday"}).to_string();
    let reply = agent.request("POST", "/init", &[], clock.as_bytes());
    assert_eq!((reply.status, &reply.json()["step"]), (500, &json!("clock")));
    assert_eq!(agent.request("POST", "/init", &[], b"{").status, 400);
}

#[test]
fn warmup_runs_to_its_end_and_quiesce_closes() {
    let agent = Agent::start();
    let message = json!({"defaultUser": user_name()}).to_string();
    assert_eq!(agent.request("POST", "/init", &[], message.as_bytes()).status, 204);
    let text = agent.request("POST", "/warmup", &[], b"").text();
    assert!(text.ends_with("{\"done\":true}\n"), "{text}");
    assert!(text.contains("{\"step\":\"/bin/true\"}"), "{text}");
    assert_eq!(agent.request("POST", "/quiesce", &[], b"").status, 204);
}
