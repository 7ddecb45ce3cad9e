//! What the command line and the configuration file may say, unchecked.
//! [`crate::config`] turns it into values that nobody validates again.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Deserialize;

/// The Warren node daemon: serves sandboxes of one machine.
#[derive(Debug, Parser)]
#[command(name = "warrend", version, args_override_self = true)]
pub struct Flags {
    /// TOML file with the long names of these flags as keys; flags win over it.
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Settings that the file may hold too.
    #[command(flatten)]
    pub settings: Settings,
    /// Something else than serving.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Something else than serving.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Manage API keys; asks the running daemon, or the store if none runs.
    #[command(subcommand)]
    Keys(KeysAction),
}

/// What to do with API keys.
#[derive(Debug, Subcommand)]
pub enum KeysAction {
    /// Make a key and print it; it is not shown again.
    Add {
        /// What the key is for.
        name: String,
    },
    /// List names, ids and first characters.
    List,
    /// Remove a key by its id.
    Remove {
        /// As `keys list` shows it.
        id: String,
    },
}

/// Settings of the daemon.
#[derive(Debug, Default, Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Settings {
    /// Address of the API and the proxy [default: 127.0.0.1:3000].
    #[arg(long, global = true, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// What must last [default: /var/lib/warren].
    #[arg(long, global = true, value_name = "DIR", env = "WARREN_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// Sockets and logs of what runs [default: /run/warren].
    #[arg(long, global = true, value_name = "DIR", env = "WARREN_RUN_DIR")]
    pub run_dir: Option<PathBuf>,
    /// The warren-vmm program [default: beside this one].
    #[arg(long, global = true, value_name = "FILE")]
    pub vmm: Option<PathBuf>,
    /// Kernel of templates with one vCPU that name none.
    #[arg(long, global = true, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Kernel of templates with several vCPUs that name none.
    #[arg(long, global = true, value_name = "FILE")]
    pub kernel_smp: Option<PathBuf>,
    /// Host names of sandboxes are <port>-<id>.<DOMAIN>; told to clients.
    #[arg(long, global = true, value_name = "DOMAIN")]
    pub domain: Option<String>,
    /// Name of this node, part of every sandbox id [default: n1].
    #[arg(long, global = true, value_name = "ID")]
    pub node_id: Option<String>,
    /// Sandboxes alive at once [default: 8192].
    #[arg(long, global = true, value_name = "COUNT")]
    pub max_sandboxes: Option<usize>,
    /// Refuse to create with less memory available than this [default: 512].
    #[arg(long, global = true, value_name = "MIB")]
    pub memory_floor_mib: Option<u64>,
    /// Metadata of a sandbox, keys and values together [default: 8192].
    #[arg(long, global = true, value_name = "BYTES")]
    pub max_metadata_bytes: Option<usize>,
    /// Longest time limit of a sandbox [default: 86400].
    #[arg(long, global = true, value_name = "SECONDS")]
    pub max_timeout_seconds: Option<u64>,
    /// Births at once per template [default: 4].
    #[arg(long, global = true, value_name = "COUNT")]
    pub max_spawns: Option<usize>,
    /// Form of log lines [default: text].
    #[arg(long, global = true, value_enum)]
    pub log_format: Option<LogFormat>,
    /// error, warn, info, debug or trace [default: info].
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// Whether sandboxes get control groups of their own [default: auto].
    #[arg(long, global = true, value_enum)]
    pub cgroup: Option<CgroupMode>,
    /// What SIGTERM does to running sandboxes [default: keep].
    #[arg(long, global = true, value_enum)]
    pub on_stop: Option<OnStop>,
}

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Whether sandboxes get control groups of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CgroupMode {
    /// If a writable hierarchy is found.
    Auto,
    /// Never.
    Off,
}

/// What a graceful stop does to running sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnStop {
    /// They run on; the next start adopts them.
    Keep,
    /// They end.
    Kill,
}

impl Settings {
    /// These settings, and those of `below` where these say nothing.
    #[must_use]
    pub fn over(self, below: Self) -> Self {
        Self {
            listen: self.listen.or(below.listen),
            state_dir: self.state_dir.or(below.state_dir),
            run_dir: self.run_dir.or(below.run_dir),
            vmm: self.vmm.or(below.vmm),
            kernel: self.kernel.or(below.kernel),
            kernel_smp: self.kernel_smp.or(below.kernel_smp),
            domain: self.domain.or(below.domain),
            node_id: self.node_id.or(below.node_id),
            max_sandboxes: self.max_sandboxes.or(below.max_sandboxes),
            memory_floor_mib: self.memory_floor_mib.or(below.memory_floor_mib),
            max_metadata_bytes: self.max_metadata_bytes.or(below.max_metadata_bytes),
            max_timeout_seconds: self.max_timeout_seconds.or(below.max_timeout_seconds),
            max_spawns: self.max_spawns.or(below.max_spawns),
            log_format: self.log_format.or(below.log_format),
            log_level: self.log_level.or(below.log_level),
            cgroup: self.cgroup.or(below.cgroup),
            on_stop: self.on_stop.or(below.on_stop),
        }
    }
}
