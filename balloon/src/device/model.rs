//! The queues and the configuration space.

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::{GuestMemory, GuestMemoryMmap, Permissions};
use warren_virtio::queue::{Chain, Drained, Segment, Step, drain, push, wants_interrupt};
use warren_virtio::{DeviceContext, EventRegistry, Outcome, VirtioDevice, copy_config};

use super::pages::{GuestRange, PAGE_BYTES, join};
use super::persist::{self, BalloonState};
use super::statistics::ENTRY_BYTES;
use super::{
    BATCH_PAGES, BalloonError, BalloonMetrics, BalloonPages, BalloonStatistics, CHAIN_PAGES_MAX,
    CHAINS_MAX, PageReclaimer, QUEUE_SIZE, STATISTICS_BYTES_MAX,
};

/// Feature bits (virtio 1.2, section 5.5.3): the guest sends statistics,
const FEATURE_STATISTICS: u64 = 1 << 1;
/// takes pages back by itself before it kills for want of memory,
const FEATURE_DEFLATE_ON_OOM: u64 = 1 << 2;
/// and reports pages it has no use for.
const FEATURE_REPORTING: u64 = 1 << 5;

/// Bytes of a page number.
const NUMBER_BYTES: u64 = 4;

/// Offset of the only field the driver writes.
const ACTUAL_OFFSET: u64 = 4;

/// num_pages, actual, and two fields of features that are not offered.
const CONFIG_BYTES: usize = 16;

/// What a queue is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueueRole {
    Inflate,
    Deflate,
    Statistics,
    Reporting,
}

/// A virtio-balloon device.
pub struct BalloonDevice {
    reclaimer: Box<dyn PageReclaimer>,
    state: BalloonState,
    chain: Chain,
    metrics: BalloonMetrics,
}

impl BalloonDevice {
    /// An empty balloon.
    pub fn new(reclaimer: Box<dyn PageReclaimer>) -> Self {
        let state = BalloonState {
            target_pages: 0,
            actual_pages: 0,
            statistics_agreed: false,
            statistics_head: None,
            statistics: None,
        };
        Self { reclaimer, state, chain: Chain::default(), metrics: BalloonMetrics::default() }
    }

    /// A balloon from saved state.
    pub fn restore(
        reclaimer: Box<dyn PageReclaimer>,
        version: u16,
        bytes: &[u8],
    ) -> Result<Self, BalloonError> {
        Ok(Self { state: persist::restore(version, bytes)?, ..Self::new(reclaimer) })
    }

    /// Asks the guest for a balloon of that size. The outcome has to reach the
    /// transport.
    pub fn set_target(&mut self, target: BalloonPages) -> Outcome {
        let config_changed = self.state.target_pages != target.0;
        self.state.target_pages = target.0;
        Outcome { config_changed, ..Outcome::default() }
    }

    /// The size asked for.
    pub fn target(&self) -> BalloonPages {
        BalloonPages(self.state.target_pages)
    }

    /// The size the guest says the balloon has.
    pub fn actual(&self) -> BalloonPages {
        BalloonPages(self.state.actual_pages)
    }

    /// The guest's last numbers, if it ever told any.
    pub fn statistics(&self) -> Option<&BalloonStatistics> {
        self.state.statistics.as_ref()
    }

    /// Asks the guest for new numbers. Nothing happens if it has not answered the
    /// last time.
    pub fn request_statistics(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let mut outcome = Outcome::default();
        let Some(index) = self.index_of(QueueRole::Statistics) else { return outcome };
        let Some(queue) = context.queues.get_mut(index) else { return outcome };
        if let Some(head) = self.state.statistics_head.take() {
            outcome.failed = push(queue, context.memory, head, 0).is_err();
            outcome.used_buffers = !outcome.failed && wants_interrupt(queue, context.memory);
        }
        outcome
    }

    /// Counters.
    pub fn balloon_metrics(&self) -> &BalloonMetrics {
        &self.metrics
    }

    /// Queues of features that were not agreed do not exist: later ones move up.
    fn role(&self, index: usize) -> Option<QueueRole> {
        match (index, self.state.statistics_agreed) {
            (0, _) => Some(QueueRole::Inflate),
            (1, _) => Some(QueueRole::Deflate),
            (2, true) => Some(QueueRole::Statistics),
            (2, false) | (3, true) => Some(QueueRole::Reporting),
            _ => None,
        }
    }

    fn index_of(&self, role: QueueRole) -> Option<usize> {
        (0..4).find(|index| self.role(*index) == Some(role))
    }

    fn inflate(&mut self, chain: &Chain, memory: &GuestMemoryMmap) {
        let run = chain.readable();
        let count = run.len() / NUMBER_BYTES;
        if !run.len().is_multiple_of(NUMBER_BYTES) || count == 0 || count > CHAIN_PAGES_MAX {
            self.metrics.malformed_requests += 1;
            return;
        }
        let mut rest = run;
        while !rest.is_empty() {
            let mut bytes = [0; BATCH_PAGES * 4];
            let Ok(read @ 1..) = rest.read(memory, &mut bytes) else { return };
            let mut numbers = [0; BATCH_PAGES];
            let mut filled = 0;
            let words = bytes.get(..read).unwrap_or_default().as_chunks::<4>().0;
            for (place, word) in numbers.iter_mut().zip(words) {
                *place = u32::from_le_bytes(*word);
                filled += 1;
            }
            for range in join(numbers.get_mut(..filled).unwrap_or_default()) {
                self.metrics.inflated_pages += range.bytes / PAGE_BYTES;
                self.release(range, memory);
            }
            rest = rest.skip(u64::try_from(read).unwrap_or(u64::MAX));
        }
    }

    fn deflate(&mut self, chain: &Chain) {
        let run = chain.readable();
        if !run.len().is_multiple_of(NUMBER_BYTES) || run.is_empty() {
            self.metrics.malformed_requests += 1;
            return;
        }
        // The pages come back by being touched; there is nothing to prepare.
        self.metrics.deflated_pages += run.len() / NUMBER_BYTES;
    }

    fn report(&mut self, chain: &Chain, memory: &GuestMemoryMmap) {
        if chain.writable().is_empty() {
            self.metrics.malformed_requests += 1;
            return;
        }
        for Segment { address, len } in chain.writable().iter() {
            let bytes = u64::from(len);
            let aligned = address.0.is_multiple_of(PAGE_BYTES) && bytes.is_multiple_of(PAGE_BYTES);
            if !aligned {
                self.metrics.foreign_pages += 1;
                continue;
            }
            self.metrics.reported_bytes += bytes;
            self.release(GuestRange { start: address, bytes }, memory);
        }
    }

    /// Gives a range back if all of it is the guest's RAM.
    fn release(&mut self, range: GuestRange, memory: &GuestMemoryMmap) {
        let bytes = usize::try_from(range.bytes).unwrap_or(usize::MAX);
        if !memory.check_range(range.start, bytes, Permissions::ReadWrite) {
            self.metrics.foreign_pages += 1;
            return;
        }
        match self.reclaimer.release(range.start, range.bytes) {
            Ok(()) => self.metrics.released_ranges += 1,
            Err(_) => self.metrics.release_failures += 1,
        }
    }

    /// Reads the guest's numbers and keeps the buffer, to be given back when new
    /// ones are wanted.
    fn take_statistics(&mut self, chain: &Chain, memory: &GuestMemoryMmap) -> Step {
        let run = chain.readable();
        if run.is_empty()
            || run.len() > STATISTICS_BYTES_MAX
            || self.state.statistics_head.is_some()
        {
            self.metrics.malformed_requests += 1;
            return Step::Used(0);
        }
        let mut statistics = BalloonStatistics::default();
        let mut rest = run;
        let mut entry = [0; ENTRY_BYTES];
        while let Ok(ENTRY_BYTES) = rest.read(memory, &mut entry) {
            statistics.take(entry);
            rest = rest.skip(10);
        }
        self.metrics.statistics_updates += 1;
        self.state.statistics = Some(statistics);
        self.state.statistics_head = Some(chain.head());
        Step::Taken
    }

    fn serve(&mut self, role: QueueRole, index: usize, context: &mut DeviceContext<'_>) -> Outcome {
        let Some(queue) = context.queues.get_mut(index) else { return Outcome::default() };
        let memory = context.memory;
        let mut chain = std::mem::take(&mut self.chain);
        let drained = drain(queue, memory, &mut chain, CHAINS_MAX, |_, chain| match role {
            QueueRole::Inflate => {
                self.inflate(chain, memory);
                Step::Used(0)
            }
            QueueRole::Deflate => {
                self.deflate(chain);
                Step::Used(0)
            }
            QueueRole::Statistics => self.take_statistics(chain, memory),
            QueueRole::Reporting => {
                self.report(chain, memory);
                Step::Used(0)
            }
        });
        self.chain = chain;
        let Drained { completed, unfinished, failed, malformed, held: _ } = drained;
        self.metrics.malformed_requests += malformed;
        let used_buffers = completed && wants_interrupt(queue, memory);
        Outcome { used_buffers, failed, unfinished, ..Outcome::default() }
    }
}

impl VirtioDevice for BalloonDevice {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn name(&self) -> &str {
        "balloon"
    }

    fn features(&self) -> u64 {
        FEATURE_STATISTICS | FEATURE_DEFLATE_ON_OOM | FEATURE_REPORTING
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE, QUEUE_SIZE, QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut space = [0; CONFIG_BYTES];
        let target = self.state.target_pages.to_le_bytes();
        let actual = self.state.actual_pages.to_le_bytes();
        for (place, byte) in space.iter_mut().zip(target.into_iter().chain(actual)) {
            *place = byte;
        }
        copy_config(&space, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (ACTUAL_OFFSET, Ok(bytes)) = (offset, <[u8; 4]>::try_from(data)) {
            self.state.actual_pages = u32::from_le_bytes(bytes);
        }
    }

    fn activate(&mut self, features: u64, _context: &mut DeviceContext<'_>) -> Outcome {
        self.state.statistics_agreed = features & FEATURE_STATISTICS != 0;
        Outcome::default()
    }

    fn reset(&mut self, _events: &dyn EventRegistry) {
        // The host's wish outlives the driver; what the driver said does not.
        let target_pages = self.state.target_pages;
        self.state = BalloonState {
            target_pages,
            actual_pages: 0,
            statistics_agreed: false,
            statistics_head: None,
            statistics: None,
        };
    }

    fn notify(&mut self, index: usize, context: &mut DeviceContext<'_>) -> Outcome {
        match self.role(index) {
            Some(role) => self.serve(role, index, context),
            None => Outcome::default(),
        }
    }

    fn save(&self) -> (u16, Vec<u8>) {
        persist::save(&self.state)
    }

    fn metrics(&self) -> Vec<(&'static str, u64)> {
        self.metrics.entries()
    }
}
