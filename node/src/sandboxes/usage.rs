//! What sandboxes use, sampled when somebody asks.
//!
//! Nobody polls: a sample wakes the guest. A sample is used again for
//! [`FRESH_FOR`], and kept for later questions about the past.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::{Phase, Sandbox};
use crate::agent::{self, AgentError, AgentMetrics};

/// Clients expect samples about this far apart.
const FRESH_FOR: SignedDuration = SignedDuration::from_secs(5);
/// An hour of samples.
const SAMPLES_MAX: usize = 720;
/// A guest that does not answer is not asked again for this long.
const FAILURE_PAUSE: Duration = Duration::from_secs(5);

/// One sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    pub at: Timestamp,
    pub metrics: AgentMetrics,
}

/// Samples of one sandbox.
#[derive(Debug, Default)]
pub struct Usage {
    samples: Mutex<VecDeque<Sample>>,
    /// Held while a sample is taken; remembers the last failure.
    sampling: tokio::sync::Mutex<Option<tokio::time::Instant>>,
}

impl Usage {
    fn last(&self) -> Option<Sample> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner).back().copied()
    }

    fn add(&self, sample: Sample) {
        let mut samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() == SAMPLES_MAX {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    fn between(&self, start: Timestamp, end: Timestamp) -> Vec<Sample> {
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        samples.iter().filter(|sample| (start..=end).contains(&sample.at)).copied().collect()
    }
}

impl Sandbox {
    /// Samples from `start` to `end`, both included; takes a fresh one if the range
    /// includes the present.
    ///
    /// # Errors
    /// When there is no sample at all and the agent does not give one.
    pub async fn usage_between(
        &self,
        start: Timestamp,
        end: Timestamp,
    ) -> Result<Vec<Sample>, AgentError> {
        let now = Timestamp::now();
        if start <= now
            && end >= now
            && let Err(error) = self.sample().await
        {
            tracing::debug!(sandbox_id = %self.id(), %error, "no fresh sample");
            // An older sample is better than none, but none is no answer.
            if self.usage.last().is_none() {
                return Err(error);
            }
        }
        // A sample taken just now is within a range that ends just now.
        let end = if end >= now { end.max(Timestamp::now()) } else { end };
        Ok(self.usage.between(start, end))
    }

    /// The last sample, fresh if possible.
    pub async fn usage_now(&self) -> Option<Sample> {
        let _ = self.sample().await;
        self.usage.last()
    }

    async fn sample(&self) -> Result<(), AgentError> {
        let Some(live) = self.live().filter(|_| self.phase() == Phase::Running) else {
            return Ok(());
        };
        let mut failed_at = self.usage.sampling.lock().await;
        let is_fresh = self
            .usage
            .last()
            .is_some_and(|last| Timestamp::now().duration_since(last.at) < FRESH_FOR);
        if is_fresh || failed_at.is_some_and(|at| at.elapsed() < FAILURE_PAUSE) {
            return Ok(());
        }
        let token = self.with_record(|record| record.envd_access_token.clone());
        match agent::metrics(&live.channels, &token).await {
            Ok(metrics) => {
                *failed_at = None;
                self.usage.add(Sample { at: Timestamp::now(), metrics });
                Ok(())
            }
            Err(error) => {
                *failed_at = Some(tokio::time::Instant::now());
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_is_bounded_and_ranged() {
        let usage = Usage::default();
        for second in 0..1000 {
            let at = Timestamp::from_second(second).unwrap();
            usage.add(Sample { at, metrics: AgentMetrics::default() });
        }
        let range = |start, end| {
            usage
                .between(
                    Timestamp::from_second(start).unwrap(),
                    Timestamp::from_second(end).unwrap(),
                )
                .len()
        };
        assert_eq!(range(0, 2000), SAMPLES_MAX);
        assert_eq!(range(0, 279), 0);
        assert_eq!(range(998, 999), 2);
    }
}
