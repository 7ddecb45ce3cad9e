//! What the command line may say, unchecked.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Where sockets and logs are unless told otherwise.
pub(crate) const DEFAULT_RUN_DIRECTORY: &str = "/run/warren";
/// What tells otherwise.
pub(crate) const RUN_DIRECTORY_VARIABLE: &str = "WARREN_RUN_DIR";

/// Sandboxes on this machine or another: each one a microVM.
#[derive(Debug, Parser)]
#[command(name = "warren", version)]
pub(crate) struct Flags {
    /// Print results as JSON, one value a command.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) connection: Connection,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Which node, and as whom.
#[derive(Debug, Args)]
pub(crate) struct Connection {
    /// Where warrend listens [default: http://127.0.0.1:3000].
    #[arg(long, global = true, env = "WARREN_URL")]
    pub(crate) url: Option<String>,
    /// API key [default: the file api-key in the state directory].
    #[arg(long, global = true, env = "WARREN_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// State directory of the node [default: /var/lib/warren].
    #[arg(long, global = true, env = "WARREN_STATE_DIR", value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start warrend and see that it has a template.
    Up(Up),
    /// Stop warrend; sandboxes live on unless told otherwise.
    Down(Down),
    /// Check whether this machine can run sandboxes, and say what to do.
    Doctor,
    /// Create a sandbox, run a command in it, kill it.
    Run(Run),
    /// Create a sandbox and print its id.
    Create(Create),
    /// Run a command in a sandbox.
    Exec(Exec),
    /// Copy files into or out of a sandbox; a remote path is ID:PATH, `-` is a stream.
    Cp(Cp),
    /// List sandboxes.
    Ls(Ls),
    /// Print a sandbox's console log.
    Logs(Logs),
    /// Put sandboxes on the node's disk; they have no process until they are resumed.
    Pause(Pause),
    /// Resume a paused sandbox.
    Resume(Resume),
    /// Copy a running sandbox: memory, processes and files. Prints the ids.
    Fork(Fork),
    /// Kill sandboxes.
    Kill(Kill),
    /// CPU, memory and disk of sandboxes.
    Stats(Stats),
    /// Build, list and remove templates.
    #[command(subcommand)]
    Template(Template),
}

impl Command {
    /// Whether the exit code is that of a command in a sandbox.
    pub(crate) fn runs_a_command(&self) -> bool {
        matches!(self, Self::Run(_) | Self::Exec(_))
    }
}

#[derive(Debug, Args)]
pub(crate) struct Up {
    /// Stay in the foreground and show the daemon's log.
    #[arg(long)]
    pub(crate) foreground: bool,
    /// Address to listen on [default: that of --url].
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,
    /// Sockets and logs of what runs.
    #[arg(
        long,
        value_name = "DIR",
        default_value = DEFAULT_RUN_DIRECTORY,
        env = RUN_DIRECTORY_VARIABLE
    )]
    pub(crate) run_dir: PathBuf,
    /// Guest kernel [default: the newest that `make guest-kernel` built].
    #[arg(long, value_name = "FILE", env = "WARREN_KERNEL")]
    pub(crate) kernel: Option<PathBuf>,
    /// Guest kernel for several vCPUs [default: the newest that `guest-kernel/build
    /// --variant smp` built].
    #[arg(long, value_name = "FILE", env = "WARREN_KERNEL_SMP")]
    pub(crate) kernel_smp: Option<PathBuf>,
    /// Root image of the default template [default: what `make image` built].
    #[arg(long, value_name = "FILE", env = "WARREN_ROOTFS")]
    pub(crate) image: Option<PathBuf>,
    /// Do not build the default template.
    #[arg(long)]
    pub(crate) no_template: bool,
    /// Passed on to warrend.
    #[arg(last = true, value_name = "WARREND FLAGS")]
    pub(crate) daemon_flags: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Down {
    /// Kill every sandbox first.
    #[arg(long)]
    pub(crate) kill: bool,
}

/// What a new sandbox is like.
#[derive(Debug, Args)]
pub(crate) struct NewSandbox {
    #[command(flatten)]
    pub(crate) lifetime: Lifetime,
    /// Label of the sandbox; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub(crate) metadata: Vec<(String, String)>,
}

/// How a command runs.
#[derive(Debug, Args)]
pub(crate) struct CommandOptions {
    /// Forward standard input.
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Give the command a terminal.
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// User in the sandbox.
    #[arg(short, long)]
    pub(crate) user: Option<String>,
    /// Working directory in the sandbox.
    #[arg(short = 'w', long, value_name = "DIR")]
    pub(crate) cwd: Option<String>,
    /// Environment variable; may be repeated.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub(crate) env: Vec<(String, String)>,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Template to create the sandbox from.
    pub(crate) template: String,
    #[command(flatten)]
    pub(crate) new: NewSandbox,
    #[command(flatten)]
    pub(crate) options: CommandOptions,
    /// Leave the sandbox alive.
    #[arg(long)]
    pub(crate) keep: bool,
    /// Program and arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// Template to create the sandbox from.
    #[arg(default_value = "base")]
    pub(crate) template: String,
    #[command(flatten)]
    pub(crate) new: NewSandbox,
    /// Environment variable of every command; may be repeated.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub(crate) env: Vec<(String, String)>,
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// Sandbox.
    pub(crate) id: String,
    #[command(flatten)]
    pub(crate) options: CommandOptions,
    /// Program and arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Cp {
    /// File or directory to read.
    pub(crate) source: String,
    /// File or directory to write.
    pub(crate) destination: String,
    /// Copy directories with all they hold.
    #[arg(short, long)]
    pub(crate) recursive: bool,
    /// User in the sandbox.
    #[arg(short, long)]
    pub(crate) user: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Ls {
    /// Only those with this label; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub(crate) metadata: Vec<(String, String)>,
    /// Only ids, one a line.
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// Sandbox.
    pub(crate) id: String,
}

/// Seconds from now until a sandbox is killed.
#[derive(Debug, Args)]
pub(crate) struct Lifetime {
    /// Seconds until the sandbox is killed.
    #[arg(
        long = "timeout",
        value_name = "SECONDS",
        default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) seconds: u64,
}

#[derive(Debug, Args)]
pub(crate) struct Pause {
    /// Sandboxes.
    #[arg(required = true)]
    pub(crate) ids: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Resume {
    /// Sandbox.
    pub(crate) id: String,
    #[command(flatten)]
    pub(crate) lifetime: Lifetime,
}

#[derive(Debug, Args)]
pub(crate) struct Fork {
    /// Sandbox.
    pub(crate) id: String,
    /// Number of children, 1 to 100.
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 1)]
    pub(crate) count: u32,
    #[command(flatten)]
    pub(crate) lifetime: Lifetime,
}

#[derive(Debug, Args)]
pub(crate) struct Kill {
    /// Sandboxes.
    #[arg(required_unless_present = "all")]
    pub(crate) ids: Vec<String>,
    /// Every sandbox of the node.
    #[arg(long, conflicts_with = "ids")]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Stats {
    /// Sandboxes [default: all].
    pub(crate) ids: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Template {
    /// Boot a root image once, warm it and freeze it.
    Build(TemplateBuild),
    /// List templates.
    Ls,
    /// Remove templates.
    Rm {
        /// Templates.
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct TemplateBuild {
    /// Name of the template.
    pub(crate) name: String,
    /// Root image (EROFS) [default: what `make image` built under this name].
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Option<PathBuf>,
    /// Guest kernel [default: the newest that `guest-kernel/build` built, or the daemon's].
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// Memory of a sandbox [default: the daemon's choice].
    #[arg(long, value_name = "MIB")]
    pub(crate) memory: Option<u64>,
    /// Disk of a sandbox [default: the daemon's choice].
    #[arg(long, value_name = "MIB")]
    pub(crate) disk: Option<u64>,
    /// Processors of a sandbox [default: the daemon's choice].
    #[arg(long, value_name = "COUNT")]
    pub(crate) vcpus: Option<u8>,
    /// Another name; may be repeated.
    #[arg(long, value_name = "NAME")]
    pub(crate) alias: Vec<String>,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("not of the form KEY=VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn flags_are_consistent() {
        Flags::command().debug_assert();
    }

    #[test]
    fn exec_takes_it_flags_and_keeps_the_commands_own() {
        let flags =
            Flags::try_parse_from(["warren", "exec", "-it", "abc", "--", "ls", "-l"]).unwrap();
        let Command::Exec(exec) = flags.command else { panic!("not exec") };
        assert!(exec.options.interactive && exec.options.tty);
        assert_eq!(exec.command, ["ls", "-l"]);
    }

    #[test]
    fn key_value_without_equals_is_refused() {
        assert!(key_value("novalue").is_err());
        assert_eq!(key_value("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
    }
}
