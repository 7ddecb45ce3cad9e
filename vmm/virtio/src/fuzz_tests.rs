//! Every device under a driver that does anything at all.
//!
//! Registers, queue memory, notifications, events, saves and restores, at random
//! but from a printed seed. A fault is a panic, a call that does not come back
//! soon, or a device that does not survive a reset. `WARREN_FUZZ_ROUNDS` and
//! `WARREN_FUZZ_SEED` make it longer and another one.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use crate::VirtioDevice;
use crate::block::{BlockConfig, BlockDevice, DiskConfig, FlushPolicy, ImageAccess, ImageFile};
use crate::console::{ConsoleDevice, ConsoleLog};
use crate::device::Readiness;
use crate::net::{NetConfig, NetDevice, TapSource};
use crate::rng::RngDevice;
use crate::testing::Machine;
use crate::vsock::{VsockConfig, VsockDevice};

/// xorshift64*: all that is needed here is that it repeats.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn word(&mut self) -> u32 {
        let value = self.next() >> 32;
        let word = u32::try_from(value).unwrap();
        match value % 4 {
            0 => word % 4,
            1 => word % 256,
            2 => word % 0x100_0000,
            _ => word,
        }
    }

    fn short(&mut self, bound: u64) -> u16 {
        u16::try_from(self.below(bound)).unwrap()
    }
}

/// An address that is mostly in memory, and often where the queues are.
fn address(dice: &mut Dice) -> u64 {
    match dice.below(8) {
        0 => dice.next(),
        1 => 0x100_0000 - dice.below(64),
        2 | 3 => 0x10_0000 + dice.below(0x3_0000),
        _ => dice.below(0x100_0000),
    }
}

/// What a driver of the device would begin a chain with.
type Opening = fn(&mut Dice) -> Vec<u8>;

fn disturb(machine: &mut Machine, dice: &mut Dice, opening: Opening) {
    let queues = u64::try_from(machine.queues.len()).unwrap();
    let queue = usize::try_from(dice.below(queues)).unwrap();
    match dice.below(20) {
        // Registers, known and unknown, of every width.
        0 | 1 => {
            let offset = if dice.below(4) == 0 { dice.below(0x1100) } else { dice.below(0x48) * 4 };
            let data = dice.next().to_le_bytes();
            let width =
                usize::try_from(if dice.below(3) == 0 { dice.below(9) } else { 4 }).unwrap();
            let _ = machine.transport.write(offset, &data[..width]);
        }
        2 => {
            let mut data = [0; 8];
            let width = usize::try_from(dice.below(9)).unwrap();
            machine.transport.read(dice.below(0x1100), &mut data[..width]);
        }
        3 => {
            let value = dice.word();
            machine.write(0x50, value);
        }
        // Descriptors: plausible requests, and noise.
        4..=11 => {
            let count = dice.below(4) + 1;
            let size = machine.queues[queue].layout().0;
            let first = dice.short(u64::from(size));
            let start = opening(dice);
            let all_writable = dice.below(4) == 0;
            for number in 0..count {
                let index = (first + u16::try_from(number).unwrap()) % size;
                let more = if number + 1 < count { 1 } else { 0 };
                let last_writable = number > 0 && (number + 1 == count || dice.below(4) == 0);
                let write = if all_writable || last_writable { 2 } else { 0 };
                let odd = if dice.below(32) == 0 { dice.short(16) } else { 0 };
                let at = address(dice);
                let len = match dice.below(8) {
                    0 => dice.word(),
                    1 => 1,
                    _ if number == 0 && !all_writable => u32::try_from(start.len()).unwrap(),
                    _ => (1 + u32::try_from(dice.below(8)).unwrap()) * 512,
                };
                let next = if dice.below(32) == 0 { dice.short(65536) } else { (index + 1) % size };
                machine.queues[queue].write_descriptor(index, at, len, more | write | odd, next);
                if number == 0 {
                    let _ = machine.memory.write_slice(&start, GuestAddress(at));
                }
            }
            machine.queues[queue].offer(first);
            if dice.below(4) > 0 {
                machine.notify(queue);
            }
        }
        12 => {
            // The rings themselves.
            let (_, _, available, used) = machine.queues[queue].layout();
            let base = if dice.below(2) == 0 { available } else { used };
            let value = dice.short(65536);
            let place = GuestAddress(base + dice.below(16) * 2);
            machine.memory.write_obj(value, place).unwrap();
        }
        13 => {
            let noise = dice.next();
            let _ = machine.memory.write_obj(noise, GuestAddress(address(dice)));
        }
        14 => machine.notify(usize::try_from(dice.below(6)).unwrap()),
        15 => {
            let flags = dice.next();
            let token = dice.word();
            machine.transport.event(
                token,
                Readiness {
                    readable: flags & 1 != 0,
                    writable: flags & 2 != 0,
                    closed: flags & 0xff00 == 0,
                },
            );
        }
        16 | 17 => drop(machine.turn(Duration::ZERO)),
        18 => {
            if dice.below(8) == 0 {
                machine.transport.quiesce();
                let state = machine.transport.save();
                assert_eq!(state, machine.transport.save());
                machine.transport.save_device();
            }
        }
        _ => {
            if dice.below(4) == 0 || !machine.transport.running() {
                bring_up(machine, dice);
            }
        }
    }
}

/// A reset, and the way up again, with some of the features.
fn bring_up(machine: &mut Machine, dice: &mut Dice) {
    machine.write(0x70, 0);
    assert_eq!(machine.read(0x70), 0);
    let sizes: Vec<u16> = machine.queues.iter().map(|queue| queue.layout().0).collect();
    for (number, size) in (0u64..).zip(sizes) {
        let base = 0x10_0000 + number * 0x1_0000;
        machine.memory.write_slice(&[0; 0x1_0000], GuestAddress(base)).unwrap();
        let index = usize::try_from(number).unwrap();
        machine.queues[index] = crate::testing::DriverQueue::new(&machine.memory, base, size);
    }
    machine.negotiate(dice.next());
    machine.set_up_queues();
    machine.write(0x70, 15);
}

fn rounds() -> u64 {
    std::env::var("WARREN_FUZZ_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20_000)
}

fn seed(name: &str) -> u64 {
    let given = std::env::var("WARREN_FUZZ_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| {
        std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos().into()
    });
    println!("{name}: WARREN_FUZZ_SEED={seed}");
    seed
}

fn torment<D: VirtioDevice>(
    opening: Opening,
    new: impl Fn() -> D,
    restore: impl Fn(u16, &[u8]) -> D,
) {
    let mut machine = Machine::boot(new());
    let mut dice = Dice(seed(machine.transport.name()) | 1 << 40);
    for round in 0..rounds() {
        let begun = Instant::now();
        disturb(&mut machine, &mut dice, opening);
        assert!(begun.elapsed() < Duration::from_secs(10), "round {round} took too long");
        if round % 1000 == 999 {
            bring_up(&mut machine, &mut dice);
            let copy = machine.clone_with(&restore);
            assert!(copy.transport.running());
        }
    }
    println!("{:?}\n{:?}", machine.transport.metrics(), machine.transport.device_metrics());
}

fn block_config(directory: &Path) -> BlockConfig {
    let path = directory.join("image");
    if !path.exists() {
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
    }
    let base = ImageFile::open(&path, ImageAccess::ReadOnly).unwrap();
    BlockConfig {
        name: "block".into(),
        id: "fuzz".into(),
        disk: DiskConfig::CopyOnWrite {
            base,
            layers: Vec::new(),
            delta: directory.join("delta"),
            bytes: None,
        },
        flush: FlushPolicy::Durable,
    }
}

#[test]
fn block_survives_any_driver() {
    let directory = tempfile::tempdir().unwrap();
    torment(
        |dice| {
            let kinds = [0, 1, 4, 8, 11, 13, 77];
            let kind: u32 = kinds[usize::try_from(dice.below(7)).unwrap()];
            let mut bytes = u64::from(kind).to_le_bytes().to_vec();
            let far = if dice.below(8) == 0 { u64::MAX } else { 2100 };
            bytes.extend(dice.below(far).to_le_bytes());
            if kind > 8 {
                bytes.extend(dice.below(2100).to_le_bytes());
                bytes.extend(dice.below(64).to_le_bytes());
            }
            bytes
        },
        || BlockDevice::new(block_config(directory.path())).unwrap(),
        |version, bytes| {
            BlockDevice::restore(block_config(directory.path()), version, bytes).unwrap()
        },
    );
}

#[test]
fn vsock_survives_any_driver() {
    let directory = tempfile::tempdir().unwrap();
    let _listener =
        std::os::unix::net::UnixListener::bind(directory.path().join("vsock.sock_1")).unwrap();
    let config = |name: &str| VsockConfig::new(directory.path().join(name));
    torment(
        |dice| {
            let port = |dice: &mut Dice| u32::try_from(dice.below(4)).unwrap().to_le_bytes();
            let mut bytes = [3u64.to_le_bytes(), 2u64.to_le_bytes()].concat();
            bytes.extend(port(dice));
            bytes.extend(port(dice));
            let operation = dice.short(9);
            let len = if operation == 5 { 512 } else { 0u32 };
            bytes.extend(len.to_le_bytes());
            bytes.extend(1u16.to_le_bytes());
            bytes.extend(operation.to_le_bytes());
            bytes.extend(port(dice));
            bytes.extend(dice.word().to_le_bytes());
            bytes.extend(dice.word().to_le_bytes());
            bytes
        },
        || VsockDevice::new(config("vsock.sock")).unwrap(),
        |version, bytes| VsockDevice::restore(config("clone"), version, bytes).unwrap(),
    );
}

#[test]
fn console_survives_any_driver() {
    let directory = tempfile::tempdir().unwrap();
    let log = || Box::new(ConsoleLog::new(&directory.path().join("log"), 10_000));
    torment(
        |_| b"a line\n".to_vec(),
        || ConsoleDevice::new(log()),
        |version, bytes| ConsoleDevice::restore(log(), version, bytes).unwrap(),
    );
}

#[test]
fn rng_survives_any_driver() {
    torment(
        |_| vec![0; 64],
        RngDevice::new,
        |version, bytes| RngDevice::restore(version, bytes).unwrap(),
    );
}

#[test]
fn net_survives_any_driver() {
    // SAFETY: takes no pointers. Each test is a process of its own.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        eprintln!("without CAP_SYS_ADMIN the card has no TAP");
    }
    let config = |name: &str| NetConfig {
        name: "net".into(),
        tap: TapSource::Name(name.into()),
        mac: [2, 0, 0, 0, 0, 1],
        mtu: None,
    };
    torment(
        |dice| {
            let mut bytes = vec![0; 12];
            if dice.below(3) == 0 {
                bytes = dice.next().to_le_bytes().to_vec();
                bytes.resize(12, 0);
            }
            bytes.resize(12 + 60, 0xff);
            bytes
        },
        || NetDevice::new(config("fuzz0")).unwrap(),
        |version, bytes| NetDevice::restore(config("fuzz1"), version, bytes).unwrap(),
    );
}
