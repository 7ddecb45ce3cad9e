use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};

use crate::support::Agent;

#[test]
fn tunnel_carries_both_directions_and_half_closes() {
    let agent = Agent::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut peer, _) = listener.accept().unwrap();
        let mut request = Vec::new();
        peer.read_to_end(&mut request).unwrap();
        peer.write_all(&request).unwrap();
    });
    let mut client = agent.connect("tunnel");
    client.write_all(format!("{port}\n").as_bytes()).unwrap();
    let mut ok = [0; 3];
    client.read_exact(&mut ok).unwrap();
    assert_eq!(&ok, b"OK\n");
    let sent: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    client.write_all(&sent).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut received = Vec::new();
    client.read_to_end(&mut received).unwrap();
    server.join().unwrap();
    assert!(received == sent);
}

#[test]
fn tunnel_without_listener_says_why() {
    let agent = Agent::start();
    for (line, expected) in [("1\n", "ERR Connection refused"), ("99999\n", "ERR \"99999\" is not")]
    {
        let mut client = agent.connect("tunnel");
        client.write_all(line.as_bytes()).unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).unwrap();
        assert!(reply.starts_with(expected), "{reply}");
    }
}
