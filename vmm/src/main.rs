//! `warren-vmm boot --config FILE` runs one cold microVM; `warren-vmm template
//! --directory DIRECTORY --socket SOCKET` waits to give birth to clones of a template.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use warren_vmm::{Template, VmmError, log, machine, process};

const USAGE: &str = "usage: warren-vmm boot --config FILE
       warren-vmm template --directory DIRECTORY --socket SOCKET
       warren-vmm --version";

enum Command {
    Boot { config: PathBuf },
    Template { directory: PathBuf, socket: PathBuf },
    Version,
}

fn main() -> ExitCode {
    let Some(command) = parse(std::env::args_os().skip(1).collect()) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    log::start();
    process::prepare();
    let result = match command {
        Command::Boot { config } => machine::boot(&config),
        Command::Template { directory, socket } => {
            Template::load(&directory).and_then(|template| template.serve(&socket))
        }
        Command::Version => {
            println!("warren-vmm {}", env!("CARGO_PKG_VERSION"));
            Ok(ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|error| report(&error))
}

fn parse(words: Vec<std::ffi::OsString>) -> Option<Command> {
    let word = |index: usize| words.get(index).and_then(|word| word.to_str());
    let path = |index: usize| words.get(index).map(PathBuf::from);
    match (word(0)?, word(1), word(3), words.len()) {
        ("boot", Some("--config"), None, 3) => Some(Command::Boot { config: path(2)? }),
        ("template", Some("--directory"), Some("--socket"), 5) => {
            Some(Command::Template { directory: path(2)?, socket: path(4)? })
        }
        ("--version", None, None, 1) => Some(Command::Version),
        _ => None,
    }
}

fn report(error: &VmmError) -> ExitCode {
    eprintln!("warren-vmm: cannot {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprintln!("  because: {error}");
        cause = error.source();
    }
    if !error.advice().is_empty() {
        eprintln!("  advice: {}", error.advice());
    }
    ExitCode::FAILURE
}
