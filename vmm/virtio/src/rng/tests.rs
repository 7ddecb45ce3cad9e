//! Entropy for a driver, and its rate.

use std::time::Duration;

use vm_memory::GuestAddress;

use super::*;
use crate::testing::Machine;

fn machine() -> Machine {
    Machine::boot(RngDevice::new())
}

fn metric(machine: &Machine, name: &str) -> u64 {
    let entries = machine.transport.device_metrics();
    entries.iter().find(|(found, _)| *found == name).unwrap().1
}

#[test]
fn buffers_are_filled_with_different_bytes() {
    let mut machine = machine();
    let buffers = [machine.buffer(64), machine.buffer(64)];
    for buffer in buffers {
        machine.queues[0].add(&[], &[(buffer, 30), (GuestAddress(buffer.0 + 30), 34)]);
    }
    machine.notify(0);
    let used = machine.queues[0].take_all_used();
    assert_eq!(used.iter().map(|used| used.len).collect::<Vec<_>>(), [64, 64]);
    let [one, two] = buffers.map(|buffer| machine.bytes(buffer, 64));
    assert_ne!(one, two);
    assert_ne!(one, vec![0; 64]);
    assert_eq!(machine.interrupt.count(), 1);
}

#[test]
fn large_buffer_is_filled_in_part() {
    let mut machine = machine();
    let buffer = machine.buffer(1 << 20);
    machine.queues[0].add(&[], &[(buffer, 1 << 20)]);
    machine.notify(0);
    let limit = u32::try_from(REQUEST_BYTES_MAX).unwrap();
    assert_eq!(machine.queues[0].take_used().map(|used| used.len), Some(limit));
    let end = GuestAddress(buffer.0 + REQUEST_BYTES_MAX);
    assert_eq!(machine.bytes(end, 4096), vec![0; 4096]);
}

#[test]
fn readable_chain_is_no_request() {
    let mut machine = machine();
    let buffer = machine.buffer(64);
    machine.queues[0].add(&[(buffer, 64)], &[]);
    machine.notify(0);
    assert_eq!(machine.queues[0].take_used().map(|used| used.len), Some(0));
    assert_eq!(metric(&machine, "malformed_requests"), 1);
}

#[test]
fn greedy_guest_waits_and_is_served() {
    let mut machine = machine();
    let buffer = machine.buffer(4096);
    assert_eq!(machine.events.watched(), 0);
    let mut served = 0;
    while machine.events.watched() == 0 {
        machine.queues[0].add(&[], &[(buffer, 4096)]);
        machine.notify(0);
        served += machine.queues[0].take_all_used().len();
        assert!(served < 1000, "never throttled");
    }
    assert!(u64::try_from(served).unwrap() >= BURST_BYTES / REQUEST_BYTES_MAX);
    assert_eq!(metric(&machine, "throttled"), 1);
    machine.run_until(|machine| machine.queues[0].take_used().is_some());
    assert_eq!(machine.events.watched(), 0);
}

#[test]
fn waiting_request_survives_save_and_restore() {
    let mut machine = machine();
    let buffer = machine.buffer(4096);
    while machine.events.watched() == 0 {
        machine.queues[0].add(&[], &[(buffer, 4096)]);
        machine.notify(0);
        machine.queues[0].take_all_used();
    }
    let mut copy = machine.clone_with(|version, bytes| RngDevice::restore(version, bytes).unwrap());
    // The clone has a full bucket, and asked no timer to find that out.
    assert!(copy.queues[0].take_used().is_some());
    assert_eq!(copy.events.watched(), 0);
    // The source is not forgotten either.
    machine.run_until(|machine| machine.queues[0].take_used().is_some());
    machine.turn(Duration::from_millis(1));
}

#[test]
fn hostile_states_are_refused() {
    assert!(RngDevice::restore(1, &[]).is_ok());
    assert!(RngDevice::restore(2, &[]).is_err());
    assert!(RngDevice::restore(1, &[0]).is_err());
}
