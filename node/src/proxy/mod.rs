//! The data plane: requests that are for a sandbox, on the same port as the API.
//!
//! | file | what |
//! |---|---|
//! | `route.rs` | whom a request is for; pure |
//! | `signature.rs` | signed file links, which name no sandbox; pure |
//! | `headers.rs` | what is passed on; pure |
//! | `reply.rs` | the proxy's own answers |
//! | `forward.rs` | passing on, in both directions, without buffering |

mod forward;
mod headers;
mod reply;
mod route;
mod signature;

pub use forward::handle;
pub use route::{Route, route};
