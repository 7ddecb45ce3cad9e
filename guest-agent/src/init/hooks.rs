//! Programs of `/etc/warren/resume.d`, run when a sandbox gets its identity.
//!
//! They are for state that only the sandbox's owner knows of, such as a random
//! generator of a library. Each runs as root, in order of names, and must end
//! well within [`LIMIT`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use warren_base::spawn::Terminal;

use super::InitError;
use crate::agent::Agent;
use crate::children::Program;
use crate::runtime::{self, Either};

const DIRECTORY: &str = "/etc/warren/resume.d";

/// Longest time one program may take.
const LIMIT: Duration = Duration::from_secs(30);

/// Runs what is there.
pub async fn run(agent: &Agent) -> Result<(), InitError> {
    let Ok(entries) = std::fs::read_dir(DIRECTORY) else { return Ok(()) };
    let mut programs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    programs.sort();
    for program in programs {
        let name = program.display().to_string();
        let fail = |what: &dyn std::fmt::Display| {
            InitError::new("resume hook", format_args!("{name}: {what}"))
        };
        let root = agent.user(Some("root")).map_err(|error| fail(&error))?;
        let child = agent
            .children
            .start(&Program {
                command: &name,
                arguments: &[],
                environment: &agent.environment(&root, &BTreeMap::new()),
                directory: "/",
                directory_is_default: true,
                identity: &root.identity,
                stdio: [None, None, None],
                terminal: Terminal::None,
            })
            .map_err(|error| fail(&error))?;
        let limit = runtime::sleep_until(Instant::now() + LIMIT);
        match runtime::either(child.exit.wait(), limit).await {
            Either::First(status) if status.exit_status() == Some(0) => {}
            Either::First(status) => return Err(fail(&format_args!("ended with {status:?}"))),
            Either::Second(()) => {
                child.signal_group(Signal::KILL);
                return Err(fail(&format_args!("ran longer than {} s", LIMIT.as_secs())));
            }
        }
    }
    Ok(())
}
