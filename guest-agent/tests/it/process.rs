use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::support::{Agent, envelope, user_header, wait_until};

fn select(pid: i64) -> Value {
    json!({ "pid": pid })
}

fn is_alive(pid: i64) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap().trim_start().starts_with('Z'))
}

#[test]
fn start_reports_output_and_exit() {
    let agent = Agent::start();
    let mut stream = agent.shell("echo out; echo err >&2; exit 3");
    assert!(stream.pid() > 0);
    let outcome = stream.finish();
    assert_eq!(outcome.stdout, b"out\n");
    assert_eq!(outcome.stderr, b"err\n");
    assert_eq!(outcome.end["exitCode"], 3);
    assert_eq!(outcome.end["exited"], true);
    assert_eq!(outcome.end["status"], "exit status 3");
    assert!(outcome.error.is_null());
}

#[test]
fn start_with_too_many_arguments_is_refused_at_once() {
    let agent = Agent::start();
    let message = json!({"process": {"cmd": "/bin/true", "args": vec!["x"; 100_000]}});
    let outcome = agent.stream("/process.Process/Start", &message, &[]).finish();
    assert_eq!(outcome.error["code"], "invalid_argument");
    let text = outcome.error["message"].as_str().unwrap();
    assert!(text.contains("more than 8192"), "{text}");
}

#[test]
fn start_with_background_child_ends_with_the_command() {
    let agent = Agent::start();
    let begun = Instant::now();
    let outcome = agent.shell("sleep 1000 & echo done").finish();
    assert_eq!(outcome.stdout, b"done\n");
    assert_eq!(outcome.end["exitCode"], 0);
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn start_daemon_left_behind_can_still_write() {
    let agent = Agent::start();
    let mark = agent.path("mark");
    let command = format!("(sleep 0.3; seq 100000; echo $? > {mark}) & exit 0");
    assert_eq!(agent.shell(&command).finish().end["exitCode"], 0);
    wait_until("the daemon is done", || {
        std::fs::read_to_string(&mark).is_ok_and(|text| text == "0\n")
    });
}

#[test]
fn start_time_limit_kills_the_group() {
    let agent = Agent::start();
    let mut stream = agent.shell_with("sleep 987 & echo $!; wait", &["connect-timeout-ms: 400"]);
    stream.pid();
    let begun = Instant::now();
    let outcome = stream.finish();
    assert_eq!(outcome.error["code"], "deadline_exceeded");
    assert!(begun.elapsed() < Duration::from_secs(10));
    let child: i64 = String::from_utf8(outcome.stdout).unwrap().trim().parse().unwrap();
    wait_until("the command's child is gone", || !is_alive(child));
}

#[test]
fn start_client_gone_process_lives_and_connect_gets_the_rest() {
    let agent = Agent::start();
    let mut stream = agent.shell("echo first; sleep 0.5; echo second; exit 4");
    let pid = stream.pid();
    stream.next();
    stream.disconnect();
    std::thread::sleep(Duration::from_millis(100));
    assert!(is_alive(pid));
    let mut later = agent.stream("/process.Process/Connect", &json!({"process": select(pid)}), &[]);
    assert_eq!(later.pid(), pid);
    let outcome = later.finish();
    assert_eq!(outcome.stdout, b"second\n");
    assert_eq!(outcome.end["exitCode"], 4);
}

#[test]
fn connect_after_the_end_tells_of_it() {
    let agent = Agent::start();
    let mut stream = agent.shell("exit 5");
    let pid = stream.pid();
    stream.finish();
    let message = json!({"process": select(pid)});
    let mut late = agent.stream("/process.Process/Connect", &message, &[]);
    assert_eq!(late.pid(), pid);
    assert_eq!(late.finish().end["exitCode"], 5);
    let unknown = json!({"process": select(1)});
    let outcome = agent.stream("/process.Process/Connect", &unknown, &[]).finish();
    assert_eq!(outcome.error["code"], "not_found");
}

#[test]
fn connect_second_client_gets_the_stream_too() {
    let agent = Agent::start();
    let mut first = agent.shell("read line < /dev/null; sleep 0.3; seq 1000");
    let pid = first.pid();
    let mut second =
        agent.stream("/process.Process/Connect", &json!({"process": select(pid)}), &[]);
    second.pid();
    let (first, second) = (first.finish(), second.finish());
    assert_eq!(first.stdout.len(), 3893);
    assert_eq!(first.stdout, second.stdout);
}

#[test]
fn output_unseen_is_kept_or_counted() {
    let agent = Agent::start();
    let mut stream = agent.shell("sleep 0.2; head -c 3000000 /dev/zero; exit 6");
    let pid = stream.pid();
    stream.disconnect();
    wait_until("the process has ended", || !is_alive(pid));
    let message = json!({"process": select(pid)});
    let outcome = agent.stream("/process.Process/Connect", &message, &[]).finish();
    let dropped: usize = outcome.end["warren"]["droppedBytes"].as_str().unwrap().parse().unwrap();
    assert!(outcome.stdout.len() <= 512 << 10);
    assert_eq!(outcome.stdout.len() + dropped, 3_000_000);
    assert_eq!(outcome.end["exitCode"], 6);
}

#[test]
fn output_slow_client_makes_the_process_wait_and_loses_nothing() {
    let agent = Agent::start();
    let mut stream = agent.shell("head -c 20000000 /dev/zero; echo end >&2");
    stream.pid();
    std::thread::sleep(Duration::from_millis(500));
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kib < 20 * 1024, "the agent holds {kib} KiB");
    let outcome = stream.finish();
    assert_eq!(outcome.stdout.len(), 20_000_000);
    assert_eq!(outcome.stderr, b"end\n");
    assert!(outcome.end["warren"].is_null());
}

#[test]
fn input_is_written_in_order_and_closed() {
    let agent = Agent::start();
    let message = json!({"process": {"cmd": "cat"}, "stdin": true, "tag": "the cat"});
    let mut stream = agent.stream("/process.Process/Start", &message, &[]);
    stream.pid();
    let tag = json!({ "tag": "the cat" });
    for text in ["one ", "two "] {
        let input = json!({"process": tag, "input": {"stdin": STANDARD.encode(text)}});
        assert_eq!(agent.call("/process.Process/SendInput", &input).0, 200);
    }
    let mut body = envelope(&json!({"start": {"process": tag}}));
    let data = json!({"data": {"input": {"stdin": STANDARD.encode("three")}}});
    body.extend(envelope(&data));
    let headers = ["content-type: application/connect+json"];
    let reply = agent.request("POST", "/process.Process/StreamInput", &headers, &body);
    assert_eq!(reply.status, 200);
    let (status, _) = agent.call("/process.Process/CloseStdin", &json!({"process": tag}));
    assert_eq!(status, 200);
    assert_eq!(stream.finish().stdout, b"one two three");
}

#[test]
fn input_without_stdin_is_refused() {
    let agent = Agent::start();
    let mut stream = agent.shell("sleep 5");
    let pid = stream.pid();
    let input = json!({"process": select(pid), "input": {"stdin": "eA=="}});
    let (status, error) = agent.call("/process.Process/SendInput", &input);
    assert_eq!((status, &error["code"]), (400, &json!("failed_precondition")));
}

#[test]
fn signal_kill_ends_the_group() {
    let agent = Agent::start();
    let mut stream = agent.shell("sleep 100 | sleep 100");
    let pid = stream.pid();
    let message = json!({"process": select(pid), "signal": "SIGNAL_SIGKILL"});
    assert_eq!(agent.call("/process.Process/SendSignal", &message).0, 200);
    let outcome = stream.finish();
    assert_eq!(outcome.end["exitCode"], -1);
    assert_eq!(outcome.end["exited"], false);
    assert_eq!(outcome.end["status"], "signal: killed");
    let (status, error) = agent.call("/process.Process/SendSignal", &message);
    assert_eq!((status, &error["code"]), (404, &json!("not_found")));
}

#[test]
fn list_shows_what_runs() {
    let agent = Agent::start();
    let message = json!({
        "process": {"cmd": "sleep", "args": ["50"], "cwd": "/tmp", "envs": {"A": "b"}}, "tag": "t",
    });
    let mut stream = agent.stream("/process.Process/Start", &message, &[]);
    let pid = stream.pid();
    let (_, list) = agent.call("/process.Process/List", &json!({}));
    let expected = json!([{
        "pid": pid, "tag": "t",
        "config": {"cmd": "sleep", "args": ["50"], "cwd": "/tmp", "envs": {"A": "b"}},
    }]);
    assert_eq!(list["processes"], expected);
}

#[test]
fn start_mistakes_are_told() {
    let agent = Agent::start();
    let start = |process: Value| {
        let message = json!({ "process": process });
        agent.stream("/process.Process/Start", &message, &[]).finish().error
    };
    let missing = start(json!({"cmd": "ls", "cwd": "/no/such"}));
    assert_eq!(missing["code"], "invalid_argument");
    assert_eq!(missing["message"], "cwd '/no/such' does not exist");
    assert_eq!(start(json!({"cmd": "/no/such"}))["code"], "invalid_argument");
    assert_eq!(start(json!({"cmd": "ls", "args": ["a\u{0}b"]}))["code"], "invalid_argument");
    assert_eq!(start(json!({"cmd": "ls", "envs": {"A=": "x"}}))["code"], "invalid_argument");
    let unknown = format!("authorization: Basic {}", STANDARD.encode("nobody-at-all:"));
    let headers = ["content-type: application/json", &unknown];
    let reply = agent.request("POST", "/filesystem.Filesystem/Stat", &headers, br#"{"path":"/"}"#);
    assert_eq!(reply.status, 401);
}

#[test]
fn keepalive_comes_when_it_is_quiet() {
    let agent = Agent::start();
    let outcome = agent.shell_with("sleep 2.5", &["keepalive-ping-interval: 1"]).finish();
    assert_eq!(outcome.keepalives, 2);
}

#[test]
fn pty_has_the_size_it_is_given() {
    let agent = Agent::start();
    let message = json!({
        "process": {"cmd": "/bin/sh", "args": ["-c", "stty size; read x; stty size"]},
        "pty": {"size": {"cols": 101, "rows": 33}},
    });
    let mut stream = agent.stream("/process.Process/Start", &message, &[]);
    let pid = stream.pid();
    stream.next();
    let size = json!({"process": select(pid), "pty": {"size": {"cols": 55, "rows": 44}}});
    assert_eq!(agent.call("/process.Process/Update", &size).0, 200);
    let input = json!({"process": select(pid), "input": {"pty": STANDARD.encode("\n")}});
    assert_eq!(agent.call("/process.Process/SendInput", &input).0, 200);
    let text = String::from_utf8(stream.finish().pty).unwrap();
    assert!(text.contains("44 55"), "{text:?}");
}

#[test]
fn orphans_are_reaped() {
    let agent = Agent::start();
    let command = "for i in 1 2 3 4 5; do (sleep 0.1 & echo $!); done";
    let outcome = agent.shell(command).finish();
    let pids: Vec<i64> = String::from_utf8(outcome.stdout)
        .unwrap()
        .lines()
        .map(|line| line.parse().unwrap())
        .collect();
    assert_eq!(pids.len(), 5);
    wait_until("no orphan is left, not even as a zombie", || {
        pids.iter().all(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
    });
}

#[test]
fn idle_agent_makes_no_move() {
    let agent = Agent::start();
    agent.shell("true").finish();
    std::thread::sleep(Duration::from_millis(200));
    let switches = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
        line.unwrap().to_owned()
    };
    let before = switches();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(before, switches());
}

#[test]
fn call_in_another_form_is_refused() {
    let agent = Agent::start();
    let user = user_header();
    let headers = ["content-type: application/proto", &user];
    assert_eq!(agent.request("POST", "/process.Process/List", &headers, b"").status, 415);
    let headers = ["content-type: application/json", &user];
    let reply = agent.request("POST", "/process.Process/List", &headers, b"{not json");
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json()["code"], "invalid_argument");
    assert_eq!(agent.request("POST", "/process.Process/Nothing", &headers, b"{}").status, 404);
}

#[test]
fn start_request_in_chunks_leaves_the_connection_usable() {
    use std::io::{BufRead, BufReader, Read, Write};
    let agent = Agent::start();
    let mut connection = agent.connect("envd");
    for round in 0..20 {
        let message = json!({"process": {"cmd": "echo", "args": [round.to_string()]}});
        let body = envelope(&message);
        let head = format!(
            "POST /process.Process/Start HTTP/1.1\r\nhost: test\r\n{}\r\n\
             content-type: application/connect+json\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n",
            user_header(),
            body.len()
        );
        connection.write_all(&[head.as_bytes(), &body].concat()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        // The end of the request comes when the reply has begun.
        connection.write_all(b"\r\n0\r\n\r\n").unwrap();
        let mut reader = BufReader::new(&connection);
        let mut line = String::new();
        while line.trim_end() != "0" {
            line.clear();
            assert!(reader.read_line(&mut line).unwrap() > 0, "closed in round {round}");
        }
        reader.read_exact(&mut [0; 2]).unwrap();
    }
}

#[test]
fn start_many_at_once_keeps_their_streams_apart() {
    let agent = Agent::start();
    let run = |number: usize| {
        let outcome =
            agent.shell(&format!("echo {number}; sleep 0.0{}; seq {number}", number % 10));
        let outcome = outcome.finish();
        let expected: String =
            std::iter::once(number).chain(1..=number).map(|n| format!("{n}\n")).collect();
        assert_eq!(String::from_utf8(outcome.stdout).unwrap(), expected);
        assert_eq!(outcome.end["exitCode"], 0, "{}", outcome.end);
    };
    std::thread::scope(|scope| {
        for worker in 0..16 {
            let run = &run;
            scope.spawn(move || (0..40).for_each(|round| run(worker * 40 + round)));
        }
    });
}
