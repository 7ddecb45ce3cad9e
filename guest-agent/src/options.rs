//! Command line.

use crate::net::Address;

/// Port of envd's protocol.
pub const ENVD_PORT: u32 = 49983;
/// Port of the code interpreter.
pub const INTERPRETER_PORT: u32 = 49999;
/// Port of the tunnel to the guest's loopback.
pub const TUNNEL_PORT: u32 = 49982;

/// What is printed for `--help`.
pub const USAGE: &str = "\
usage: warren-agent [--SERVICE ADDRESS]...

  --envd ADDRESS         envd's protocol (default vsock:49983)
  --interpreter ADDRESS  the code interpreter (default vsock:49999)
  --tunnel ADDRESS       streams to ports of the loopback (default vsock:49982)

ADDRESS is vsock:PORT, unix:PATH or tcp:IP:PORT; each option may be repeated.
The defaults hold when no option is given. As process 1 the agent also mounts
the file systems of a microVM, unless --no-mounts says that someone else did.";

/// A service that can be listened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceName {
    /// envd's protocol.
    Envd,
    /// The code interpreter.
    Interpreter,
    /// The tunnel.
    Tunnel,
}

/// Who prepares the file systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mounts {
    /// The agent, when it is process 1.
    AsInit,
    /// Somebody else did.
    Done,
}

/// Checked options.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    /// What to listen for, and where.
    pub listen: Vec<(ServiceName, Address)>,
    /// Who prepares the file systems.
    pub mounts: Mounts,
}

impl Options {
    /// Parses arguments, the program's name left out.
    pub fn from_arguments(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Options { listen: Vec::new(), mounts: Mounts::AsInit };
        let mut arguments = arguments.peekable();
        while let Some(argument) = arguments.next() {
            let service = match argument.as_str() {
                "--envd" => ServiceName::Envd,
                "--interpreter" => ServiceName::Interpreter,
                "--tunnel" => ServiceName::Tunnel,
                "--no-mounts" => {
                    options.mounts = Mounts::Done;
                    continue;
                }
                "--help" | "-h" => return Err(USAGE.to_owned()),
                // The kernel hands its unknown parameters to process 1.
                _ if rustix::process::getpid().is_init() => continue,
                other => return Err(format!("unknown argument {other:?}\n{USAGE}")),
            };
            let address = arguments.next().ok_or_else(|| format!("{argument} needs an address"))?;
            let address = address.parse().map_err(|error| format!("{argument}: {error}"))?;
            options.listen.push((service, address));
        }
        if options.listen.is_empty() {
            options.listen = vec![
                (ServiceName::Envd, Address::Vsock(ENVD_PORT)),
                (ServiceName::Interpreter, Address::Vsock(INTERPRETER_PORT)),
                (ServiceName::Tunnel, Address::Vsock(TUNNEL_PORT)),
            ];
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Options, String> {
        Options::from_arguments(arguments.iter().map(|s| (*s).to_owned()))
    }

    #[test]
    fn from_arguments_none_is_all_services_on_vsock() {
        let listen = parse(&[]).unwrap().listen;
        assert_eq!(listen.len(), 3);
        assert_eq!(listen[0], (ServiceName::Envd, Address::Vsock(49983)));
    }

    #[test]
    fn from_arguments_addresses_of_every_kind() {
        let options =
            parse(&["--envd", "unix:/a/b", "--envd", "tcp:127.0.0.1:80", "--no-mounts"]).unwrap();
        assert_eq!(options.mounts, Mounts::Done);
        assert_eq!(options.listen[0].1, Address::Unix("/a/b".into()));
        assert_eq!(options.listen[1].1, Address::Tcp("127.0.0.1:80".parse().unwrap()));
    }

    #[test]
    fn from_arguments_mistakes_are_named() {
        assert!(parse(&["--envd"]).unwrap_err().contains("--envd"));
        assert!(parse(&["--tunnel", "udp:1"]).unwrap_err().contains("udp"));
        assert!(parse(&["--what"]).unwrap_err().contains("--what"));
    }
}
