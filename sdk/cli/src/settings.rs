//! Which node to talk to and with which key, checked.

use std::path::{Path, PathBuf};

use crate::error::CliError;
use crate::flags::Connection;

const DEFAULT_URL: &str = "http://127.0.0.1:3000";
const DEFAULT_STATE_DIRECTORY: &str = "/var/lib/warren";

/// Where a node is.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// `host:port`.
    pub(crate) address: String,
    pub(crate) state_directory: PathBuf,
    api_key: Option<String>,
}

impl Settings {
    pub(crate) fn from_flags(flags: &Connection) -> Result<Self, CliError> {
        Ok(Self {
            address: address_of(flags.url.as_deref().unwrap_or(DEFAULT_URL))?,
            state_directory: flags
                .state_dir
                .clone()
                .unwrap_or_else(|| PathBuf::from(DEFAULT_STATE_DIRECTORY)),
            api_key: flags.api_key.clone(),
        })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The variables by which other `warren` commands find this node; none where the
    /// defaults do.
    pub(crate) fn variables(&self) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        if self.url() != DEFAULT_URL {
            variables.push(("WARREN_URL", self.url()));
        }
        if self.state_directory != Path::new(DEFAULT_STATE_DIRECTORY) {
            variables.push(("WARREN_STATE_DIR", self.state_directory.display().to_string()));
        }
        variables
    }

    /// The run directory that the node uses, which may run already and in another than one
    /// would start it with. `None` if its state directory cannot be read.
    pub(crate) fn run_directory(&self) -> Option<PathBuf> {
        std::fs::read_to_string(self.state_directory.join("run-directory")).ok().map(PathBuf::from)
    }

    /// The key given, or the one the daemon left for local users. Read late: the
    /// daemon may be starting.
    pub(crate) fn api_key(&self) -> Option<String> {
        self.api_key.clone().or_else(|| read_key(&self.state_directory.join("api-key")))
    }
}

fn read_key(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|key| !key.is_empty())
}

fn address_of(url: &str) -> Result<String, CliError> {
    let bad = || CliError::Url(url.to_owned());
    let uri: http::Uri = url.parse().map_err(|_| bad())?;
    let authority = uri.authority().ok_or_else(bad)?;
    if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/") {
        return Err(bad());
    }
    Ok(format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(80)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_keeps_host_and_port() {
        assert_eq!(address_of("http://127.0.0.1:3000/").unwrap(), "127.0.0.1:3000");
        assert_eq!(address_of("http://node").unwrap(), "node:80");
    }

    #[test]
    fn variables_name_only_what_is_not_the_default() {
        let settings = |url: Option<&str>, state: Option<&str>| {
            let flags = Connection {
                url: url.map(str::to_owned),
                api_key: None,
                state_dir: state.map(PathBuf::from),
            };
            Settings::from_flags(&flags).unwrap()
        };
        assert_eq!(settings(None, None).variables(), []);
        assert_eq!(
            settings(Some("http://127.0.0.1:4000"), Some("/srv/w")).variables(),
            [
                ("WARREN_URL", "http://127.0.0.1:4000".to_owned()),
                ("WARREN_STATE_DIR", "/srv/w".to_owned()),
            ]
        );
    }

    #[test]
    fn address_without_http_is_refused() {
        assert!(address_of("127.0.0.1:3000").is_err());
        assert!(address_of("https://node").is_err());
    }
}
