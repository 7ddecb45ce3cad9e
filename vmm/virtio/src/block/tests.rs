//! Requests against real files, and the copy-on-write disk against a model.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};
use warren_base::skip::skipped;

use super::*;
use crate::testing::{INDIRECT, Machine, NEXT, Used, WRITE, write_descriptor};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

const DISK_BYTES: usize = 256 << 10;

fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at / 7 + at * 13 + seed * 101) % 251).unwrap()).collect()
}

struct Fixture {
    directory: TempDir,
    image: Vec<u8>,
}

impl Fixture {
    fn new(bytes: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let image = pattern(bytes, 1);
        std::fs::write(directory.path().join("image"), &image).unwrap();
        Self { directory, image }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn open(&self, access: ImageAccess) -> ImageFile {
        ImageFile::open(&self.path("image"), access).unwrap()
    }

    fn cow(&self) -> DiskConfig {
        DiskConfig::CopyOnWrite {
            base: self.open(ImageAccess::ReadOnly),
            layers: Vec::new(),
            delta: self.path("delta"),
            bytes: None,
        }
    }

    fn boot(&self, disk: DiskConfig) -> Machine {
        Machine::boot(BlockDevice::new(config(disk)).unwrap())
    }
}

fn config(disk: DiskConfig) -> BlockConfig {
    BlockConfig {
        name: "block-test".into(),
        id: "warren".into(),
        disk,
        flush: FlushPolicy::Durable,
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&sector.to_le_bytes());
    bytes
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend_from_slice(&sectors.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes
}

impl Machine {
    /// Queues a request; the address is where its status and data come to be.
    fn start(&mut self, kind: u32, sector: u64, out: &[u8], room: usize) -> (u16, GuestAddress) {
        let head = self.buffer_of(&header(kind, sector));
        let mut readable = vec![head];
        if !out.is_empty() {
            // In two pieces, as a guest's memory is rarely in one.
            let (address, len) = self.buffer_of(out);
            let first = len.min(700);
            readable.push((address, first));
            if len > first {
                readable.push((GuestAddress(address.0 + u64::from(first)), len - first));
            }
        }
        let inward = self.buffer(room + 1);
        let len = u32::try_from(room).unwrap();
        let mut writable = Vec::new();
        if room > 0 {
            writable.push((inward, len));
        }
        writable.push((GuestAddress(inward.0 + u64::from(len)), 1));
        self.memory.write_obj(0xffu8, GuestAddress(inward.0 + u64::from(len))).unwrap();
        (self.queues[0].add(&readable, &writable), inward)
    }

    fn finish(&mut self, head: u16) -> Used {
        let mut found = None;
        self.run_until(|machine| {
            found = found.or_else(|| machine.queues[0].take_used());
            found.is_some()
        });
        let used = found.unwrap();
        assert_eq!(used.head, head);
        used
    }

    fn request(&mut self, kind: u32, sector: u64, out: &[u8], room: usize) -> (u8, Vec<u8>) {
        // Each request may use the same guest memory again.
        let (head, inward) = self.start(kind, sector, out, room);
        self.notify(0);
        let used = self.finish(head);
        let data = self.bytes(inward, room + 1);
        // Data counts as written when it was.
        let written = if data[room] == OK { room + 1 } else { used.len.try_into().unwrap() };
        assert_eq!(used.len, u32::try_from(written).unwrap());
        (data[room], data[..room].to_vec())
    }

    fn read_disk(&mut self, offset: usize, bytes: usize) -> Vec<u8> {
        let (status, data) = self.request(IN, u64::try_from(offset / 512).unwrap(), &[], bytes);
        assert_eq!(status, OK);
        data
    }

    fn metric(&self, name: &str) -> u64 {
        let entries = self.transport.device_metrics();
        entries.iter().find(|(found, _)| *found == name).unwrap().1
    }
}

#[test]
fn config_space_tells_capacity_and_limits() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    assert_eq!(machine.read(0x100), 512);
    assert_eq!(machine.read(0x104), 0);
    assert_eq!(machine.read(0x10c), 126);
    assert_eq!(machine.read(0x114), 512);
    assert_eq!(machine.read(0x118), 3 | 8 << 16);
    assert_eq!(machine.read(0x124), RANGE_SECTORS_MAX);
    let mut bytes = [0xff; 8];
    machine.transport.read(0x100 + 58, &mut bytes);
    assert_eq!(bytes, [0; 8]);
}

#[test]
fn read_only_disk_reads_and_refuses_writes() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(DiskConfig::ReadOnly(fixture.open(ImageAccess::ReadOnly)));
    assert_eq!(machine.read_disk(4096, 8192), fixture.image[4096..12288]);
    assert_eq!(machine.request(OUT, 0, &[1; 512], 0).0, IOERR);
    assert_eq!(machine.request(DISCARD, 0, &range(0, 8, 0), 0).0, IOERR);
    assert_eq!(machine.request(WRITE_ZEROES, 0, &range(0, 8, 0), 0).0, IOERR);
    assert_eq!(machine.request(FLUSH, 0, &[], 0).0, OK);
    assert_eq!(std::fs::read(fixture.path("image")).unwrap(), fixture.image);
}

#[test]
fn read_write_disk_writes_flushes_and_zeroes_in_place() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(DiskConfig::ReadWrite(fixture.open(ImageAccess::ReadWrite)));
    let data = pattern(10 * 512, 5);
    assert_eq!(machine.request(OUT, 3, &data, 0).0, OK);
    assert_eq!(machine.request(FLUSH, 0, &[], 0).0, OK);
    let zeroes = [range(64, 8, 1), range(100, 1, 0)].concat();
    assert_eq!(machine.request(WRITE_ZEROES, 0, &zeroes, 0).0, OK);
    assert_eq!(machine.request(DISCARD, 0, &range(128, 64, 0), 0).0, OK);
    let mut expected = fixture.image.clone();
    expected[3 * 512..13 * 512].copy_from_slice(&data);
    expected[64 * 512..72 * 512].fill(0);
    expected[100 * 512..101 * 512].fill(0);
    expected[128 * 512..192 * 512].fill(0);
    assert_eq!(machine.read_disk(0, DISK_BYTES), expected);
    assert_eq!(std::fs::read(fixture.path("image")).unwrap(), expected);
    assert_eq!(machine.metric("rings"), 1);
}

#[test]
fn cached_reads_make_no_ring_and_no_delta() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    // The file was just written: it is in the page cache.
    assert_eq!(machine.read_disk(0, DISK_BYTES), fixture.image);
    if machine.metric("cached_transfers") == 0 {
        skipped("this file system does not read from its cache only");
        return;
    }
    assert_eq!(machine.metric("rings"), 0);
    assert_eq!(machine.events.watched(), 0);
    assert!(!fixture.path("delta").exists());
}

#[test]
fn id_is_told_and_unknown_requests_are_not_served() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    let (status, id) = machine.request(GET_ID, 0, &[], 20);
    assert_eq!(status, OK);
    assert_eq!(&id, b"warren\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(machine.request(GET_ID, 0, &[], 3).1, b"war");
    assert_eq!(machine.request(77, 0, &[], 0).0, UNSUPP);
    assert_eq!(machine.request(DISCARD, 0, &range(0, 8, 1), 0).0, UNSUPP);
    assert_eq!(machine.metric("unsupported_requests"), 2);
}

#[test]
fn requests_outside_the_disk_fail() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    let last = u64::try_from(DISK_BYTES / 512).unwrap();
    for sector in [last, last - 1, u64::MAX, u64::MAX / 512, 1 << 55] {
        assert_eq!(machine.request(IN, sector, &[], 1024).0, IOERR, "sector {sector}");
        assert_eq!(machine.request(OUT, sector, &[0; 1024], 0).0, IOERR, "sector {sector}");
        let ranges = range(sector, 2, 0);
        assert_eq!(machine.request(WRITE_ZEROES, 0, &ranges, 0).0, IOERR, "sector {sector}");
    }
    assert_eq!(machine.request(IN, 0, &[], 100).0, IOERR);
    assert_eq!(machine.request(IN, 0, &[], 0).0, IOERR);
    assert_eq!(machine.request(WRITE_ZEROES, 0, &range(0, 0, 0), 0).0, IOERR);
    assert_eq!(machine.request(WRITE_ZEROES, 0, &[0; 15], 0).0, IOERR);
    assert_eq!(machine.request(DISCARD, 0, &range(0, 1, 0).repeat(17), 0).0, IOERR);
    assert!(!fixture.path("delta").exists());
    assert!(machine.transport.running());
}

#[test]
fn malformed_chains_are_completed_unserved() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    let buffer = machine.buffer(4096);
    let table = machine.buffer(4096);
    let header = machine.buffer_of(&header(IN, 0)).0.0;
    let queue = &mut machine.queues[0];

    // No status, no header, a short header.
    queue.write_descriptor(0, header, 16, 0, 0);
    queue.write_descriptor(1, buffer.0, 512, WRITE, 0);
    queue.write_descriptor(2, header, 15, NEXT, 1);
    // Readable behind writable; a loop; an index outside the table.
    queue.write_descriptor(3, buffer.0, 512, WRITE | NEXT, 0);
    queue.write_descriptor(4, header, 16, NEXT, 4);
    queue.write_descriptor(5, header, 16, NEXT, 9999);
    // Outside memory, wrapping, empty.
    queue.write_descriptor(6, u64::MAX - 3, 16, NEXT, 1);
    queue.write_descriptor(7, 1 << 30, 16, NEXT, 1);
    queue.write_descriptor(8, header, 0, NEXT, 1);
    queue.write_descriptor(9, 0, u32::MAX, NEXT, 1);
    // Tables: of odd length, outside memory, in themselves, followed by more.
    queue.write_descriptor(10, table.0, 17, INDIRECT, 0);
    queue.write_descriptor(11, 1 << 40, 32, INDIRECT, 0);
    queue.write_descriptor(12, table.0, 32, INDIRECT, 0);
    queue.write_descriptor(13, table.0, 32, INDIRECT | NEXT, 1);
    queue.write_descriptor(14, table.0, 0, INDIRECT, 0);
    write_descriptor(&machine.memory, table.0, 0, (table.0, 32, INDIRECT, 0));
    for head in 0..15 {
        machine.queues[0].offer(head);
    }
    machine.notify(0);
    let used = machine.queues[0].take_all_used();
    assert_eq!(used.len(), 15);
    assert!(used.iter().all(|used| used.len == 0));
    assert_eq!(machine.metric("malformed_requests"), 15);
    assert!(machine.transport.running());
    assert_eq!(machine.read_disk(0, 512), fixture.image[..512]);

    // A head outside the table cannot even be completed.
    machine.queues[0].offer(256);
    machine.notify(0);
    assert!(!machine.transport.running());
}

#[test]
fn indirect_request_is_served() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    let table = machine.buffer(4096).0;
    let header = machine.buffer_of(&header(IN, 8)).0.0;
    let data = machine.buffer(4096);
    write_descriptor(&machine.memory, table, 0, (header, 16, NEXT, 2));
    write_descriptor(&machine.memory, table, 2, (data.0, 512, WRITE | NEXT, 1));
    write_descriptor(&machine.memory, table, 1, (data.0 + 512, 1, WRITE, 0));
    machine.queues[0].write_descriptor(7, table, 48, INDIRECT, 0);
    machine.queues[0].offer(7);
    machine.notify(0);
    assert_eq!(machine.finish(7).len, 513);
    assert_eq!(machine.bytes(data, 512), fixture.image[4096..4608]);
}

#[test]
fn cow_write_leaves_the_base_and_makes_a_sparse_delta() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    let data = pattern(8192, 9);
    assert_eq!(machine.request(OUT, 16, &data, 0).0, OK);
    assert_eq!(machine.read_disk(8192, 8192), data);
    assert_eq!(machine.read_disk(0, 8192), fixture.image[..8192]);
    assert_eq!(std::fs::read(fixture.path("image")).unwrap(), fixture.image);
    let delta = std::fs::metadata(fixture.path("delta")).unwrap();
    assert_eq!(delta.len(), u64::try_from(DISK_BYTES).unwrap());
    assert!(delta.blocks() * 512 <= 16384, "{} blocks", delta.blocks());
    assert_eq!(machine.metric("delta_blocks"), 2);
    assert_eq!(machine.metric("copied_blocks"), 0);
}

#[test]
fn cow_write_of_part_of_a_block_keeps_the_rest() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    // From the middle of block 1 to the middle of block 4.
    let data = pattern(6 * 4096 / 2, 3);
    assert_eq!(machine.request(OUT, 12, &data, 0).0, OK);
    let mut expected = fixture.image.clone();
    expected[12 * 512..12 * 512 + data.len()].copy_from_slice(&data);
    assert_eq!(machine.read_disk(0, DISK_BYTES), expected);
    assert_eq!(machine.metric("copied_blocks"), 2);
    assert_eq!(machine.metric("delta_blocks"), 4);
}

#[test]
fn cow_disk_with_a_short_last_block_works_to_its_end() {
    let fixture = Fixture::new(5 * 4096 + 512);
    let mut machine = fixture.boot(fixture.cow());
    assert_eq!(machine.request(OUT, 40, &pattern(512, 2), 0).0, OK);
    assert_eq!(machine.read_disk(40 * 512, 512), pattern(512, 2));
    assert_eq!(machine.metric("copied_blocks"), 0);
    assert_eq!(machine.request(DISCARD, 0, &range(32, 9, 0), 0).0, OK);
    assert_eq!(machine.read_disk(32 * 512, 9 * 512), vec![0; 9 * 512]);
}

#[test]
fn cow_disk_larger_than_its_base_reads_zero_beyond_it() {
    let fixture = Fixture::new(4096 + 1024);
    let DiskConfig::CopyOnWrite { base, delta, .. } = fixture.cow() else { unreachable!() };
    let disk = DiskConfig::CopyOnWrite { base, layers: Vec::new(), delta, bytes: Some(16384) };
    let mut machine = fixture.boot(disk);
    let mut expected = fixture.image.clone();
    expected.resize(16384, 0);
    assert_eq!(machine.read_disk(0, 16384), expected);
    assert_eq!(machine.request(OUT, 11, &pattern(512, 7), 0).0, OK);
    expected[11 * 512..12 * 512].copy_from_slice(&pattern(512, 7));
    assert_eq!(machine.read_disk(0, 16384), expected);
}

#[test]
fn cow_state_comes_back_with_its_delta() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    let data = pattern(4096, 4);
    assert_eq!(machine.request(OUT, 8, &data, 0).0, OK);
    let mut copy = machine.clone_with(|version, bytes| {
        BlockDevice::restore(config(fixture.cow()), version, bytes).unwrap()
    });
    assert_eq!(copy.read_disk(4096, 4096), data);
    assert_eq!(copy.read_disk(0, 4096), fixture.image[..4096]);
    assert_eq!(copy.metric("delta_blocks"), 1);
    // The first machine goes on as well.
    assert_eq!(machine.read_disk(4096, 4096), data);
}

#[test]
fn template_disk_becomes_the_base_of_clones() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut template = fixture.boot(DiskConfig::ReadWrite(fixture.open(ImageAccess::ReadWrite)));
    assert_eq!(template.request(OUT, 0, &pattern(4096, 8), 0).0, OK);
    let mut clones: Vec<Machine> = (0..3)
        .map(|number| {
            let base = fixture.open(ImageAccess::ReadOnly);
            let delta = fixture.path(&format!("delta-{number}"));
            let disk = DiskConfig::CopyOnWrite { base, layers: Vec::new(), delta, bytes: None };
            template.clone_with(|version, bytes| {
                BlockDevice::restore(config(disk), version, bytes).unwrap()
            })
        })
        .collect();
    for (number, clone) in clones.iter_mut().enumerate() {
        assert_eq!(clone.read_disk(0, 4096), pattern(4096, 8));
        assert_eq!(clone.request(OUT, 0, &pattern(4096, 20 + number), 0).0, OK);
    }
    for (number, clone) in clones.iter_mut().enumerate() {
        assert_eq!(clone.read_disk(0, 4096), pattern(4096, 20 + number));
    }
}

#[test]
fn fresh_cow_disk_does_not_inherit_a_stale_delta() {
    let fixture = Fixture::new(DISK_BYTES);
    std::fs::write(fixture.path("delta"), pattern(DISK_BYTES, 99)).unwrap();
    let mut machine = fixture.boot(fixture.cow());
    assert_eq!(machine.request(OUT, 1, &[7; 512], 0).0, OK);
    let mut expected = fixture.image[..8192].to_vec();
    expected[512..1024].fill(7);
    assert_eq!(machine.read_disk(0, 8192), expected);
}

#[test]
fn delta_that_cannot_be_made_fails_writes_only() {
    let fixture = Fixture::new(DISK_BYTES);
    let base = fixture.open(ImageAccess::ReadOnly);
    let delta = fixture.path("missing/delta");
    let mut machine =
        fixture.boot(DiskConfig::CopyOnWrite { base, layers: Vec::new(), delta, bytes: None });
    assert_eq!(machine.request(OUT, 0, &[1; 4096], 0).0, IOERR);
    assert_eq!(machine.request(OUT, 1, &[1; 512], 0).0, IOERR);
    assert_eq!(machine.read_disk(0, 4096), fixture.image[..4096]);
    std::fs::create_dir(fixture.path("missing")).unwrap();
    assert_eq!(machine.request(OUT, 0, &[1; 4096], 0).0, OK);
    assert_eq!(machine.read_disk(0, 4096), [1; 4096]);
}

#[test]
fn full_host_disk_fails_the_write_and_keeps_the_old_data() {
    let fixture = Fixture::new(DISK_BYTES);
    let mount = fixture.path("small");
    std::fs::create_dir(&mount).unwrap();
    if !mount_small(&mount) {
        skipped("mounting a file system needs CAP_SYS_ADMIN");
        return;
    }
    let base = fixture.open(ImageAccess::ReadOnly);
    let delta = mount.join("delta");
    let mut machine =
        fixture.boot(DiskConfig::CopyOnWrite { base, layers: Vec::new(), delta, bytes: None });
    let mut failed = 0;
    for block in 0..32usize {
        let sector = u64::try_from(block * 8).unwrap();
        let (status, _) = machine.request(OUT, sector, &[9; 4096], 0);
        let now = machine.read_disk(block * 4096, 4096);
        match status {
            OK => assert_eq!(now, [9; 4096]),
            IOERR => {
                failed += 1;
                assert_eq!(now, fixture.image[block * 4096..(block + 1) * 4096]);
            }
            other => panic!("status {other}"),
        }
    }
    assert!(failed > 0);
    assert_eq!(machine.metric("host_disk_full"), failed);
    assert_eq!(machine.request(FLUSH, 0, &[], 0).0, OK);
}

/// A file system of 64 KiB in this process's own mount namespace.
fn mount_small(at: &Path) -> bool {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    let target = CString::new(at.as_os_str().as_bytes()).unwrap();
    // SAFETY: the strings are valid and NUL-terminated, and outlive the calls.
    unsafe {
        libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) == 0
            && libc::mount(
                c"none".as_ptr(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ) == 0
            && libc::mount(
                c"none".as_ptr(),
                target.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                c"size=64k".as_ptr().cast(),
            ) == 0
    }
}

#[test]
fn many_requests_at_once_are_all_served() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    let mut expected = fixture.image.clone();
    let mut heads = Vec::new();
    // More than the ring has entries, three descriptors each.
    for number in 0..80usize {
        let data = pattern(1024, number);
        let sector = (number * 5) % 500;
        expected[sector * 512..sector * 512 + 1024].copy_from_slice(&data);
        let (head, _) = machine.start(OUT, u64::try_from(sector).unwrap(), &data[..600], 0);
        heads.push(head);
    }
    machine.notify(0);
    let mut done = 0;
    machine.run_until(|machine| {
        done += machine.queues[0].take_all_used().len();
        done == heads.len()
    });
    // 600 bytes are no whole sectors: all were refused; now in earnest.
    assert_eq!(machine.metric("failed_requests"), 80);
    for number in 0..80usize {
        let sector = u64::try_from((number * 5) % 500).unwrap();
        machine.start(OUT, sector, &pattern(1024, number), 0);
        if number % 40 == 39 {
            machine.notify(0);
            let mut done = 0;
            machine.run_until(|machine| {
                done += machine.queues[0].take_all_used().len();
                done == 40
            });
        }
    }
    assert_eq!(machine.read_disk(0, DISK_BYTES), expected);
}

#[test]
fn quiesce_ends_what_is_in_flight_and_lets_go_of_the_ring() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    for number in 0..60u64 {
        machine.start(OUT, number * 8, &[1; 4096], 0);
    }
    machine.notify(0);
    for number in 0..10u64 {
        machine.start(OUT, number * 8, &[2; 512], 0);
    }
    machine.transport.quiesce();
    assert_eq!(machine.queues[0].take_all_used().len(), 70);
    assert_eq!(machine.events.watched(), 0);
    assert_eq!(machine.metric("failed_requests"), 0);
    let (version, bytes) = machine.transport.save_device();
    assert!(bytes.len() < 16, "{} bytes for one run of blocks", bytes.len());
    assert!(BlockDevice::restore(config(fixture.cow()), version, &bytes).is_ok());
    // It runs on.
    assert_eq!(machine.request(OUT, 0, &[3; 512], 0).0, OK);
    assert_eq!(machine.read_disk(0, 1024), [vec![3; 512], vec![2; 0], vec![1; 512]].concat());
}

#[test]
fn host_that_refuses_rings_is_served_in_place() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 8192 };
    // The delta is open, and from here on the process gets no descriptor.
    assert_eq!(machine.request(OUT, 0, &[1; 4096], 0).0, OK);
    machine.transport.quiesce();
    // SAFETY: `none` is a valid struct that outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) }, 0);
    assert_eq!(machine.request(OUT, 8, &[2; 4096], 0).0, OK);
    assert_eq!(machine.request(FLUSH, 0, &[], 0).0, OK);
    assert_eq!(machine.metric("rings"), 1);
    assert_eq!(machine.read_disk(0, 8192), [[1; 4096], [2; 4096]].concat());
}

#[test]
fn reset_waits_for_transfers_and_forgets_requests() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(fixture.cow());
    for number in 0..20u64 {
        machine.start(OUT, number * 8, &[1; 4096], 0);
    }
    machine.notify(0);
    machine.write(0x70, 0);
    assert_eq!(machine.events.watched(), 0);
    assert_eq!(machine.turn(Duration::from_millis(20)), 0);
}

#[test]
fn bad_images_are_refused_by_name() {
    let fixture = Fixture::new(DISK_BYTES);
    let open = |name: &str| ImageFile::open(&fixture.path(name), ImageAccess::ReadOnly);
    let error = open("nothing").unwrap_err();
    assert!(matches!(error, BlockError::Open { .. }));
    assert!(error.to_string().contains("nothing"));
    File::create(fixture.path("empty")).unwrap();
    let error = open("empty").unwrap_err();
    assert!(matches!(error, BlockError::Empty { bytes: 0, .. }));
    assert!(error.to_string().contains("empty"));
    File::create(fixture.path("odd")).unwrap().write_all(&[0; 1000]).unwrap();
    assert!(matches!(open("odd").unwrap_err(), BlockError::Unaligned { bytes: 1000, .. }));
    assert!(matches!(open("").unwrap_err(), BlockError::Kind { .. }));
    let mut named = config(fixture.cow());
    named.id = "x".repeat(21);
    assert!(matches!(BlockDevice::new(named), Err(BlockError::Id { .. })));
}

#[test]
fn file_that_shrank_fails_the_read() {
    let fixture = Fixture::new(DISK_BYTES);
    let mut machine = fixture.boot(DiskConfig::ReadOnly(fixture.open(ImageAccess::ReadOnly)));
    let image = File::options().write(true).open(fixture.path("image")).unwrap();
    image.set_len(4096).unwrap();
    assert_eq!(machine.request(IN, 16, &[], 4096).0, IOERR);
    assert_eq!(machine.read_disk(0, 4096), fixture.image[..4096]);
}

#[test]
fn hostile_states_are_refused() {
    let fixture = Fixture::new(DISK_BYTES);
    let device = BlockDevice::new(config(fixture.cow())).unwrap();
    let (version, bytes) = crate::VirtioDevice::save(&device);
    let restore = |version, bytes: &[u8]| {
        BlockDevice::restore(config(fixture.cow()), version, bytes).map(|_| ())
    };
    assert!(restore(version, &bytes).is_ok());
    assert!(matches!(restore(1, &bytes), Err(BlockError::State(StateError::Version { .. }))));
    assert!(matches!(restore(version, &[]), Err(BlockError::State(StateError::Decode { .. }))));
    let longer = [bytes.clone(), vec![0]].concat();
    assert!(matches!(
        restore(version, &longer),
        Err(BlockError::State(StateError::Trailing { .. }))
    ));
    let sectors = u64::try_from(DISK_BYTES / 512).unwrap();
    let none: &[&[(u64, u64)]] = &[];
    let encode = |sectors: u64, runs: &[(u64, u64)]| crate::persist::encode(&(sectors, none, runs));
    assert!(restore(version, &encode(sectors, &[(0, 64)])).is_ok());
    let beyond = encode(sectors, &[(60, 5)]);
    assert!(matches!(
        restore(version, &beyond),
        Err(BlockError::State(StateError::Invalid { .. }))
    ));
    let smaller = encode(sectors - 8, &[]);
    assert!(matches!(restore(version, &smaller), Err(BlockError::SizeChanged { .. })));
    let disk = DiskConfig::ReadOnly(fixture.open(ImageAccess::ReadOnly));
    let with_delta = encode(sectors, &[(0, 1)]);
    assert!(BlockDevice::restore(config(disk), version, &with_delta).is_err());
    let none: &[(u64, u64)] = &[];
    let with_layer = crate::persist::encode(&(sectors, vec![vec![(0u64, 1u64)]], none));
    assert!(matches!(
        restore(version, &with_layer),
        Err(BlockError::State(StateError::Invalid { .. }))
    ));
}

#[derive(Debug, Clone)]
enum Act {
    Read(usize, usize),
    Write(usize, usize),
    Discard(usize, usize),
    Zero(usize, usize),
    Flush,
    Restore,
    /// Ends the delta, and goes on in the same device or a restored one.
    EndDelta {
        restored: bool,
    },
}

const MODEL_SECTORS: usize = 101;

fn act() -> impl Strategy<Value = Act> {
    let part = || {
        (0..MODEL_SECTORS, 1..24usize)
            .prop_map(|(start, len)| (start, len.min(MODEL_SECTORS - start)))
    };
    prop_oneof![
        3 => part().prop_map(|(start, len)| Act::Read(start, len)),
        4 => part().prop_map(|(start, len)| Act::Write(start, len)),
        1 => part().prop_map(|(start, len)| Act::Discard(start, len)),
        2 => part().prop_map(|(start, len)| Act::Zero(start, len)),
        1 => Just(Act::Flush),
        1 => Just(Act::Restore),
        2 => any::<bool>().prop_map(|restored| Act::EndDelta { restored }),
    ]
}

/// A device restored from the state of `machine`'s.
fn again(
    machine: &mut Machine,
    fixture: &Fixture,
    layers: &[(PathBuf, Vec<u8>)],
    delta: &Path,
) -> Machine {
    let open = |(path, _): &(PathBuf, _)| ImageFile::open(path, ImageAccess::ReadOnly).unwrap();
    let disk = DiskConfig::CopyOnWrite {
        base: fixture.open(ImageAccess::ReadOnly),
        layers: layers.iter().map(open).collect(),
        delta: delta.to_owned(),
        bytes: None,
    };
    machine.clone_with(|version, bytes| BlockDevice::restore(config(disk), version, bytes).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// A copy-on-write disk behaves as a plain array of bytes does, and its base
    /// never changes. Discarded sectors read as zero or as before.
    #[test]
    fn cow_disk_agrees_with_an_array(acts in proptest::collection::vec(act(), 1..40)) {
        let fixture = Fixture::new(MODEL_SECTORS * 512);
        let mut machine = fixture.boot(fixture.cow());
        let mut model = fixture.image.clone();
        let mut delta = fixture.path("delta");
        // What every layer held when its delta ended.
        let mut layers: Vec<(PathBuf, Vec<u8>)> = Vec::new();
        for (number, act) in acts.iter().enumerate() {
            match *act {
                Act::Read(start, len) => {
                    let data = machine.read_disk(start * 512, len * 512);
                    prop_assert_eq!(&data, &model[start * 512..(start + len) * 512]);
                }
                Act::Write(start, len) => {
                    let data = pattern(len * 512, number);
                    let sector = u64::try_from(start).unwrap();
                    prop_assert_eq!(machine.request(OUT, sector, &data, 0).0, OK);
                    model[start * 512..(start + len) * 512].copy_from_slice(&data);
                }
                Act::Discard(start, len) | Act::Zero(start, len) => {
                    let discard = matches!(act, Act::Discard(..));
                    let kind = if discard { DISCARD } else { WRITE_ZEROES };
                    let sector = u64::try_from(start).unwrap();
                    let out = range(sector, u32::try_from(len).unwrap(), 0);
                    prop_assert_eq!(machine.request(kind, 0, &out, 0).0, OK);
                    for sector in start..start + len {
                        let at = sector * 512..(sector + 1) * 512;
                        let block = sector / 8 * 8;
                        let whole = block >= start
                            && (block + 8 <= start + len || start + len == MODEL_SECTORS);
                        if !discard || whole {
                            model[at].fill(0);
                        }
                    }
                }
                Act::Flush => prop_assert_eq!(machine.request(FLUSH, 0, &[], 0).0, OK),
                Act::Restore => machine = again(&mut machine, &fixture, &layers, &delta),
                Act::EndDelta { restored } => {
                    machine.transport.quiesce();
                    let next = fixture.path(&format!("delta-{number}"));
                    let device = machine.transport.device::<BlockDevice>().unwrap();
                    let before = device.layers().len();
                    device.end_delta(next.clone()).unwrap();
                    if device.layers().len() > before {
                        layers.push((delta.clone(), std::fs::read(&delta).unwrap()));
                    }
                    delta = next;
                    if restored {
                        machine = again(&mut machine, &fixture, &layers, &delta);
                    }
                }
            }
        }
        for (path, bytes) in &layers {
            prop_assert_eq!(&std::fs::read(path).unwrap(), bytes);
        }
        let base = File::open(fixture.path("image")).unwrap();
        let mut bytes = vec![0; model.len()];
        base.read_exact_at(&mut bytes, 0).unwrap();
        prop_assert_eq!(&bytes, &fixture.image);
        prop_assert_eq!(machine.read_disk(0, model.len()), model);
    }
}
