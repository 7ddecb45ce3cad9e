//! The two queues of the port.

use std::io;

use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use super::{ConsoleMetrics, INPUT_BYTES_MAX, OUTPUT_BYTES_MAX, QUEUE_SIZE, persist};
use crate::device::{DeviceContext, EventRegistry, Outcome, VirtioDevice};
use crate::persist::StateError;
use crate::queue::{Chain, Step, drain, to_u64, wants_interrupt};

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

/// Where the guest's output goes.
pub trait ConsoleSink: Send {
    /// Takes bytes, or as many of them as its bound allows. Must not block.
    fn output(&mut self, data: &[u8]) -> io::Result<usize>;
}

/// A virtio-console device.
pub struct ConsoleDevice {
    sink: Box<dyn ConsoleSink>,
    input: Vec<u8>,
    chain: Chain,
    metrics: ConsoleMetrics,
}

impl ConsoleDevice {
    /// A console without waiting input.
    pub fn new(sink: Box<dyn ConsoleSink>) -> Self {
        Self {
            sink,
            input: Vec::new(),
            chain: Chain::default(),
            metrics: ConsoleMetrics::default(),
        }
    }

    /// A console from saved state.
    pub fn restore(
        sink: Box<dyn ConsoleSink>,
        version: u16,
        bytes: &[u8],
    ) -> Result<Self, StateError> {
        Ok(Self { input: persist::restore(version, bytes)?, ..Self::new(sink) })
    }

    /// Gives the guest input; returns how many bytes were taken.
    pub fn input(&mut self, data: &[u8], context: &mut DeviceContext<'_>) -> (usize, Outcome) {
        let room = INPUT_BYTES_MAX.saturating_sub(self.input.len());
        let taken = data.get(..room.min(data.len())).unwrap_or_default();
        self.input.extend_from_slice(taken);
        (taken.len(), self.receive(context))
    }

    /// Counters.
    pub fn console_metrics(&self) -> &ConsoleMetrics {
        &self.metrics
    }

    fn receive(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let Self { input, chain, metrics, .. } = self;
        if input.is_empty() {
            return Outcome::default();
        }
        let Some(queue) = context.queues.get_mut(RECEIVE) else { return Outcome::default() };
        let mut given = 0;
        let drained = drain(queue, context.memory, chain, usize::from(QUEUE_SIZE), |_, chain| {
            let rest = input.get(given..).unwrap_or_default();
            if rest.is_empty() {
                return Step::Hold;
            }
            match chain.writable().write(context.memory, rest) {
                Ok(0) | Err(_) => {
                    metrics.malformed_requests += 1;
                    Step::Used(0)
                }
                Ok(bytes) => {
                    given += bytes;
                    metrics.input_bytes += to_u64(bytes);
                    Step::Used(u32::try_from(bytes).expect("bounded by the input"))
                }
            }
        });
        metrics.malformed_requests += drained.malformed;
        input.drain(..given);
        if input.is_empty() {
            *input = Vec::new();
        }
        Outcome {
            used_buffers: drained.completed && wants_interrupt(queue, context.memory),
            failed: drained.failed,
            unfinished: drained.unfinished,
            ..Outcome::default()
        }
    }

    fn transmit(&mut self, context: &mut DeviceContext<'_>) -> Outcome {
        let Self { sink, chain, metrics, .. } = self;
        let Some(queue) = context.queues.get_mut(TRANSMIT) else { return Outcome::default() };
        let drained = drain(queue, context.memory, chain, usize::from(QUEUE_SIZE), |_, chain| {
            let run = chain.readable();
            if run.is_empty() || run.len() > OUTPUT_BYTES_MAX {
                metrics.malformed_requests += 1;
                return Step::Used(0);
            }
            let mut buffer = [0; 1024];
            let mut done = 0;
            while done < run.len() {
                let Ok(bytes @ 1..) = run.skip(done).read(context.memory, &mut buffer) else {
                    break;
                };
                let data = buffer.get(..bytes).unwrap_or_default();
                let taken = sink.output(data).unwrap_or(0).min(bytes);
                metrics.dropped_output_bytes += to_u64(bytes - taken);
                done += to_u64(bytes);
            }
            metrics.output_bytes += done;
            Step::Used(0)
        });
        metrics.malformed_requests += drained.malformed;
        Outcome {
            used_buffers: drained.completed && wants_interrupt(queue, context.memory),
            failed: drained.failed,
            unfinished: drained.unfinished,
            ..Outcome::default()
        }
    }
}

impl VirtioDevice for ConsoleDevice {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn name(&self) -> &str {
        "console"
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, _features: u64, context: &mut DeviceContext<'_>) -> Outcome {
        self.receive(context)
    }

    fn reset(&mut self, _events: &dyn EventRegistry) {
        self.input = Vec::new();
    }

    fn notify(&mut self, index: usize, context: &mut DeviceContext<'_>) -> Outcome {
        match index {
            RECEIVE => self.receive(context),
            TRANSMIT => self.transmit(context),
            _ => Outcome::default(),
        }
    }

    fn save(&self) -> (u16, Vec<u8>) {
        persist::save(self.input.clone())
    }

    fn metrics(&self) -> Vec<(&'static str, u64)> {
        self.metrics.entries()
    }
}
