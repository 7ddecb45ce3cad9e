//! The agent's binary, served on unix sockets of this machine.

mod files;
mod filesystem;
mod init;
mod interpreter;
mod process;
mod support;
mod tunnel;
