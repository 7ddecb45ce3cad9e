//! The user's terminal: raw while a remote one is shown in it, and its size.

use rustix::termios::{self, OptionalActions, Termios};
use serde_json::{Value, json};

use crate::error::CliError;

/// Columns and rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    columns: u16,
    rows: u16,
}

impl Size {
    /// What a terminal has that does not tell its size.
    const DEFAULT: Self = Self { columns: 80, rows: 24 };

    /// The size of the terminal on standard output.
    pub(crate) fn current() -> Self {
        match termios::tcgetwinsize(rustix::stdio::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                Self { columns: size.ws_col, rows: size.ws_row }
            }
            Ok(_) | Err(_) => Self::DEFAULT,
        }
    }

    pub(crate) fn to_json(self) -> Value {
        json!({"cols": self.columns, "rows": self.rows})
    }
}

/// Standard input in raw mode for as long as this lives.
#[derive(Debug)]
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// `None` if standard input is no terminal.
    pub(crate) fn enter() -> Result<Option<Self>, CliError> {
        let stdin = rustix::stdio::stdin();
        if !termios::isatty(stdin) {
            return Ok(None);
        }
        let failed = |error: rustix::io::Errno| {
            CliError::io("switch the terminal to raw mode")(error.into())
        };
        let before = termios::tcgetattr(stdin).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(stdin, OptionalActions::Flush, &raw).map_err(failed)?;
        Ok(Some(Self { before }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // The terminal may be gone; then nobody sees its mode.
        let _ = termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &self.before);
    }
}
