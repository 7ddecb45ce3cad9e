//! Guests and clients that break the rules, and what is limited.

use super::*;

#[test]
fn packets_that_break_the_protocol_are_answered_with_resets() {
    let mut guest = Guest::ready();
    let stray = Peer::new(5, 6);
    guest.send(&stray, PacketOperation::Data, 0, b"who?");
    guest.expect(PacketOperation::Reset);
    guest.send(&stray, PacketOperation::Reset, 0, &[]);
    let bad_operation = Header { operation: None, ..stray.header(PacketOperation::Data) };
    guest.send_raw(bad_operation, &[]);
    guest.expect(PacketOperation::Reset);
    let datagram = Header { socket_type: 3, ..stray.header(PacketOperation::Request) };
    guest.send_raw(datagram, &[]);
    guest.expect(PacketOperation::Reset);
    for (source_cid, destination_cid) in [(4, 2), (3, 3), (3, 1)] {
        let header =
            Header { source_cid, destination_cid, ..stray.header(PacketOperation::Request) };
        guest.send_raw(header, &[]);
    }
    let (_client, peer) = guest.connect(80);
    guest.send(&peer, PacketOperation::Response, 0, &[]);
    guest.expect(PacketOperation::Reset);
    assert!(guest.inbox.is_empty());
    assert!(guest.machine.transport.running());
}

#[test]
fn data_longer_than_its_buffer_is_no_packet() {
    let mut guest = Guest::ready();
    let (_client, peer) = guest.connect(80);
    let header = Header { len: 100, ..peer.header(PacketOperation::Data) };
    guest.send_raw(header, &[0; 99]);
    let header = Header { len: u32::MAX, ..peer.header(PacketOperation::Data) };
    guest.send_raw(header, &[0; 99]);
    guest.machine.queues[1].add(&[(guest.transmit, 43)], &[]);
    guest.machine.notify(1);
    assert_eq!(guest.metric("malformed_packets"), 3);
    assert_eq!(guest.metric("guest_bytes"), 0);
}

#[test]
fn unfit_receive_buffers_are_given_back() {
    let mut guest = Guest::new();
    let small = guest.machine.buffer(64);
    for _ in 0..3 {
        guest.machine.queues[0].add(&[], &[(small, 44)]);
        guest.machine.queues[0].add(&[(small, 44)], &[]);
    }
    let mut client = UnixStream::connect(guest.path()).unwrap();
    client.write_all(b"CONNECT 9\n").unwrap();
    guest.settle_without_receiving();
    let used = guest.machine.queues[0].take_all_used();
    assert_eq!(used.iter().filter(|used| used.len == 0).count(), 6);
    guest.give_buffers(2);
    guest.expect(PacketOperation::Request);
}

#[test]
fn resets_for_strangers_are_bounded_and_hold_the_guest_up() {
    let mut guest = Guest::new();
    let stray = Peer::new(5, 6);
    let header = stray.header(PacketOperation::Data);
    guest.machine.memory.write_slice(&header.to_bytes(), guest.transmit).unwrap();
    let packets = RESETS_MAX + 50;
    let mut taken = 0;
    let mut offered = 0;
    while offered < packets {
        let burst = (packets - offered).min(100);
        for _ in 0..burst {
            guest.machine.queues[1].add(&[(guest.transmit, 44)], &[]);
        }
        offered += burst;
        guest.machine.notify(1);
        taken += guest.machine.queues[1].take_all_used().len();
    }
    assert_eq!(taken, RESETS_MAX);
    guest.give_buffers(100);
    let mut resets = 0;
    while resets < packets {
        guest.expect(PacketOperation::Reset);
        resets += 1;
    }
    taken += guest.machine.queues[1].take_all_used().len();
    assert_eq!(taken, packets);
}

#[test]
fn connections_are_limited() {
    let limit = libc::rlimit { rlim_cur: 8192, rlim_max: 8192 };
    // SAFETY: `limit` is a valid struct that outlives the call.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } != 0 {
        skipped("the limit of open files cannot be raised");
        return;
    }
    let mut guest = Guest::ready();
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        let mut client = UnixStream::connect(guest.path()).unwrap();
        client.write_all(b"CONNECT 9\n").unwrap();
        clients.push(client);
        guest.expect(PacketOperation::Request);
    }
    let mut late = UnixStream::connect(guest.path()).unwrap();
    guest.settle();
    assert!(read_to_end(&mut late).is_empty());
    assert_eq!(guest.metric("refused_by_limit"), 1);
    let stray = Peer::new(7, 8);
    guest.send(&stray, PacketOperation::Request, 0, &[]);
    guest.expect(PacketOperation::Reset);
    drop(clients);
    guest.settle();
    guest.inbox.clear();
    guest.connect(9);
}

#[test]
fn accepting_pauses_without_descriptors_and_goes_on() {
    let mut guest = Guest::ready();
    let (first, _) = guest.connect(1);
    let mut hoard = Vec::new();
    let second = UnixStream::connect(guest.path()).unwrap();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        hoard.push(file);
        assert!(hoard.len() < 1 << 20);
    }
    guest.machine.turn(Duration::from_millis(5));
    assert_eq!(guest.metric("accept_pauses"), 1);
    assert_eq!(guest.machine.turn(Duration::from_millis(50)), 0);
    drop(hoard);
    drop(first);
    (&second).write_all(b"CONNECT 2\n").unwrap();
    guest.expect_eventually(PacketOperation::Request);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever a guest sends, in whatever order, and whatever clients do.
    #[test]
    fn random_packets_never_panic(
        acts in proptest::collection::vec((0..10u16, 0..4u32, any::<u32>(), any::<u32>(), 0..9000usize), 1..120),
    ) {
        let mut guest = Guest::new();
        guest.give_buffers(20);
        let _listener = UnixListener::bind(format!("{}_2", guest.path().display())).unwrap();
        let mut clients = Vec::new();
        for (operation, port, a, b, len) in acts {
            match operation {
                9 => clients.clear(),
                8 => {
                    let mut client = UnixStream::connect(guest.path()).unwrap();
                    client.set_nonblocking(true).unwrap();
                    let _ = client.write_all(format!("CONNECT {port}\n").as_bytes());
                    let _ = client.write_all(&vec![1; len]);
                    clients.push(client);
                    guest.machine.turn(Duration::ZERO);
                }
                operation => {
                    // Half of the packets go to a connection of a host client.
                    let host = if a % 2 == 0 { port } else { FIRST_HOST_PORT + a % 4 };
                    let mut bytes = Peer { buffer_bytes: a, forwarded: b, ..Peer::new(host, port) }
                        .header(PacketOperation::Data)
                        .to_bytes();
                    bytes[30..32].copy_from_slice(&operation.to_le_bytes());
                    let header = Header {
                        len: u32::try_from(len).unwrap(),
                        flags: b % 4,
                        ..Header::from_bytes(&bytes)
                    };
                    guest.send_raw(header, &vec![2; len]);
                }
            }
            if b % 3 == 0 {
                guest.receive();
                guest.inbox.clear();
            }
        }
        while guest.machine.turn(Duration::ZERO) > 0 {
            guest.receive();
        }
        prop_assert!(guest.machine.transport.running());
    }
}
