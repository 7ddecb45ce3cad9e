//! `warrend`, the node daemon: flags → [`Config`] → run.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use warren_node::config::Config;
use warren_node::flags::{Command, Flags};

fn main() -> ExitCode {
    match start(Flags::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("warrend: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(mut flags: Flags) -> anyhow::Result<()> {
    let command = flags.command.take();
    let config = Config::from_flags(flags)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match command {
        None => runtime.block_on(warren_node::run(config))?,
        Some(Command::Keys(action)) => {
            runtime.block_on(warren_node::manage_keys(&config, action))?
        }
    }
    Ok(())
}
