//! The guest agent: PID 1 of a microVM, and in every kind of sandbox the
//! server that speaks envd's protocol.
//!
//! One thread, one epoll ([`runtime`]), one reaper ([`children`]). A request
//! enters by [`net`], is parsed by [`http`] and routed by [`envd`] or
//! [`interpreter`]; [`tunnel`] is a protocol of its own.
#![forbid(unsafe_code)]
#![allow(missing_docs)]

pub mod agent;
pub mod boot;
pub mod children;
pub mod connect;
pub mod console;
pub mod envd;
pub mod files;
pub mod filesystem;
pub mod http;
pub mod init;
pub mod interpreter;
pub mod lifecycle;
pub mod metrics;
pub mod net;
pub mod options;
pub mod paths;
pub mod process;
pub mod runtime;
pub mod tunnel;
pub mod users;

mod run;

pub use run::run;
