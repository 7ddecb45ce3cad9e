//! A guest's side in memory, host clients over real unix sockets.

mod hostile;
mod life;
mod streams;

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
    fn expect_eventually(&mut self, operation: PacketOperation) {
        while self.next().0.operation != Some(operation) {}
    }

    fn settle_without_receiving(&mut self) {
        while self.machine.turn(Duration::from_millis(20)) > 0 {}
    }

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
