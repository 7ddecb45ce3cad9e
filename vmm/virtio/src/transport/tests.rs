//! The register model, negotiation, and state in and out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::device::{DeviceContext, EventRegistry, Outcome, VirtioDevice, copy_config};
use crate::queue::{Chain, Step, drain, wants_interrupt};
use crate::testing::{CountingInterrupt, Machine, PollLoop, memory};

const FEATURE: u64 = 1 << 3;

/// Completes every chain; counts what it is asked.
#[derive(Default)]
struct Echo {
    calls: Arc<Calls>,
    chain: Chain,
    fail: bool,
    budget: usize,
}

#[derive(Default)]
struct Calls {
    activations: AtomicUsize,
    resumptions: AtomicUsize,
    resets: AtomicUsize,
}

impl VirtioDevice for Echo {
    fn device_type(&self) -> u32 {
        42
    }

    fn name(&self) -> &str {
        "echo"
    }

    fn features(&self) -> u64 {
        FEATURE
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16, 8]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        copy_config(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], offset, data);
    }

    fn activate(&mut self, features: u64, _context: &mut DeviceContext<'_>) -> Outcome {
        assert_eq!(features & FEATURE, FEATURE);
        self.calls.activations.fetch_add(1, Ordering::SeqCst);
        Outcome::default()
    }

    fn resume(&mut self, _features: u64, _context: &mut DeviceContext<'_>) -> Outcome {
        self.calls.resumptions.fetch_add(1, Ordering::SeqCst);
        Outcome::default()
    }

    fn reset(&mut self, _events: &dyn EventRegistry) {
        self.calls.resets.fetch_add(1, Ordering::SeqCst);
    }

    fn notify(&mut self, index: usize, context: &mut DeviceContext<'_>) -> Outcome {
        let queue = &mut context.queues[index];
        let budget = if self.budget == 0 { 64 } else { self.budget };
        let drained = drain(queue, context.memory, &mut self.chain, budget, |_, _| Step::Used(1));
        Outcome {
            used_buffers: drained.completed && wants_interrupt(queue, context.memory),
            failed: drained.failed || self.fail,
            unfinished: drained.unfinished,
            ..Outcome::default()
        }
    }

    fn save(&self) -> (u16, Vec<u8>) {
        (1, Vec::new())
    }

    fn metrics(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

#[test]
fn identity_registers_read_as_specified() {
    let mut machine = Machine::power_on(Echo::default());
    assert_eq!(machine.read(0x0), 0x7472_6976);
    assert_eq!(machine.read(0x4), 2);
    assert_eq!(machine.read(0x8), 42);
    assert_eq!(machine.read(0x34), 16);
    machine.write(0x30, 1);
    assert_eq!(machine.read(0x34), 8);
    machine.write(0x30, 2);
    assert_eq!(machine.read(0x34), 0);
    machine.write(0x14, 1);
    assert_eq!(machine.read(0x10), 1);
    machine.write(0x14, 2);
    assert_eq!(machine.read(0x10), 0);
    assert_eq!(machine.read(0xb0), u32::MAX);
}

#[test]
fn odd_widths_read_zero_and_write_nothing() {
    let mut machine = Machine::power_on(Echo::default());
    for width in [1, 2, 3, 5, 8, 16] {
        let mut data = vec![0xff; width];
        machine.transport.read(0, &mut data);
        assert!(data.iter().all(|byte| *byte == 0));
    }
    assert_eq!(machine.transport.write(0x70, &[1]), WriteEffect::None);
    assert_eq!(machine.transport.write(0x71, &[1, 0, 0, 0]), WriteEffect::None);
    assert_eq!(machine.read(0x70), 0);
}

#[test]
fn config_reads_any_width_and_zero_beyond_the_end() {
    let mut machine = Machine::power_on(Echo::default());
    let mut data = [0xff; 8];
    machine.transport.read(0x104, &mut data);
    assert_eq!(data, [5, 6, 7, 8, 9, 10, 0, 0]);
    let mut data = [0xff; 2];
    machine.transport.read(0x101, &mut data);
    assert_eq!(data, [2, 3]);
    let mut data = [0xff; 4];
    machine.transport.read(u64::MAX, &mut data);
    assert_eq!(data, [0; 4]);
}

#[test]
fn status_goes_up_one_step_at_a_time() {
    let mut machine = Machine::power_on(Echo::default());
    machine.write(0x70, 2);
    assert_eq!(machine.read(0x70), 0);
    machine.write(0x70, 15);
    assert_eq!(machine.read(0x70), 0);
    machine.write(0x70, 1);
    machine.write(0x70, 5);
    assert_eq!(machine.read(0x70), 1);
    machine.write(0x70, 3);
    assert_eq!(machine.read(0x70), 3);
    // FEATURES_OK without VERSION_1 is not granted.
    machine.write(0x70, 11);
    assert_eq!(machine.read(0x70), 3);
    machine.negotiate_again();
    assert_eq!(machine.read(0x70), 11);
    // Bits cannot be taken back but by a reset.
    machine.write(0x70, 3);
    assert_eq!(machine.read(0x70), 11);
    machine.write(0x70, 0);
    assert_eq!(machine.read(0x70), 0);
}

impl Machine {
    fn negotiate_again(&mut self) {
        self.write(0x24, 1);
        self.write(0x20, 1);
        self.write(0x70, 11);
    }
}

#[test]
fn unknown_feature_is_refused() {
    let mut machine = Machine::power_on(Echo::default());
    machine.write(0x70, 3);
    machine.write(0x24, 0);
    machine.write(0x20, 1 << 4);
    machine.negotiate_again();
    assert_eq!(machine.read(0x70), 3);
}

#[test]
fn features_after_agreement_are_ignored() {
    let mut machine = Machine::power_on(Echo::default());
    machine.negotiate(u64::MAX);
    machine.write(0x24, 0);
    machine.write(0x20, u32::MAX);
    assert_eq!(machine.transport.save().driver_features, FEATURE | (1 << 29) | (1 << 32));
}

#[test]
fn queue_before_agreement_cannot_be_configured() {
    let mut machine = Machine::power_on(Echo::default());
    machine.write(0x70, 3);
    machine.write(0x38, 8);
    machine.write(0x44, 1);
    assert_eq!(machine.read(0x44), 0);
    assert_eq!(machine.transport.save().queues[0].size, 16);
}

#[test]
fn ready_queue_cannot_be_moved() {
    let mut machine = Machine::power_on(Echo::default());
    machine.negotiate(u64::MAX);
    machine.set_up_queues();
    let before = machine.transport.save();
    machine.write(0x30, 0);
    for register in [0x38, 0x80, 0x84, 0x90, 0x94, 0xa0, 0xa4] {
        machine.write(register, 0x10);
    }
    machine.write(0x30, before.queue_select);
    assert_eq!(machine.transport.save(), before);
}

#[test]
fn queue_outside_memory_fails_the_device() {
    let mut machine = Machine::power_on(Echo::default());
    machine.negotiate(u64::MAX);
    machine.write(0x30, 0);
    machine.write(0x84, 1);
    machine.write(0x44, 1);
    assert_eq!(machine.read(0x44), 0);
    assert_eq!(machine.read(0x70) & 64, 64);
    // No way on but a reset.
    machine.write(0x70, 15);
    assert_eq!(machine.read(0x70) & 4, 0);
    machine.write(0x70, 0);
    assert_eq!(machine.read(0x70), 0);
}

#[test]
fn illegal_queue_sizes_are_refused() {
    let mut machine = Machine::power_on(Echo::default());
    machine.negotiate(u64::MAX);
    for size in [0, 3, 32, 0x1_0008, u32::MAX] {
        machine.write(0x38, size);
        assert_eq!(machine.transport.save().queues[0].size, 16);
    }
    machine.write(0x38, 4);
    assert_eq!(machine.transport.save().queues[0].size, 4);
}

#[test]
fn notify_before_driver_ok_does_nothing() {
    let calls = Arc::new(Calls::default());
    let mut machine = Machine::power_on(Echo { calls: calls.clone(), ..Echo::default() });
    machine.negotiate(u64::MAX);
    machine.set_up_queues();
    let buffer = machine.buffer(16);
    machine.queues[0].add(&[], &[(buffer, 16)]);
    assert_eq!(machine.transport.write(0x50, &[0; 4]), WriteEffect::None);
    assert!(machine.queues[0].take_used().is_none());
    assert_eq!(machine.transport.write(0x70, &[15, 0, 0, 0]), WriteEffect::Activated);
    // What was there before is served now.
    assert!(machine.queues[0].take_used().is_some());
    machine.queues[0].add(&[], &[(buffer, 16)]);
    assert_eq!(machine.transport.write(0x70, &[15, 0, 0, 0]), WriteEffect::None);
    assert_eq!(calls.activations.load(Ordering::SeqCst), 1);
    assert_eq!(machine.transport.write(0x50, &[0; 4]), WriteEffect::Notified(0));
    assert!(machine.queues[0].take_used().is_some());
    assert_eq!(machine.transport.write(0x50, &[2, 0, 0, 0]), WriteEffect::None);
}

#[test]
fn interrupt_status_is_set_and_acknowledged() {
    let mut machine = Machine::boot(Echo::default());
    let buffer = machine.buffer(16);
    machine.queues[0].add(&[], &[(buffer, 16)]);
    machine.notify(0);
    assert_eq!(machine.interrupt.count(), 1);
    assert_eq!(machine.read(0x60), 1);
    machine.write(0x64, 1);
    assert_eq!(machine.read(0x60), 0);
}

#[test]
fn event_index_suppresses_interrupts_the_driver_does_not_want() {
    let mut machine = Machine::boot(Echo::default());
    let buffer = machine.buffer(16);
    for _ in 0..3 {
        machine.queues[0].add(&[], &[(buffer, 16)]);
        machine.notify(0);
    }
    // The driver has not taken the first one: nothing new to tell.
    assert_eq!(machine.interrupt.count(), 1);
    assert_eq!(machine.queues[0].take_all_used().len(), 3);
    machine.queues[0].add(&[], &[(buffer, 16)]);
    machine.notify(0);
    assert_eq!(machine.interrupt.count(), 2);
}

#[test]
fn flag_suppresses_interrupts_without_event_index() {
    let mut machine = Machine::boot_with(Echo::default(), !(1 << 29));
    let (_, _, available, _) = machine.queues[0].layout();
    machine.memory.write_obj(1u16, GuestAddress(available)).unwrap();
    let buffer = machine.buffer(16);
    machine.queues[0].add(&[], &[(buffer, 16)]);
    machine.notify(0);
    assert_eq!(machine.interrupt.count(), 0);
    machine.memory.write_obj(0u16, GuestAddress(available)).unwrap();
    machine.queues[0].add(&[], &[(buffer, 16)]);
    machine.notify(0);
    assert_eq!(machine.interrupt.count(), 1);
}

#[test]
fn failed_device_needs_a_reset_and_says_so() {
    let mut machine = Machine::boot(Echo { fail: true, ..Echo::default() });
    machine.notify(0);
    assert_eq!(machine.read(0x70), 15 | 64);
    assert_eq!(machine.read(0x60), 2);
    assert_eq!(machine.interrupt.count(), 1);
    assert!(!machine.transport.running());
    machine.notify(0);
    assert_eq!(machine.transport.metrics().failures, 1);
    machine.write(0x70, 0);
    assert_eq!(machine.read(0x70), 0);
    assert_eq!(machine.read(0x60), 0);
}

#[test]
fn impossible_available_index_fails_the_device() {
    let mut machine = Machine::boot(Echo::default());
    let (_, _, available, _) = machine.queues[0].layout();
    machine.memory.write_obj(17u16, GuestAddress(available + 2)).unwrap();
    machine.notify(0);
    assert_eq!(machine.read(0x70) & 64, 64);
}

#[test]
fn unfinished_work_is_taken_up_by_the_event_loop() {
    let mut machine = Machine::boot(Echo { budget: 2, ..Echo::default() });
    assert_eq!(machine.events.watched(), 0);
    let buffer = machine.buffer(16);
    for _ in 0..7 {
        machine.queues[0].add(&[], &[(buffer, 16)]);
    }
    machine.notify(0);
    let mut done = machine.queues[0].take_all_used().len();
    assert_eq!(done, 2);
    machine.run_until(|machine| {
        done += machine.queues[0].take_all_used().len();
        done == 7
    });
    while machine.turn(std::time::Duration::ZERO) > 0 {}
    assert_eq!(machine.transport.metrics().revisits, 3);
}

#[test]
fn queue_stopped_while_running_stays_stopped() {
    let mut machine = Machine::boot(Echo::default());
    machine.write(0x30, 0);
    machine.write(0x44, 0);
    assert_eq!(machine.read(0x44), 0);
    machine.write(0x44, 1);
    assert_eq!(machine.read(0x44), 0);
    assert_eq!(machine.transport.write(0x50, &[0; 4]), WriteEffect::None);
}

#[test]
fn state_round_trip_goes_on_where_it_stopped() {
    let calls = Arc::new(Calls::default());
    let mut machine = Machine::boot(Echo::default());
    let buffer = machine.buffer(16);
    for _ in 0..5 {
        machine.queues[0].add(&[], &[(buffer, 16)]);
        machine.notify(0);
    }
    // One that was made available and never notified is served by `quiesce`.
    machine.queues[0].add(&[], &[(buffer, 16)]);
    let mut copy = machine.clone_with(|_, _| Echo { calls: calls.clone(), ..Echo::default() });
    assert_eq!(calls.resumptions.load(Ordering::SeqCst), 1);
    assert_eq!(calls.activations.load(Ordering::SeqCst), 0);
    assert_eq!(copy.transport.save(), machine.transport.save());
    // The interrupt was pending.
    assert_eq!(copy.interrupt.count(), 1);
    assert_eq!(copy.queues[0].take_all_used().len(), 6);
    copy.queues[0].add(&[], &[(buffer, 16)]);
    copy.notify(0);
    assert_eq!(copy.queues[0].take_all_used().len(), 1);
}

fn restore(state: &TransportState) -> Result<MmioTransport, TransportError> {
    MmioTransport::restore(
        Box::new(Echo::default()),
        memory(),
        Arc::new(CountingInterrupt::default()),
        Arc::new(PollLoop::new()),
        state,
    )
}

fn good_state() -> TransportState {
    Machine::boot(Echo::default()).transport.save()
}

#[test]
fn hostile_states_are_refused_each_with_its_error() {
    assert!(restore(&good_state()).is_ok());
    let with = |change: fn(&mut TransportState)| {
        let mut state = good_state();
        change(&mut state);
        restore(&state).err()
    };
    let error = with(|state| state.device_type = 1);
    assert!(matches!(error, Some(TransportError::DeviceType { found: 1, wanted: 42 })));
    let error = with(|state| state.status = 4);
    assert!(matches!(error, Some(TransportError::Status(4))));
    let error = with(|state| state.status |= 256);
    assert!(matches!(error, Some(TransportError::Status(_))));
    let error = with(|state| state.driver_features |= 1 << 40);
    assert!(matches!(error, Some(TransportError::Features { .. })));
    let error = with(|state| state.interrupt_status = 4);
    assert!(matches!(error, Some(TransportError::Register(_))));
    let error = with(|state| state.queues.truncate(1));
    assert!(matches!(error, Some(TransportError::QueueCount { found: 1, wanted: 2, .. })));
    let error = with(|state| state.queues[0].size = 32);
    assert!(matches!(error, Some(TransportError::Queue { index: 0, .. })));
    let error = with(|state| state.queues[1].used_ring = 2);
    assert!(matches!(error, Some(TransportError::Queue { index: 1, .. })));
    let error = with(|state| state.queues[1].descriptor_table = !0xf);
    assert!(matches!(error, Some(TransportError::QueueMemory { index: 1, .. })));
}

proptest! {
    /// No state, however made, panics or yields a ready queue outside memory.
    #[test]
    fn random_states_never_panic(
        status in 0..256u32,
        features in any::<u64>(),
        interrupt_status in 0..5u32,
        ready in any::<bool>(),
        size in prop_oneof![Just(16u16), any::<u16>()],
        addresses in prop_oneof![
            (0..0x1_0000u64, 0..0x1_0000u64, 0..0x1_0000u64).prop_map(|(a, b, c)| (a << 8, b << 8, c << 8)),
            (any::<u64>(), any::<u64>(), any::<u64>()),
        ],
        indices in (any::<u16>(), any::<u16>()),
    ) {
        let queue = QueueState {
            size,
            ready,
            event_index: features & (1 << 29) != 0,
            descriptor_table: addresses.0,
            available_ring: addresses.1,
            used_ring: addresses.2,
            next_available: indices.0,
            next_used: indices.1,
        };
        let state = TransportState {
            device_type: 42,
            status,
            driver_features: features & (FEATURE | 1 << 29 | 1 << 32),
            device_features_select: 7,
            driver_features_select: 9,
            queue_select: 11,
            interrupt_status,
            config_generation: u32::MAX,
            queues: vec![queue.clone(), queue],
        };
        if let Ok(mut transport) = restore(&state) {
            prop_assert_eq!(transport.save(), state);
            transport.notify(0);
            transport.notify(1);
        }
    }
}

#[test]
fn reset_forgets_queues_and_features() {
    let mut machine = Machine::boot(Echo::default());
    let fresh = Machine::power_on(Echo::default()).transport.save();
    assert_eq!(machine.transport.write(0x70, &[0; 4]), WriteEffect::Reset);
    assert_eq!(machine.transport.save(), fresh);
    assert!(!machine.queues[0].device_queue().event_idx_enabled());
}
