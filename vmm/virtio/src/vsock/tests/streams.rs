//! Connections: opened, closed, and held to their credit.

use super::*;

#[test]
fn config_space_is_the_cid() {
    let mut guest = Guest::new();
    assert_eq!(guest.machine.read(0x100), 3);
    assert_eq!(guest.machine.read(0x104), 0);
    assert_eq!(guest.machine.read(0x108), 0);
}

#[test]
fn host_client_talks_to_the_guest() {
    let mut guest = Guest::ready();
    let (mut client, peer) = guest.connect(49983);
    client.write_all(b"ping").unwrap();
    assert_eq!(guest.expect(PacketOperation::Data).1, b"ping");
    guest.send(&peer, PacketOperation::Data, 0, b"pong");
    let mut data = [0; 4];
    client.read_exact(&mut data).unwrap();
    assert_eq!(&data, b"pong");
    assert_eq!(guest.metric("host_connections"), 1);
    assert_eq!((guest.metric("host_bytes"), guest.metric("guest_bytes")), (4, 4));
}

#[test]
fn request_half_closed_by_the_client_still_gets_its_reply() {
    let mut guest = Guest::ready();
    let (mut client, peer) = guest.connect(80);
    client.write_all(b"GET").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(guest.expect(PacketOperation::Data).1, b"GET");
    let (shutdown, _) = guest.expect(PacketOperation::Shutdown);
    assert_eq!(shutdown.flags, SHUTDOWN_SEND);
    guest.settle();
    guest.send(&peer, PacketOperation::Data, 0, b"reply");
    guest.send(&peer, PacketOperation::Shutdown, SHUTDOWN_BOTH, &[]);
    assert_eq!(read_to_end(&mut client), b"reply");
    guest.expect(PacketOperation::Reset);
    assert_eq!(guest.metric("closed_connections"), 1);
    assert_eq!(guest.machine.events.watched(), 1);
}

#[test]
fn guest_half_close_reaches_the_client_which_sends_on() {
    let mut guest = Guest::ready();
    let (mut client, peer) = guest.connect(80);
    guest.send(&peer, PacketOperation::Data, 0, b"all");
    guest.send(&peer, PacketOperation::Shutdown, SHUTDOWN_SEND, &[]);
    assert_eq!(read_to_end(&mut client), b"all");
    client.write_all(b"more").unwrap();
    assert_eq!(guest.expect(PacketOperation::Data).1, b"more");
    drop(client);
    // Both directions are done, one way or the other.
    let (shutdown, _) = guest.expect(PacketOperation::Shutdown);
    assert_ne!(shutdown.flags & SHUTDOWN_SEND, 0);
    guest.settle();
    assert_eq!(guest.metric("closed_connections"), 1);
}

#[test]
fn guest_that_stops_receiving_is_sent_no_more() {
    let mut guest = Guest::ready();
    let (mut client, peer) = guest.connect(80);
    guest.send(&peer, PacketOperation::Shutdown, SHUTDOWN_RECEIVE, &[]);
    client.write_all(b"unwanted").unwrap();
    guest.settle();
    assert!(guest.inbox.is_empty());
    guest.send(&peer, PacketOperation::Data, 0, b"still");
    let mut data = [0; 5];
    client.read_exact(&mut data).unwrap();
    assert_eq!(&data, b"still");
}

#[test]
fn data_before_a_full_close_arrives_before_the_shutdown() {
    let mut guest = Guest::ready();
    let (mut client, _) = guest.connect(80);
    client.write_all(b"fire and forget").unwrap();
    drop(client);
    assert_eq!(guest.expect(PacketOperation::Data).1, b"fire and forget");
    let (shutdown, _) = guest.expect(PacketOperation::Shutdown);
    assert_eq!(shutdown.flags, SHUTDOWN_BOTH);
    guest.settle();
    assert_eq!(guest.metric("closed_connections"), 1);
    assert_eq!(guest.machine.events.watched(), 1);
}

#[test]
fn refused_port_closes_without_ok() {
    let mut guest = Guest::ready();
    let mut client = UnixStream::connect(guest.path()).unwrap();
    client.write_all(b"CONNECT 81\n").unwrap();
    let (request, _) = guest.expect(PacketOperation::Request);
    let peer = Peer::new(request.source_port, 81);
    guest.send(&peer, PacketOperation::Reset, 0, &[]);
    assert!(read_to_end(&mut client).is_empty());
    assert_eq!(guest.metric("refused_by_guest"), 1);
}

#[test]
fn client_gone_before_the_answer_is_reset() {
    let mut guest = Guest::ready();
    let mut client = UnixStream::connect(guest.path()).unwrap();
    client.write_all(b"CONNECT 81\n").unwrap();
    guest.expect(PacketOperation::Request);
    drop(client);
    guest.expect(PacketOperation::Reset);
}

#[test]
fn guest_connects_to_a_host_listener() {
    let mut guest = Guest::ready();
    let listener = UnixListener::bind(format!("{}_7000", guest.path().display())).unwrap();
    let peer = Peer::new(7000, 1234);
    guest.send(&peer, PacketOperation::Request, 0, &[]);
    guest.expect(PacketOperation::Response);
    let (mut host, _) = listener.accept().unwrap();
    guest.send(&peer, PacketOperation::Data, 0, b"up");
    let mut data = [0; 2];
    host.read_exact(&mut data).unwrap();
    host.write_all(b"down").unwrap();
    assert_eq!(guest.expect(PacketOperation::Data).1, b"down");
    guest.send(&peer, PacketOperation::Shutdown, SHUTDOWN_BOTH, &[]);
    guest.expect(PacketOperation::Reset);
    assert!(read_to_end(&mut host).is_empty());
}

#[test]
fn guest_connecting_to_nobody_is_reset() {
    let mut guest = Guest::ready();
    let peer = Peer::new(7001, 1234);
    guest.send(&peer, PacketOperation::Request, 0, &[]);
    let (reset, _) = guest.expect(PacketOperation::Reset);
    assert_eq!((reset.source_port, reset.destination_port), (7001, 1234));
    assert_eq!(guest.metric("refused_by_host"), 1);
}

#[test]
fn line_in_pieces_leaves_the_stream_untouched() {
    let mut guest = Guest::ready();
    let mut client = UnixStream::connect(guest.path()).unwrap();
    client.write_all(b"CONN").unwrap();
    guest.settle();
    client.write_all(b"ECT 5\nfirst bytes").unwrap();
    let (request, _) = guest.expect(PacketOperation::Request);
    let peer = Peer::new(request.source_port, 5);
    guest.send(&peer, PacketOperation::Response, 0, &[]);
    assert_eq!(guest.expect(PacketOperation::Data).1, b"first bytes");
    // Listener and client; the timer of the handshake is gone.
    assert_eq!(guest.machine.events.watched(), 2);
}

#[test]
fn bad_lines_are_hung_up_on() {
    let mut guest = Guest::ready();
    for line in ["GET / HTTP/1.1\r\n", "CONNECT x\n", &"C".repeat(33), "CONNECT 1\u{0}\n"] {
        let mut client = UnixStream::connect(guest.path()).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        guest.settle();
        let mut data = Vec::new();
        match client.read_to_end(&mut data) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("{line:?}: {other:?}"),
        }
    }
    drop(UnixStream::connect(guest.path()).unwrap());
    guest.settle();
    assert_eq!(guest.metric("failed_handshakes"), 5);
    assert!(guest.inbox.is_empty());
    assert_eq!(guest.machine.events.watched(), 1);
}

#[test]
fn silent_client_is_hung_up_on_in_time() {
    let mut guest = Guest::ready();
    let mut client = UnixStream::connect(guest.path()).unwrap();
    guest.settle();
    let begun = Instant::now();
    guest.machine.run_until(|machine| machine.events.watched() == 1);
    assert!(begun.elapsed() < HANDSHAKE_TIME_MAX + Duration::from_secs(2));
    assert!(read_to_end(&mut client).is_empty());
    assert_eq!(guest.metric("failed_handshakes"), 1);
}

#[test]
fn guest_without_buffers_gets_packets_when_it_has_some() {
    let mut guest = Guest::new();
    let mut client = UnixStream::connect(guest.path()).unwrap();
    client.write_all(b"CONNECT 9\n").unwrap();
    guest.settle();
    assert!(guest.metric("buffer_stalls") > 0);
    guest.give_buffers(1);
    guest.expect(PacketOperation::Request);
}

/// Counts the bytes that came and gives credit as Linux does: when the host's
/// view is three quarters behind.
fn take_data(guest: &mut Guest, peer: &mut Peer, got: &mut u64, told: &mut u32) {
    guest.receive();
    for (header, data) in std::mem::take(&mut guest.inbox) {
        if header.operation != Some(PacketOperation::Data) {
            continue;
        }
        assert!(data == pattern(*got, data.len()), "wrong data at {got}");
        *got += u64::try_from(data.len()).unwrap();
    }
    let count = u32::try_from(*got).unwrap();
    if count - *told >= GUEST_BUFFER_BYTES / 4 * 3 {
        *told = count;
        peer.forwarded = count;
        guest.send(peer, PacketOperation::CreditUpdate, 0, &[]);
    }
}

const LARGE: u64 = 50 << 20;

#[test]
fn large_stream_to_the_guest_flows_within_its_credit() {
    let mut guest = Guest::ready();
    let (mut client, mut peer) = guest.connect(80);
    let writer = std::thread::spawn(move || {
        let mut at = 0;
        while at < LARGE {
            let data = pattern(at, 100_000.min(usize::try_from(LARGE - at).unwrap()));
            client.write_all(&data).unwrap();
            at += u64::try_from(data.len()).unwrap();
        }
        client
    });
    let (mut got, mut told) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(60);
    while got < LARGE {
        assert!(Instant::now() < deadline, "stuck at {got}");
        guest.machine.turn(Duration::from_millis(5));
        take_data(&mut guest, &mut peer, &mut got, &mut told);
        assert!(got - u64::from(told) <= u64::from(GUEST_BUFFER_BYTES));
    }
    assert!(guest.metric("credit_stalls") > 0);
    // Far fewer interrupts than packets.
    let (interrupts, packets) =
        (guest.machine.interrupt.count(), usize::try_from(guest.metric("host_packets")).unwrap());
    assert!(interrupts * 4 < packets, "{interrupts} interrupts for {packets} packets");
    drop(writer.join().unwrap());
}

#[test]
fn large_stream_from_the_guest_waits_for_a_slow_client() {
    let mut guest = Guest::ready();
    let (mut client, peer) = guest.connect(80);
    let reader = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        let mut at = 0;
        let mut data = vec![0; 65536];
        loop {
            let bytes = client.read(&mut data).unwrap();
            if bytes == 0 {
                return at;
            }
            assert!(data[..bytes] == pattern(at, bytes), "wrong data at {at}");
            at += u64::try_from(bytes).unwrap();
        }
    });
    let (mut sent, mut freed) = (0u64, 0u64);
    let deadline = Instant::now() + Duration::from_secs(60);
    while sent < LARGE {
        assert!(Instant::now() < deadline, "stuck at {sent}");
        let credit = u64::from(BUFFER_BYTES) - (sent - freed);
        let bytes = credit.min(32 << 10).min(LARGE - sent);
        if bytes > 0 {
            let data = pattern(sent, usize::try_from(bytes).unwrap());
            guest.send(&peer, PacketOperation::Data, 0, &data);
            sent += bytes;
        } else {
            guest.machine.turn(Duration::from_millis(5));
        }
        guest.receive();
        for (header, _) in std::mem::take(&mut guest.inbox) {
            assert_eq!(header.operation, Some(PacketOperation::CreditUpdate));
            assert_eq!(header.buffer_bytes, BUFFER_BYTES);
            freed = u64::from(header.forwarded);
        }
    }
    guest.send(&peer, PacketOperation::Shutdown, SHUTDOWN_BOTH, &[]);
    guest.machine.run_until(|_| reader.is_finished());
    assert_eq!(reader.join().unwrap(), LARGE);
    guest.expect_eventually(PacketOperation::Reset);
    assert!(guest.metric("delayed_writes") > 0);
    assert_eq!(guest.metric("discarded_bytes"), 0);
}

#[test]
fn guest_beyond_its_credit_is_reset() {
    let mut guest = Guest::ready();
    let (client, peer) = guest.connect(80);
    // The client reads nothing; the socket's own buffer takes some.
    for _ in 0..100 {
        guest.send(&peer, PacketOperation::Data, 0, &[0; 32 << 10]);
        guest.receive();
        if guest.inbox.iter().any(|(header, _)| header.operation == Some(PacketOperation::Reset)) {
            assert_eq!(guest.metric("protocol_errors"), 1);
            drop(client);
            return;
        }
    }
    panic!("credit was never enforced");
}

#[test]
fn backlog_survives_the_guests_close_and_its_time_limit() {
    let mut guest = Guest::ready();
    let (mut client, peer) = guest.connect(80);
    let mut sent = 0u64;
    while guest.metric("delayed_writes") == 0 {
        guest.send(&peer, PacketOperation::Data, 0, &pattern(sent, 16 << 10));
        sent += 16 << 10;
    }
    guest.send(&peer, PacketOperation::Shutdown, SHUTDOWN_BOTH, &[]);
    // Linux gives up waiting for the reset after some seconds.
    guest.send(&peer, PacketOperation::Reset, 0, &[]);
    let reader = std::thread::spawn(move || read_to_end(&mut client));
    guest.machine.run_until(|_| reader.is_finished());
    assert!(reader.join().unwrap() == pattern(0, usize::try_from(sent).unwrap()));
    assert_eq!(guest.metric("closed_connections"), 1);
}

#[test]
fn client_gone_while_the_guest_sends_ends_the_connection() {
    let mut guest = Guest::ready();
    let (client, peer) = guest.connect(80);
    drop(client);
    guest.send(&peer, PacketOperation::Data, 0, b"too late");
    let (shutdown, _) = guest.expect(PacketOperation::Shutdown);
    assert_eq!(shutdown.flags, SHUTDOWN_BOTH);
    // The guest answers with a reset, which needs no answer.
    guest.send(&peer, PacketOperation::Reset, 0, &[]);
    guest.settle();
    assert!(guest.inbox.is_empty());
    assert_eq!(guest.machine.events.watched(), 1);
}

#[test]
fn hung_up_client_whose_data_lacks_credit_does_not_spin() {
    let mut guest = Guest::ready();
    let (mut client, mut peer) = guest.connect(80);
    peer.buffer_bytes = 4;
    guest.send(&peer, PacketOperation::CreditUpdate, 0, &[]);
    client.write_all(b"12345678").unwrap();
    drop(client);
    assert_eq!(guest.expect(PacketOperation::Data).1, b"1234");
    guest.settle();
    assert_eq!(guest.machine.turn(Duration::from_millis(50)), 0);
    peer.forwarded = 4;
    guest.send(&peer, PacketOperation::CreditUpdate, 0, &[]);
    assert_eq!(guest.expect(PacketOperation::Data).1, b"5678");
    peer.forwarded = 8;
    guest.send(&peer, PacketOperation::CreditUpdate, 0, &[]);
    guest.expect(PacketOperation::Shutdown);
}

#[test]
fn credit_request_is_answered() {
    let mut guest = Guest::ready();
    let (_client, peer) = guest.connect(80);
    guest.send(&peer, PacketOperation::CreditRequest, 0, &[]);
    let (update, _) = guest.expect(PacketOperation::CreditUpdate);
    assert_eq!((update.buffer_bytes, update.forwarded), (BUFFER_BYTES, 0));
}

#[test]
fn busy_connection_leaves_others_their_turns() {
    let mut guest = Guest::ready();
    let (mut busy, mut busy_peer) = guest.connect(1);
    busy_peer.buffer_bytes = u32::MAX;
    guest.send(&busy_peer, PacketOperation::CreditUpdate, 0, &[]);
    let (mut quiet, _) = guest.connect(2);
    busy.set_nonblocking(true).unwrap();
    let fill = |busy: &mut UnixStream| while busy.write(&[0; 65536]).is_ok() {};
    fill(&mut busy);
    guest.machine.turn(Duration::from_millis(5));
    quiet.write_all(b"me too").unwrap();
    for _ in 0..20 {
        fill(&mut busy);
        guest.machine.turn(Duration::from_millis(5));
        guest.receive();
        if guest.inbox.iter().any(|(_, data)| data == b"me too") {
            return;
        }
        guest.inbox.clear();
    }
    panic!("the quiet connection starved");
}
