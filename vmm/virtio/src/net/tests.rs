//! Frames over a TAP in a network namespace of the test's own.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use vm_memory::GuestAddress;
use warren_base::skip::skipped;

use super::*;
use crate::VirtioDevice;
use crate::testing::Machine;

const MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 1];
const MERGEABLE: u64 = 1 << 15;
const LARGE: u64 = 1 << 1 | 1 << 7 | 1 << 8;

fn config(name: &str) -> NetConfig {
    let tap = TapSource::Name(name.to_owned());
    NetConfig { name: "net-test".into(), tap, mac: MAC, mtu: None }
}

/// A running card and a raw socket at the host's end of its TAP.
struct Cable {
    machine: Machine,
    socket: OwnedFd,
    receive: Vec<(u16, GuestAddress)>,
}

impl Cable {
    /// `None`, said aloud, where the test may not make network namespaces.
    fn plug(features: u64) -> Option<Self> {
        // SAFETY: takes no pointers. Each test is a process of its own.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            skipped("a network namespace needs CAP_SYS_ADMIN");
            return None;
        }
        let name = "test0";
        let device = NetDevice::new(config(name)).unwrap();
        let mask = features | 1 << 5 | 1 << 29;
        let machine = Machine::boot_with(device, mask);
        if metric(&machine, "tap_failures") > 0 {
            skipped("no TAP can be made");
            return None;
        }
        let socket = raw_socket(name).unwrap();
        Some(Self { machine, socket, receive: Vec::new() })
    }

    fn give_buffers(&mut self, count: usize, bytes: u32) {
        for _ in 0..count {
            let buffer = self.machine.buffer(usize::try_from(bytes).unwrap());
            let head = self.machine.queues[0].add(&[], &[(buffer, bytes)]);
            self.receive.push((head, buffer));
        }
        self.machine.notify(0);
    }

    /// The next frame to the guest, without its header, and its buffers' number.
    fn receive(&mut self) -> (Vec<u8>, u16) {
        let mut first = None;
        self.machine.run_until(|machine| {
            first = first.or_else(|| machine.queues[0].take_used());
            first.is_some()
        });
        let mut used = first.unwrap();
        let mut frame = Vec::new();
        let mut buffers = None;
        for number in 1.. {
            let place = self.receive.iter().position(|(head, _)| *head == used.head).unwrap();
            let (_, buffer) = self.receive.remove(place);
            frame.extend(self.machine.bytes(buffer, usize::try_from(used.len).unwrap()));
            let wanted = *buffers.get_or_insert(u16::from_le_bytes([frame[10], frame[11]]));
            if number == wanted {
                break;
            }
            used = self.machine.queues[0].take_used().expect("all buffers of a frame at once");
        }
        (frame.split_off(12), buffers.unwrap())
    }

    fn send(&mut self, frame: &[u8]) {
        let header = self.machine.buffer_of(&[0; 12]);
        let frame = self.machine.buffer_of(frame);
        self.machine.queues[1].add(&[header, frame], &[]);
        self.machine.notify(1);
    }

    fn host_send(&self, frame: &[u8]) {
        let sent = rustix::net::send(&self.socket, frame, rustix::net::SendFlags::empty());
        assert_eq!(sent, Ok(frame.len()));
    }

    /// The next frame of the guest; the host's own are skipped.
    fn host_receive(&self) -> Vec<u8> {
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut data = vec![0; 70_000];
        loop {
            assert!(Instant::now() < deadline, "no frame came");
            match rustix::net::recv(&self.socket, &mut data[..], rustix::net::RecvFlags::DONTWAIT) {
                Ok((bytes, _)) if data[6..12] == MAC => return data[..bytes].to_vec(),
                Ok(_) => {}
                Err(rustix::io::Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
                Err(errno) => panic!("recv: {errno}"),
            }
        }
    }
}

fn metric(machine: &Machine, name: &str) -> u64 {
    let entries = machine.transport.device_metrics();
    entries.iter().find(|(found, _)| *found == name).unwrap().1
}

/// Brings the interface up and listens to all of its frames.
fn raw_socket(name: &str) -> io::Result<OwnedFd> {
    let check = |result: i32| match result {
        0.. => Ok(result),
        _ => Err(io::Error::last_os_error()),
    };
    let protocol = u16::try_from(libc::ETH_P_ALL).unwrap().to_be();
    // SAFETY: all-zero is a valid value of these plain structs; every pointer is to a
    // live one of the type the call wants; the descriptor is owned by nobody else.
    unsafe {
        let descriptor = check(libc::socket(libc::AF_PACKET, libc::SOCK_RAW, protocol.into()))?;
        let socket = OwnedFd::from_raw_fd(descriptor);
        let mut request: libc::ifreq = std::mem::zeroed();
        for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *place = byte.cast_signed();
        }
        // No IPv6 chatter: the interface gets no address, and stays without ARP.
        let flags = libc::IFF_UP | libc::IFF_NOARP;
        request.ifr_ifru.ifru_flags = i16::try_from(flags).unwrap();
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request))?;
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFINDEX, &raw mut request))?;
        let mut address: libc::sockaddr_ll = std::mem::zeroed();
        address.sll_family = u16::try_from(libc::AF_PACKET).unwrap();
        address.sll_protocol = protocol;
        address.sll_ifindex = request.ifr_ifru.ifru_ifindex;
        let len = u32::try_from(size_of_val(&address)).unwrap();
        check(libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len))?;
        Ok(socket)
    }
}

fn frame(payload: usize, seed: u8) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(MAC);
    frame.extend([0x88, 0xb5]);
    frame.extend((0..payload).map(|at| u8::try_from(at % 251).unwrap() ^ seed));
    frame
}

/// From the host, the addresses the other way round; marked to be told from others.
fn host_frame(payload: usize, seed: u8) -> Vec<u8> {
    let mut frame = frame(payload, seed);
    frame[..6].copy_from_slice(&MAC);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
    frame
}

impl Cable {
    /// The next frame that one of the tests sent.
    fn receive_ours(&mut self) -> (Vec<u8>, u16) {
        loop {
            let (frame, buffers) = self.receive();
            if frame[12..14] == [0x88, 0xb5] {
                return (frame, buffers);
            }
        }
    }
}

#[test]
fn frames_go_both_ways() {
    let Some(mut cable) = Cable::plug(MERGEABLE | LARGE) else { return };
    cable.give_buffers(60, 1600);
    cable.host_send(&host_frame(100, 1));
    assert_eq!(cable.receive_ours(), (host_frame(100, 1), 1));
    cable.send(&frame(200, 2));
    assert_eq!(cable.host_receive(), frame(200, 2));
    assert_eq!(metric(&cable.machine, "sent_frames"), 1);
    assert!(metric(&cable.machine, "received_bytes") >= 126);
}

#[test]
fn frame_is_spread_over_mergeable_buffers() {
    let Some(mut cable) = Cable::plug(MERGEABLE) else { return };
    cable.give_buffers(40, 200);
    cable.host_send(&host_frame(1000, 3));
    // 12 + 1014 bytes over buffers of 200.
    assert_eq!(cable.receive_ours(), (host_frame(1000, 3), 6));
    cable.host_send(&host_frame(10, 4));
    assert_eq!(cable.receive_ours(), (host_frame(10, 4), 1));
}

#[test]
fn frames_without_merging_take_one_buffer_each() {
    let Some(mut cable) = Cable::plug(0) else { return };
    cable.give_buffers(20, 1600);
    for seed in 0..5 {
        cable.host_send(&host_frame(1400, seed));
    }
    for seed in 0..5 {
        assert_eq!(cable.receive_ours(), (host_frame(1400, seed), 1));
    }
}

#[test]
fn frames_wait_for_buffers_without_spinning() {
    let Some(mut cable) = Cable::plug(MERGEABLE) else { return };
    for seed in 0..3 {
        cable.host_send(&host_frame(64, seed));
    }
    cable.machine.turn(Duration::from_millis(50));
    assert_eq!(metric(&cable.machine, "buffer_stalls"), 1);
    assert_eq!(cable.machine.turn(Duration::from_millis(50)), 0);
    cable.give_buffers(20, 1600);
    for seed in 0..3 {
        assert_eq!(cable.receive_ours().0, host_frame(64, seed));
    }
}

#[test]
fn malformed_frames_are_not_sent() {
    let Some(mut cable) = Cable::plug(MERGEABLE) else { return };
    let buffer = cable.machine.buffer(128 << 10);
    for len in [1, 12, 25, 12 + 65_551, 100_000] {
        cable.machine.queues[1].add(&[(buffer, len)], &[]);
    }
    cable.machine.queues[1].add(&[], &[(buffer, 100)]);
    cable.machine.notify(1);
    assert_eq!(cable.machine.queues[1].take_all_used().len(), 6);
    assert_eq!(metric(&cable.machine, "malformed_frames"), 6);
    // A header that promises what it does not keep is the TAP's to refuse.
    let header = cable.machine.buffer_of(&[1, 1, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0]);
    let body = cable.machine.buffer_of(&frame(10, 0));
    cable.machine.queues[1].add(&[header, body], &[]);
    cable.machine.notify(1);
    assert_eq!(metric(&cable.machine, "refused_frames"), 1);
    cable.send(&frame(20, 9));
    assert_eq!(cable.host_receive(), frame(20, 9));
}

#[test]
fn unfit_receive_buffer_fails_the_device() {
    let Some(mut cable) = Cable::plug(MERGEABLE) else { return };
    cable.give_buffers(1, 20);
    cable.host_send(&host_frame(64, 1));
    cable.machine.turn(Duration::from_millis(100));
    assert!(!cable.machine.transport.running());
}

#[test]
fn restored_card_keeps_its_address_and_works() {
    let Some(mut cable) = Cable::plug(MERGEABLE) else { return };
    let other = NetConfig { mac: [2, 9, 9, 9, 9, 9], ..config("test1") };
    let mut copy = cable
        .machine
        .clone_with(|version, bytes| NetDevice::restore(other, version, bytes).unwrap());
    assert_eq!(copy.read(0x100), u32::from_le_bytes([2, 0, 0, 0]));
    assert_eq!(metric(&copy, "tap_failures"), 0);
    let copy = Cable { machine: copy, socket: raw_socket("test1").unwrap(), receive: Vec::new() };
    let mut copy = copy;
    copy.send(&frame(33, 5));
    assert_eq!(copy.host_receive(), frame(33, 5));
}

#[test]
fn card_without_a_tap_works_without_a_cable() {
    let mut machine = Machine::boot(NetDevice::new(config("no/such name")).unwrap());
    assert_eq!(metric(&machine, "tap_failures"), 1);
    let buffer = machine.buffer_of(&[0; 100]);
    machine.queues[1].add(&[buffer], &[]);
    machine.notify(1);
    machine.notify(0);
    assert_eq!(machine.queues[1].take_all_used().len(), 1);
    assert_eq!(metric(&machine, "refused_frames"), 1);
    assert!(machine.transport.running());
}

#[test]
fn configuration_is_checked_and_told() {
    let with = |mac, mtu| NetDevice::new(NetConfig { mac, mtu, ..config("test0") });
    assert!(matches!(with([1, 0, 0, 0, 0, 0], None), Err(NetError::Mac(_))));
    assert!(matches!(with([0; 6], None), Err(NetError::Mac(_))));
    assert!(matches!(with(MAC, Some(67)), Err(NetError::Mtu(67))));
    let device = with(MAC, Some(9000)).unwrap();
    assert_ne!(device.features() & 1 << 3, 0);
    let mut space = [0xff; 14];
    device.read_config(0, &mut space);
    assert_eq!(space, [2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0x28, 0x23, 0, 0]);
}

#[test]
fn hostile_states_are_refused() {
    let (version, bytes) = NetDevice::new(config("test0")).unwrap().save();
    let restore =
        |version, bytes: &[u8]| NetDevice::restore(config("test0"), version, bytes).map(|_| ());
    assert!(restore(version, &bytes).is_ok());
    assert!(restore(version + 1, &bytes).is_err());
    assert!(restore(version, &bytes[1..]).is_err());
    let group = crate::persist::encode(&([1u8; 6], None::<u16>));
    assert!(matches!(restore(version, &group), Err(NetError::Mac(_))));
}
