//! The node's own calls to the agent, and the connections that the proxy shares.
//!
//! A connection costs the guest many system calls, so connections are kept and used
//! again ([`Channels`]).

mod body;
mod calls;
mod channels;

pub use calls::{
    AgentError, AgentMetrics, Identity, InitRequest, health, initialise, metrics, stream_lines,
};
pub use channels::{ChannelError, Channels};

/// Version of envd's protocol that the agent speaks. Clients switch features on by it.
pub const ENVD_VERSION: &str = "0.6.4";
