//! One module per command, or per few that belong together.

use std::process::ExitCode;

use crate::client::Http;
use crate::error::CliError;
use crate::flags::{Command, Flags};
use crate::output::Output;
use crate::settings::Settings;

mod cp;
mod doctor;
mod exec;
mod sandboxes;
mod template;
mod up;

/// Runs the command that the flags name.
pub(crate) async fn run(flags: Flags, output: Output) -> Result<ExitCode, CliError> {
    let settings = Settings::from_flags(&flags.connection)?;
    let http = Http::new(&settings)?;
    match flags.command {
        Command::Up(up) => return up::up(&settings, &up, output).await,
        Command::Down(down) => up::down(&http, &down, output).await?,
        Command::Doctor => return doctor::doctor(&settings, output).await,
        Command::Run(run) => return exec::run(&http, &run, output).await,
        Command::Exec(exec) => return exec::exec(&http, &exec, output).await,
        Command::Create(create) => sandboxes::create(&http, &create, output).await?,
        Command::Cp(cp) => cp::cp(&http, &cp, output).await?,
        Command::Ls(ls) => sandboxes::ls(&http, &ls, output).await?,
        Command::Logs(logs) => sandboxes::logs(&http, &logs.id, output).await?,
        Command::Pause(pause) => return sandboxes::pause(&http, &pause, output).await,
        Command::Resume(resume) => sandboxes::resume(&http, &resume, output).await?,
        Command::Fork(fork) => return sandboxes::fork(&http, &fork, output).await,
        Command::Kill(kill) => return sandboxes::kill(&http, &kill, output).await,
        Command::Stats(stats) => sandboxes::stats(&http, &stats.ids, output).await?,
        Command::Template(action) => template::run(&http, &action, output).await?,
    }
    Ok(ExitCode::SUCCESS)
}
