//! The agent's binary, served on unix sockets of this machine.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod files;
mod filesystem;
mod init;
mod interpreter;
mod process;
mod support;
mod tunnel;
