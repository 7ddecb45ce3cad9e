//! The checked configuration.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::admission::Limits;
use crate::flags::{CgroupMode, Flags, LogFormat, OnStop, Settings};
use crate::ids::{NameError, NodeId};

const DEFAULT_LISTEN: &str = "127.0.0.1:3000";
const DEFAULT_STATE_DIRECTORY: &str = "/var/lib/warren";
const DEFAULT_RUN_DIRECTORY: &str = "/run/warren";
const DEFAULT_NODE_ID: &str = "n1";
const DEFAULT_SANDBOXES_MAX: usize = 8192;
const DEFAULT_MEMORY_FLOOR_MIB: u64 = 512;
const DEFAULT_METADATA_BYTES_MAX: usize = 8192;
const DEFAULT_TIMEOUT_SECONDS_MAX: u64 = 24 * 60 * 60;
/// A template process serves one birth after the other; more at once only queue
/// inside it.
const DEFAULT_SPAWNS_MAX: usize = 4;
/// Keeps arithmetic on deadlines far from overflow.
const TIMEOUT_SECONDS_CEILING: u64 = 100 * 365 * 24 * 60 * 60;

/// How the daemon runs.
#[derive(Debug, Clone)]
pub struct Config {
    pub(crate) listen: SocketAddr,
    pub(crate) state_directory: PathBuf,
    pub(crate) run_directory: PathBuf,
    pub(crate) vmm: PathBuf,
    pub(crate) kernel: Option<PathBuf>,
    pub(crate) kernel_smp: Option<PathBuf>,
    pub(crate) domain: Option<String>,
    pub(crate) node_id: NodeId,
    pub(crate) limits: Limits,
    pub(crate) metadata_bytes_max: usize,
    pub(crate) timeout_max: Duration,
    pub(crate) spawns_max: usize,
    pub(crate) log_format: LogFormat,
    pub(crate) log_level: tracing::level_filters::LevelFilter,
    pub(crate) cgroup: CgroupMode,
    pub(crate) on_stop: OnStop,
}

/// Why the configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("read configuration file {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The file is not what is expected.
    #[error("parse configuration file {path}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// Not an address.
    #[error("listen address {0:?} is not of the form 127.0.0.1:3000")]
    Listen(String),
    /// Not a level.
    #[error("log level {0:?} is not one of error, warn, info, debug and trace")]
    LogLevel(String),
    /// The daemon's own path is unknown.
    #[error("find the directory of this program to look for warren-vmm")]
    OwnPath(#[source] std::io::Error),
    /// A bad node id.
    #[error(transparent)]
    Node(#[from] NameError),
    /// A directory that is not absolute changes its meaning with the working directory.
    #[error("make {path} an absolute path")]
    Absolute {
        /// The path as given.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
}

impl Config {
    /// Checks flags and the file they name.
    ///
    /// # Errors
    /// [`ConfigError`] names the setting.
    pub fn from_flags(flags: Flags) -> Result<Self, ConfigError> {
        let file = match flags.config {
            None => Settings::default(),
            Some(path) => {
                let text = std::fs::read_to_string(&path)
                    .map_err(|source| ConfigError::Read { path: path.clone(), source })?;
                toml::from_str(&text)
                    .map_err(|source| ConfigError::Parse { path, source: Box::new(source) })?
            }
        };
        Self::from_settings(flags.settings.over(file))
    }

    fn from_settings(settings: Settings) -> Result<Self, ConfigError> {
        let listen = settings.listen.unwrap_or_else(|| DEFAULT_LISTEN.to_owned());
        let level = settings.log_level.unwrap_or_else(|| "info".to_owned());
        let vmm = match settings.vmm {
            Some(path) => absolute(path)?,
            None => {
                std::env::current_exe().map_err(ConfigError::OwnPath)?.with_file_name("warren-vmm")
            }
        };
        let seconds = settings.max_timeout_seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS_MAX);
        Ok(Self {
            listen: listen.parse().map_err(|_| ConfigError::Listen(listen))?,
            state_directory: absolute(
                settings.state_dir.unwrap_or_else(|| DEFAULT_STATE_DIRECTORY.into()),
            )?,
            run_directory: absolute(
                settings.run_dir.unwrap_or_else(|| DEFAULT_RUN_DIRECTORY.into()),
            )?,
            vmm,
            kernel: settings.kernel.map(absolute).transpose()?,
            kernel_smp: settings.kernel_smp.map(absolute).transpose()?,
            domain: settings.domain,
            node_id: NodeId::parse(settings.node_id.as_deref().unwrap_or(DEFAULT_NODE_ID))?,
            limits: Limits {
                sandboxes_max: settings.max_sandboxes.unwrap_or(DEFAULT_SANDBOXES_MAX),
                memory_floor_bytes: settings
                    .memory_floor_mib
                    .unwrap_or(DEFAULT_MEMORY_FLOOR_MIB)
                    .saturating_mul(1 << 20),
            },
            metadata_bytes_max: settings.max_metadata_bytes.unwrap_or(DEFAULT_METADATA_BYTES_MAX),
            timeout_max: Duration::from_secs(seconds.min(TIMEOUT_SECONDS_CEILING)),
            spawns_max: settings.max_spawns.unwrap_or(DEFAULT_SPAWNS_MAX).max(1),
            log_format: settings.log_format.unwrap_or(LogFormat::Text),
            log_level: level.parse().map_err(|_| ConfigError::LogLevel(level))?,
            cgroup: settings.cgroup.unwrap_or(CgroupMode::Auto),
            on_stop: settings.on_stop.unwrap_or(OnStop::Keep),
        })
    }

    /// Local door for the command line; needs no key.
    pub(crate) fn admin_socket(&self) -> PathBuf {
        self.run_directory.join("warrend.sock")
    }

    /// Where the first API key is saved.
    pub(crate) fn key_file(&self) -> PathBuf {
        self.state_directory.join("api-key")
    }
}

fn absolute(path: PathBuf) -> Result<PathBuf, ConfigError> {
    std::path::absolute(&path).map_err(|source| ConfigError::Absolute { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_complete() {
        let config = Config::from_settings(Settings::default()).unwrap();
        assert_eq!(config.listen.to_string(), DEFAULT_LISTEN);
        assert_eq!(config.vmm.file_name().unwrap(), "warren-vmm");
    }

    #[test]
    fn flags_win_over_file() {
        let file: Settings = toml::from_str("listen = \"1.2.3.4:5\"\nnode-id = \"n7\"").unwrap();
        let flags = Settings { listen: Some("127.0.0.1:9".to_owned()), ..Settings::default() };
        let config = Config::from_settings(flags.over(file)).unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:9");
        assert_eq!(config.node_id.as_str(), "n7");
    }

    #[test]
    fn unknown_key_in_file_is_refused() {
        assert!(toml::from_str::<Settings>("listn = \"x\"").is_err());
    }

    #[test]
    fn bad_values_are_named() {
        let settings = Settings { listen: Some("x".to_owned()), ..Settings::default() };
        assert!(matches!(Config::from_settings(settings), Err(ConfigError::Listen(_))));
        let settings = Settings { node_id: Some("N-1".to_owned()), ..Settings::default() };
        assert!(matches!(Config::from_settings(settings), Err(ConfigError::Node(_))));
    }
}
