//! What the daemon counts, for Prometheus.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::lifecycle::EndCause;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabels {
    cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: String,
    route: String,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

/// How a create ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreateOutcome {
    Created,
    Failed,
    Refused,
}

/// All counters; cheap to clone.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    creates: Family<OutcomeLabels, Counter>,
    create_seconds: Histogram,
    ends: Family<EndLabels, Counter>,
    sandboxes: Gauge,
    paused: Gauge,
    requests: Family<RequestLabels, Counter>,
    proxied: Family<OutcomeLabels, Counter>,
    streams: Gauge,
    adopted: Counter,
    store_failures: Counter,
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("warren");
        let creates = Family::default();
        let create_seconds =
            Histogram::new([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0]);
        let ends = Family::default();
        let sandboxes = Gauge::default();
        let paused = Gauge::default();
        let requests = Family::default();
        let proxied = Family::default();
        let streams = Gauge::default();
        let adopted = Counter::default();
        let store_failures = Counter::default();
        registry.register("creates", "Sandboxes asked for, by outcome", creates.clone());
        registry.register_with_unit(
            "create",
            "Time from request to a sandbox that serves",
            Unit::Seconds,
            create_seconds.clone(),
        );
        registry.register("ends", "Sandboxes that ended, by cause", ends.clone());
        registry.register("sandboxes", "Sandboxes alive or in transition", sandboxes.clone());
        registry.register("sandboxes_paused", "Sandboxes on disk", paused.clone());
        registry.register("requests", "Requests to the API, by route and status", requests.clone());
        registry.register("proxied", "Requests to sandboxes, by outcome", proxied.clone());
        registry.register("streams", "Requests to sandboxes under way", streams.clone());
        registry.register("adopted", "Sandboxes found running at the start", adopted.clone());
        registry.register("store_failures", "Batches the store refused", store_failures.clone());
        Self {
            registry: Arc::new(registry),
            creates,
            create_seconds,
            ends,
            sandboxes,
            paused,
            requests,
            proxied,
            streams,
            adopted,
            store_failures,
        }
    }

    pub fn create(&self, outcome: CreateOutcome, took: Duration) {
        let outcome = match outcome {
            CreateOutcome::Created => {
                self.create_seconds.observe(took.as_secs_f64());
                "created"
            }
            CreateOutcome::Failed => "failed",
            CreateOutcome::Refused => "refused",
        };
        self.creates.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    pub fn end(&self, cause: EndCause) {
        self.ends.get_or_create(&EndLabels { cause: cause.label() }).inc();
    }

    pub fn sandboxes(&self, alive: usize, paused: usize) {
        self.sandboxes.set(i64::try_from(alive).unwrap_or(i64::MAX));
        self.paused.set(i64::try_from(paused).unwrap_or(i64::MAX));
    }

    pub fn request(&self, method: &http::Method, route: &str, status: u16) {
        let labels = RequestLabels { method: method.to_string(), route: route.to_owned(), status };
        self.requests.get_or_create(&labels).inc();
    }

    pub fn proxied(&self, outcome: &'static str) {
        self.proxied.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    /// Counts a request to a sandbox while the value lives.
    pub fn stream(&self) -> StreamGuard {
        self.streams.inc();
        StreamGuard(self.streams.clone())
    }

    pub fn adopted(&self) {
        self.adopted.inc();
    }

    pub fn store_failure(&self) {
        self.store_failures.inc();
    }

    /// Everything in the text format.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut text, &self.registry);
        text
    }
}

/// See [`Metrics::stream`].
#[derive(Debug)]
pub struct StreamGuard(Gauge);

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_incremented_and_shown() {
        let metrics = Metrics::new();
        metrics.create(CreateOutcome::Created, Duration::from_millis(3));
        metrics.end(EndCause::Timeout);
        metrics.sandboxes(7, 3);
        metrics.request(&http::Method::GET, "/health", 200);
        metrics.proxied("ok");
        let _guard = metrics.stream();
        metrics.adopted();
        metrics.store_failure();
        let text = metrics.render();
        for expected in [
            "warren_creates_total{outcome=\"created\"} 1",
            "warren_create_seconds_count 1",
            "warren_ends_total{cause=\"timeout\"} 1",
            "warren_sandboxes 7",
            "warren_sandboxes_paused 3",
            "warren_requests_total{method=\"GET\",route=\"/health\",status=\"200\"} 1",
            "warren_proxied_total{outcome=\"ok\"} 1",
            "warren_streams 1",
            "warren_adopted_total 1",
            "warren_store_failures_total 1",
        ] {
            assert!(text.contains(expected), "{expected} is not in {text}");
        }
    }
}
