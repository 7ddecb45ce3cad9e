//! Chains against a model that walks them slowly, and runs against plain bytes.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::testing::{DriverQueue, INDIRECT, MEMORY_BYTES, NEXT, WRITE, memory, write_descriptor};

const QUEUE_BASE: u64 = 0x10_0000;
const TABLE: u64 = 0x20_0000;
const SIZE: u16 = 8;

#[derive(Debug, Clone, Copy)]
struct Raw {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

fn raw() -> impl Strategy<Value = Raw> {
    let end = u64::try_from(MEMORY_BYTES).unwrap();
    let address = prop_oneof![
        8 => (0..end).prop_map(|address| address & !0xff),
        2 => Just(TABLE),
        1 => (0..64u64).prop_map(move |below| end - below),
        1 => any::<u64>(),
    ];
    let len = prop_oneof![6 => 1..5000u32, 2 => (0..6u32).prop_map(|count| count * 16), 1 => any::<u32>()];
    let flags = prop_oneof![
        4 => Just(NEXT), 3 => Just(WRITE), 4 => Just(WRITE | NEXT), 2 => Just(0),
        2 => Just(INDIRECT), 1 => 0..16u16,
    ];
    (address, len, flags, 0..SIZE + 2).prop_map(|(address, len, flags, next)| Raw {
        address,
        len,
        flags,
        next,
    })
}

/// The segments of a chain, or `None` if any rule is broken.
fn model(head: u16, direct: &[Raw], indirect: &[Raw]) -> Option<(Vec<Segment>, usize)> {
    let end = u64::try_from(MEMORY_BYTES).unwrap();
    let inside = |address: u64, len: u64| address.checked_add(len).is_some_and(|last| last <= end);
    let mut table: Vec<Raw> = direct.to_vec();
    let (mut index, mut in_table) = (usize::from(head), false);
    let mut seen = HashSet::new();
    let (mut segments, mut readable, mut total) = (Vec::new(), 0, 0u64);
    loop {
        let raw = *table.get(index)?;
        if !seen.insert((in_table, index)) {
            return None;
        }
        if raw.flags & INDIRECT != 0 {
            let count = usize::try_from(raw.len / 16).unwrap();
            let sound = raw.len % 16 == 0 && count > 0 && count <= 65535 && raw.flags & NEXT == 0;
            // Only one table has known content; others are not followed here.
            if in_table || !sound || raw.address != TABLE {
                return None;
            }
            let zero = Raw { address: 0, len: 0, flags: 0, next: 0 };
            table = (0..count).map(|at| indirect.get(at).copied().unwrap_or(zero)).collect();
            (index, in_table) = (0, true);
            continue;
        }
        total += u64::from(raw.len);
        if raw.len == 0 || !inside(raw.address, u64::from(raw.len)) || total > u64::from(u32::MAX) {
            return None;
        }
        if raw.flags & WRITE == 0 {
            if readable != segments.len() {
                return None;
            }
            readable += 1;
        }
        segments.push(Segment { address: GuestAddress(raw.address), len: raw.len });
        if raw.flags & NEXT == 0 {
            return Some((segments, readable));
        }
        index = usize::from(raw.next);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn popped_chain_is_what_the_model_walks(
        direct in proptest::collection::vec(raw(), usize::from(SIZE)),
        indirect in proptest::collection::vec(raw(), 5),
        head in 0..SIZE,
    ) {
        let memory = memory();
        let mut driver = DriverQueue::new(&memory, QUEUE_BASE, SIZE);
        for (index, raw) in (0u16..).zip(&direct) {
            // Buffers may lie over the table, but nothing is written to them here.
            driver.write_descriptor(index, raw.address, raw.len, raw.flags, raw.next);
        }
        for (index, raw) in (0u16..).zip(&indirect) {
            write_descriptor(&memory, TABLE, index, (raw.address, raw.len, raw.flags, raw.next));
        }
        driver.offer(head);
        let mut queue = driver.device_queue();
        let mut chain = Chain::default();
        let popped = pop(&mut queue, &memory, &mut chain);
        // A table elsewhere is unknown to the model unless it is refused by itself.
        let elsewhere = direct.iter().any(|raw| raw.flags & INDIRECT != 0 && raw.address != TABLE);
        match model(head, &direct, &indirect) {
            Some((segments, readable)) => {
                prop_assert!(matches!(popped, Ok(true)), "{popped:?}");
                prop_assert_eq!(chain.head(), head);
                let got: Vec<Segment> = chain.readable().iter().collect();
                prop_assert_eq!(&got[..], &segments[..readable]);
                let got: Vec<Segment> = chain.writable().iter().collect();
                prop_assert_eq!(&got[..], &segments[readable..]);
            }
            None if elsewhere => {}
            None => {
                let refused = matches!(popped, Err(QueueError::Chain { head: found, .. }) if found == head);
                prop_assert!(refused, "{popped:?}");
            }
        }
        prop_assert!(matches!(pop(&mut queue, &memory, &mut chain), Ok(false)));
        unpop(&mut queue, 1);
        prop_assert!(!matches!(pop(&mut queue, &memory, &mut chain), Ok(false)));
    }

    #[test]
    fn runs_slice_as_bytes_do(
        lengths in proptest::collection::vec(1..40u32, 1..8),
        skip in 0..200u64,
        limit in 0..200u64,
        more in 0..50u64,
    ) {
        let memory = memory();
        let mut all = Vec::new();
        let mut list = Vec::new();
        for (number, len) in (0u64..).zip(&lengths) {
            let address = GuestAddress(0x1000 * (number * 7 % 8 + 1));
            let bytes: Vec<u8> = (0..*len).map(|at| u8::try_from(all.len() + usize::try_from(at).unwrap()).unwrap_or(255)).collect();
            memory.write_slice(&bytes, address).unwrap();
            all.extend_from_slice(&bytes);
            list.push(Segment { address, len: *len });
        }
        let total = u64::try_from(all.len()).unwrap();
        let run = Segments { list: &list, skip: 0, len: total }.skip(skip).limit(limit).skip(more);
        let start = usize::try_from((skip + more).min(total)).unwrap();
        let end = usize::try_from((skip.min(total) + limit).min(total)).unwrap().max(start.min(all.len()));
        let expected = if skip + more > skip.min(total) + limit { &[][..] } else { &all[start..end] };
        prop_assert_eq!(run.len(), u64::try_from(expected.len()).unwrap());
        let mut data = vec![0; expected.len()];
        prop_assert_eq!(run.read(&memory, &mut data).unwrap(), expected.len());
        prop_assert_eq!(&data[..], expected);
        let mut vectors = Vec::new();
        run.io_vectors(&memory, &mut vectors).unwrap();
        prop_assert_eq!(vectors.iter().map(IoVector::len).sum::<usize>(), expected.len());

        let inverted: Vec<u8> = expected.iter().map(|byte| !byte).collect();
        run.write(&memory, &inverted).unwrap();
        run.read(&memory, &mut data).unwrap();
        prop_assert_eq!(&data, &inverted);
        run.zero(&memory).unwrap();
        run.read(&memory, &mut data).unwrap();
        prop_assert!(data.iter().all(|byte| *byte == 0));
        // What lies around the run is untouched.
        let mut whole = vec![0; all.len()];
        Segments { list: &list, skip: 0, len: total }.read(&memory, &mut whole).unwrap();
        for (at, byte) in whole.iter().enumerate() {
            let inside = !expected.is_empty() && (start..end).contains(&at);
            prop_assert_eq!(*byte, if inside { 0 } else { all[at] });
        }
    }
}

#[test]
fn group_becomes_visible_at_once_and_wraps() {
    let memory = memory();
    let mut driver = DriverQueue::new(&memory, QUEUE_BASE, SIZE);
    let mut queue = driver.device_queue();
    queue.set_event_idx(true);
    for round in 0..5u16 {
        let before = queue.next_used();
        let group: Vec<(u16, u32)> = (0..3).map(|at| (at, u32::from(round * 10 + at))).collect();
        push_group(&mut queue, &memory, &group).unwrap();
        assert!(wants_interrupt_since(&queue, &memory, before));
        let used = driver.take_all_used();
        assert_eq!(used.len(), 3);
        for (got, (head, len)) in used.iter().zip(&group) {
            assert_eq!((got.head, got.len), (*head, *len));
        }
    }
    // The driver has seen all: it wants to hear of the next, and only once.
    let before = queue.next_used();
    push_group(&mut queue, &memory, &[(0, 0)]).unwrap();
    assert!(wants_interrupt_since(&queue, &memory, before));
    let before = queue.next_used();
    push_group(&mut queue, &memory, &[(1, 0)]).unwrap();
    assert!(!wants_interrupt_since(&queue, &memory, before));
}

#[test]
fn endless_chain_in_a_large_table_ends() {
    let memory = memory();
    let mut driver = DriverQueue::new(&memory, QUEUE_BASE, SIZE);
    let entries = 65535u16;
    for index in 0..entries {
        let next = (index + 1) % entries;
        write_descriptor(&memory, TABLE, index, (0, 1, NEXT, next));
    }
    driver.write_descriptor(0, TABLE, 16 * u32::from(entries), INDIRECT, 0);
    driver.offer(0);
    let mut queue = driver.device_queue();
    let mut chain = Chain::default();
    let error = pop(&mut queue, &memory, &mut chain).unwrap_err();
    assert!(matches!(error, QueueError::Chain { source: ChainError::TooLong, .. }));
}

#[test]
fn drain_stops_at_its_budget_and_at_a_held_chain() {
    let memory = memory();
    let mut driver = DriverQueue::new(&memory, QUEUE_BASE, SIZE);
    let mut queue = driver.device_queue();
    let mut chain = Chain::default();
    for _ in 0..5 {
        driver.add(&[(GuestAddress(0x1000), 8)], &[]);
    }
    let drained = drain(&mut queue, &memory, &mut chain, 2, |_, _| Step::Used(0));
    assert_eq!(drained, Drained { completed: true, unfinished: true, ..Drained::default() });
    let mut seen = 0;
    let drained = drain(&mut queue, &memory, &mut chain, 9, |_, _| {
        seen += 1;
        if seen == 2 { Step::Hold } else { Step::Used(0) }
    });
    assert_eq!(drained, Drained { completed: true, held: true, ..Drained::default() });
    let drained = drain(&mut queue, &memory, &mut chain, 9, |_, _| Step::Used(0));
    assert_eq!(drained, Drained { completed: true, ..Drained::default() });
    assert_eq!(driver.take_all_used().len(), 5);
}
