//! The balloon with a driver, and a reclaimer that remembers.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use vm_memory::GuestAddress;
use warren_virtio::VirtioDevice;
use warren_virtio::testing::{MEMORY_BYTES, Machine};

use super::pages::{PAGE_BYTES, join};
use super::*;

#[derive(Debug, Clone, Default)]
struct Remembered(Arc<Mutex<Vec<(u64, u64)>>>);

impl PageReclaimer for Remembered {
    fn release(&self, start: GuestAddress, bytes: u64) -> io::Result<()> {
        self.0.lock().unwrap().push((start.0 / PAGE_BYTES, bytes / PAGE_BYTES));
        Ok(())
    }
}

impl Remembered {
    fn take(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

fn boot() -> (Machine, Remembered) {
    let remembered = Remembered::default();
    (Machine::boot(BalloonDevice::new(Box::new(remembered.clone()))), remembered)
}

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn metric(machine: &Machine, name: &str) -> u64 {
    let entries = machine.transport.device_metrics();
    entries.iter().find(|(found, _)| *found == name).unwrap().1
}

fn entry(tag: u16, value: u64) -> Vec<u8> {
    [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat()
}

#[test]
fn poison_is_never_offered() {
    let device = BalloonDevice::new(Box::new(Remembered::default()));
    assert_eq!(device.features(), 1 << 1 | 1 << 2 | 1 << 5);
}

#[test]
fn inflated_pages_are_joined_and_released() {
    let (mut machine, remembered) = boot();
    let pages = machine.buffer_of(&numbers(&[9, 7, 8, 100, 3, 8, 101]));
    machine.queues[0].add(&[pages], &[]);
    machine.notify(0);
    assert_eq!(machine.queues[0].take_all_used().len(), 1);
    assert_eq!(remembered.take(), [(3, 1), (7, 3), (100, 2)]);
    assert_eq!(metric(&machine, "inflated_pages"), 6);
}

#[test]
fn foreign_pages_are_not_released() {
    let (mut machine, remembered) = boot();
    let last = u32::try_from(MEMORY_BYTES / 4096).unwrap() - 1;
    let pages = machine.buffer_of(&numbers(&[1, last, last + 1, u32::MAX, u32::MAX - 1]));
    machine.queues[0].add(&[pages], &[]);
    machine.notify(0);
    // The run over the end of memory is refused whole.
    assert_eq!(remembered.take(), [(1, 1)]);
    assert_eq!(metric(&machine, "foreign_pages"), 2);
    assert!(machine.transport.running());
}

#[test]
fn malformed_inflation_is_completed_unserved() {
    let (mut machine, remembered) = boot();
    let (odd, _) = machine.buffer_of(&[1; 8192]);
    machine.queues[0].add(&[(odd, 3)], &[]);
    machine.queues[0].add(&[(odd, 8192)], &[]);
    machine.queues[0].add(&[], &[(odd, 4)]);
    machine.notify(0);
    assert_eq!(machine.queues[0].take_all_used().len(), 3);
    assert_eq!(metric(&machine, "malformed_requests"), 3);
    assert!(remembered.take().is_empty());
}

#[test]
fn target_and_actual_meet_in_the_configuration() {
    let (mut machine, _) = boot();
    let done = machine
        .transport
        .with_device(|balloon: &mut BalloonDevice, _| ((), balloon.set_target(BalloonPages(300))));
    assert!(done.is_some());
    assert_eq!(machine.read(0x100), 300);
    assert_eq!(machine.read(0x60), 2);
    assert_eq!(machine.interrupt.count(), 1);
    assert_eq!(machine.read(0xfc), 1);
    machine.write(0x104, 250);
    machine.write(0x100, 9999);
    let balloon = machine.transport.device::<BalloonDevice>().unwrap();
    assert_eq!((balloon.target(), balloon.actual()), (BalloonPages(300), BalloonPages(250)));
    assert_eq!(balloon.actual().bytes(), 250 * 4096);
    let pages = machine.buffer_of(&numbers(&[5, 6]));
    machine.queues[1].add(&[pages], &[]);
    machine.notify(1);
    assert_eq!(metric(&machine, "deflated_pages"), 2);
}

#[test]
fn statistics_are_asked_for_by_giving_the_buffer_back() {
    let (mut machine, _) = boot();
    let told = [entry(4, 1000), entry(5, 2000), entry(6, 1500), entry(999, 1)].concat();
    let buffer = machine.buffer_of(&told);
    machine.queues[2].add(&[buffer], &[]);
    machine.notify(2);
    assert!(machine.queues[2].take_used().is_none());
    let request = |machine: &mut Machine| {
        machine.transport.with_device(|balloon: &mut BalloonDevice, context| {
            let statistics = *balloon.statistics().unwrap();
            (statistics, balloon.request_statistics(context))
        })
    };
    let statistics = request(&mut machine).unwrap();
    assert_eq!(statistics.free_bytes, Some(1000));
    assert_eq!(statistics.total_bytes, Some(2000));
    assert_eq!(statistics.available_bytes, Some(1500));
    assert_eq!(statistics.oom_kills, None);
    assert!(machine.queues[2].take_used().is_some());
    // It has not answered yet: asking again changes nothing.
    request(&mut machine);
    assert!(machine.queues[2].take_used().is_none());
}

#[test]
fn statistics_given_before_the_driver_is_ready_are_taken() {
    let mut machine = Machine::power_on(BalloonDevice::new(Box::new(Remembered::default())));
    machine.negotiate(u64::MAX);
    machine.set_up_queues();
    let buffer = machine.buffer_of(&entry(5, 7));
    machine.queues[2].add(&[buffer], &[]);
    machine.write(0x50, 2);
    machine.write(0x70, 15);
    let balloon = machine.transport.device::<BalloonDevice>().unwrap();
    assert_eq!(balloon.statistics().unwrap().total_bytes, Some(7));
}

#[test]
fn reported_ranges_are_released_before_the_guest_hears() {
    let (mut machine, remembered) = boot();
    let ranges = [(GuestAddress(0x80_0000), 0x20_0000), (GuestAddress(0xc0_0000), 0x1000)];
    machine.queues[3].add(&[], &ranges);
    machine.queues[3].add(&[], &[(GuestAddress(0x80_0800), 0x1000)]);
    machine.queues[3].add(&[(GuestAddress(0x80_0000), 0x1000)], &[]);
    machine.notify(3);
    assert_eq!(machine.queues[3].take_all_used().len(), 3);
    assert_eq!(remembered.take(), [(0x800, 512), (0xc00, 1)]);
    assert_eq!(metric(&machine, "reported_bytes"), 0x20_1000);
    assert_eq!(metric(&machine, "foreign_pages"), 1);
    assert_eq!(metric(&machine, "malformed_requests"), 1);
}

#[test]
fn reporting_without_statistics_is_the_third_queue() {
    let remembered = Remembered::default();
    let device = BalloonDevice::new(Box::new(remembered.clone()));
    let mut machine = Machine::boot_with(device, !(1 << 1));
    machine.queues[2].add(&[], &[(GuestAddress(0x80_0000), 0x20_0000)]);
    machine.notify(2);
    assert_eq!(remembered.take(), [(0x800, 512)]);
}

#[test]
fn state_comes_back() {
    let (mut machine, _) = boot();
    let buffer = machine.buffer_of(&entry(4, 1000));
    machine.queues[2].add(&[buffer], &[]);
    machine.notify(2);
    machine
        .transport
        .with_device(|balloon: &mut BalloonDevice, _| ((), balloon.set_target(BalloonPages(77))));
    let remembered = Remembered::default();
    let mut copy = machine.clone_with(|version, bytes| {
        BalloonDevice::restore(Box::new(remembered), version, bytes).unwrap()
    });
    assert_eq!(copy.read(0x100), 77);
    copy.transport.with_device(|balloon: &mut BalloonDevice, context| {
        assert_eq!(balloon.statistics().unwrap().free_bytes, Some(1000));
        ((), balloon.request_statistics(context))
    });
    assert!(copy.queues[2].take_used().is_some());
}

#[test]
fn hostile_states_are_refused() {
    let device = BalloonDevice::new(Box::new(Remembered::default()));
    let (version, bytes) = device.save();
    let restore = |version, bytes: &[u8]| {
        BalloonDevice::restore(Box::new(Remembered::default()), version, bytes).map(|_| ())
    };
    assert!(restore(version, &bytes).is_ok());
    assert!(restore(version + 1, &bytes).is_err());
    assert!(restore(version, &bytes[1..]).is_err());
    let outside = warren_virtio::persist::encode(&(0u32, 0u32, true, Some(QUEUE_SIZE), None::<u8>));
    assert!(restore(version, &outside).is_err());
}

proptest! {
    #[test]
    fn join_covers_exactly_the_given_pages(given in proptest::collection::vec(prop_oneof![0..60u32, any::<u32>()], 0..300)) {
        let expected: BTreeSet<u64> = given.iter().copied().map(u64::from).collect();
        let mut numbers = given.clone();
        let mut covered = BTreeSet::new();
        let mut end = None;
        for range in join(&mut numbers) {
            let first = range.start.0 / PAGE_BYTES;
            // Ascending, and as long as can be.
            prop_assert!(end.is_none_or(|end| first > end));
            end = Some(first + range.bytes / PAGE_BYTES);
            covered.extend(first..first + range.bytes / PAGE_BYTES);
        }
        prop_assert_eq!(covered, expected);
    }

    #[test]
    fn random_chains_never_panic(chains in proptest::collection::vec((0..5usize, any::<u64>(), any::<u32>(), 0..8u16, 0..16u16), 1..40)) {
        let (mut machine, _) = boot();
        for (number, (queue, address, len, flags, next)) in chains.into_iter().enumerate() {
            let index = u16::try_from(number % 16).unwrap();
            let address = if flags & 1 == 0 { address } else { address % 0x100_0000 };
            let len = if flags & 2 == 0 { len } else { len % 0x1_0000 };
            if let Some(driver) = machine.queues.get_mut(queue) {
                driver.write_descriptor(index, address, len, flags, next);
                driver.offer(index);
            }
            machine.notify(queue);
            for queue in &mut machine.queues {
                queue.take_all_used();
            }
        }
    }
}
