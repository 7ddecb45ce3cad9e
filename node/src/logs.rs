//! Log lines: fields, not prose.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::flags::LogFormat;

/// Sends log lines to standard error. Later calls change nothing.
pub fn start(format: LogFormat, level: LevelFilter) {
    let registry = tracing_subscriber::registry().with(level);
    let writer = std::io::stderr;
    let _ = match format {
        LogFormat::Text => registry
            .with(
                tracing_subscriber::fmt::layer()
                    .with_writer(writer)
                    .with_target(false)
                    .with_ansi(false),
            )
            .try_init(),
        LogFormat::Json => registry
            .with(tracing_subscriber::fmt::layer().with_writer(writer).json().flatten_event(true))
            .try_init(),
    };
}
