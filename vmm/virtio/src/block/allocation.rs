//! Which blocks of a copy-on-write disk are in its delta.
//!
//! A map from chunks of 4096 blocks (16 MiB of disk) to bits. A chunk without
//! any block costs nothing, a full one costs no bits.

use std::collections::BTreeMap;
use std::ops::Range;

/// Blocks of one chunk.
const CHUNK_BLOCKS: u64 = 4096;

/// Words of one chunk's bits.
const CHUNK_WORDS: usize = 64;

/// Bits of a word.
const WORD_BITS: u64 = 64;

/// Set of allocated blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    chunks: BTreeMap<u64, Chunk>,
    blocks: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Chunk {
    Full,
    Some { bits: Box<[u64; CHUNK_WORDS]>, blocks: u64 },
}

impl Chunk {
    /// Whether the block is set, and how many blocks from it on are the same way,
    /// looking no further than the end of the block's word.
    fn look(&self, block: u64) -> (bool, u64) {
        let rest_of_chunk = CHUNK_BLOCKS - block;
        match self {
            Self::Full => (true, rest_of_chunk),
            Self::Some { bits, .. } => {
                let (word, bit) = position(block);
                let shifted = bits.get(word).copied().unwrap_or(0) >> bit;
                let run = match shifted & 1 {
                    1 => shifted.trailing_ones(),
                    _ => shifted.trailing_zeros(),
                };
                (shifted & 1 == 1, u64::from(run).min(WORD_BITS - bit))
            }
        }
    }

    /// Sets blocks of this chunk; returns how many were not set before.
    fn set(&mut self, range: Range<u64>) -> u64 {
        let Self::Some { bits, blocks } = self else { return 0 };
        let mut added = 0;
        let mut block = range.start;
        while block < range.end {
            let (word, bit) = position(block);
            let count = (WORD_BITS - bit).min(range.end - block);
            let mask = (u64::MAX >> (WORD_BITS - count)) << bit;
            if let Some(value) = bits.get_mut(word) {
                added += u64::from((mask & !*value).count_ones());
                *value |= mask;
            }
            block += count;
        }
        *blocks += added;
        if *blocks == CHUNK_BLOCKS {
            *self = Self::Full;
        }
        added
    }
}

/// Word and bit of a block within its chunk.
fn position(block: u64) -> (usize, u64) {
    let word = usize::try_from(block / WORD_BITS).expect("a chunk has 64 words");
    (word, block % WORD_BITS)
}

impl Allocation {
    /// Number of allocated blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Whether no block is allocated.
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// Whether `block` is allocated.
    pub fn contains(&self, block: u64) -> bool {
        self.chunks
            .get(&(block / CHUNK_BLOCKS))
            .is_some_and(|chunk| chunk.look(block % CHUNK_BLOCKS).0)
    }

    /// Whether `range.start` is allocated, and how many blocks from there, within
    /// the range, are the same way.
    pub fn run(&self, range: Range<u64>) -> (bool, u64) {
        let mut first = None;
        let mut block = range.start;
        while block < range.end {
            let (allocated, same) = match self.chunks.get(&(block / CHUNK_BLOCKS)) {
                Some(chunk) => chunk.look(block % CHUNK_BLOCKS),
                None => (false, CHUNK_BLOCKS - block % CHUNK_BLOCKS),
            };
            if *first.get_or_insert(allocated) != allocated {
                break;
            }
            block = (block + same).min(range.end);
        }
        (first.unwrap_or(false), block - range.start)
    }

    /// Allocates `range`.
    pub fn set(&mut self, range: Range<u64>) {
        let mut block = range.start;
        while block < range.end {
            let start = block % CHUNK_BLOCKS;
            let count = (CHUNK_BLOCKS - start).min(range.end - block);
            let index = block / CHUNK_BLOCKS;
            if count == CHUNK_BLOCKS {
                let before = match self.chunks.insert(index, Chunk::Full) {
                    None => 0,
                    Some(Chunk::Full) => CHUNK_BLOCKS,
                    Some(Chunk::Some { blocks, .. }) => blocks,
                };
                self.blocks += CHUNK_BLOCKS - before;
            } else {
                let chunk = self
                    .chunks
                    .entry(index)
                    .or_insert_with(|| Chunk::Some { bits: Box::new([0; CHUNK_WORDS]), blocks: 0 });
                self.blocks += chunk.set(start..start + count);
            }
            block += count;
        }
    }

    /// The allocated blocks as pairs: blocks skipped since the last run, blocks of
    /// the run.
    pub fn to_runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut end_of_last = 0;
        for index in self.chunks.keys() {
            let mut block = index * CHUNK_BLOCKS;
            let end = block + CHUNK_BLOCKS;
            while block < end {
                let (allocated, count) = self.run(block..end);
                if allocated {
                    match runs.last_mut() {
                        Some((_, length)) if end_of_last == block => *length += count,
                        _ => runs.push((block - end_of_last, count)),
                    }
                    end_of_last = block + count;
                }
                block += count;
            }
        }
        runs
    }

    /// The opposite of [`Allocation::to_runs`]; `None` if the runs are not in
    /// their one form or go beyond `blocks`.
    pub fn from_runs(runs: &[(u64, u64)], blocks: u64) -> Option<Self> {
        let mut allocation = Self::default();
        let mut end = 0u64;
        for (number, (skipped, count)) in runs.iter().enumerate() {
            if *count == 0 || (*skipped == 0 && number > 0) {
                return None;
            }
            let start = end.checked_add(*skipped)?;
            end = start.checked_add(*count)?;
            if end > blocks {
                return None;
            }
            allocation.set(start..end);
        }
        Some(allocation)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const BLOCKS: u64 = 3 * CHUNK_BLOCKS + 17;

    fn ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
        let small =
            (0..BLOCKS, 1..200u64).prop_map(|(start, len)| start..(start + len).min(BLOCKS));
        let large =
            (0..BLOCKS, 1..BLOCKS).prop_map(|(start, len)| start..(start + len).min(BLOCKS));
        proptest::collection::vec(prop_oneof![4 => small, 1 => large], 0..24)
    }

    proptest! {
        #[test]
        fn map_agrees_with_a_set(ranges in ranges(), probes in proptest::collection::vec(0..BLOCKS, 64)) {
            let mut map = Allocation::default();
            let mut model = BTreeSet::new();
            for range in ranges {
                map.set(range.clone());
                model.extend(range);
            }
            prop_assert_eq!(map.blocks(), u64::try_from(model.len()).unwrap());
            for probe in probes {
                prop_assert_eq!(map.contains(probe), model.contains(&probe));
                let (allocated, count) = map.run(probe..BLOCKS);
                prop_assert_eq!(allocated, model.contains(&probe));
                let expected = (probe..BLOCKS)
                    .take_while(|block| model.contains(block) == allocated)
                    .count();
                prop_assert_eq!(count, u64::try_from(expected).unwrap());
            }
        }

        #[test]
        fn runs_come_back_as_the_same_map(ranges in ranges()) {
            let mut map = Allocation::default();
            for range in ranges {
                map.set(range);
            }
            let runs = map.to_runs();
            let back = Allocation::from_runs(&runs, BLOCKS).unwrap();
            prop_assert_eq!(back.to_runs(), runs);
            prop_assert_eq!(back.blocks(), map.blocks());
        }

        #[test]
        fn hostile_runs_never_leave_the_disk(runs in proptest::collection::vec((0..2 * BLOCKS, 0..2 * BLOCKS), 0..8)) {
            if let Some(map) = Allocation::from_runs(&runs, BLOCKS) {
                prop_assert!(map.blocks() <= BLOCKS);
                prop_assert!(!map.contains(BLOCKS));
            }
        }
    }

    #[test]
    fn from_runs_overflowing_is_refused() {
        assert!(Allocation::from_runs(&[(u64::MAX, 1)], BLOCKS).is_none());
        assert!(Allocation::from_runs(&[(1, u64::MAX)], BLOCKS).is_none());
    }

    #[test]
    fn empty_map_owns_no_chunk() {
        let map = Allocation::default();
        assert!(map.is_empty());
        assert!(map.chunks.is_empty());
        assert!(map.to_runs().is_empty());
    }
}
