//! The request queue and its rate limit.

use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use vm_memory::GuestMemoryMmap;

use super::{BURST_BYTES, BYTES_PER_SECOND, QUEUE_SIZE, REQUEST_BYTES_MAX, RngMetrics, persist};
use crate::device::{DeviceContext, EventRegistry, Outcome, Readiness, VirtioDevice};
use crate::persist::StateError;
use crate::queue::{Chain, Segments, Step, drain, to_u64, wants_interrupt};
use crate::timer::Timer;

const TIMER_TOKEN: u32 = 0;

/// A virtio-rng device.
pub struct RngDevice {
    chain: Chain,
    bucket: Bucket,
    timer: Timer,
    metrics: RngMetrics,
}

/// Bytes that may be given now.
struct Bucket {
    bytes: u64,
    filled: Option<Instant>,
}

impl Bucket {
    fn full() -> Self {
        Self { bytes: BURST_BYTES, filled: None }
    }

    /// Adds what the time since the last call is worth.
    fn fill(&mut self, now: Instant) {
        let Some(last) = self.filled else {
            self.filled = Some(now);
            return;
        };
        let micros = u64::try_from(now.duration_since(last).as_micros()).unwrap_or(u64::MAX);
        let earned = micros.saturating_mul(BYTES_PER_SECOND) / 1_000_000;
        // Without the condition, frequent calls would round their gain away.
        if earned > 0 {
            self.bytes = self.bytes.saturating_add(earned).min(BURST_BYTES);
            self.filled = Some(now);
        }
    }

    /// When a whole request can be served again.
    fn delay() -> Duration {
        Duration::from_micros(REQUEST_BYTES_MAX * 1_000_000 / BYTES_PER_SECOND)
    }
}

impl Default for RngDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl RngDevice {
    /// The device.
    pub fn new() -> Self {
        Self {
            chain: Chain::default(),
            bucket: Bucket::full(),
            timer: Timer::new(TIMER_TOKEN),
            metrics: RngMetrics::default(),
        }
    }

    /// The device, from saved state.
    pub fn restore(version: u16, bytes: &[u8]) -> Result<Self, StateError> {
        persist::restore(version, bytes)?;
        Ok(Self::new())
    }

    /// Counters.
    pub fn rng_metrics(&self) -> &RngMetrics {
        &self.metrics
    }

    fn run(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let Some(queue) = context.queues.first_mut() else { return Outcome::default() };
        let Self { chain, bucket, timer, metrics } = self;
        bucket.fill(Instant::now());
        let drained = drain(queue, context.memory, chain, usize::from(QUEUE_SIZE), |_, chain| {
            let wanted = chain.writable().len().min(REQUEST_BYTES_MAX);
            if wanted == 0 {
                metrics.malformed_requests += 1;
                return Step::Used(0);
            }
            if bucket.bytes < wanted {
                return Step::Hold;
            }
            let given = fill(chain.writable().limit(wanted), context.memory);
            bucket.bytes -= given;
            metrics.requests += 1;
            metrics.bytes += given;
            metrics.host_failures += u64::from(given < wanted);
            Step::Used(u32::try_from(given).expect("at most a request's bytes"))
        });
        metrics.malformed_requests += drained.malformed;
        if drained.held && !timer.is_armed() {
            metrics.throttled += 1;
            if timer.arm(context.events, Bucket::delay()).is_err() {
                metrics.host_failures += 1;
            }
        }
        Outcome {
            used_buffers: drained.completed && wants_interrupt(queue, context.memory),
            failed: drained.failed,
            // Without a timer the event loop has to come back by itself.
            unfinished: drained.unfinished || (drained.held && !timer.is_armed()),
            ..Outcome::default()
        }
    }
}

/// Fills the run from the host's generator; returns the bytes written.
fn fill(run: Segments<'_>, memory: &GuestMemoryMmap) -> u64 {
    let mut done = 0;
    let mut buffer = [0; 256];
    while done < run.len() {
        let wanted = usize::try_from(run.len() - done).unwrap_or(usize::MAX).min(buffer.len());
        let Some(part) = buffer.get_mut(..wanted) else { break };
        // 256 bytes are never given in part once the pool is initialised.
        if getrandom(&mut *part, GetRandomFlags::empty()) != Ok(wanted) {
            break;
        }
        match run.skip(done).write(memory, part) {
            Ok(written) => done += to_u64(written),
            Err(_) => break,
        }
    }
    done
}

impl VirtioDevice for RngDevice {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn name(&self) -> &str {
        "rng"
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, _features: u64, _context: &mut DeviceContext<'_>) -> Outcome {
        Outcome::default()
    }

    fn resume(&mut self, _features: u64, context: &mut DeviceContext<'_>) -> Outcome {
        // A request may have been waiting for the rate when the state was saved.
        self.run(context)
    }

    fn reset(&mut self, events: &dyn EventRegistry) {
        self.timer.disarm(events);
    }

    fn notify(&mut self, _index: usize, context: &mut DeviceContext<'_>) -> Outcome {
        self.run(context)
    }

    fn event(
        &mut self,
        _token: u32,
        _readiness: Readiness,
        context: &mut DeviceContext<'_>,
    ) -> Outcome {
        self.timer.disarm(context.events);
        self.run(context)
    }

    fn quiesce(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        // Requests left waiting are served again from the queue: by `resume` in a
        // restored device, by the revisit asked for here in this one.
        let waiting = self.timer.is_armed();
        self.timer.disarm(context.events);
        Outcome { unfinished: waiting, ..Outcome::default() }
    }

    fn save(&self) -> (u16, Vec<u8>) {
        persist::save()
    }

    fn metrics(&self) -> Vec<(&'static str, u64)> {
        self.metrics.entries()
    }
}
