//! A node with real microVMs.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod adoption;
mod bad_input;
mod clones;
mod command_line;
mod files;
mod leaks;
mod lifecycle;
mod pausing;
mod several_vcpus;
mod vector_registers;
