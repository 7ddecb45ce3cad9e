//! HTTP to `warrend`: the control plane ([`api`], [`templates`]) and, through its proxy, the
//! agent of a sandbox ([`process`], [`files`]).

pub(crate) mod api;
pub(crate) mod connect;
pub(crate) mod files;
mod http;
pub(crate) mod process;
pub(crate) mod templates;

pub(crate) use http::{Body, Http, full, streamed};
