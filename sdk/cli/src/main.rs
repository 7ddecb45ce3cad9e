//! `warren`: the command line of a Warren node.
//!
//! It talks HTTP to `warrend` and holds no state of its own.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

mod client;
mod commands;
mod error;
mod flags;
mod locate;
mod output;
mod settings;
mod terminal;

use error::CliError;
use flags::Flags;

fn main() -> ExitCode {
    let flags = Flags::parse();
    let output = output::Output::new(flags.json);
    let runs_a_command = flags.command.runs_a_command();
    match run(flags, output) {
        Ok(code) => code,
        Err(error) => {
            output.error(&error);
            // As other tools of this kind do, so that 1 stays the command's own.
            ExitCode::from(if runs_a_command { error::EXIT_OWN_FAILURE } else { 1 })
        }
    }
}

fn run(flags: Flags, output: output::Output) -> Result<ExitCode, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CliError::Runtime)?;
    let code = runtime.block_on(commands::run(flags, output));
    // A read of standard input may be blocked; it must not hold the exit.
    runtime.shutdown_background();
    code
}
