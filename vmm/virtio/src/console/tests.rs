//! A driver at the console, and a sink that remembers.

use std::io;
use std::sync::{Arc, Mutex};

use super::*;
use crate::testing::Machine;
use crate::{DeviceContext, VirtioDevice};

#[derive(Clone)]
struct Screen {
    text: Arc<Mutex<Vec<u8>>>,
    limit: usize,
}

impl ConsoleSink for Screen {
    fn output(&mut self, data: &[u8]) -> io::Result<usize> {
        let mut text = self.text.lock().unwrap();
        let room = self.limit - text.len();
        let taken = &data[..room.min(data.len())];
        text.extend_from_slice(taken);
        Ok(taken.len())
    }
}

fn screen(limit: usize) -> Screen {
    Screen { text: Arc::default(), limit }
}

fn metric(machine: &Machine, name: &str) -> u64 {
    let entries = machine.transport.device_metrics();
    entries.iter().find(|(found, _)| *found == name).unwrap().1
}

fn type_in(machine: &mut Machine, data: &[u8]) -> usize {
    machine
        .transport
        .with_device(|console: &mut ConsoleDevice, context: &mut DeviceContext<'_>| {
            console.input(data, context)
        })
        .unwrap()
}

#[test]
fn output_reaches_the_sink_in_order() {
    let screen = screen(100);
    let mut machine = Machine::boot(ConsoleDevice::new(Box::new(screen.clone())));
    let (hello, world) = (machine.buffer_of(b"hello "), machine.buffer_of(b"world\n"));
    machine.queues[1].add(&[hello, world], &[]);
    machine.queues[1].add(&[hello], &[]);
    machine.notify(1);
    assert_eq!(&*screen.text.lock().unwrap(), b"hello world\nhello ");
    assert_eq!(machine.queues[1].take_all_used().len(), 2);
    assert_eq!(metric(&machine, "output_bytes"), 18);
}

#[test]
fn output_beyond_the_bound_is_dropped_and_counted() {
    let screen = screen(10);
    let mut machine = Machine::boot(ConsoleDevice::new(Box::new(screen.clone())));
    let text = machine.buffer_of(&[b'x'; 5000]);
    machine.queues[1].add(&[text], &[]);
    let huge = machine.buffer(1 << 20);
    machine.queues[1].add(&[(huge, 1 << 20)], &[]);
    machine.notify(1);
    assert_eq!(screen.text.lock().unwrap().len(), 10);
    assert_eq!(metric(&machine, "dropped_output_bytes"), 4990);
    assert_eq!(metric(&machine, "malformed_requests"), 1);
    assert_eq!(machine.queues[1].take_all_used().len(), 2);
}

#[test]
fn input_waits_for_buffers_and_has_a_bound() {
    let mut machine = Machine::boot(ConsoleDevice::new(Box::new(screen(0))));
    assert_eq!(type_in(&mut machine, b"ls\n"), 3);
    let buffer = machine.buffer(64);
    machine.queues[0].add(&[], &[(buffer, 2)]);
    machine.queues[0].add(&[(buffer, 2)], &[]);
    machine.notify(0);
    let used = machine.queues[0].take_all_used();
    assert_eq!(used.iter().map(|used| used.len).collect::<Vec<_>>(), [2, 0]);
    assert_eq!(machine.bytes(buffer, 2), b"ls");
    machine.queues[0].add(&[], &[(buffer, 64)]);
    machine.notify(0);
    assert_eq!(machine.queues[0].take_used().map(|used| used.len), Some(1));
    assert_eq!(type_in(&mut machine, &[b'y'; 10_000]), INPUT_BYTES_MAX);
    assert_eq!(type_in(&mut machine, b"z"), 0);
}

#[test]
fn waiting_input_comes_back() {
    let mut machine = Machine::boot(ConsoleDevice::new(Box::new(screen(0))));
    type_in(&mut machine, b"waiting");
    let mut copy = machine.clone_with(|version, bytes| {
        ConsoleDevice::restore(Box::new(screen(0)), version, bytes).unwrap()
    });
    let buffer = copy.buffer(64);
    copy.queues[0].add(&[], &[(buffer, 64)]);
    copy.notify(0);
    assert_eq!(copy.bytes(buffer, 7), b"waiting");
}

#[test]
fn hostile_states_are_refused() {
    let (version, bytes) = ConsoleDevice::new(Box::new(screen(0))).save();
    let restore = |version, bytes: &[u8]| {
        ConsoleDevice::restore(Box::new(screen(0)), version, bytes).map(|_| ())
    };
    assert!(restore(version, &bytes).is_ok());
    assert!(restore(version + 1, &bytes).is_err());
    assert!(restore(version, &[9, 1]).is_err());
    let large = crate::persist::encode(&(vec![1u8; INPUT_BYTES_MAX + 1],));
    assert!(restore(version, &large).is_err());
}
