//! Recent output of one process and who has seen how much of it.
//!
//! Chunks are numbered. Each reader has the number of the next chunk it takes.
//! While anyone reads, nothing unread by the slowest is dropped: [`OutputLog::has_room`]
//! becomes false and the pump stops. While nobody reads, the newest
//! [`RETAINED_BYTES`] stay, and what falls out unseen is counted.

use std::collections::VecDeque;

use bytes::Bytes;

/// Output kept for who connects later.
pub const RETAINED_BYTES: u64 = 256 << 10;

/// How far the slowest reader may be behind before the process has to wait.
const WINDOW_BYTES: u64 = 256 << 10;

/// What a chunk costs beside its bytes, so that tiny chunks are bounded too.
const CHUNK_OVERHEAD_BYTES: u64 = 64;

/// Where output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    Stdout,
    Stderr,
    Pty,
}

impl Channel {
    /// The field's name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Channel::Stdout => "stdout",
            Channel::Stderr => "stderr",
            Channel::Pty => "pty",
        }
    }
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    pub channel: Channel,
    pub bytes: Bytes,
}

struct Kept {
    chunk: Chunk,
    /// Cost of all chunks before this one, from the beginning.
    start: u64,
    /// Bytes of all chunks before this one, from the beginning.
    start_bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct Reader {
    next: u64,
    missed_bytes: u64,
}

/// A reader's place.
#[derive(Debug, PartialEq, Eq)]
pub struct ReaderId(usize);

#[derive(Default)]
pub struct OutputLog {
    chunks: VecDeque<Kept>,
    first: u64,
    end_cost: u64,
    end_bytes: u64,
    readers: Vec<Option<Reader>>,
    /// Number of the first chunk that no reader has taken.
    unseen: u64,
    dropped_bytes: u64,
}

impl OutputLog {
    /// Whether the process may be read from.
    pub fn has_room(&self) -> bool {
        match self.slowest() {
            None => true,
            Some(next) => self.end_cost - self.cost_before(next) < WINDOW_BYTES,
        }
    }

    /// Adds output.
    pub fn push(&mut self, channel: Channel, bytes: Bytes) {
        let (cost, length) = (cost(&bytes), length(&bytes));
        self.chunks.push_back(Kept {
            chunk: Chunk { channel, bytes },
            start: self.end_cost,
            start_bytes: self.end_bytes,
        });
        self.end_cost += cost;
        self.end_bytes += length;
        self.trim();
    }

    /// A new reader, which begins with what nobody has seen.
    pub fn attach(&mut self) -> ReaderId {
        self.attach_at(Reader {
            next: self.unseen.max(self.first),
            missed_bytes: self.dropped_bytes,
        })
    }

    /// A new reader, which begins with the oldest output that is kept.
    pub fn attach_replaying(&mut self) -> ReaderId {
        let missed_bytes = self.chunks.front().map_or(self.end_bytes, |kept| kept.start_bytes);
        self.attach_at(Reader { next: self.first, missed_bytes })
    }

    fn attach_at(&mut self, reader: Reader) -> ReaderId {
        let free = self.readers.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.readers.push(None);
            self.readers.len() - 1
        });
        self.readers[index] = Some(reader);
        ReaderId(index)
    }

    /// The reader's next chunk.
    pub fn take(&mut self, reader: &ReaderId) -> Option<Chunk> {
        let place = self.readers[reader.0].as_mut().expect("attached until it is detached");
        let index = usize::try_from(place.next - self.first).expect("the log is small");
        let chunk = self.chunks.get(index)?.chunk.clone();
        place.next += 1;
        self.unseen = self.unseen.max(place.next);
        self.trim();
        Some(chunk)
    }

    /// The reader goes away.
    pub fn detach(&mut self, reader: &ReaderId) {
        self.readers[reader.0] = None;
        self.trim();
    }

    /// Bytes that this reader would have been given and that were dropped
    /// before it came.
    pub fn missed_bytes(&self, reader: &ReaderId) -> u64 {
        self.readers[reader.0].map_or(0, |reader| reader.missed_bytes)
    }

    /// Bytes of output that nobody saw and nobody will.
    #[cfg(test)]
    pub fn dropped_bytes(&self) -> u64 {
        self.dropped_bytes
    }

    /// Bytes this log holds.
    pub fn held_bytes(&self) -> u64 {
        self.end_cost - self.chunks.front().map_or(self.end_cost, |kept| kept.start)
    }

    /// Forgets everything that is kept and not wanted by a reader.
    pub fn forget(&mut self) {
        self.trim_to(0);
    }

    fn trim(&mut self) {
        self.trim_to(RETAINED_BYTES);
    }

    fn trim_to(&mut self, limit: u64) {
        let wanted = self.slowest().unwrap_or(u64::MAX);
        while self.held_bytes() > limit && self.first < wanted {
            let Some(kept) = self.chunks.pop_front() else { break };
            if self.first >= self.unseen {
                self.dropped_bytes += length(&kept.chunk.bytes);
            }
            self.first += 1;
        }
    }

    fn slowest(&self) -> Option<u64> {
        self.readers.iter().flatten().map(|reader| reader.next).min()
    }

    fn cost_before(&self, number: u64) -> u64 {
        let index = usize::try_from(number - self.first).expect("the log is small");
        self.chunks.get(index).map_or(self.end_cost, |kept| kept.start)
    }
}

fn cost(bytes: &Bytes) -> u64 {
    length(bytes) + CHUNK_OVERHEAD_BYTES
}

fn length(bytes: &Bytes) -> u64 {
    u64::try_from(bytes.len()).expect("lengths fit in 64 bits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(length: usize) -> Bytes {
        vec![b'x'; length].into()
    }

    #[test]
    fn has_room_slow_reader_stops_the_pump() {
        let mut log = OutputLog::default();
        let reader = log.attach();
        while log.has_room() {
            log.push(Channel::Stdout, bytes(10_000));
        }
        assert!(log.held_bytes() < WINDOW_BYTES + 20_000);
        log.take(&reader).unwrap();
        assert!(log.has_room());
        assert_eq!(log.dropped_bytes(), 0);
    }

    #[test]
    fn push_without_reader_keeps_the_newest_and_counts() {
        let mut log = OutputLog::default();
        for _ in 0..1000 {
            assert!(log.has_room());
            log.push(Channel::Stdout, bytes(1000));
        }
        assert!(log.held_bytes() <= RETAINED_BYTES);
        let reader = log.attach();
        let mut seen = 0;
        while let Some(chunk) = log.take(&reader) {
            seen += length(&chunk.bytes);
        }
        assert_eq!(seen + log.missed_bytes(&reader), 1_000_000);
    }

    #[test]
    fn attach_second_reader_gets_only_what_is_new() {
        let mut log = OutputLog::default();
        let first = log.attach();
        log.push(Channel::Stdout, bytes(1));
        assert!(log.take(&first).is_some());
        let second = log.attach();
        assert!(log.take(&second).is_none());
        let third = log.attach_replaying();
        assert!(log.take(&third).is_some());
        log.push(Channel::Stderr, bytes(2));
        assert_eq!(log.take(&second).unwrap().channel, Channel::Stderr);
    }

    #[test]
    fn forget_releases_what_nobody_wants() {
        let mut log = OutputLog::default();
        log.push(Channel::Stdout, bytes(10));
        log.forget();
        assert_eq!((log.held_bytes(), log.dropped_bytes()), (0, 10));
    }

    proptest! {
        /// Whatever happens, a reader sees consecutive numbers and no byte is
        /// both seen and counted as dropped.
        #[test]
        fn log_loses_nothing_silently(steps in prop::collection::vec((0u8..6, 1usize..40_000), 1..300)) {
            let mut log = OutputLog::default();
            let mut readers: Vec<(ReaderId, Option<u64>)> = Vec::new();
            let (mut pushed, mut seen) = (0u64, std::collections::BTreeSet::new());
            let mut sizes = Vec::new();
            for (kind, size) in steps {
                match kind {
                    0 | 1 if log.has_room() => {
                        let number = u64::try_from(sizes.len()).unwrap();
                        let mut content = vec![0; size.max(8)];
                        content[..8].copy_from_slice(&number.to_le_bytes());
                        sizes.push(length(&content.clone().into()));
                        pushed += u64::try_from(content.len()).unwrap();
                        log.push(Channel::Stdout, content.into());
                    }
                    2 if readers.len() < 4 => readers.push((log.attach(), None)),
                    3 if readers.len() < 4 => readers.push((log.attach_replaying(), None)),
                    4 if !readers.is_empty() => {
                        let index = size % readers.len();
                        let (reader, last) = &mut readers[index];
                        if let Some(chunk) = log.take(reader) {
                            let number = u64::from_le_bytes(*chunk.bytes.first_chunk().unwrap());
                            prop_assert!(last.is_none_or(|last| number == last + 1));
                            *last = Some(number);
                            seen.insert(number);
                        }
                    }
                    5 if !readers.is_empty() => {
                        let (reader, _) = readers.swap_remove(size % readers.len());
                        log.detach(&reader);
                    }
                    _ => {}
                }
                let seen_bytes: u64 = seen.iter().map(|n| sizes[usize::try_from(*n).unwrap()]).sum();
                prop_assert!(seen_bytes + log.dropped_bytes() <= pushed);
                prop_assert!(log.held_bytes() <= WINDOW_BYTES.max(RETAINED_BYTES) + 80_000);
            }
        }
    }
}
