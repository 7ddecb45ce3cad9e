//! What the user sees: tables or JSON on stdout, progress and errors on stderr.

use std::error::Error;
use std::io::{IsTerminal, Write};

use serde::Serialize;

use crate::error::CliError;

/// How results are shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// A result: as JSON if asked for, as `text` else.
    pub(crate) fn result(self, value: &impl Serialize, text: impl FnOnce() -> String) {
        if self.json {
            let line = serde_json::to_string(value).expect("our own values have string keys");
            print_line(&line);
        } else {
            let text = text();
            if !text.is_empty() {
                print_line(&text);
            }
        }
    }

    /// Progress of a long step; goes to stderr, so that results stay clean.
    pub(crate) fn progress(self, message: &str) {
        let mut stderr = std::io::stderr().lock();
        // Progress that nobody can read is not worth an error.
        let _ = writeln!(stderr, "{message}");
    }

    /// The cause chain once, then what to do next.
    pub(crate) fn error(self, error: &CliError) {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(inner) = cause {
            text.push_str(": ");
            text.push_str(&inner.to_string());
            cause = inner.source();
        }
        let advice = error.advice();
        let mut stderr = std::io::stderr().lock();
        let _ = if self.json {
            writeln!(
                stderr,
                "{}",
                serde_json::json!({"error": {"message": text, "advice": advice}})
            )
        } else {
            match advice {
                Some(advice) => writeln!(stderr, "warren: {text}\n  -> {advice}"),
                None => writeln!(stderr, "warren: {text}"),
            }
        };
    }
}

/// A closed pipe downstream (`warren ls | head`) is not a failure.
fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Rows under headings, columns as wide as they need to be.
pub(crate) fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .chain([headings[column].len()])
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let padded: Vec<String> =
            cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(headings.to_vec())];
    lines.extend(rows.iter().map(|row| line(row.iter().map(String::as_str).collect())));
    lines.join("\n")
}

/// Bytes with a binary unit, three digits.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut tenths = count.saturating_mul(10);
    while tenths >= 10240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    if unit == 0 || tenths >= 1000 {
        format!("{} {}", tenths / 10, UNITS[unit])
    } else {
        format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
    }
}

/// Seconds as people say them.
pub(crate) fn duration(seconds: i64) -> String {
    match seconds {
        ..0 => "0s".to_owned(),
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Whether progress may be drawn over itself.
pub(crate) fn stderr_is_terminal() -> bool {
    std::io::stderr().is_terminal()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_pads_columns_to_the_widest_cell() {
        let text = table(&["ID", "STATE"], &[vec!["abcdef".to_owned(), "running".to_owned()]]);
        assert_eq!(text, "ID      STATE\nabcdef  running");
    }

    #[test]
    fn bytes_keeps_three_digits() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(300 << 20), "300 MiB");
    }

    #[test]
    fn duration_of_an_hour_and_a_half_is_in_minutes() {
        assert_eq!(duration(5400), "90m");
    }
}
