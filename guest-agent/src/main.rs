//! `warren-agent`: see [`warren_guest_agent`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

use warren_guest_agent::options::Options;

fn main() -> ExitCode {
    let options = match Options::from_arguments(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            eprintln!("warren-agent: {message}");
            return ExitCode::from(2);
        }
    };
    match warren_guest_agent::run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("warren-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}
