//! A guest's side in memory, host clients over real unix sockets.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};
use warren_base::skip::skipped;

use super::packet::{
    HEADER_BYTES, Header, PacketOperation, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND,
    TYPE_STREAM,
};
use super::*;
use crate::testing::Machine;

/// Size of Linux's receive buffers.
const BUFFER: usize = 4096;
const GUEST_BUFFER_BYTES: u32 = 256 << 10;

struct Guest {
    machine: Machine,
    directory: TempDir,
    /// Receive buffers by head.
    receive: Vec<(u16, GuestAddress)>,
    transmit: GuestAddress,
    /// Packets that came in: header and payload.
    inbox: Vec<(Header, Vec<u8>)>,
}

fn restore(path: PathBuf, version: u16, bytes: &[u8]) -> VsockDevice {
    VsockDevice::restore(VsockConfig::new(path), version, bytes).unwrap()
}

impl Guest {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = VsockConfig::new(directory.path().join("vsock.sock"));
        let machine = Machine::boot(VsockDevice::new(config).unwrap());
        Self::with(machine, directory)
    }

    fn with(mut machine: Machine, directory: TempDir) -> Self {
        let transmit = machine.buffer(64 << 10);
        Self { machine, directory, receive: Vec::new(), transmit, inbox: Vec::new() }
    }

    /// A guest that gave all its receive buffers.
    fn ready() -> Self {
        let mut guest = Self::new();
        guest.give_buffers(100);
        guest
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("vsock.sock")
    }

    fn give_buffers(&mut self, count: usize) {
        for _ in 0..count {
            let buffer = self.machine.buffer(BUFFER);
            self.give_buffer(buffer);
        }
        self.machine.notify(0);
    }

    fn give_buffer(&mut self, buffer: GuestAddress) {
        let len = u32::try_from(BUFFER).unwrap();
        let head = self.machine.queues[0].add(&[], &[(buffer, len)]);
        self.receive.push((head, buffer));
    }

    /// Takes what came in and gives the buffers back.
    fn receive(&mut self) -> usize {
        let mut count = 0;
        while let Some(used) = self.machine.queues[0].take_used() {
            let place = self.receive.iter().position(|(head, _)| *head == used.head).unwrap();
            let (_, buffer) = self.receive.remove(place);
            let len = usize::try_from(used.len).unwrap();
            let bytes = self.machine.bytes(buffer, len);
            let header = Header::from_bytes(bytes[..HEADER_BYTES].try_into().unwrap());
            assert_eq!(usize::try_from(header.len).unwrap(), len - HEADER_BYTES);
            assert_eq!(header.socket_type, TYPE_STREAM);
            assert_eq!((header.source_cid, header.destination_cid), (HOST_CID, GUEST_CID));
            self.inbox.push((header, bytes[HEADER_BYTES..].to_vec()));
            self.give_buffer(buffer);
            count += 1;
        }
        if count > 0 {
            self.machine.notify(0);
        }
        count
    }

    /// Waits for the next packet.
    fn next(&mut self) -> (Header, Vec<u8>) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.inbox.is_empty() {
            assert!(Instant::now() < deadline, "no packet came");
            self.machine.turn(Duration::from_millis(5));
            self.receive();
        }
        self.inbox.remove(0)
    }

    fn expect(&mut self, operation: PacketOperation) -> (Header, Vec<u8>) {
        let (header, data) = self.next();
        assert_eq!(header.operation, Some(operation));
        (header, data)
    }

    /// Lets the event loop run until it has nothing to do.
    fn settle(&mut self) {
        while self.machine.turn(Duration::from_millis(20)) > 0 {
            self.receive();
        }
        self.receive();
    }

    fn send_raw(&mut self, header: Header, data: &[u8]) {
        self.machine.memory.write_slice(&header.to_bytes(), self.transmit).unwrap();
        let payload = GuestAddress(self.transmit.0 + 1024);
        self.machine.memory.write_slice(data, payload).unwrap();
        let mut buffers = vec![(self.transmit, u32::try_from(HEADER_BYTES).unwrap())];
        if !data.is_empty() {
            buffers.push((payload, u32::try_from(data.len()).unwrap()));
        }
        self.machine.queues[1].add(&buffers, &[]);
        self.machine.notify(1);
        assert_eq!(self.machine.queues[1].take_all_used().len(), 1);
    }

    fn send(&mut self, to: &Peer, operation: PacketOperation, flags: u32, data: &[u8]) {
        let header =
            Header { flags, len: u32::try_from(data.len()).unwrap(), ..to.header(operation) };
        self.send_raw(header, data);
    }

    fn metric(&self, name: &str) -> u64 {
        let entries = self.machine.transport.device_metrics();
        entries.iter().find(|(found, _)| *found == name).unwrap().1
    }

    /// A host client whose connection the guest accepted.
    fn connect(&mut self, port: u32) -> (UnixStream, Peer) {
        let mut client = UnixStream::connect(self.path()).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        writeln!(client, "CONNECT {port}").unwrap();
        let (request, _) = self.expect(PacketOperation::Request);
        assert_eq!(request.destination_port, port);
        let peer = Peer::new(request.source_port, port);
        self.send(&peer, PacketOperation::Response, 0, &[]);
        assert_eq!(read_line(&mut client), format!("OK {}\n", request.source_port));
        (client, peer)
    }
}

/// The guest's end of a connection.
struct Peer {
    host: u32,
    guest: u32,
    buffer_bytes: u32,
    forwarded: u32,
}

impl Peer {
    fn new(host: u32, guest: u32) -> Self {
        Self { host, guest, buffer_bytes: GUEST_BUFFER_BYTES, forwarded: 0 }
    }

    fn header(&self, operation: PacketOperation) -> Header {
        Header {
            source_cid: GUEST_CID,
            destination_cid: HOST_CID,
            source_port: self.guest,
            destination_port: self.host,
            len: 0,
            socket_type: TYPE_STREAM,
            operation: Some(operation),
            flags: 0,
            buffer_bytes: self.buffer_bytes,
            forwarded: self.forwarded,
        }
    }
}

fn read_line(client: &mut UnixStream) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.last() != Some(&b'\n') {
        client.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

fn read_to_end(client: &mut UnixStream) -> Vec<u8> {
    let mut data = Vec::new();
    client.read_to_end(&mut data).unwrap();
    data
}

fn pattern(at: u64, len: usize) -> Vec<u8> {
    let at = usize::try_from(at).unwrap();
    (at..at + len).map(|at| u8::try_from((at * 31 + at / 251) % 253).unwrap()).collect()
}

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

impl Guest {
    fn expect_eventually(&mut self, operation: PacketOperation) {
        while self.next().0.operation != Some(operation) {}
    }
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

impl Guest {
    fn settle_without_receiving(&mut self) {
        while self.machine.turn(Duration::from_millis(20)) > 0 {}
    }
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

#[test]
fn restored_guest_is_told_of_lost_connections_only() {
    let mut guest = Guest::ready();
    let event = guest.machine.buffer(8);
    guest.machine.queues[2].add(&[], &[(event, 8)]);
    guest.machine.notify(2);
    let path = |name: &str| guest.directory.path().join(name);
    let (one, two, three) = (path("one"), path("two"), path("three"));

    let mut idle = guest.machine.clone_with(|version, bytes| restore(one, version, bytes));
    assert_eq!(idle.queues[2].take_used(), None);
    // Nothing but the listener.
    assert_eq!(idle.events.watched(), 1);

    let (mut client, peer) = guest.connect(80);
    let mut connected = guest.machine.clone_with(|version, bytes| restore(two, version, bytes));
    let used = connected.queues[2].take_used().unwrap();
    assert_eq!(used.len, 4);
    assert_eq!(connected.bytes(event, 4), [0; 4]);
    assert!(connected.interrupt.count() > 0);
    // No client is taken until the guest has dealt with it and gives the buffer back. It
    // notifies of that, however many more it has made available before.
    assert_eq!(connected.events.watched(), 0);
    connected.notify(2);
    assert_eq!(connected.events.watched(), 0);
    assert!(connected.queues[2].wants_notification_of_next());
    connected.queues[2].add(&[], &[(event, 8)]);
    connected.notify(2);
    assert_eq!(connected.events.watched(), 1);

    let always = guest.machine.clone_with(|version, bytes| {
        let reset_on_restore = ResetOnRestore::Always;
        let config = VsockConfig { reset_on_restore, ..VsockConfig::new(three) };
        VsockDevice::restore(config, version, bytes).unwrap()
    });
    assert!(always.interrupt.count() > 0);

    // The source runs on, connection and all.
    guest.send(&peer, PacketOperation::Data, 0, b"here");
    let mut data = [0; 4];
    client.read_exact(&mut data).unwrap();
    assert_eq!(&data, b"here");
}

#[test]
fn reset_event_waits_for_a_buffer() {
    let mut guest = Guest::ready();
    guest.connect(80);
    let path = guest.directory.path().join("clone");
    let mut clone = guest.machine.clone_with(|version, bytes| restore(path, version, bytes));
    assert_eq!(clone.queues[2].take_used(), None);
    // Saved again before it could be told: still to be told.
    let path = guest.directory.path().join("clone of clone");
    let mut clone = clone.clone_with(|version, bytes| restore(path, version, bytes));
    let event = clone.buffer(8);
    clone.queues[2].add(&[], &[(event, 8)]);
    clone.notify(2);
    assert_eq!(clone.queues[2].take_used().map(|used| used.len), Some(4));
}

#[test]
fn restored_device_does_not_use_a_host_port_again() {
    let mut guest = Guest::ready();
    let (_client, first) = guest.connect(80);
    let path = guest.directory.path().join("clone");
    let machine = guest.machine.clone_with(|version, bytes| restore(path.clone(), version, bytes));
    let mut clone = Guest::with(machine, tempfile::tempdir().unwrap());
    clone.receive = guest.receive.clone();
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"CONNECT 80\n").unwrap();
    // The guest learns that its connections are gone, and gives the buffer back.
    let event = clone.machine.buffer(8);
    for _ in 0..2 {
        clone.machine.queues[2].add(&[], &[(event, 8)]);
        clone.machine.notify(2);
    }
    let (request, _) = clone.expect(PacketOperation::Request);
    assert_ne!(request.source_port, first.host);
}

#[test]
fn socket_file_comes_and_goes_with_the_device() {
    let guest = Guest::new();
    let path = guest.path();
    assert!(path.exists());
    let Guest { machine, directory, .. } = guest;
    drop(machine);
    assert!(!path.exists());
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let device = VsockDevice::new(VsockConfig::new(path.clone())).unwrap();
    drop(UnixStream::connect(&path).unwrap());
    drop(device);
    std::fs::write(&path, "precious").unwrap();
    let error = VsockDevice::new(VsockConfig::new(path.clone())).err().unwrap();
    assert!(matches!(error, VsockError::NotASocket { .. }));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    let missing = directory.path().join("no/such/directory");
    let error = VsockDevice::new(VsockConfig::new(missing)).err().unwrap();
    assert!(matches!(error, VsockError::Listen { .. }));
}

#[test]
fn hostile_states_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let restore = |version, bytes: &[u8]| {
        let config = VsockConfig::new(directory.path().join("vsock.sock"));
        VsockDevice::restore(config, version, bytes).map(|_| ())
    };
    let encode = |cid: u64, port: u32| crate::persist::encode(&(cid, port, false));
    assert!(restore(1, &encode(3, FIRST_HOST_PORT)).is_ok());
    assert!(matches!(restore(1, &encode(2, FIRST_HOST_PORT)), Err(VsockError::Cid(2))));
    assert!(matches!(restore(1, &encode(3, 80)), Err(VsockError::State(_))));
    assert!(matches!(restore(2, &encode(3, FIRST_HOST_PORT)), Err(VsockError::State(_))));
    assert!(matches!(restore(1, &[]), Err(VsockError::State(_))));
}

#[test]
fn driver_reset_closes_everything() {
    let mut guest = Guest::ready();
    let (mut client, _) = guest.connect(80);
    guest.machine.write(0x70, 0);
    assert!(read_to_end(&mut client).is_empty());
    assert_eq!(guest.machine.events.watched(), 0);
    assert!(guest.path().exists());
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
