//! A device that is saved, restored, reset or dropped.

use super::*;

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
