use std::io::{Read, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde_json::json;
use sha2::{Digest, Sha256};
use warren_base::skip::skipped;

use crate::support::{Agent, Reply, user_header, user_name, wait_until};

fn upload(agent: &Agent, path: &str, headers: &[&str], body: &[u8]) -> Reply {
    let user = user_header();
    let mut all = vec!["content-type: application/octet-stream", &user];
    all.extend(headers);
    agent.request("POST", &format!("/files?path={path}"), &all, body)
}

fn download(agent: &Agent, path: &str, headers: &[&str]) -> Reply {
    agent.request("GET", &format!("/files?path={path}&username={}", user_name()), headers, b"")
}

#[test]
fn upload_large_file_arrives_whole() {
    let agent = Agent::start();
    let path = agent.path("deep/er/file");
    let content: Vec<u8> =
        (0..50_000_000_u32).map(|n| n.to_le_bytes()[usize::from(n % 3 == 0)]).collect();
    let reply = upload(&agent, &path, &[], &content);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.json(), json!([{"path": path, "name": "file", "type": "file"}]));
    assert!(download(&agent, &path, &[]).body == content);
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kib < 20 * 1024, "the agent took {kib} KiB for it");
}

#[test]
fn deep_upload_and_large_listing_let_others_have_their_turn() {
    let agent = Agent::start();
    let deep = agent.path(&"d/".repeat(1500));
    let place = agent.path("many");
    std::fs::create_dir(&place).unwrap();
    for number in 0..5000 {
        std::fs::write(format!("{place}/{number}"), "").unwrap();
    }
    std::thread::scope(|scope| {
        let heavy = [
            scope.spawn(|| upload(&agent, &format!("{deep}file"), &[], b"deep").status),
            scope.spawn(|| {
                let listed = json!({"path": place, "depth": 9});
                agent.call("/filesystem.Filesystem/ListDir", &listed).0
            }),
        ];
        while !heavy.iter().all(|request| request.is_finished()) {
            assert_eq!(agent.request("GET", "/health", &[], b"").status, 204);
        }
        for request in heavy {
            assert_eq!(request.join().unwrap(), 200);
        }
    });
    assert_eq!(std::fs::read(format!("{deep}file")).unwrap(), b"deep");
}

#[test]
fn download_of_a_file_that_cannot_be_read_says_so() {
    let agent = Agent::start();
    let reply = download(&agent, "/proc/self/mem", &[]);
    assert_eq!(reply.status, 500);
    assert!(reply.text().contains("read '/proc/self/mem'"), "{}", reply.text());
}

#[test]
fn upload_form_with_several_files() {
    let agent = Agent::start();
    let (first, second) = (agent.path("a"), agent.path("b \"q\""));
    let mut body = Vec::new();
    for (path, text) in [(&first, "1"), (&second, "two")] {
        let escaped = path.replace('"', "%22");
        body.extend_from_slice(
            format!(
                "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{escaped}\"\r\n\r\n{text}\r\n"
            )
            .as_bytes(),
        );
    }
    body.extend_from_slice(b"--XX--\r\n");
    let user = user_header();
    let headers = ["content-type: multipart/form-data; boundary=XX", &user];
    let reply = agent.request("POST", "/files", &headers, &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(std::fs::read_to_string(first).unwrap(), "1");
    assert_eq!(std::fs::read_to_string(second).unwrap(), "two");
    let cut = agent.request("POST", "/files", &headers, &body[..body.len() - 6]);
    assert_eq!(cut.status, 400);
}

#[test]
fn gzip_in_both_directions() {
    let agent = Agent::start();
    let path = agent.path("z");
    let content = "warren ".repeat(100_000).into_bytes();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&content).unwrap();
    let packed = encoder.finish().unwrap();
    assert_eq!(upload(&agent, &path, &["content-encoding: gzip"], &packed).status, 200);
    assert!(std::fs::read(&path).unwrap() == content);
    let broken = upload(&agent, &path, &["content-encoding: gzip"], &packed[..packed.len() / 2]);
    assert_eq!(broken.status, 400);
    std::fs::write(&path, &content).unwrap();
    let reply = download(&agent, &path, &["accept-encoding: gzip"]);
    assert_eq!(reply.header("content-encoding"), Some("gzip"));
    assert!(reply.body.len() < content.len() / 10);
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&reply.body[..]).read_to_end(&mut plain).unwrap();
    assert!(plain == content);
    let refused = download(&agent, &path, &["accept-encoding: br, identity;q=0"]);
    assert_eq!(refused.status, 406);
}

#[test]
fn download_range_and_proc_files() {
    let agent = Agent::start();
    let path = agent.path("r");
    std::fs::write(&path, "0123456789").unwrap();
    let part = download(&agent, &path, &["range: bytes=2-4"]);
    assert_eq!((part.status, part.text().as_str()), (206, "234"));
    assert_eq!(part.header("content-range"), Some("bytes 2-4/10"));
    assert_eq!(download(&agent, &path, &["range: bytes=10-"]).status, 416);
    assert!(download(&agent, "/proc/version", &[]).text().starts_with("Linux"));
}

#[test]
fn mistakes_are_told() {
    let agent = Agent::start();
    let place = agent.path("");
    let missing = download(&agent, "/no/such", &[]);
    assert_eq!(missing.status, 404);
    assert_eq!(missing.json()["message"], "path '/no/such' does not exist");
    assert_eq!(download(&agent, &place, &[]).status, 400);
    assert_eq!(upload(&agent, &place, &[], b"x").status, 400);
    assert_eq!(download(&agent, "/tmp/%00", &[]).status, 400);
    assert_eq!(download(&agent, "%ff", &[]).status, 400);
    let fifo = agent.path("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
    assert_eq!(download(&agent, &fifo, &[]).status, 400);
    let reply = agent.request("GET", "/files?path=/etc/passwd&username=nobody-at-all", &[], b"");
    assert_eq!(reply.status, 401);
    let user = user_header();
    let headers = ["content-type: text/plain", &user];
    assert_eq!(agent.request("POST", "/files?path=/tmp/x", &headers, b"x").status, 400);
}

#[test]
fn disk_full_is_507() {
    let agent = Agent::start();
    // A device is no regular file, so a full disk needs a mount of its own.
    let place = agent.path("small");
    std::fs::create_dir(&place).unwrap();
    let options = Some(c"size=1m");
    let flags = rustix::mount::MountFlags::empty();
    if rustix::mount::mount("tmpfs", place.as_str(), "tmpfs", flags, options).is_err() {
        skipped("a mount needs privileges");
        return;
    }
    let reply = upload(&agent, &format!("{place}/big"), &[], &vec![7; 4 << 20]);
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0, "it keeps the disk full");
    // What an upload was to replace is still there when it fails.
    let kept = format!("{place}/kept");
    std::fs::write(&kept, "before").unwrap();
    let second = upload(&agent, &kept, &[], &vec![7; 4 << 20]);
    assert_eq!((second.status, std::fs::read_to_string(&kept).unwrap()), (507, "before".into()));
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1);
    rustix::mount::unmount(place.as_str(), rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(reply.status, 507, "{}", reply.text());
}

#[test]
fn upload_that_breaks_off_leaves_what_was_there() {
    let agent = Agent::start();
    let place = agent.path("place");
    std::fs::create_dir(&place).unwrap();
    std::fs::write(format!("{place}/kept"), "before").unwrap();
    std::os::unix::fs::symlink("nowhere", format!("{place}/link")).unwrap();
    for name in ["kept", "new", "link"] {
        let user = user_header();
        let mut stream = agent.connect("envd");
        let head = format!(
            "POST /files?path={place}/{name} HTTP/1.1\r\nhost: test\r\n{user}\r\n\
             content-type: application/octet-stream\r\ncontent-length: 1000\r\n\r\nabc"
        );
        stream.write_all(head.as_bytes()).unwrap();
        // So that the agent has begun with it.
        wait_until("the upload begins", || {
            let files = std::fs::read_dir(&place).unwrap();
            files
                .filter(|file| {
                    let meta = std::fs::metadata(file.as_ref().unwrap().path());
                    meta.is_ok_and(|meta| meta.len() == 3)
                })
                .count()
                > 0
        });
        drop(stream);
        wait_until("nothing of the upload is left", || {
            let mut names: Vec<_> = std::fs::read_dir(&place)
                .unwrap()
                .map(|file| file.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names == ["kept", "link"]
        });
        assert_eq!(std::fs::read_to_string(format!("{place}/kept")).unwrap(), "before");
    }
}

#[test]
fn upload_over_a_file_keeps_its_mode_and_the_links_to_it() {
    use std::os::unix::fs::PermissionsExt;
    let agent = Agent::start();
    let file = agent.path("file");
    std::fs::write(&file, "before, and longer").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o751)).unwrap();
    let link = agent.path("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert_eq!(upload(&agent, &link, &[], b"after").status, 200);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "after");
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o751);
}

#[test]
fn signatures_open_what_they_are_for() {
    let agent = Agent::start();
    let path = agent.path("s");
    std::fs::write(&path, "secret").unwrap();
    let init = json!({"accessToken": "tok"}).to_string();
    assert_eq!(agent.request("POST", "/init", &[], init.as_bytes()).status, 204);
    let sign = |operation: &str, end: &str| {
        let text = format!("{path}:{operation}:{}:tok{end}", user_name());
        let hash = STANDARD_NO_PAD.encode(Sha256::digest(text)).replace('+', "%2B");
        format!("/files?path={path}&username={}&signature=v1_{hash}", user_name())
    };
    assert_eq!(agent.request("GET", &sign("read", ""), &[], b"").text(), "secret");
    assert_eq!(agent.request("GET", &sign("write", ""), &[], b"").status, 401);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let link =
        format!("{}&signature_expiration={}", sign("read", &format!(":{}", now + 60)), now + 60);
    assert_eq!(agent.request("GET", &link, &[], b"").status, 200);
    let link = format!("{}&signature_expiration=5", sign("read", ":5"));
    let expired = agent.request("GET", &link, &[], b"");
    assert_eq!(expired.status, 401);
    assert_eq!(expired.text(), r#"{"code":401,"message":"signature is already expired"}"#);
    assert_eq!(download(&agent, &path, &[]).status, 401);
    assert_eq!(download(&agent, &path, &["x-access-token: tok"]).status, 200);
    assert_eq!(download(&agent, &path, &["x-access-token: no"]).status, 401);
}

#[test]
fn compose_joins_and_removes() {
    let agent = Agent::start();
    let (first, second, whole) = (agent.path("1"), agent.path("2"), agent.path("d/whole"));
    std::fs::write(&first, "one ").unwrap();
    std::fs::write(&second, "two").unwrap();
    let message = json!({
        "source_paths": [first, second], "destination": whole, "username": user_name(),
    });
    let reply = agent.request("POST", "/files/compose", &[], message.to_string().as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(std::fs::read_to_string(whole).unwrap(), "one two");
    assert!(!std::path::Path::new(&first).exists());
    let reply = agent.request("POST", "/files/compose", &[], message.to_string().as_bytes());
    assert_eq!(reply.status, 404);
}
